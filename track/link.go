package track

import (
	"net/netip"

	"gatewayd/flow"
)

// Link is l, counted: the payload of what it takes is up. Once the flow ended, Send
// fails with the cause. It shows nothing of l that would go uncounted, and closing it
// does not close the flow.
func (f *Flow) Link(l flow.Link) flow.Link { return &link{f, l} }

type link struct {
	flow *Flow
	next flow.Link
}

// Send sends trains and counts those that were taken.
func (l *link) Send(ts []flow.Train) (int, error) {
	if cause := l.flow.Cause(); cause != nil {
		return 0, cause
	}
	n, err := l.next.Send(ts)
	l.flow.Moved(flow.Up, payload(ts[:min(max(n, 0), len(ts))]))
	return n, err
}

// Close closes the link below.
func (l *link) Close() error { return l.next.Close() }

// LocalAddr is that of the link below.
func (l *link) LocalAddr() netip.AddrPort { return l.next.LocalAddr() }

// Receiver is r, counted: the payload that it was handed is down. Once the flow
// ended, only Closed gets through.
func (f *Flow) Receiver(r flow.Receiver) flow.Receiver { return &receiver{f, r} }

type receiver struct {
	flow *Flow
	next flow.Receiver
}

// Receive hands trains on and counts them.
func (r *receiver) Receive(ts []flow.Train) {
	if r.flow.Cause() != nil {
		return
	}
	n := payload(ts) // now: the next receiver may use the slice as it likes
	r.next.Receive(ts)
	r.flow.Moved(flow.Down, n)
}

// Unreachable hands an ICMP error on.
func (r *receiver) Unreachable(e flow.ICMPError) {
	if r.flow.Cause() == nil {
		r.next.Unreachable(e)
	}
}

// Closed hands the end of the link on.
func (r *receiver) Closed(err error) { r.next.Closed(err) }

// payload is the bytes of trains, whatever datagrams they are cut into.
func payload(ts []flow.Train) int {
	n := 0
	for i := range ts {
		n += len(ts[i].Payload)
	}
	return n
}
