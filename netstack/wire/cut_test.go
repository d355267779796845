package wire

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// tcpPacket is a TCP packet of any payload, with complete checksums.
func tcpPacket(src, dst netip.Addr, options, payload []byte, flags uint8) []byte {
	h := Header{Src: src, Dst: dst, TTL: 64, ID: 0xfffe, DontFragment: true}
	size := 20 + len(options) + len(payload)
	b := h.AppendIP(nil, ProtoTCP, size)
	start := len(b)
	b = binary.BigEndian.AppendUint32(b, 1234<<16|80)
	b = binary.BigEndian.AppendUint32(b, 0xffff_ff00) // wraps
	b = binary.BigEndian.AppendUint32(b, 7)
	b = append(b, byte(20+len(options))<<2, flags, 1, 2, 0, 0, 0, 0)
	b = append(append(b, options...), payload...)
	binary.BigEndian.PutUint16(b[start+16:], ^Sum(b[start:], PseudoSum(src, dst, ProtoTCP, size)))
	return b
}

// pieces is b in parts of random sizes.
func pieces(t *rapid.T, b []byte) (parts [][]byte) {
	for len(b) > 0 {
		n := rapid.IntRange(0, len(b)).Draw(t, "part")
		parts = append(parts, b[:n])
		b = b[n:]
		if len(parts) == 6 {
			return append(parts, b)
		}
	}
	return parts
}

// However a packet lies in memory and is cut: the pieces are valid packets that
// make up the whole, with flags where they belong.
func TestACutPacketIsTheSameBytesInValidPackets(t *testing.T) {
	var c Cutter
	rapid.Check(t, func(t *rapid.T) {
		src, dst := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("203.0.113.9")
		if rapid.Bool().Draw(t, "IPv6") {
			src, dst = netip.MustParseAddr("fd00::2"), netip.MustParseAddr("2001:db8::9")
		}
		options := make([]byte, 4*rapid.IntRange(0, 10).Draw(t, "options"))
		for i := range options {
			options[i] = 1
		}
		payload := rapid.SliceOfN(rapid.Byte(), 0, 5000).Draw(t, "payload")
		mss := rapid.IntRange(1, 2000).Draw(t, "mss")
		if len(payload) > 100*mss {
			mss = len(payload) / 100
		}
		const all = FIN | PSH | flagCWR | ACK
		whole := tcpPacket(src, dst, options, payload, all)
		ip := len(whole) - len(payload) - len(options) - 20
		before := slices.Clone(whole)
		c.Begin(pieces(t, whole), ip, ip+20+len(options), mss)
		var got []byte
		n := 0
		for p := c.Next(); p != nil; p = c.Next() {
			b := slices.Concat(p...)
			var head Packet
			if cause, ok := Parse(b, len(b), false, &head); !ok || head.Length != len(b) || !VerifyTransport(b, nil, &head) {
				t.Fatalf("packet %d is %v or has a wrong checksum: % x", n, cause, b[:min(len(b), 60)])
			}
			want := uint8(ACK)
			if n == 0 {
				want |= flagCWR
			}
			if len(got)+head.PayloadLen == len(payload) {
				want |= FIN | PSH
			}
			seq := binary.BigEndian.Uint32(b[ip+4:])
			if head.TCPFlags != want&0x3f|want&flagCWR || seq != 0xffff_ff00+uint32(len(got)) || head.PayloadLen > mss {
				t.Fatalf("packet %d: flags %#x, want %#x, sequence %#x, %d bytes", n, head.TCPFlags, want, seq, head.PayloadLen)
			}
			if id := binary.BigEndian.Uint16(b[4:]); ip == IPv4HeaderLen && id != 0xfffe+uint16(n) {
				t.Fatalf("packet %d has id %#x", n, id)
			}
			got = append(got, b[head.PayloadOffset:]...)
			n++
		}
		if !bytes.Equal(got, payload) || n != max((len(payload)+mss-1)/mss, 1) {
			t.Fatalf("%d packets have %d bytes of %d, or others", n, len(got), len(payload))
		}
		if !bytes.Equal(whole, before) {
			t.Fatal("the packet itself was changed")
		}
	})
}

func TestCuttingAllocatesNothing(t *testing.T) {
	whole := tcpPacket(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("203.0.113.9"), nil, make([]byte, 20_000), ACK)
	bufs := [][]byte{whole[:40], whole[40:9000], whole[9000:]}
	var c Cutter
	if n := testing.AllocsPerRun(100, func() {
		c.Begin(bufs, 20, 40, 1460)
		for c.Next() != nil {
		}
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}
