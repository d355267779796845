package user

import (
	"net/netip"
	"sync/atomic"

	"gatewayd/flow"
)

// Causes by which an account ends its flows.
var (
	ErrRetired  = &flow.Cause{Reason: flow.Retired, Text: "the user was retired"}
	ErrDisabled = &flow.Cause{Reason: flow.Disabled, Text: "the user was disabled"}
	ErrExpired  = &flow.Cause{Reason: flow.Expired, Text: "the user's time is up"}
	ErrQuota    = &flow.Cause{Reason: flow.Quota, Text: "the user's traffic is used up"}
)

// Refusal is why a user may not begin a flow. Nothing was reserved then.
type Refusal string

// The refusals, in the order in which they are looked for.
const (
	RefusedUnknown     Refusal = "unknown"
	RefusedDisabled    Refusal = "disabled"
	RefusedExpired     Refusal = "expired"
	RefusedTraffic     Refusal = "traffic"
	RefusedConnections Refusal = "connections"
	RefusedIPs         Refusal = "ips"
)

// Error names the refusal.
func (r Refusal) Error() string { return "the user is refused: " + string(r) }

// Subject is who asks to begin a flow under a user.
type Subject struct {
	Source  netip.Addr     // takes a slot of ips
	Inbound string         // with Client: the association that the flow's datagrams belong to
	Client  netip.AddrPort // the client's socket
	Free    bool           // takes no slot, is not charged and not paced
}

// Lease is one flow's part in its user's account. It is the flow's Meter, for datagrams
// by Link and Receiver.
type Lease struct {
	account *account
	subject Subject
	state   atomic.Uint32

	// Guarded by the account's lock.
	index   int   // among the account's leases; -1: released
	cause   error // why it ended, written before state is over
	end     func(cause error)
	pending [2]int
	ways    [2]way
	backlog *backlog // of its association, once it queued
}

// States of a lease, whose only writer is the account.
const (
	free  = iota // nothing is asked, nothing counted
	open         // nothing is asked; what moves is counted
	paced        // asks the account
	over         // nothing moves any more; see cause
)

var _ flow.Meter = (*Lease)(nil)

// admitAll reserves the slots of several flows, or none.
func (a *account) admitAll(ss []Subject) ([]*Lease, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cause != nil {
		return nil, refusalOf(a.cause)
	}
	if a.reached && a.policy.block {
		return nil, RefusedTraffic
	}
	leases := make([]*Lease, 0, len(ss))
	for _, s := range ss {
		if err := a.takeSlotLocked(s); err != nil {
			for _, l := range leases {
				a.removeLocked(l)
			}
			return nil, err
		}
		l := &Lease{account: a, subject: s, index: len(a.leases)}
		for d := range l.ways {
			l.ways[d].lease, l.ways[d].dir = l, flow.Dir(d)
		}
		a.leases = append(a.leases, l)
		a.live++
		leases = append(leases, l)
		a.modeLocked(l)
	}
	return leases, nil
}

// refusalOf is how new flows are refused where live ones were ended.
func refusalOf(cause error) Refusal {
	switch cause {
	case ErrDisabled:
		return RefusedDisabled
	case ErrExpired:
		return RefusedExpired
	case ErrQuota:
		return RefusedTraffic
	}
	return RefusedUnknown
}

func (a *account) takeSlotLocked(s Subject) error {
	p := a.policy
	switch {
	case s.Free:
		return nil
	case p.connections > 0 && a.connections >= p.connections:
		return RefusedConnections
	case p.ips > 0 && a.ips[s.Source] == 0 && len(a.ips) >= p.ips:
		return RefusedIPs
	}
	a.connections++
	a.ips[s.Source]++
	return nil
}

// removeLocked gives back all that a lease holds, once.
func (a *account) removeLocked(l *Lease) {
	if l.index < 0 {
		return
	}
	last := len(a.leases) - 1
	a.leases[l.index] = a.leases[last]
	a.leases[l.index].index = l.index
	a.leases[last] = nil
	a.leases, l.index = a.leases[:last], -1
	if l.cause == nil {
		a.live--
	}
	if !l.subject.Free {
		a.connections--
		if a.ips[l.subject.Source]--; a.ips[l.subject.Source] == 0 {
			delete(a.ips, l.subject.Source)
		}
	}
	for d := range l.ways {
		w := &l.ways[d]
		if w.wake != nil { // it may go on under another lease
			a.later.freed = append(a.later.freed, w.wake)
		}
		a.leaveLocked(w)
		a.returnLocked(l, w.dir, int(w.granted.Swap(0)))
		a.settleLocked(l, w.dir, l.pending[d])
		a.discardLocked(w)
	}
	a.forgetLocked(l)
}

// Attach gives the hook by which the account ends the flow, called once at most; at
// once, on this goroutine, if the account did so before. It must not block.
func (l *Lease) Attach(end func(cause error)) {
	a := l.account
	a.mu.Lock()
	l.end = end
	cause := l.cause
	a.mu.Unlock()
	if cause != nil {
		end(cause)
	}
}

// Release gives back the slots, the place in line and what was reserved. Only the first
// call does anything.
func (l *Lease) Release() {
	a := l.account
	now := a.lock()
	a.removeLocked(l)
	a.unlock(now)
}

// Ready is flow.Meter's: without limits one atomic load.
func (l *Lease) Ready(d flow.Dir, wake func()) (int, error) {
	if l.state.Load() <= open {
		return maxTransfer, nil
	}
	a := l.account
	now := a.lock()
	defer a.mu.Unlock()
	w := &l.ways[d]
	switch {
	case l.cause != nil:
		return 0, l.cause
	case l.index < 0, l.state.Load() <= open: // since a moment ago
		return maxTransfer, nil
	case !a.mayLocked(w):
		a.joinLocked(w)
		w.wake = wake
		a.armLocked(now)
		return 0, flow.ErrPaused
	}
	a.leaveLocked(w)
	n := a.turn[d]
	w.granted.Store(int32(n))
	a.reserveLocked(l, d, n)
	return n, nil
}

// Took is flow.Meter's: it gives back what was allowed and not taken.
func (l *Lease) Took(d flow.Dir, n int) {
	a, w := l.account, &l.ways[d]
	if n > 0 && !l.subject.Free {
		a.use()
	}
	if w.granted.Load() == 0 {
		return
	}
	granted := int(w.granted.Swap(0))
	a.mu.Lock()
	a.returnLocked(l, d, granted-n)
	a.unlockQuietly()
}

// Moved is flow.Meter's: it charges. Without limits it is one atomic addition.
func (l *Lease) Moved(d flow.Dir, n int) {
	a := l.account
	if n <= 0 || l.subject.Free {
		return
	}
	a.moved[d].Add(uint64(n))
	if l.state.Load() == open {
		return
	}
	a.mu.Lock()
	a.settleLocked(l, d, n)
	a.chargeLocked()
	a.unlockQuietly()
}

// unlockQuietly releases the lock; the clock is asked only if somebody waits.
func (a *account) unlockQuietly() {
	if a.lines == [2]line{} && !(a.reached && a.policy.block) && !a.later.crossed {
		a.mu.Unlock()
		return
	}
	now := a.now()
	a.earnLocked(now)
	a.unlock(now)
}

// Leave is flow.Meter's: it gives the place in line up.
func (l *Lease) Leave(d flow.Dir) {
	a := l.account
	now := a.lock()
	a.leaveLocked(&l.ways[d])
	a.unlock(now)
}
