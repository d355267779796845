package user

import "gatewayd/flow"

// fired is the timer's. Whoever may go now is told, and datagrams whose turn it is are
// sent, as long as there are any. A second timer goroutine leaves them to the first.
func (a *account) fired() {
	now := a.lock()
	a.due = 0
	for {
		w := a.nextLocked()
		if w == nil {
			a.unlock(now)
			return
		}
		now = a.pumpLocked(now, w)
	}
}

// nextLocked is a way whose datagrams may go, if nobody sends any.
func (a *account) nextLocked() *way {
	if a.pumping {
		return nil
	}
	for d := range a.lines {
		w := a.lines[d].first
		if w == nil || !w.waiting() {
			continue
		}
		if a.mayLocked(w) {
			return w
		}
		w.state = waits // if it was called, somebody else was faster
	}
	return nil
}

// pumpLocked sends what may go of a way whose turn it is, without the lock. The way
// keeps its turn while it earns what its datagrams cost, one after the other, until
// those are as many bytes as a stream may move; then it waits behind the others.
func (a *account) pumpLocked(now int64, w *way) int64 {
	w.state = called
	batch, bytes := a.cutLocked(w)
	w.spent += bytes
	a.reserveLocked(w.lease, w.dir, bytes)
	a.pumping, w.busy = true, true
	a.unlock(now)
	moved := a.sendWaited(w, batch)
	now = a.relock()
	a.earnLocked(now)
	a.pumping, w.busy = false, false
	clear(batch)
	a.batch = batch[:0]
	a.finishLocked(w, bytes, moved)
	if w.lease.index < 0 || w.lease.cause != nil {
		a.discardLocked(w)
		return now
	}
	if len(w.queue) > 0 && w.spent+firstBytes(&w.queue[0]) <= a.turn[w.dir] {
		w.state = waits
		return now
	}
	a.leaveLocked(w)
	w.spent = 0
	if len(w.queue) > 0 {
		a.joinLocked(w)
	} else if a.policy.unlimited() {
		a.modeLocked(w.lease)
	}
	return now
}

// firstBytes is the size of a train's first datagram.
func firstBytes(tr *flow.Train) int {
	if tr.Count() > 1 {
		return tr.Segment
	}
	return len(tr.Payload)
}

// cutLocked takes one turn's datagrams from a queue, and tells their bytes.
func (a *account) cutLocked(w *way) ([]flow.Train, int) {
	g := a.grantLocked(w.dir)
	g.turn -= w.spent
	batch := a.batch[:0]
	for len(w.queue) > 0 {
		tr := &w.queue[0]
		if !g.whole(tr) {
			if len(batch) == 0 {
				first, rest := g.part(*tr)
				batch = append(batch, first)
				a.countLocked(w.lease, -len(first.Payload), -first.Count())
				*tr = compact(rest)
			}
			break
		}
		batch = append(batch, *tr)
		a.countLocked(w.lease, -len(tr.Payload), -tr.Count())
		*tr = flow.Train{}
		w.queue = w.queue[1:]
	}
	if len(w.queue) == 0 {
		w.queue = nil
	}
	return batch, g.bytes
}

// compact copies what is left of a train, when it holds more than twice its bytes.
func compact(tr flow.Train) flow.Train {
	if cap(tr.Payload) > 2*len(tr.Payload) {
		tr.Payload = append([]byte(nil), tr.Payload...)
	}
	return tr
}

// sendWaited sends trains that waited.
func (a *account) sendWaited(w *way, ts []flow.Train) (moved int) {
	if !w.owner.Hold() {
		for i := range ts {
			a.drops.Add(flow.DropPaced, ts[i].Count())
		}
		return 0
	}
	defer w.owner.Release()
	for len(ts) > 0 {
		n, m, err := w.out(ts)
		moved += m
		if err != nil {
			w.owner.Failed(ts[n], err)
			n++
		}
		ts = ts[n:]
	}
	return moved
}
