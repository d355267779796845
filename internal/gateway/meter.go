package gateway

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"gatewayd/flow"
	"gatewayd/track"
	"gatewayd/user"
)

// meter is what a flow's relay or sub-link asks: track counts, and the lease of its
// user, if it has one, charges and paces. Promotion and demotion give it another
// lease while it lives; what moves from then on is the other's.
type meter struct {
	flow   *track.Flow
	device *deviceTraffic
	lease  atomic.Pointer[leased]

	mu   sync.Mutex // one change of the lease at a time, none before the flow is open
	ways *datagrams // of a sub-link, once it is open; guarded by mu
}

// leased is a lease with the ways of datagrams through it, which streams don't have.
type leased struct {
	*user.Lease
	link     flow.Link
	receiver flow.Receiver
}

// open registers the flow, with end as its hook. Whoever finds it registered waits with
// the lease until it is open.
func (m *meter) open(g *Gateway, meta track.Meta, end func(cause error)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.device = g.unowned.open(meta.Device)
	m.flow = g.tracker.Open(meta, end)
}

// through makes the ways of a sub-link through the meter.
func (m *meter) through(link flow.Link, r flow.Receiver, o user.Owner) *datagrams {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ways = &datagrams{meter: m, owner: o, link: m.flow.Link(link), receiver: m.flow.Receiver(r)}
	if l := m.current(); l != nil {
		m.lease.CompareAndSwap(l, m.ways.with(l.Lease)) // or it is over meanwhile
	}
	return m.ways
}

// gone takes the place of the lease of a flow that is over.
var gone leased

// hand puts the flow under another lease, nil for nobody, and gives the old one back. A
// flow that is over takes none.
func (m *meter) hand(l *user.Lease, p track.Principal) {
	old, taken := m.swap(l, p)
	switch {
	case l == nil:
	case taken:
		l.Attach(m.flow.End)
	default:
		l.Release()
	}
	if old != nil {
		old.Release()
	}
}

// swap is hand's exchange. It gives back the old lease only if the new one was taken.
func (m *meter) swap(l *user.Lease, p track.Principal) (old *leased, taken bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var next *leased
	switch {
	case l == nil:
	case m.ways != nil:
		next = m.ways.with(l)
	default:
		next = &leased{Lease: l}
	}
	old = m.lease.Load()
	if old == &gone || !m.flow.Change(p) || !m.lease.CompareAndSwap(old, next) {
		return nil, false
	}
	return old, true
}

// close gives the lease back for good.
func (m *meter) close() {
	if l := m.lease.Swap(&gone); l != nil && l != &gone {
		l.Release()
	}
	if m.device != nil {
		m.device.close()
	}
}

// current is the lease that holds, nil if there is none.
func (m *meter) current() *leased {
	if l := m.lease.Load(); l != &gone {
		return l
	}
	return nil
}

// Ready asks track first: a kill comes before a pause.
func (m *meter) Ready(d flow.Dir, wake func()) (int, error) {
	most, err := m.flow.Ready(d, wake)
	if l := m.current(); l != nil && err == nil {
		return l.Ready(d, wake)
	}
	return most, err
}

// Took tells the lease.
func (m *meter) Took(d flow.Dir, n int) {
	if l := m.current(); l != nil {
		l.Took(d, n)
	}
}

// Moved tells both, and counts for the device of an anonymous flow.
func (m *meter) Moved(d flow.Dir, n int) {
	m.flow.Moved(d, n)
	if l := m.current(); l != nil {
		l.Moved(d, n)
	} else {
		m.device.stream(d, n)
	}
}

// Leave tells the lease.
func (m *meter) Leave(d flow.Dir) {
	if l := m.current(); l != nil {
		l.Leave(d)
	}
}

// datagrams are both ways of a sub-link through the meter.
type datagrams struct {
	meter    *meter
	owner    user.Owner    // the sub-link
	link     flow.Link     // counted
	receiver flow.Receiver // counted
}

// with is the lease with this sub-link's ways through it.
func (g *datagrams) with(l *user.Lease) *leased {
	return &leased{Lease: l, link: l.Link(g.link, g.owner), receiver: l.Receiver(g.receiver, g.owner)}
}

// Send sends trains through the lease, or counts them for the device.
func (g *datagrams) Send(ts []flow.Train) (taken, moved int, err error) {
	if l := g.meter.current(); l != nil {
		return l.link.Send(ts)
	}
	taken, moved, err = g.link.Send(ts)
	g.meter.device.datagrams(flow.Up, moved)
	return taken, moved, err
}

// Receive hands trains on through the lease, or counts them for the device.
func (g *datagrams) Receive(ts []flow.Train) (moved int) {
	if l := g.meter.current(); l != nil {
		return l.receiver.Receive(ts)
	}
	moved = g.receiver.Receive(ts)
	g.meter.device.datagrams(flow.Down, moved)
	return moved
}

// Unreachable hands an ICMP error on.
func (g *datagrams) Unreachable(e flow.ICMPError) { g.receiver.Unreachable(e) }

// Closed hands the end of the link on.
func (g *datagrams) Closed(err error) { g.receiver.Closed(err) }

// Close closes the link below.
func (g *datagrams) Close() error { return g.link.Close() }

// LocalAddr is that of the link below.
func (g *datagrams) LocalAddr() netip.AddrPort { return g.link.LocalAddr() }
