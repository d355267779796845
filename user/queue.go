package user

import (
	"net/netip"

	"gatewayd/flow"
)

// Datagrams of a paced lease, from where they come in:
//
//	carry     their caller's goroutine: what may go, goes, in runs of whole trains
//	queue     what may not is copied to the end of its way's queue, which waits in line
//	pump      the timer's goroutine, one at a time for a user: a turn of who is first
//
// While anything waits, what comes later waits behind it. A datagram is never split; a
// train is, between datagrams.

// Bounds of what waits, both directions together: payload bytes and datagrams of one
// association, one user, and all users. The newest are dropped.
const (
	associationBytes, associationDatagrams = 1 << 20, 256
	userBytes, userDatagrams               = 4 << 20, 1024
	allBytes, allDatagrams                 = 64 << 20, 16384

	maxDatagram = 65535 // bytes of payload
)

// Owner is who a lease's datagrams belong to, as far as those are concerned that waited:
// a sub-link of an association. None of its methods may block.
type Owner interface {
	// Hold keeps the owner from being closed until Release; false: it is over.
	Hold() bool
	Release()
	// Failed reports a train that waited, and was refused by the link with err as
	// flow.Link.Send says. It counts the drop.
	Failed(tr flow.Train, err error)
}

// datagrams is a way's queue.
type datagrams struct {
	out   func(ts []flow.Train) (taken, moved int, err error)
	owner Owner
	queue []flow.Train // payloads are copies
	busy  bool         // some of it is being sent
	spent int          // bytes of the turn that it has
	piece [1]flow.Train
}

// waiting reports that datagrams wait.
func (q *datagrams) waiting() bool { return len(q.queue) > 0 || q.busy }

// backlog counts what waits.
type backlog struct {
	bytes, datagrams int
	leases           int // that it is shared by, if it is an association's
}

// association is the key of one.
type association struct {
	inbound string
	client  netip.AddrPort
}

// Link is next, charged and paced: what the user may not send yet waits, and is sent
// later, on another goroutine. It is to be given out once for a lease.
func (l *Lease) Link(next flow.Link, o Owner) flow.Link {
	w := &l.ways[flow.Up]
	w.out, w.owner = next.Send, o
	return &link{Link: next, way: w}
}

type link struct {
	flow.Link
	way *way
}

// Send sends trains or has them wait.
func (k *link) Send(ts []flow.Train) (taken, moved int, err error) { return k.way.carry(ts) }

// Receiver is next, charged and paced as by Link.
func (l *Lease) Receiver(next flow.Receiver, o Owner) flow.Receiver {
	w := &l.ways[flow.Down]
	w.owner = o
	w.out = func(ts []flow.Train) (taken, moved int, err error) { return len(ts), next.Receive(ts), nil }
	return &receiver{Receiver: next, way: w}
}

type receiver struct {
	flow.Receiver
	way *way
}

// Receive hands trains on or has them wait.
func (r *receiver) Receive(ts []flow.Train) (moved int) {
	_, moved, _ = r.way.carry(ts)
	return moved
}

// carry sends trains as far as they may go now. The rest is copied and waits.
func (w *way) carry(ts []flow.Train) (taken, moved int, err error) {
	l, a := w.lease, w.lease.account
	switch state := l.state.Load(); {
	case state == free:
		return w.out(ts)
	case state == open:
		a.useBy(ts)
		taken, moved, err = w.out(ts)
		a.moved[w.dir].Add(uint64(moved))
		return taken, moved, err
	}
	a.useBy(ts)
	now := a.lock()
	for taken < len(ts) {
		if err = l.cause; err != nil {
			break
		}
		if w.waiting() || !a.mayLocked(w) {
			for ; taken < len(ts); taken++ {
				a.enqueueLocked(w, ts[taken])
			}
			break
		}
		var n, m int
		n, m, err = a.carrySomeLocked(w, ts[taken:])
		taken, moved = taken+n, moved+m
		if err != nil {
			break
		}
	}
	a.unlock(now)
	return taken, moved, err
}

// carrySomeLocked makes one transfer of the first trains: as many whole ones as may go,
// or else a part of the first, whose rest waits. It lets go of the lock meanwhile.
func (a *account) carrySomeLocked(w *way, ts []flow.Train) (taken, moved int, err error) {
	g := a.grantLocked(w.dir)
	for taken < len(ts) && g.whole(&ts[taken]) {
		taken++
	}
	out, rest := ts[:taken], flow.Train{}
	if taken == 0 {
		if tooLarge(&ts[0]) {
			a.drops.Add(flow.DropTooBig, ts[0].Count())
			return 1, 0, nil
		}
		w.piece[0], rest = g.part(ts[0])
		out = w.piece[:]
	}
	a.reserveLocked(w.lease, w.dir, g.bytes)
	a.mu.Unlock()
	taken, moved, err = w.out(out)
	now := a.relock()
	a.earnLocked(now)
	a.finishLocked(w, g.bytes, moved)
	a.endSpentLocked(now)
	w.piece[0] = flow.Train{}
	if len(rest.Payload) > 0 && err == nil {
		a.enqueueLocked(w, rest)
	}
	return taken, moved, err
}

// relock takes the lock again.
func (a *account) relock() int64 {
	now := a.now()
	a.mu.Lock()
	return now
}

// finishLocked charges a transfer of datagrams, of which moved bytes left.
func (a *account) finishLocked(w *way, reserved, moved int) {
	a.returnLocked(w.lease, w.dir, reserved-moved)
	a.settleLocked(w.lease, w.dir, moved)
	a.moved[w.dir].Add(uint64(moved))
	a.chargeLocked()
}

