package wire

import (
	"encoding/binary"
	"net/netip"

	"gatewayd/flow"
)

const (
	maxExtensions   = 8   // IPv6 extension headers of one packet
	maxExtensionLen = 512 // bytes of them
)

// Parse reads the headers of a packet of total bytes, whose first ones are head.
// All headers have to lie in head, which 2 KiB are always enough for; of a packet
// that is longer, the rest may be elsewhere. gso says that this is a super-packet
// of several UDP datagrams: its UDP length may be the whole or that of one
// datagram, and the payload is the whole in either case.
//
// When ok is false, cause is why the packet has to be dropped, and p holds what
// was understood. The IPv4 header checksum is verified; that of the transport is
// VerifyTransport's. Unknown protocols are accepted, the caller sees Proto.
// Packets that ask for a source route (RFC 7126, RFC 5095) are malformed here.
func Parse(head []byte, total int, gso bool, p *Packet) (cause flow.Drop, ok bool) {
	*p = Packet{}
	if ok := p.network(head); p.Length > total {
		p.Problem = Problem{}
		return flow.DropMalformed, false
	} else if !ok {
		return flow.DropMalformed, false
	}
	if p.Version == 4 && Sum(head[:p.HeaderLen], 0) != 0xffff {
		return flow.DropChecksum, false
	}
	p.PayloadOffset, p.PayloadLen = p.HeaderLen, p.Length-p.HeaderLen
	if p.Fragment {
		return flow.DropMalformed, p.fragmentFits()
	}
	b := head[p.HeaderLen:min(len(head), p.Length)]
	if !p.transport(b) || !p.transportFits(b, gso) {
		return flow.DropMalformed, false
	}
	if p.DstPort == 0 && (p.Proto == ProtoTCP || p.Proto == ProtoUDP) {
		return flow.DropDestinationZero, false
	}
	return 0, true
}

// network reads the IP header and the extension chain of b, which may end early
// behind them.
func (p *Packet) network(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	p.Version = b[0] >> 4
	switch p.Version {
	case 4:
		return p.ipv4(b)
	case 6:
		return p.ipv6(b)
	}
	return false
}

// ipv4 reads a header as in RFC 791.
func (p *Packet) ipv4(b []byte) bool {
	if len(b) < IPv4HeaderLen {
		return false
	}
	p.HeaderLen = int(b[0]&0x0f) * 4
	p.Length = int(binary.BigEndian.Uint16(b[2:]))
	if p.HeaderLen < IPv4HeaderLen || p.HeaderLen > len(b) || p.Length < p.HeaderLen {
		return false
	}
	p.TClass, p.TTL, p.Proto, p.ProtoOffset = b[1], b[8], b[9], 9
	p.ID = uint32(binary.BigEndian.Uint16(b[4:]))
	frag := binary.BigEndian.Uint16(b[6:])
	p.DontFragment = frag&0x4000 != 0
	p.setFragment(int(frag&0x1fff)*8, frag&0x2000 != 0)
	p.Src = netip.AddrFrom4([4]byte(b[12:16]))
	p.Dst = netip.AddrFrom4([4]byte(b[16:20]))
	return optionsIPv4(b[IPv4HeaderLen:p.HeaderLen])
}

// optionsIPv4 reports whether b is a well-formed list of options without a source
// route that still leads elsewhere.
func optionsIPv4(b []byte) bool {
	const end, nop, looseRoute, strictRoute = 0, 1, 131, 137
	for len(b) > 0 {
		if b[0] == end {
			return true
		}
		if b[0] == nop {
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			return false
		}
		size := int(b[1])
		if b[0] == looseRoute || b[0] == strictRoute {
			if size < 3 || int(b[2]) <= size { // the pointer is not behind the last address yet
				return false
			}
		}
		b = b[size:]
	}
	return true
}

// ipv6 reads a header as in RFC 8200.
func (p *Packet) ipv6(b []byte) bool {
	if len(b) < IPv6HeaderLen {
		return false
	}
	p.Length = IPv6HeaderLen + int(binary.BigEndian.Uint16(b[4:]))
	p.TClass = b[0]<<4 | b[1]>>4
	p.TTL = b[7]
	p.DontFragment = true
	p.Src = netip.AddrFrom16([16]byte(b[8:24]))
	p.Dst = netip.AddrFrom16([16]byte(b[24:40]))
	return p.extensions(b[:min(len(b), p.Length)])
}

// extensions walks the chain up to the first header that is not an extension
// header, or to the data of a fragment. A header of unknown kind ends the walk:
// its format is unknown too (RFC 6564 has only a recommendation). One that is
// understood and not accepted is a Problem and does not end it, since nothing may
// be told about an ICMP error that is behind it.
func (p *Packet) extensions(b []byte) bool {
	next, at := b[6], IPv6HeaderLen
	p.ProtoOffset = 6
	for n := 0; isExtension(next); n++ {
		size, ok := p.extension(next, b, at)
		if !ok || n == maxExtensions || at+size-IPv6HeaderLen > maxExtensionLen {
			p.Problem = Problem{}
			return false
		}
		if next == protoFragment {
			offset := binary.BigEndian.Uint16(b[at+2:])
			p.ID = binary.BigEndian.Uint32(b[at+4:])
			p.setFragment(int(offset&^7), offset&1 != 0)
		}
		next, p.ProtoOffset = b[at], at
		at += size
		if p.Fragment { // an atomic fragment (RFC 6946) is a whole packet, its chain goes on
			break
		}
	}
	p.Proto, p.HeaderLen = next, at
	return p.Problem == Problem{}
}

