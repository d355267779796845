package wire

import (
	"encoding/binary"
	"net/netip"
)

// MaxHeader is room for the longest headers that AppendUDP and AppendEcho write,
// in bytes.
const MaxHeader = IPv6HeaderLen + fragmentHeaderLen + UDPHeaderLen

// Header is what the IP header of a packet to be built says.
type Header struct {
	Src, Dst     netip.Addr // of one family; an IPv4 address mapped into IPv6 is IPv4
	TClass       uint8      // IPv4 TOS or IPv6 traffic class
	TTL          uint8      // or hop limit
	DontFragment bool       // IPv4 only: IPv6 packets never are on their way

	// ID names the datagram among those of the same addresses, if it is or may
	// become fragmented. A fragment has MoreFragments, or a FragOffset in bytes,
	// a multiple of 8.
	ID            uint32
	FragOffset    int
	MoreFragments bool
}

// AppendIP appends to b the header of an IPv4 or IPv6 packet that carries n bytes
// of proto; for a fragment n is what this one carries, and over IPv6 a fragment
// header is appended too. It returns nil when such a packet cannot be: addresses
// of two families, n negative or too large.
func (h *Header) AppendIP(b []byte, proto uint8, n int) []byte {
	src, dst := h.Src.Unmap(), h.Dst.Unmap()
	switch {
	case n < 0 || n > maxLength:
		return nil
	case src.Is4() && dst.Is4() && IPv4HeaderLen+n <= maxLength:
		return h.appendIPv4(b, src, dst, proto, n)
	case src.Is6() && dst.Is6():
		return h.appendIPv6(b, src, dst, proto, n)
	}
	return nil
}

func (h *Header) appendIPv4(b []byte, src, dst netip.Addr, proto uint8, n int) []byte {
	start := len(b)
	frag := uint16(h.FragOffset / 8)
	if h.MoreFragments {
		frag |= 0x2000
	}
	if h.DontFragment {
		frag |= 0x4000
	}
	b = append(b, 0x45, h.TClass)
	b = binary.BigEndian.AppendUint16(b, uint16(IPv4HeaderLen+n))
	b = binary.BigEndian.AppendUint16(b, uint16(h.ID))
	b = binary.BigEndian.AppendUint16(b, frag)
	b = append(b, h.TTL, proto, 0, 0)
	s, d := src.As4(), dst.As4()
	b = append(append(b, s[:]...), d[:]...)
	binary.BigEndian.PutUint16(b[start+10:], ^Sum(b[start:], 0))
	return b
}

func (h *Header) appendIPv6(b []byte, src, dst netip.Addr, proto uint8, n int) []byte {
	next := proto
	fragment := h.MoreFragments || h.FragOffset != 0
	if fragment {
		next = protoFragment
		n += fragmentHeaderLen
	}
	if n > maxLength {
		return nil
	}
	b = append(b, 0x60|h.TClass>>4, h.TClass<<4, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	b = append(b, next, h.TTL)
	s, d := src.As16(), dst.As16()
	b = append(append(b, s[:]...), d[:]...)
	if !fragment {
		return b
	}
	offset := uint16(h.FragOffset) &^ 7
	if h.MoreFragments {
		offset |= 1
	}
	b = append(b, proto, 0)
	b = binary.BigEndian.AppendUint16(b, offset)
	return binary.BigEndian.AppendUint32(b, h.ID)
}

// AppendUDP appends to b the IP and UDP headers of a datagram with this payload,
// which has to follow them. With partial the UDP checksum is the pseudo header's
// sum only, as a device wants it that completes checksums; then payload may also
// be several datagrams, which the device segments. It returns nil when the
// datagram cannot be, as AppendIP does.
func (h *Header) AppendUDP(b []byte, srcPort, dstPort uint16, payload []byte, partial bool) []byte {
	b = h.AppendIP(b, ProtoUDP, UDPHeaderLen+len(payload))
	if b == nil {
		return nil
	}
	return h.AppendUDPHeader(b, srcPort, dstPort, payload, partial)
}

// AppendUDPPartial is AppendUDP with partial for n bytes of payload, wherever they are.
func (h *Header) AppendUDPPartial(b []byte, srcPort, dstPort uint16, n int) []byte {
	b = h.AppendIP(b, ProtoUDP, UDPHeaderLen+n)
	if b == nil {
		return nil
	}
	return h.appendUDPHeader(b, srcPort, dstPort, n)
}

// AppendUDPHeader appends the UDP header alone, for a datagram that is going to
// be fragmented: the first fragment carries it. The payload has at most 65,527
// bytes, and the addresses are of one family.
func (h *Header) AppendUDPHeader(b []byte, srcPort, dstPort uint16, payload []byte, partial bool) []byte {
	start := len(b)
	b = h.appendUDPHeader(b, srcPort, dstPort, len(payload))
	if partial {
		return b
	}
	sum := ^SumTwo(b[start:], payload, 0) // of the pseudo header's sum too, which is in the checksum's place
	if sum == 0 {                         // which would mean that there is no checksum
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(b[start+6:], sum)
	return b
}

// appendUDPHeader appends the UDP header for n bytes, with the pseudo header's sum.
func (h *Header) appendUDPHeader(b []byte, srcPort, dstPort uint16, n int) []byte {
	size := UDPHeaderLen + n
	b = binary.BigEndian.AppendUint16(b, srcPort)
	b = binary.BigEndian.AppendUint16(b, dstPort)
	b = binary.BigEndian.AppendUint16(b, uint16(size))
	return binary.BigEndian.AppendUint16(b, PseudoSum(h.Src.Unmap(), h.Dst.Unmap(), ProtoUDP, size))
}

// AppendEcho appends to b the IP and ICMP headers of an echo request, or reply,
// with this payload, which has to follow them. It returns nil as AppendIP does.
func (h *Header) AppendEcho(b []byte, reply bool, id, seq uint16, payload []byte) []byte {
	proto, _ := h.echo(reply)
	b = h.AppendIP(b, proto, ICMPHeaderLen+len(payload))
	if b == nil {
		return nil
	}
	return h.AppendEchoHeader(b, reply, id, seq, payload)
}

// AppendEchoHeader appends the ICMP header alone, for a message that is going to
// be fragmented.
func (h *Header) AppendEchoHeader(b []byte, reply bool, id, seq uint16, payload []byte) []byte {
	start := len(b)
	_, kind := h.echo(reply)
	b = append(b, kind, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, id)
	b = binary.BigEndian.AppendUint16(b, seq)
	h.sumICMP(b[start:], payload)
	return b
}

// echo gives the protocol and the type of an echo message.
func (h *Header) echo(reply bool) (proto, kind uint8) {
	v4 := h.Dst.Unmap().Is4()
	switch {
	case v4 && reply:
		return ProtoICMP, icmpEchoReply
	case v4:
		return ProtoICMP, icmpEcho
	case reply:
		return ProtoICMPv6, icmp6EchoReply
	}
	return ProtoICMPv6, icmp6Echo
}

// sumICMP sets the checksum of an ICMP message that begins with header and goes
// on with payload.
func (h *Header) sumICMP(header, payload []byte) {
	var pseudo uint16
	if src, dst := h.Src.Unmap(), h.Dst.Unmap(); dst.Is6() {
		pseudo = PseudoSum(src, dst, ProtoICMPv6, len(header)+len(payload))
	}
	binary.BigEndian.PutUint16(header[2:], ^SumTwo(header, payload, pseudo))
}
