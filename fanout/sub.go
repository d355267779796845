package fanout

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

const (
	maxWaiting = 16               // datagrams that wait for an opening, in each direction
	echoIdle   = 10 * time.Second // idle limit of echo streams
)

// Sub is one sub-link: the datagrams of an association that go through one
// outbound version. It is the Receiver to give to OpenLink.
//
// States, by who moves it on:
//
//	opening  the opener; sends and receives are queued
//	open     sends go to the link, receives to the client
//	over     whoever calls End first; nothing is carried any more
//	closed   whoever gives the last of refs back: the link is closed, then the flow
//
// refs counts the opener, the place in the association, and calls of the link
// under way, so that a flow is closed after its last byte was counted.
type Sub struct {
	a         *association
	outbound  any
	name      string
	allowHost bool
	refs      atomic.Int32
	cause     atomic.Pointer[error] // why it is over; nil while it is not
	seen      atomic.Int64          // when a datagram last passed
	answered  atomic.Bool
	ready     atomic.Bool // receives need not be queued any more
	nextEnded *Sub        // guarded by Table.ended

	// Guarded by the association's lock.
	used     uint64 // the association's turn of the last datagram sent
	open     bool
	general  bool  // a port without a limit of its own was sent to
	portIdle int64 // longest limit of the ports that have one, ns
	up       []flow.Train

	// Written by the opener before ready, then constant.
	opened Opened

	early struct { // what came back before the flow was registered
		sync.Mutex
		down []flow.Train
	}

	opening *opening // set while opening
}

// opening is what only the opener needs.
type opening struct {
	f      flow.Flow
	target Target
	ctx    context.Context
	cancel context.CancelCauseFunc
	next   *Sub // guarded by Table.openers
}

func newSub(a *association, f flow.Flow, target Target) *Sub {
	f.AllowHost = target.AllowHost
	s := &Sub{
		a: a, outbound: target.Outbound, name: target.Name, allowHost: target.AllowHost,
		opening: &opening{f: f, target: target},
	}
	s.refs.Store(2) // its place in the association, and its opener
	return s
}

// End ends the sub-link with cause, from any goroutine and without blocking; the
// first cause holds. Opened.Close follows soon, on another goroutine.
func (s *Sub) End(cause error) {
	if cause == nil {
		cause = net.ErrClosed
	}
	if s.cause.CompareAndSwap(nil, &cause) {
		s.a.t.ended.push(s)
	}
}

// over reports that the sub-link ended.
func (s *Sub) over() bool { return s.cause.Load() != nil }

