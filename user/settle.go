package user

import (
	"sync"
	"time"

	"gatewayd/flow"
)

// Settling brings an account in line with its definition, its usage and the time. An
// edit, the sweep, a limit that was reached and the first byte all ask for the same
// thing. One goroutine settles an account at a time; who asks meanwhile makes it go
// round again, and waits for nothing: it may be inside of one of the hooks.

func (u *Users) settle(e *entry) {
	if e.settling.Add(1) > 1 {
		return
	}
	for {
		asked := e.settling.Load()
		u.settleOnce(e)
		if e.settling.Add(-asked) == 0 {
			return
		}
	}
}

func (u *Users) settleOnce(e *entry) {
	began := u.opt.Now()
	if e.retired.Load() {
		u.alarms.set(&e.alarm, never)
		u.end(e, ErrRetired, began)
		return
	}
	s := e.spec.Load()
	limits := effective(s.Limits, e.group.Load())
	now, plausible := u.clock.wall()
	// Another calendar begins no period: the one that is goes on under it.
	anew := plausible && !sameReset(&e.calendar, &limits.Traffic.Reset)
	if anew {
		e.calendar = limits.Traffic.Reset
	}
	var usage Usage
	renewed := false
	p := u.amend(e, func(of *Usage) {
		if plausible {
			generation := of.Generation
			*of = brought(&limits.Traffic, *of, now, anew)
			renewed = of.Generation != generation
		}
		usage = *of
	})
	at := expiry(&s.Expires, &usage)
	expired := plausible && !at.IsZero() && !now.Before(at)
	state := stateOf(s, &usage, p, expired)

	e.expires.Store(nano(at))
	u.alarms.set(&e.alarm, due(at, expired, limits.Traffic.Reset.next(usage.PeriodStart), plausible))
	switch {
	case state == StateDisabled:
		u.end(e, ErrDisabled, began)
	case state == StateExpired:
		u.end(e, ErrExpired, began)
	case e.cause != nil:
		e.cause = nil
		e.account.allow()
	}
	if renewed {
		u.event("user.reset", e)
	}
	if old := State(e.now.Swap(uint32(state))); old != state && old != numStates {
		u.changed(e.key)
		u.event("user."+state.String(), e)
	}
}

// amend changes the account's usage, and with it the policy, which it returns.
func (u *Users) amend(e *entry, change func(*Usage)) (p *policy) {
	limits := effective(e.spec.Load().Limits, e.group.Load())
	e.account.update(func(usage *Usage) *policy {
		change(usage)
		p = u.policies.intern(policyOf(&limits, usage))
		return p
	})
	return p
}

// brought is the usage with dates that can be right, in the period that now lies in;
// anew: its calendar is another one than before.
func brought(t *Traffic, usage Usage, now time.Time, anew bool) Usage {
	usage = dated(usage, now)
	if start := t.Reset.start(now); anew && start.After(usage.PeriodStart) {
		usage.PeriodStart = start
	}
	return renew(t, usage, now)
}

// end ends the account's flows, unless it ended already, and measures how long after
// the cause arose the last of them heard of it.
func (u *Users) end(e *entry, cause *flow.Cause, began time.Time) {
	if e.cause == cause {
		return
	}
	first := e.cause == nil
	e.cause = cause
	e.account.end(cause)
	if !first || State(e.now.Load()) == numStates {
		return // nothing was alive
	}
	late := u.opt.Now().Sub(began)
	if at := e.expires.Load(); cause == ErrExpired && u.started.Before(time.Unix(0, at)) {
		late = max(late, u.opt.Now().Sub(time.Unix(0, at)))
	}
	u.stats.enforced(late)
}

func stateOf(s *Spec, usage *Usage, p *policy, expired bool) State {
	switch {
	case s.Disabled:
		return StateDisabled
	case expired:
		return StateExpired
	case usedUp(p, usage) && p.throttle > 0:
		return StateThrottled
	case usedUp(p, usage):
		return StateExhausted
	case usage.FirstUse.IsZero():
		return StateUnused
	}
	return StateActive
}

// due is when an account has to be looked at again, in UnixNano.
func due(expires time.Time, expired bool, period time.Time, plausible bool) int64 {
	if !plausible {
		return never // everybody is looked at when the clock is set
	}
	at := nano(period)
	if !expired {
		at = min(at, nano(expires))
	}
	return at
}

// nano is t as UnixNano, never if it is zero or later than that can say.
func nano(t time.Time) int64 {
	if t.IsZero() || t.Year() > 2261 {
		return never
	}
	return t.UnixNano()
}

// redefined tells rules of another name or group, and forgets by how much a date was
// extended that is another one now.
func (u *Users) redefined(e *entry, old, s *Spec) {
	if old.Expires.AfterFirstUse != s.Expires.AfterFirstUse || !old.Expires.At.Equal(s.Expires.At) {
		u.amend(e, func(usage *Usage) { usage.Extended = 0 })
	}
	if old.Name != s.Name || old.Group != s.Group {
		u.changed(e.key)
	}
}

func (u *Users) changed(key flow.UserKey) {
	if u.opt.Changed != nil {
		u.opt.Changed(key)
	}
}

func (u *Users) event(kind string, e *entry) {
	if u.opt.Events != nil {
		u.opt.Events(Event{Kind: kind, User: e.key, Name: e.spec.Load().Name, State: e.state().String()})
	}
}

// policies are those in use: many users have the same one.
type policies struct {
	sync.Mutex
	of map[policy]*policy
}

// maxPolicies bounds the table; it is begun anew when it is full.
const maxPolicies = 4096

func (ps *policies) intern(p policy) *policy {
	ps.Lock()
	defer ps.Unlock()
	if known := ps.of[p]; known != nil {
		return known
	}
	if ps.of == nil || len(ps.of) >= maxPolicies {
		ps.of = make(map[policy]*policy)
	}
	ps.of[p] = &p
	return &p
}
