package wire

import (
	"encoding/binary"
	"net/netip"

	"gatewayd/flow"
)

// ICMP types and codes (RFC 792, RFC 1812, RFC 4443).
const (
	icmpEchoReply    = 0
	icmpUnreachable  = 3
	icmpSourceQuench = 4
	icmpRedirect     = 5
	icmpEcho         = 8
	icmpTimeExceeded = 11
	icmpParameter    = 12

	icmpNet            = 0
	icmpHost           = 1
	icmpProtocol       = 2
	icmpPort           = 3
	icmpFragNeeded     = 4
	icmpNetUnknown     = 6
	icmpHostUnknown    = 7
	icmpNetProhibited  = 9
	icmpHostProhibited = 10
	icmpProhibited     = 13

	icmp6Unreachable  = 1
	icmp6TooBig       = 2
	icmp6TimeExceeded = 3
	icmp6Parameter    = 4
	icmp6Echo         = 128
	icmp6EchoReply    = 129
	icmp6Redirect     = 137

	icmp6NoRoute      = 0
	icmp6Prohibited   = 1
	icmp6Address      = 3
	icmp6Port         = 4
	icmp6SourcePolicy = 5
	icmp6RejectRoute  = 6
	icmp6BadField     = 0
	icmp6NextHeader   = 1
	icmp6Option       = 2

	icmpReassembly = 1 // of time exceeded, in both families
)

// MaxUnreachable is room for the longest message that AppendUnreachable writes,
// in bytes.
const MaxUnreachable = maxError6

const (
	maxError4 = 576  // RFC 1812, 4.3.2.3
	maxError6 = 1280 // RFC 4443, 2.4 (c)

	errorTTL    = 64
	errorTClass = 0xc0 // IPv4: internetwork control (RFC 1812, 4.3.2.5)
)

// Kind is what an ICMP error says, in either family.
type Kind uint8

// The kinds of errors.
const (
	NetUnreachable Kind = iota
	HostUnreachable
	PortUnreachable
	Prohibited          // administratively
	ProtocolUnreachable // IPv6: parameter problem, pointing at the next header
	TooBig              // carries an MTU
	TimeExceeded        // TTL or hop limit
	ReassemblyTime      // a datagram did not become whole in time
	ParameterProblem    // IPv6: carries a Problem
	numKinds
)

var messages = [numKinds]struct{ type4, code4, type6, code6 uint8 }{
	NetUnreachable:      {icmpUnreachable, icmpNet, icmp6Unreachable, icmp6NoRoute},
	HostUnreachable:     {icmpUnreachable, icmpHost, icmp6Unreachable, icmp6Address},
	PortUnreachable:     {icmpUnreachable, icmpPort, icmp6Unreachable, icmp6Port},
	Prohibited:          {icmpUnreachable, icmpProhibited, icmp6Unreachable, icmp6Prohibited},
	ProtocolUnreachable: {icmpUnreachable, icmpProtocol, icmp6Parameter, icmp6NextHeader},
	TooBig:              {icmpUnreachable, icmpFragNeeded, icmp6TooBig, 0},
	TimeExceeded:        {icmpTimeExceeded, 0, icmp6TimeExceeded, 0},
	ReassemblyTime:      {icmpTimeExceeded, icmpReassembly, icmp6TimeExceeded, icmpReassembly},
	ParameterProblem:    {icmpParameter, 0, icmp6Parameter, 0},
}

// KindOf tells what an ICMP error from the outside says, by the family of its
// peer. ok is false for one that means nothing to a client.
func KindOf(e flow.ICMPError) (kind Kind, ok bool) {
	if e.Peer.Addr().Unmap().Is4() {
		return kindOf4(e.Type, e.Code)
	}
	return kindOf6(e.Type, e.Code)
}

func kindOf4(kind, code uint8) (Kind, bool) {
	switch kind {
	case icmpTimeExceeded:
		return TimeExceeded, code == 0
	case icmpUnreachable:
	default:
		return 0, false
	}
	switch code {
	case icmpNet, icmpNetUnknown:
		return NetUnreachable, true
	case icmpProtocol:
		return ProtocolUnreachable, true
	case icmpPort:
		return PortUnreachable, true
	case icmpFragNeeded:
		return TooBig, true
	case icmpProhibited, icmpNetProhibited, icmpHostProhibited:
		return Prohibited, true
	}
	return HostUnreachable, true // so does RFC 1122 treat the rest: as no more than a hint
}

func kindOf6(kind, code uint8) (Kind, bool) {
	switch kind {
	case icmp6TooBig:
		return TooBig, true
	case icmp6TimeExceeded:
		return TimeExceeded, code == 0
	case icmp6Parameter:
		return ProtocolUnreachable, code == icmp6NextHeader
	case icmp6Unreachable:
	default:
		return 0, false
	}
	switch code {
	case icmp6NoRoute:
		return NetUnreachable, true
	case icmp6Prohibited, icmp6SourcePolicy, icmp6RejectRoute:
		return Prohibited, true
	case icmp6Port:
		return PortUnreachable, true
	}
	return HostUnreachable, true
}

