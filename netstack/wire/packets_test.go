package wire

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Packets made by hand here, and not by the functions under test.

var (
	client4 = netip.MustParseAddr("10.0.0.2")
	server4 = netip.MustParseAddr("203.0.113.5")
	client6 = netip.MustParseAddr("fd00::2")
	server6 = netip.MustParseAddr("2001:db8::5")
	router4 = netip.MustParseAddr("10.0.0.1")
	router6 = netip.MustParseAddr("fd00::1")
)

func cat(parts ...[]byte) []byte { return slices.Concat(parts...) }

func be16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

// naive is RFC 1071's sum as its text says it.
func naive(b []byte) uint16 {
	var s uint32
	for i := range b {
		if i%2 == 0 {
			s += uint32(b[i]) << 8
		} else {
			s += uint32(b[i])
		}
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// ip4 is a packet from client4 to server4 with a right header checksum.
func ip4(proto byte, options, data []byte) []byte {
	return ip4frag(proto, 0x4000, options, data)
}

func ip4frag(proto byte, flags int, options, data []byte) []byte {
	n := 20 + len(options)
	b := cat([]byte{0x40 | byte(n/4), 0x28}, be16(n+len(data)), be16(0x1234), be16(flags),
		[]byte{64, proto, 0, 0}, client4.AsSlice(), server4.AsSlice(), options, data)
	return fix4(b)
}

// fix4 makes the header checksum right after a change.
func fix4(b []byte) []byte {
	n := min(int(b[0]&0xf)*4, len(b))
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], ^naive(b[:n]))
	return b
}

// ip6 is a packet from client6 to server6; rest is the chain and the transport.
func ip6(next byte, rest ...[]byte) []byte {
	data := cat(rest...)
	return cat([]byte{0x62, 0x80, 0, 0}, be16(len(data)), []byte{next, 64}, client6.AsSlice(), server6.AsSlice(), data)
}

// udp is a header from port 5000 to port 53 and a payload, with a checksum for
// the addresses above.
func udp(v int, payload []byte) []byte {
	b := cat(be16(5000), be16(53), be16(8+len(payload)), be16(0), payload)
	return summed(v, 17, b, 6)
}

func tcp(v int, flags byte, options, payload []byte) []byte {
	b := cat(be16(5000), be16(443), make([]byte, 8), []byte{byte(20+len(options)) / 4 << 4, flags}, be16(1000), be16(0), be16(0), options, payload)
	return summed(v, 6, b, 16)
}

// icmp is a message whose header's second half is detail.
func icmp(v int, kind, code byte, detail [4]byte, payload []byte) []byte {
	b := cat([]byte{kind, code, 0, 0}, detail[:], payload)
	if v == 4 {
		binary.BigEndian.PutUint16(b[2:], ^naive(b))
		return b
	}
	return summed(6, 58, b, 2)
}

func summed(v int, proto byte, b []byte, at int) []byte {
	src, dst := client4, server4
	if v == 6 {
		src, dst = client6, server6
	}
	pseudo := cat(src.AsSlice(), dst.AsSlice(), []byte{0, proto}, be16(len(b)), b)
	binary.BigEndian.PutUint16(b[at:], ^naive(pseudo))
	return b
}

// ext is an extension header of whole 8-byte units: next, length, body, zeros.
func ext(next byte, body ...byte) []byte {
	b := append([]byte{next, 0}, body...)
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	b[1] = byte(len(b)/8 - 1)
	return b
}

func frag6(next byte, offsetAndMore int, id uint32) []byte {
	return binary.BigEndian.AppendUint32(cat([]byte{next, 0}, be16(offsetAndMore)), id)
}

// set is a copy of b with one byte changed.
func set(b []byte, at int, v byte) []byte {
	b = slices.Clone(b)
	b[at] = v
	return b
}