// problem notes what is wrong with the chain; the first one counts.
func (p *Packet) problem(code uint8, pointer int) {
	if p.Problem == (Problem{}) {
		p.Problem = Problem{code, pointer}
	}
}

// isExtension leaves out the authentication header (RFC 4302): nobody here could
// verify it, so that it is an unknown protocol as over IPv4.
func isExtension(next uint8) bool {
	switch next {
	case protoHopByHop, protoRouting, protoFragment, protoDestOptions:
		return true
	}
	return false
}

// extension checks the extension header at an offset of the packet b, and gives
// its size in bytes. Hop-by-hop options are allowed in the first place only: else
// they are a header that is unknown (RFC 8200, section 4).
func (p *Packet) extension(kind uint8, b []byte, at int) (size int, ok bool) {
	h := b[at:]
	if len(h) < 8 {
		return 0, false
	}
	size = (int(h[1]) + 1) * 8
	switch kind {
	case protoFragment:
		return fragmentHeaderLen, true // its second byte is reserved
	case protoRouting:
		if h[3] != 0 { // segments left (RFC 8200, section 4.4)
			p.problem(icmp6BadField, at+2)
		}
		return size, size <= len(h)
	case protoHopByHop:
		if at != IPv6HeaderLen {
			p.problem(icmp6NextHeader, p.ProtoOffset)
		}
	}
	return size, size <= len(h) && p.optionsIPv6(b[:at+size], at+2)
}

// optionsIPv6 reports whether b, from an offset on, is a well-formed list of
// options, none of which is to be dropped in silence for not being known (RFC
// 8200, section 4.2); so far none is.
func (p *Packet) optionsIPv6(b []byte, at int) bool {
	const pad1, drop, tell = 0, 0x40, 0x80 // what the first bits of an option ask for
	for at < len(b) {
		if b[at] == pad1 {
			at++
			continue
		}
		if len(b)-at < 2 || int(b[at+1])+2 > len(b)-at || b[at]&0xc0 == drop {
			return false
		}
		if b[at]&tell != 0 { // about multicast too or not: nobody here is a member
			p.problem(icmp6Option, at)
		}
		at += int(b[at+1]) + 2
	}
	return true
}

func (p *Packet) setFragment(offset int, more bool) {
	p.FragOffset, p.MoreFragments = offset, more
	p.Fragment = more || offset != 0
}

// fragmentFits checks that the fragment has data, that another one can follow it,
// and that the whole will not be too long.
func (p *Packet) fragmentFits() bool {
	limit := maxLength
	if p.Version == 4 {
		limit -= p.HeaderLen
	}
	switch {
	case p.PayloadLen == 0:
		return false
	case p.FragOffset+p.PayloadLen > limit:
		p.fragmentProblem(p.ProtoOffset + 2) // the fragment offset
		return false
	case p.MoreFragments && p.PayloadLen%8 != 0:
		p.fragmentProblem(4) // the packet's length
		return false
	}
	return true
}

// fragmentProblem notes what is wrong with a fragment (RFC 8200, section 4.5); over
// IPv4 nothing is told.
func (p *Packet) fragmentProblem(pointer int) {
	if p.Version == 6 {
		p.problem(icmp6BadField, pointer)
	}
}

// transport reads what the first bytes of the transport header b tell: as many as
// an ICMP error quotes at least.
func (p *Packet) transport(b []byte) bool {
	n := p.Network()
	if n == 0 {
		return true
	}
	if len(b) < 8 { // of every header that follows, and of every quote
		return false
	}
	if n == flow.ICMP {
		p.icmp(b)
		return true
	}
	p.SrcPort = binary.BigEndian.Uint16(b)
	p.DstPort = binary.BigEndian.Uint16(b[2:])
	if n == flow.TCP && len(b) > 13 {
		p.TCPFlags = b[13]
	}
	return true
}

func (p *Packet) icmp(b []byte) {
	p.ICMPType, p.ICMPCode = b[0], b[1]
	switch {
	case p.hasType(icmpEcho, icmp6Echo), p.hasType(icmpEchoReply, icmp6EchoReply):
		p.EchoID = binary.BigEndian.Uint16(b[4:])
		p.EchoSeq = binary.BigEndian.Uint16(b[6:])
	case p.Version == 4 && p.ICMPType == icmpUnreachable && p.ICMPCode == icmpFragNeeded:
		p.MTU = uint32(binary.BigEndian.Uint16(b[6:]))
	case p.Version == 6 && p.ICMPType == icmp6TooBig:
		p.MTU = binary.BigEndian.Uint32(b[4:])
	}
}

// transportFits checks the transport header's length fields, now that b holds all
// of it, and finds the payload.
func (p *Packet) transportFits(b []byte, gso bool) bool {
	header := 0
	switch p.Network() {
	case flow.TCP:
		if len(b) < tcpHeaderLen {
			return false
		}
		header = int(b[12]>>4) * 4
		if header < tcpHeaderLen || header > len(b) {
			return false
		}
	case flow.UDP:
		header = UDPHeaderLen
		size := int(binary.BigEndian.Uint16(b[4:]))
		if size < UDPHeaderLen || size > p.PayloadLen {
			return false
		}
		if !gso {
			p.PayloadLen = size // what follows is padding
		}
	case flow.ICMP:
		header = ICMPHeaderLen
	}
	p.PayloadOffset += header
	p.PayloadLen -= header
	return true
}