// KindOfVerdict tells which error shows a verdict to a client that sent a
// datagram; ok is false when it is silence.
func KindOfVerdict(v flow.Verdict) (kind Kind, ok bool) {
	switch v {
	case flow.VerdictReset:
		return PortUnreachable, true
	case flow.VerdictNetUnreachable:
		return NetUnreachable, true
	case flow.VerdictHostUnreachable:
		return HostUnreachable, true
	case flow.VerdictProhibited:
		return Prohibited, true
	case flow.VerdictProtocol:
		return ProtocolUnreachable, true
	}
	return 0, false
}

// Unreachable is an ICMP error to be sent.
type Unreachable struct {
	Kind Kind
	From netip.Addr // who says so, of the family of the packet that it is about
	MTU  int        // bytes, of TooBig

	Problem Problem // of ParameterProblem
}

// AppendUnreachable appends to b the whole ICMP error about a packet, of which
// original holds the first bytes at least: to its sender, quoting as much as may
// be (RFC 1812, RFC 4443). It returns nil where no error may be sent: about an
// ICMP error, a fragment that is not the first, a packet from or to more or less
// than one host (RFC 1122, 3.2.2; RFC 4443, 2.4), one that says that nothing
// follows, and one that is not understood. A ParameterProblem is about the latter
// and may be about any fragment.
func AppendUnreachable(b []byte, e Unreachable, original []byte) []byte {
	var p Packet
	if e.Kind >= numKinds || !p.network(original) && e.Kind != ParameterProblem || !p.answerable(e.Kind, original) {
		return nil
	}
	h := Header{Src: e.From, Dst: p.Src, TTL: errorTTL}
	m := messages[e.Kind]
	proto, kind, code, room := uint8(ProtoICMPv6), m.type6, m.code6, maxError6-IPv6HeaderLen
	if p.Version == 4 {
		proto, kind, code, room = ProtoICMP, m.type4, m.code4, maxError4-IPv4HeaderLen
		h.TClass, h.DontFragment = errorTClass, true
	}
	if e.Kind == ParameterProblem {
		code = e.Problem.Code
	}
	quote := original[:min(len(original), p.Length, room-ICMPHeaderLen)]
	b = h.AppendIP(b, proto, ICMPHeaderLen+len(quote))
	if b == nil {
		return nil
	}
	start := len(b)
	b = append(b, kind, code, 0, 0)
	b = binary.BigEndian.AppendUint32(b, e.detail(&p))
	b = append(b, quote...)
	h.sumICMP(b[start:], nil)
	return b
}

// detail is the second half of the ICMP header: an MTU, a pointer, or zero.
func (e *Unreachable) detail(p *Packet) uint32 {
	switch {
	case e.Kind == TooBig && p.Version == 4:
		return uint32(min(max(e.MTU, 68), maxLength))
	case e.Kind == TooBig:
		return uint32(min(max(e.MTU, maxError6), 1<<31-1))
	case e.Kind == ProtocolUnreachable && p.Version == 6:
		return uint32(p.ProtoOffset)
	case e.Kind == ParameterProblem:
		return uint32(e.Problem.Pointer)
	}
	return 0
}

// answerable reports whether an ICMP error about the packet b may be sent.
func (p *Packet) answerable(kind Kind, b []byte) bool {
	if p.FragOffset != 0 && kind != ParameterProblem || p.Version == 6 && p.Proto == ProtoNoNext {
		return false
	}
	if isGroup(p.Src) || isUnspecified(p.Src) || p.Src.IsLoopback() || p.Src.Is4In6() {
		return false
	}
	if isGroup(p.Dst) || isUnspecified(p.Dst) || p.Dst.Is4In6() {
		return false
	}
	if p.Network() != flow.ICMP {
		return true
	}
	return p.FragOffset == 0 && len(b) > p.HeaderLen && p.Length > p.HeaderLen && !isError(p.Version, b[p.HeaderLen])
}

// isError reports ICMP types that are never answered by an error.
func isError(version, kind uint8) bool {
	if version == 6 {
		return kind < 128 || kind == icmp6Redirect
	}
	switch kind {
	case icmpUnreachable, icmpSourceQuench, icmpRedirect, icmpTimeExceeded, icmpParameter:
		return true
	}
	return false
}

// Quoted reads what the ICMP error in head, parsed as p, quotes of the packet
// that it is about. ok is false when p is no ICMP error or the quote says too
// little. The quoted packet need not be there as a whole, nor its checksums be
// right. Offsets in inner count from inner's first byte, at head[p.PayloadOffset],
// and may lie behind what is quoted; PayloadOffset is the transport header's.
// Ports and echo ids are read of a first fragment too, and none of a later one.
func Quoted(head []byte, p, inner *Packet) (ok bool) {
	*inner = Packet{}
	if !p.IsICMPError() || p.PayloadOffset > len(head) {
		return false
	}
	b := head[p.PayloadOffset:min(len(head), p.Length)]
	if !inner.network(b) || inner.Version != p.Version {
		return false
	}
	inner.PayloadOffset, inner.PayloadLen = inner.HeaderLen, inner.Length-inner.HeaderLen
	if inner.FragOffset != 0 {
		return true
	}
	return inner.transport(b[inner.HeaderLen:min(len(b), inner.Length)])
}