// Hold keeps the sub-link from being closed until Release. It fails once the
// sub-link is over.
func (s *Sub) Hold() bool {
	if s.over() {
		return false
	}
	for {
		n := s.refs.Load()
		if n == 0 {
			return false
		}
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Release gives a reference back; the last one closes the link and the flow.
func (s *Sub) Release() {
	if s.refs.Add(-1) > 0 {
		return
	}
	if s.opened.Link != nil {
		s.opened.Link.Close() //nolint:errcheck // it is gone either way
	}
	if s.opened.Close != nil {
		s.opened.Close(*s.cause.Load())
	}
	t := s.a.t
	t.dying.Add(-1)
	if t.live.Add(-1) == 0 {
		t.ended.rouse() // Run may wait for it
	}
}

// widenLocked lets the idle limit of one more destination port hold.
func (s *Sub) widenLocked(network flow.Network, port uint16) {
	limit, ok := s.a.t.cfg.Timeouts.Ports[port]
	if network == flow.ICMP {
		limit, ok = echoIdle, true
	}
	if !ok {
		s.general = true
		return
	}
	s.portIdle = max(s.portIdle, int64(limit))
}

// idleLocked reports that nothing passed for as long as the limits allow.
func (s *Sub) idleLocked(now int64) bool {
	limit := s.portIdle
	if s.general && s.answered.Load() {
		limit = max(limit, int64(s.a.t.cfg.Timeouts.Answered))
	} else if s.general {
		limit = max(limit, int64(s.a.t.cfg.Timeouts.OneWay))
	}
	return s.open && now-s.seen.Load() >= limit
}

// carryLocked sends trains, or queues them while the sub-link opens. It returns how
// many are settled: those that follow the end of the sub-link are not.
func (s *Sub) carryLocked(ts []flow.Train, now int64) int {
	if s.open {
		return s.sendLocked(ts, now)
	}
	for i := range ts {
		s.up = s.enqueue(s.up, ts[i])
	}
	return len(ts)
}

// sendLocked sends trains, until one ends the sub-link, and returns how many were
// sent or failed. One that fails does not count as activity: a client that keeps
// sending does not keep a dead sub-link alive.
func (s *Sub) sendLocked(ts []flow.Train, now int64) (done int) {
	for done < len(ts) {
		n, _, err := s.opened.Link.Send(ts[done:])
		if n > 0 {
			s.seen.Store(now)
		}
		if done += n; err == nil {
			return done
		}
		done++
		if s.Failed(ts[done-1], err); s.over() {
			return done
		}
	}
	return done
}

// Failed counts a train that the link refused with err, and tells the client; the end
// of the link or of its flow ends the sub-link. Whoever sends what waited calls it too.
func (s *Sub) Failed(tr flow.Train, err error) {
	s.a.t.cfg.Drops.Add(flow.DropOf(err, flow.DropSendFailed), tr.Count())
	s.debug("sending on ", " failed: ", err)
	s.a.refuse(tr, err)
	if _, ok := errors.AsType[*flow.Cause](err); ok || errors.Is(err, net.ErrClosed) {
		s.End(err)
	}
}

// enqueue copies as much of tr to q as fits into it; the rest is dropped.
func (s *Sub) enqueue(q []flow.Train, tr flow.Train) []flow.Train {
	t := s.a.t
	room := maxWaiting
	for i := range q {
		room -= q[i].Count()
	}
	n := tr.Count()
	if room <= 0 {
		t.cfg.Drops.Add(flow.DropQueueFull, n)
		return q
	}
	if n > room {
		t.cfg.Drops.Add(flow.DropQueueFull, n-room)
		tr.Payload = tr.Payload[:room*tr.Segment]
	}
	size := int64(len(tr.Payload))
	if t.queued.Add(size) > maxQueue {
		t.queued.Add(-size)
		t.cfg.Drops.Add(flow.DropQueueFull, tr.Count())
		return q
	}
	tr.Payload = append(make([]byte, 0, size), tr.Payload...)
	return append(q, tr)
}

// dequeued says that q's memory is free again.
func (s *Sub) dequeued(q []flow.Train) {
	for i := range q {
		s.a.t.queued.Add(-int64(len(q[i].Payload)))
	}
}

// Receive passes datagrams on to Opened.Receiver. What comes before the flow was
// registered waits, 16 datagrams at most, and passes then.
func (s *Sub) Receive(ts []flow.Train) (moved int) {
	if !s.Hold() {
		return 0
	}
	defer s.Release()
	if s.ready.Load() || !s.keep(ts) {
		return s.opened.Receiver.Receive(ts)
	}
	return 0
}

// keep queues what was received too early. It returns false when it was not.
func (s *Sub) keep(ts []flow.Train) bool {
	s.early.Lock()
	defer s.early.Unlock()
	if s.ready.Load() {
		return false
	}
	for _, tr := range ts {
		s.early.down = s.enqueue(s.early.down, tr)
	}
	return true
}

// Unreachable passes an ICMP error on to the client. It is not counted and
// does not refresh the idle limits.
func (s *Sub) Unreachable(e flow.ICMPError) {
	if !s.ready.Load() || !s.Hold() {
		return
	}
	defer s.Release()
	s.opened.Receiver.Unreachable(e)
}

// Closed ends the sub-link, since its link ended by itself.
func (s *Sub) Closed(err error) {
	if !s.over() {
		s.debug("sub-link ", " ended: ", err)
	}
	s.End(err)
}

// Down is the client's end of the sub-link, for a meter to wrap and to be
// returned as Opened.Receiver.
func (s *Sub) Down() flow.Receiver { return (*down)(s) }

// down is a Sub as the meter sees it.
type down Sub

// Receive carries datagrams to the client.
func (d *down) Receive(ts []flow.Train) (moved int) {
	t := d.a.t
	now := t.now()
	d.seen.Store(now)
	d.a.seen.Store(now)
	d.answered.Store(true)
	return t.cfg.Reply(d.a.client, ts)
}

// Unreachable tells the client of an ICMP error.
func (d *down) Unreachable(e flow.ICMPError) {
	if report := d.a.t.cfg.Unreachable; report != nil {
		report(d.a.client, e)
	}
}

// Closed ends the sub-link.
func (d *down) Closed(err error) { (*Sub)(d).End(err) }

// debug logs verb NAME result ERR, and composes it only when someone reads it.
func (s *Sub) debug(verb, result string, err error) {
	log := s.a.t.cfg.Log
	if !log.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	text := "end of link"
	if err != nil {
		text = err.Error()
	}
	log.Debug(verb+s.name+result+text, "inbound", s.a.client.Inbound, "source", s.a.client.Source)
}
