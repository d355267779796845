package flow

import (
	"context"
	"net"
	"net/netip"
)

// Outbound is a way out. Implementations are safe for concurrent use.
type Outbound interface {
	// DialStream opens a TCP connection to f.Dest. It blocks until the far side
	// answered, ctx ends, or the dial failed; the error keeps its errno
	// (ECONNREFUSED, EHOSTUNREACH, …) for errors.Is, or is a Refusal.
	DialStream(ctx context.Context, f Flow) (Stream, error)
	// OpenLink opens a datagram link for f. r hears what comes back, from before
	// OpenLink returns until r.Closed. It may block as DialStream does.
	OpenLink(ctx context.Context, f Flow, r Receiver) (Link, error)
}

// Stream is a connected byte stream. One that is a kernel socket also implements
// syscall.Conn; whoever takes the descriptor from it moves the bytes by itself
// and uses none of Read, Write and the deadlines.
// Close may be called once from any goroutine and ends blocked calls.
type Stream interface {
	net.Conn
	// CloseWrite sends FIN; reading goes on.
	CloseWrite() error
}

// Link carries datagrams of one sub-link to any number of peers.
type Link interface {
	// Send sends trains in order and never blocks. It returns how many of them
	// were taken before err, and how many bytes of their payload left. A datagram
	// that the socket had no room for is taken and lost, as on any link, and so is
	// what follows the first one of a train; the link counts them as drops. Of the
	// train that err is about nothing left, and nobody counted it yet.
	Send(ts []Train) (taken, moved int, err error)
	// Close ends the link. No call of its Receiver begins after Close returned,
	// unless Close was called from within one. r.Closed is not called for it.
	Close() error
	// LocalAddr is the address that datagrams leave from, if known.
	LocalAddr() netip.AddrPort
}

// Receiver hears a Link. Calls for one link never overlap, and none may block.
type Receiver interface {
	// Receive gets datagrams from the far side; payloads are valid during the call.
	// It returns how many bytes of payload left toward the client. The rest was
	// counted as drops, or waits and is counted later.
	Receive(ts []Train) (moved int)
	// Unreachable reports an ICMP error about something that was sent. The link lives on.
	Unreachable(e ICMPError)
	// Closed reports that the link ended by itself; no call follows it.
	Closed(err error)
}

// Train is one datagram, or several of equal size to or from one peer.
type Train struct {
	Peer         Destination // far side: where it goes, or where it came from
	Payload      []byte      // one datagram, or datagrams of Segment bytes end to end, the last one may be shorter
	Segment      int         // bytes of each datagram; 0: Payload is one datagram, which may be empty
	TClass       uint8       // IPv4 TOS or IPv6 traffic class
	DontFragment bool

	// Seq is an ICMP echo's sequence number. Payload is then what follows the 8 bytes
	// of ICMP header, Segment is 0, and the ports of Peer are.
	Seq uint16
}

// Count is the number of datagrams in the train.
func (t *Train) Count() int {
	if t.Segment <= 0 || len(t.Payload) <= t.Segment {
		return 1
	}
	return (len(t.Payload) + t.Segment - 1) / t.Segment
}

// ICMPError is an ICMP error message that the outside sent about a datagram of ours.
type ICMPError struct {
	Type, Code uint8          // as in the message's family
	MTU        int            // bytes, of fragmentation needed and packet too big
	Offender   netip.Addr     // who sent it
	Peer       netip.AddrPort // whom the datagram was for
	Payload    []byte         // of the datagram, as far as the message quoted it; valid during the call
	Seq        uint16         // of the echo request that it was, of an ICMP flow
}

// Meter counts, charges and paces one flow, and tells when it has to end.
// Its methods are called by the flow's relay alone, one call at a time per direction.
//
// Bytes have moved when they left the gateway for good: given to the outbound's
// socket (up), or sent to the client as packets (down). What the gateway merely
// holds in a send queue has not moved; a flow that is reset drops it uncounted.
type Meter interface {
	// Ready asks to take bytes in direction d. The relay may take at most max bytes,
	// which is at least 1 when err is nil, and says with Took what it took. ErrPaused:
	// not now, wake is called once when it is worth asking again, perhaps on another
	// goroutine, and never from inside Ready; the flow keeps its place in line until
	// it asks again or leaves. Any other error is the cause by which the flow ended.
	Ready(d Dir, wake func()) (max int, err error)
	// Took reports n bytes, 0 included, taken from their source. It follows every
	// Ready without error exactly once, before the next Ready in d.
	Took(d Dir, n int)
	// Moved reports n bytes, after they moved. They were taken before; what was taken
	// and has not moved when the flow ends is lost.
	Moved(d Dir, n int)
	// Leave gives up the place in line of a flow that was paused and can't use its
	// turn in d now, because its receiver takes nothing. It may ask again later.
	Leave(d Dir)
}
