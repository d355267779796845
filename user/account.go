package user

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// heldTime is how long the last bytes of a user's traffic may be held by flows that
// don't move them, while nothing else can start.
const heldTime = 5 * time.Second

// common is what all accounts share.
type common struct {
	drops *flow.Drops

	// firstUse is called once, when the first payload byte of an account arrives, and
	// crossed whenever a limit of traffic is reached. They are called from within calls
	// of the account and its leases, with none of its locks held; they may not block, nor
	// take a lock that somebody holds who calls an account.
	firstUse, crossed func(*account)
	// enforced is called after flows were ended since the traffic was used up, with how
	// long ago that was.
	enforced func(late time.Duration)

	queued struct{ bytes, datagrams atomic.Int64 } // datagrams that wait, of all users
}

// account is one user's live state: what it used, its balances, its flows. All methods
// are safe for concurrent use.
type account struct {
	*common
	key    flow.UserKey
	name   string
	base   time.Time // time 0 of its clock
	used   atomic.Bool
	moved  [2]atomic.Uint64 // bytes, ever
	policy *policy          // guarded by mu, as all that follows

	mu      sync.Mutex
	total   Usage
	counted [2]uint64 // of moved, in total
	pending [2]int    // bytes that are reserved or taken, and have not moved
	reached bool      // the traffic is used up
	spent   int64     // since when; 0: it is not
	stuck   int64     // when those who hold the last of the traffic are ended; 0: they don't
	cause   error     // why nothing moves any more; nil: it does

	bandwidth       [2]bucket
	speed, throttle bucket
	turn            [2]int // bytes that may move at once

	lines   [2]line
	tickets uint64
	timer   *time.Timer
	due     int64 // when it fires; 0: it doesn't
	pumping bool
	batch   []flow.Train // of the pump

	leases       []*Lease
	live         int // of them, not ended
	connections  int
	ips          map[netip.Addr]int // connections of each
	associations map[association]*backlog
	backlog      backlog

	later later
}

// later is what has to be done once the lock is released.
type later struct {
	wakes   [2]func()
	pump    bool
	crossed bool
	ended   []*Lease
	freed   []func() // paused streams that are paused no more
}

func newAccount(c *common, key flow.UserKey, name string, u Usage, p *policy) *account {
	a := &account{
		common: c, key: key, name: name, base: time.Now(), total: u,
		ips: make(map[netip.Addr]int), associations: make(map[association]*backlog),
	}
	a.used.Store(!u.FirstUse.IsZero())
	a.policy = p
	a.ratesLocked(0)
	a.reachLocked()
	a.later = later{}
	return a
}

// now is the account's clock in ns, never 0.
func (a *account) now() int64 { return int64(time.Since(a.base)) + 1 }

// lock takes the lock and brings the balances up to date.
func (a *account) lock() int64 {
	now := a.now()
	a.mu.Lock()
	a.earnLocked(now)
	return now
}

func (a *account) earnLocked(now int64) {
	a.bandwidth[flow.Up].earn(now)
	a.bandwidth[flow.Down].earn(now)
	a.speed.earn(now)
	a.throttle.earn(now)
}

// unlock decides who may go now and who has to end, releases the lock, and tells them.
func (a *account) unlock(now int64) {
	switch {
	case !a.reached:
		a.spent = 0
	case a.spent == 0:
		a.spent = now
	}
	a.endSpentLocked(now)
	a.callLocked()
	a.armLocked(now)
	if a.later.pump {
		a.fireLocked(now, now+1)
	}
	do, spent := a.later, a.spent
	a.later = later{}
	a.mu.Unlock()
	for _, wake := range do.wakes {
		if wake != nil {
			wake()
		}
	}
	for _, wake := range do.freed {
		wake()
	}
	for _, l := range do.ended {
		l.end(l.cause)
	}
	if len(do.ended) > 0 && do.ended[0].cause == ErrQuota && spent != 0 && a.enforced != nil {
		a.enforced(time.Duration(a.now() - spent))
	}
	if do.crossed && a.crossed != nil {
		a.crossed(a)
	}
}

