package user

import (
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

const (
	longestPause  = time.Second // a pause is looked at again at least as often
	shortestPause = time.Millisecond
)

// A way is one direction of a lease, and its place in the line of those that wait for
// their turn in it. Who comes later never overtakes.
//
//	away    not in line
//	waits   in line
//	called  first in line, and told so: it takes its turn, or leaves
//
// Everything is guarded by the account's lock, but for what is marked.
type way struct {
	lease   *Lease
	dir     flow.Dir
	state   place
	ticket  uint64 // of those in both lines, the lowest came first
	wake    func() // of a stream, while it waits
	before  *way
	behind  *way
	granted atomic.Int32 // bytes that Ready allowed, until Took or Release takes them back
	datagrams
}

type place uint8

const (
	away place = iota
	waits
	called
)

// line is a FIFO of ways.
type line struct{ first, last *way }

// joinLocked puts w at the end of its line, unless it is in it.
func (a *account) joinLocked(w *way) {
	if w.state != away {
		w.state = waits
		return
	}
	a.tickets++
	w.state, w.ticket = waits, a.tickets
	ln := &a.lines[w.dir]
	if w.before = ln.last; w.before == nil {
		ln.first = w
	} else {
		w.before.behind = w
	}
	ln.last = w
}

// leaveLocked takes w out of its line.
func (a *account) leaveLocked(w *way) {
	if w.state == away {
		return
	}
	ln := &a.lines[w.dir]
	if w.before == nil {
		ln.first = w.behind
	} else {
		w.before.behind = w.behind
	}
	if w.behind == nil {
		ln.last = w.before
	} else {
		w.behind.before = w.before
	}
	w.state, w.before, w.behind, w.wake = away, nil, nil, nil
}

// mayLocked reports that a transfer of w may start now: nobody is before it, and no
// balance is negative. Where both directions share a rate, the other's first has its
// turn before w if it came first and could go.
func (a *account) mayLocked(w *way) bool {
	if first := a.lines[w.dir].first; first != nil && first != w {
		return false
	}
	if a.bandwidth[w.dir].debt|a.speed.debt|a.throttle.debt != 0 || !a.spaceLocked() {
		return false
	}
	other := a.lines[1-w.dir].first
	if other == nil || a.speed.rate|a.throttle.rate == 0 || a.bandwidth[1-w.dir].debt != 0 {
		return true
	}
	return w.state != away && w.ticket < other.ticket
}

// callLocked finds who may go now and notes whom to tell.
func (a *account) callLocked() {
	for d := range a.lines {
		w := a.lines[d].first
		if w == nil || w.state == called || !a.mayLocked(w) {
			continue
		}
		w.state = called
		if w.waiting() {
			a.later.pump = true
		} else {
			a.later.wakes[d], w.wake = w.wake, nil
		}
	}
}

// pauseLocked is how long nobody can go, or that there is nobody to wait for.
func (a *account) pauseLocked() (pause time.Duration, ok bool) {
	pause = longestPause
	for d := range a.lines {
		w := a.lines[d].first
		if w == nil {
			continue
		}
		ok = true
		debt := max(a.bandwidth[d].wait(), a.speed.wait(), a.throttle.wait())
		if w.state == waits && (debt > 0 || a.mayLocked(w)) { // else it waits for others
			pause = min(pause, debt)
		}
	}
	return max(pause, shortestPause), ok || a.stuck != 0
}

// armLocked makes the timer fire when somebody may go.
func (a *account) armLocked(now int64) {
	if pause, ok := a.pauseLocked(); ok {
		a.fireLocked(now, now+int64(pause))
	}
}

// fireLocked makes the timer fire at a time, if it would not before.
func (a *account) fireLocked(now, at int64) {
	if a.due != 0 && a.due <= at {
		return
	}
	a.due = at
	if a.timer == nil {
		a.timer = time.AfterFunc(time.Duration(at-now), a.fired)
	} else {
		a.timer.Reset(time.Duration(at - now))
	}
}
