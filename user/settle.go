package user

import (
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
	began := time.Now()
	if e.retired.Load() {
		u.alarms.set(e, never)
		u.end(e, ErrRetired, began)
		return
	}
	d, limits := e.def.Load(), e.limits()
	now, plausible := u.clock.wall()
	// Another calendar begins no period: the one that is goes on under it.
	anew := plausible && *e.settled.calendar != limits.Traffic.Reset
	if anew {
		e.settled.calendar = e.calendar()
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
	at := expiry(&d.expires, &usage)
	expired := plausible && !at.IsZero() && !now.Before(at)
	state := stateOf(d, &usage, p, expired)

	e.expires.Store(nano(at))
	u.alarms.set(e, due(at, expired, periodEnd(&limits.Traffic.Reset, &usage), plausible))
	switch {
	case state == StateDisabled:
		u.end(e, ErrDisabled, began)
	case state == StateExpired:
		u.end(e, ErrExpired, began)
	case e.cause != nil:
		e.cause = nil
		e.account.Load().allow()
	}
	if renewed {
		u.event("user.reset", e)
	}
	if old := State(e.now.Swap(uint32(state))); old != state && old != numStates {
		u.changed(e.key)
		u.event("user."+state.String(), e)
	}
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

// end ends the account's flows, unless there is none or it ended already, and measures
// how long after the cause arose the last of them heard of it.
func (u *Users) end(e *entry, cause *flow.Cause, began time.Time) {
	a := e.account.Load()
	if a == nil || e.cause == cause {
		return
	}
	alive := e.cause == nil
	e.cause = cause
	a.end(cause)
	if !alive {
		return
	}
	late := time.Since(began)
	if at := time.Unix(0, e.expires.Load()); cause == ErrExpired && u.started.Before(at) {
		late = max(late, u.opt.Now().Sub(at))
	}
	u.stats.enforced(late)
}

func stateOf(d *definition, usage *Usage, p *policy, expired bool) State {
	switch {
	case d.disabled:
		return StateDisabled
	case expired:
		return StateExpired
	case p.used(usage) && p.throttle > 0:
		return StateThrottled
	case p.used(usage):
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
func (u *Users) redefined(e *entry, old, d *definition) {
	if old.expires != d.expires {
		u.amend(e, func(usage *Usage) { usage.Extended = 0 })
	}
	if old.name != d.name || old.group != d.group {
		u.changed(e.key)
	}
}

func (u *Users) changed(key flow.UserKey) {
	if u.opt.Changed != nil {
		u.opt.Changed(key)
	}
}

func (u *Users) event(kind string, e *entry) { u.tell(Event{Kind: kind}, e) }

// tell tells of an event of e.
func (u *Users) tell(ev Event, e *entry) {
	if u.opt.Events != nil {
		ev.User, ev.Name, ev.State = e.key, e.def.Load().name, e.state().String()
		u.opt.Events(ev)
	}
}