// grant is what may go in one turn: each datagram has to start at a balance that is not
// negative, and none but the first goes beyond the turn.
type grant struct {
	credit uint64 // bytes at which the last datagram may start
	turn   int
	bytes  int // granted
}

// grantLocked begins a turn.
func (a *account) grantLocked(d flow.Dir) grant {
	g := grant{credit: none, turn: a.turn[d]}
	for _, b := range []*bucket{&a.bandwidth[d], &a.speed, &a.throttle} {
		if b.rate != 0 {
			g.credit = min(g.credit, b.credit)
		}
	}
	return g
}

// fits is how many datagrams of a train may go, and their bytes.
func (g *grant) fits(tr *flow.Train) (n, size int) {
	segment, count := tr.Segment, tr.Count()
	if count == 1 {
		segment = len(tr.Payload)
	}
	for n < count && uint64(g.bytes+size) <= g.credit {
		next := min(segment, len(tr.Payload)-size)
		if g.bytes+size > 0 && g.bytes+size+next > g.turn {
			break
		}
		n, size = n+1, size+next
	}
	return n, size
}

// whole grants a train, if all of it may go.
func (g *grant) whole(tr *flow.Train) bool {
	n, size := g.fits(tr)
	if n < tr.Count() || tooLarge(tr) {
		return false
	}
	g.bytes += size
	return true
}

// part grants what may go of a train, which is a datagram at least of the first one.
func (g *grant) part(tr flow.Train) (first, rest flow.Train) {
	_, size := g.fits(&tr)
	g.bytes += size
	first, rest = tr, tr
	first.Payload, rest.Payload = tr.Payload[:size], tr.Payload[size:]
	return first, rest
}

// tooLarge reports a datagram that nobody can send.
func tooLarge(tr *flow.Train) bool {
	return tr.Count() == 1 && len(tr.Payload) > maxDatagram || tr.Count() > 1 && tr.Segment > maxDatagram
}

// enqueueLocked copies as much of a train as there is room for; the rest is dropped.
func (a *account) enqueueLocked(w *way, tr flow.Train) {
	if tooLarge(&tr) {
		a.drops.Add(flow.DropTooBig, tr.Count())
		return
	}
	count := tr.Count()
	if w.lease.index < 0 || w.lease.cause != nil {
		a.drops.Add(flow.DropPaced, count)
		return
	}
	if n, size := a.roomLocked(w.lease, &tr); n < count {
		a.drops.Add(flow.DropPaced, count-n)
		if n == 0 {
			return
		}
		tr.Payload = tr.Payload[:size]
	}
	a.countLocked(w.lease, len(tr.Payload), tr.Count())
	tr.Payload = append([]byte(nil), tr.Payload...)
	w.queue = append(w.queue, tr)
	if !w.busy && w.state == away {
		a.joinLocked(w)
	}
}

// roomLocked is how many datagrams of a train there is room for, and their bytes.
func (a *account) roomLocked(l *Lease, tr *flow.Train) (n, size int) {
	b := a.backlogLocked(l)
	room := min(associationBytes-b.bytes, userBytes-a.backlog.bytes, allBytes-int(a.queued.bytes.Load()))
	places := min(associationDatagrams-b.datagrams, userDatagrams-a.backlog.datagrams, allDatagrams-int(a.queued.datagrams.Load()))
	n = tr.Count()
	switch {
	case places <= 0:
		return 0, 0
	case n == 1 && len(tr.Payload) > room:
		return 0, 0
	case n == 1:
		return 1, len(tr.Payload)
	case len(tr.Payload) > room:
		n = max(room, 0) / tr.Segment
	}
	n = min(n, places)
	return n, min(n*tr.Segment, len(tr.Payload))
}

// backlogLocked is what waits of a lease's association.
func (a *account) backlogLocked(l *Lease) *backlog {
	if l.backlog == nil {
		key := association{l.subject.Inbound, l.subject.Client}
		b := a.associations[key]
		if b == nil {
			b = new(backlog)
			a.associations[key] = b
		}
		b.leases++
		l.backlog = b
	}
	return l.backlog
}

// countLocked adds to what waits, or takes from it.
func (a *account) countLocked(l *Lease, bytes, datagrams int) {
	b := a.backlogLocked(l)
	b.bytes, b.datagrams = b.bytes+bytes, b.datagrams+datagrams
	a.backlog.bytes, a.backlog.datagrams = a.backlog.bytes+bytes, a.backlog.datagrams+datagrams
	a.queued.bytes.Add(int64(bytes))
	a.queued.datagrams.Add(int64(datagrams))
}

// discardLocked drops what waits of a lease that ended.
func (a *account) discardLocked(w *way) {
	for i := range w.queue {
		tr := &w.queue[i]
		a.countLocked(w.lease, -len(tr.Payload), -tr.Count())
		a.drops.Add(flow.DropPaced, tr.Count())
	}
	w.queue = nil
}

// forgetLocked takes a lease from its association.
func (a *account) forgetLocked(l *Lease) {
	if l.backlog == nil {
		return
	}
	if l.backlog.leases--; l.backlog.leases == 0 {
		delete(a.associations, association{l.subject.Inbound, l.subject.Client})
	}
	l.backlog = nil
}

// useBy notes the first payload byte.
func (a *account) useBy(ts []flow.Train) {
	if a.used.Load() {
		return
	}
	for i := range ts {
		if len(ts[i].Payload) > 0 {
			a.use()
			return
		}
	}
}
