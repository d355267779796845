package track

import (
	"net/netip"

	"gatewayd/flow"
)

// Link is l, counted: the payload of what it sends is up. Once the flow ended, Send
// fails with the cause. It shows nothing of l that would go uncounted, and closing it
// does not close the flow.
func (f *Flow) Link(l flow.Link) flow.Link { return &link{f, l} }

type link struct {
	flow *Flow
	next flow.Link
}

// Send sends trains and counts what left.
func (l *link) Send(ts []flow.Train) (taken, moved int, err error) {
	if cause := l.flow.Cause(); cause != nil {
		return 0, 0, cause
	}
	taken, moved, err = l.next.Send(ts)
	l.flow.Moved(flow.Up, moved)
	return taken, moved, err
}

// Close closes the link below.
func (l *link) Close() error { return l.next.Close() }

// LocalAddr is that of the link below.
func (l *link) LocalAddr() netip.AddrPort { return l.next.LocalAddr() }

// Receiver is r, counted: the payload that it sent to the client is down. Once the flow
// ended, only Closed gets through.
func (f *Flow) Receiver(r flow.Receiver) flow.Receiver { return &receiver{f, r} }

type receiver struct {
	flow *Flow
	next flow.Receiver
}

// Receive hands trains on and counts what left toward the client.
func (r *receiver) Receive(ts []flow.Train) (moved int) {
	if r.flow.Cause() != nil {
		return 0
	}
	moved = r.next.Receive(ts)
	r.flow.Moved(flow.Down, moved)
	return moved
}

// Unreachable hands an ICMP error on.
func (r *receiver) Unreachable(e flow.ICMPError) {
	if r.flow.Cause() == nil {
		r.next.Unreachable(e)
	}
}

// Closed hands the end of the link on.
func (r *receiver) Closed(err error) { r.next.Closed(err) }