// endSpentLocked ends all leases once the traffic is used up and what is pending has
// moved, or had its time. While it is not used up, flows that hold the last of it and
// move nothing end, if others wait for them.
func (a *account) endSpentLocked(now int64) {
	switch {
	case a.spaceLocked(), a.live == 0, !a.reached && a.lines == [2]line{}:
		a.stuck = 0
	case a.reached && a.pending == [2]int{}:
		a.endLocked(ErrQuota, func(*Lease) bool { return true })
	case a.stuck == 0:
		a.stuck = now + int64(heldTime)
	case now >= a.stuck:
		a.stuck = 0
		a.endLocked(ErrQuota, func(l *Lease) bool { return a.reached || l.pending != [2]int{} })
	}
}

// endLocked ends leases, those that did not end before.
func (a *account) endLocked(cause error, which func(*Lease) bool) {
	for _, l := range a.leases {
		if l.cause != nil || !which(l) {
			continue
		}
		l.cause = cause
		l.state.Store(over)
		a.live--
		for d := range l.ways {
			a.leaveLocked(&l.ways[d])
		}
		if l.end != nil {
			a.later.ended = append(a.later.ended, l)
		}
	}
}

// end ends every lease and refuses new ones, for cause, until allow.
func (a *account) end(cause *flow.Cause) {
	now := a.lock()
	a.cause = cause
	a.endLocked(cause, func(*Lease) bool { return true })
	a.unlock(now)
}

// allow undoes end for leases to come.
func (a *account) allow() {
	a.mu.Lock()
	a.cause = nil
	a.mu.Unlock()
}

// update changes the usage, as it is now, and with it the policy, at once for live
// leases too.
func (a *account) update(change func(*Usage) *policy) {
	now := a.lock()
	a.chargeLocked()
	a.policy = change(&a.total)
	a.ratesLocked(now)
	a.reachLocked()
	for _, l := range a.leases {
		a.modeLocked(l)
	}
	a.unlock(now)
}

// ratesLocked makes the policy's rates hold from now on.
func (a *account) ratesLocked(now int64) {
	p := a.policy
	for d, rate := range p.bandwidth {
		a.bandwidth[d].change(rate, bandwidthBurst(rate), now)
		a.turn[d] = p.turn(flow.Dir(d))
	}
	a.speed.change(p.speed, speedBurst(p.speed), now)
	a.throttle.change(p.throttle, speedBurst(p.throttle), now)
}

// modeLocked lets a lease go without being asked, or not any more.
func (a *account) modeLocked(l *Lease) {
	switch {
	case l.cause != nil || l.subject.Free:
	case !a.policy.unlimited():
		l.state.Store(paced)
	default:
		for d := range l.ways {
			w := &l.ways[d]
			if w.wake != nil {
				a.later.freed = append(a.later.freed, w.wake)
			}
			if !w.waiting() {
				a.leaveLocked(w)
			}
			a.settleLocked(l, w.dir, l.pending[d])
		}
		if !l.ways[flow.Up].waiting() && !l.ways[flow.Down].waiting() {
			l.state.Store(open)
		}
	}
}

// use notes that a payload byte arrived.
func (a *account) use() {
	if !a.used.Load() && a.used.CompareAndSwap(false, true) && a.firstUse != nil {
		a.firstUse(a)
	}
}

// usage is what was used until now.
func (a *account) usage() Usage {
	now := a.lock()
	a.chargeLocked()
	u := a.total
	a.unlock(now)
	return u
}

// gauges are the slots that are held.
func (a *account) gauges() (connections int, ips []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for ip := range a.ips {
		ips = append(ips, ip)
	}
	slices.SortFunc(ips, netip.Addr.Compare)
	return a.connections, ips
}
