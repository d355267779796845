package wire

import (
	"encoding/binary"
	"math/bits"
	"net/netip"

	"gatewayd/flow"
)

// Sum adds the bytes of b, as 16-bit numbers with the high byte first, to initial
// in ones' complement arithmetic (RFC 1071). An odd last byte counts as if a zero
// followed. The checksum that a header carries is the complement of such a sum,
// and the sum over data with its right checksum is 0xffff.
func Sum(b []byte, initial uint16) uint16 {
	if bits.UintSize == 64 {
		return add(bigEndian(fold(sum64(b))), initial)
	}
	return add(bigEndian(fold(sum32(b))), initial)
}

// SumTwo is Sum over a and then b, as if they were one slice; a may be odd.
func SumTwo(a, b []byte, initial uint16) uint16 {
	s := Sum(a, initial)
	if len(b) == 0 {
		return s
	}
	t := Sum(b, 0)
	if len(a)%2 != 0 { // b's bytes are in the other halves of their numbers (RFC 1071, 2B)
		t = bits.ReverseBytes16(t)
	}
	return add(s, t)
}

// PseudoSum is the sum of the pseudo header (RFC 9293, RFC 768, RFC 8200) of a
// transport packet of length bytes. Both addresses are of one family.
func PseudoSum(src, dst netip.Addr, proto uint8, length int) uint16 {
	s := fold(uint64(proto) + uint64(length))
	if dst.Is4() {
		a, b := src.As4(), dst.As4()
		return Sum(a[:], Sum(b[:], s))
	}
	a, b := src.As16(), dst.As16()
	return Sum(a[:], Sum(b[:], s))
}

// VerifyTransport reports whether the TCP, UDP or ICMP checksum of a packet that
// Parse accepted is right. The packet's bytes are head and then tail. A UDP
// checksum of zero is none over IPv4 and wrong over IPv6. Other protocols pass;
// fragments do not, since nothing can be said about them.
// A super-packet whose UDP length is that of one datagram cannot be verified.
func VerifyTransport(head, tail []byte, p *Packet) bool {
	n := p.Network()
	if p.Fragment || n == 0 {
		return !p.Fragment
	}
	end := p.PayloadOffset + p.PayloadLen
	if len(head) < p.PayloadOffset || len(head)+len(tail) < end {
		return false
	}
	if n == flow.UDP && binary.BigEndian.Uint16(head[p.HeaderLen+6:]) == 0 {
		return p.Version == 4
	}
	var pseudo uint16
	if p.Proto != ProtoICMP {
		pseudo = PseudoSum(p.Src, p.Dst, p.Proto, end-p.HeaderLen)
	}
	tail = tail[:max(0, end-len(head))]
	head = head[p.HeaderLen:min(len(head), end)]
	return SumTwo(head, tail, pseudo) == 0xffff
}

// sum64 adds 64 bits at a time, in the order of the machine: a ones' complement
// sum is the same in either order, but for the order of its own bytes.
func sum64(b []byte) uint64 {
	var s, c uint64
	for len(b) >= 64 {
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[8:]), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[16:]), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[24:]), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[32:]), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[40:]), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[48:]), c)
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b[56:]), c)
		b = b[64:]
	}
	for len(b) >= 8 {
		s, c = bits.Add64(s, binary.NativeEndian.Uint64(b), c)
		b = b[8:]
	}
	s, c = bits.Add64(s, sum32(b), c)
	return uint64(fold(s)) + c
}

// sum32 adds 32 bits at a time, which is what 32-bit machines are good at. It is
// right for less than 16 GiB.
func sum32(b []byte) uint64 {
	var s uint64
	for len(b) >= 16 {
		s += uint64(binary.NativeEndian.Uint32(b))
		s += uint64(binary.NativeEndian.Uint32(b[4:]))
		s += uint64(binary.NativeEndian.Uint32(b[8:]))
		s += uint64(binary.NativeEndian.Uint32(b[12:]))
		b = b[16:]
	}
	for len(b) >= 4 {
		s += uint64(binary.NativeEndian.Uint32(b))
		b = b[4:]
	}
	if len(b) >= 2 {
		s += uint64(binary.NativeEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		s += uint64(binary.NativeEndian.Uint16([]byte{b[0], 0}))
	}
	return s
}

// fold brings a sum down to 16 bits by adding its carries. Only 0 becomes 0.
func fold(s uint64) uint16 {
	s = s>>32 + s&0xffffffff
	s = s>>32 + s&0xffffffff
	s = s>>16 + s&0xffff
	s = s>>16 + s&0xffff
	return uint16(s)
}

func add(a, b uint16) uint16 { return fold(uint64(a) + uint64(b)) }

// bigEndian gives the number that a sum in the order of the machine stands for.
func bigEndian(s uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], s)
	return binary.BigEndian.Uint16(b[:])
}
