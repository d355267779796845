// Package wire parses the IP, TCP, UDP and ICMP headers of packets, verifies and
// computes their checksums, and builds UDP and ICMP packets, all without allocating.
//
// Stages of a packet from a device: Parse (network header, extension chain,
// transport header), Deliverable (addresses), VerifyTransport (unless the device
// vouches for it). A packet toward a device begins with one of the Append
// functions; its payload stays where it is. Nothing here keeps a buffer.
package wire

import (
	"net/netip"

	"gatewayd/flow"
)

// IP protocols and IPv6 next headers that this package looks into.
const (
	ProtoICMP   = 1
	ProtoTCP    = 6
	ProtoUDP    = 17
	ProtoICMPv6 = 58
	ProtoNoNext = 59 // IPv6: nothing follows

	protoHopByHop    = 0
	protoRouting     = 43
	protoFragment    = 44
	protoDestOptions = 60
)

// Lengths of headers, in bytes.
const (
	IPv4HeaderLen = 20 // without options
	IPv6HeaderLen = 40 // without extension headers
	UDPHeaderLen  = 8
	ICMPHeaderLen = 8

	fragmentHeaderLen = 8
	tcpHeaderLen      = 20
)

// Bits of Packet.TCPFlags.
const (
	FIN = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
	ECE
	CWR
)

// maxLength is the largest number that a 16-bit length field holds.
const maxLength = 65535

// Packet is what the headers of one packet say. All offsets count bytes from the
// packet's first byte.
type Packet struct {
	Src, Dst netip.Addr

	Length      int // of the IP packet; bytes behind it are padding
	HeaderLen   int // IP header with options or extension chain: where the transport header begins
	ProtoOffset int // of the byte that names Proto

	// PayloadOffset and PayloadLen are what TCP, UDP and ICMP carry behind their
	// header. For a fragment, or another protocol, everything from HeaderLen on.
	PayloadOffset int
	PayloadLen    int

	// Fragment says that this is not a whole datagram. Its transport header is
	// not looked at. FragOffset counts bytes.
	Fragment      bool
	MoreFragments bool
	FragOffset    int
	ID            uint32 // of IPv4, or of IPv6's fragment header

	Version      uint8 // 4 or 6
	Proto        uint8 // behind the extension chain; unknown headers are not walked over
	TTL          uint8 // or hop limit
	TClass       uint8 // IPv4 TOS or IPv6 traffic class
	DontFragment bool  // always true for IPv6

	TCPFlags         uint8
	SrcPort, DstPort uint16 // TCP and UDP

	ICMPType, ICMPCode uint8
	EchoID, EchoSeq    uint16 // echo request and reply
	MTU                uint32 // bytes, of fragmentation needed and packet too big

	Problem Problem // of an IPv6 packet that is malformed
}

// Problem is what an ICMPv6 parameter problem tells (RFC 4443, 3.4). The zero value
// is none: nothing, or nothing to be told.
type Problem struct {
	Code    uint8
	Pointer int // offset of the byte that is not understood
}

// Network is the kind of traffic that a whole packet carries; 0 for one that the
// gateway does not know. ICMP is that of the packet's own version only.
func (p *Packet) Network() flow.Network {
	switch p.Proto {
	case ProtoTCP:
		return flow.TCP
	case ProtoUDP:
		return flow.UDP
	case ProtoICMP:
		if p.Version == 4 {
			return flow.ICMP
		}
	case ProtoICMPv6:
		if p.Version == 6 {
			return flow.ICMP
		}
	}
	return 0
}

// Source is the source address and port; the echo id stands for ICMP's port.
func (p *Packet) Source() netip.AddrPort {
	if p.Network() == flow.ICMP {
		return netip.AddrPortFrom(p.Src, p.EchoID)
	}
	return netip.AddrPortFrom(p.Src, p.SrcPort)
}

// Destination is the destination address and port; port 0 for ICMP.
func (p *Packet) Destination() netip.AddrPort { return netip.AddrPortFrom(p.Dst, p.DstPort) }

// IsEchoRequest reports an ICMP echo request.
func (p *Packet) IsEchoRequest() bool { return !p.Fragment && p.hasType(icmpEcho, icmp6Echo) }

// IsEchoReply reports an ICMP echo reply.
func (p *Packet) IsEchoReply() bool { return !p.Fragment && p.hasType(icmpEchoReply, icmp6EchoReply) }

// IsICMPError reports an ICMP message that begins with a quote of the packet that
// it is about, which Quoted reads.
func (p *Packet) IsICMPError() bool {
	if p.Fragment || p.Network() != flow.ICMP {
		return false
	}
	return isError(p.Version, p.ICMPType) && p.ICMPType != icmp6Redirect // which quotes in an option
}

func (p *Packet) hasType(type4, type6 uint8) bool {
	if p.Network() != flow.ICMP {
		return false
	}
	return p.Version == 4 && p.ICMPType == type4 || p.Version == 6 && p.ICMPType == type6
}
