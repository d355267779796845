package user

import (
	"context"
	"slices"
	"time"

	"gatewayd/flow"
)

// Run does what is due by time until ctx ends: users expire, periods begin, promotions
// end and usage is committed, for a last time when it returns, with nil.
func (u *Users) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	plausible, committed := u.Plausible(), time.Now()
	for {
		select {
		case <-ctx.Done():
			u.commit(true)
			return nil
		case <-timer.C:
		}
		if now := u.Plausible(); now != plausible {
			plausible = now
			u.clockTurned(ctx, plausible)
		}
		u.sweep(ctx)
		u.promotionsDue(ctx)
		u.commitEdges()
		if time.Since(committed) >= u.opt.Commit {
			committed = time.Now()
			u.commit(false)
		}
		timer.Reset(u.pause(committed))
	}
}

// pause is how long there is nothing to do, at most a sweep's interval.
func (u *Users) pause(committed time.Time) time.Duration {
	d := min(u.opt.Sweep, u.opt.Commit-time.Since(committed))
	if now, plausible := u.clock.wall(); plausible {
		d = until(d, u.alarms.next(), now.UnixNano())
	}
	d = until(d, u.looks.next(), u.sinceStart())
	return max(d, time.Millisecond)
}

func until(most time.Duration, at, now int64) time.Duration {
	if at == never {
		return most
	}
	return min(most, time.Duration(max(at-now, 0)))
}

// atOnce is how many due users are taken out under one lock.
const atOnce = 256

// sweep settles users of which a time has come.
func (u *Users) sweep(ctx context.Context) {
	var owners [atOnce]*entry
	for ctx.Err() == nil {
		now, plausible := u.clock.wall()
		if !plausible {
			return
		}
		n := u.alarms.due(now.UnixNano(), owners[:])
		for _, o := range owners[:n] {
			u.settle(o)
		}
		if n < len(owners) {
			return
		}
	}
}

// clockTurned settles everybody: the clock was set, or lost.
func (u *Users) clockTurned(ctx context.Context, plausible bool) {
	u.opt.Log.Warn("the clock changed", "plausible", plausible, "time", u.opt.Now())
	for _, e := range u.byKey.all() {
		if ctx.Err() != nil {
			return
		}
		u.settle(e)
	}
}

// onFirstUse stamps the account whose first byte arrived.
func (u *Users) onFirstUse(a *account) {
	e, known := u.byKey.get(a.key)
	if !known {
		return
	}
	u.amend(e, func(usage *Usage) {
		if usage.FirstUse.IsZero() {
			usage.FirstUse = u.now()
		}
	})
	u.settle(e)
}

// onCrossed hears of a limit of traffic that was reached.
func (u *Users) onCrossed(a *account) {
	e, known := u.byKey.get(a.key)
	if !known {
		return
	}
	u.settle(e)
	select {
	case u.edges <- e:
	default: // the next commit has it
	}
}

// commitEdges commits the usage of those that reached a limit.
func (u *Users) commitEdges() {
	var es []*entry
	for {
		select {
		case e := <-u.edges:
			es = append(es, e)
			continue
		default:
		}
		break
	}
	if len(es) == 0 {
		return
	}
	u.committing.Lock()
	defer u.committing.Unlock()
	// Of who is gone by now all was kept that is to be kept.
	if es = slices.DeleteFunc(es, func(e *entry) bool { return e.retired.Load() }); len(es) > 0 {
		u.unkept(u.commitLocked(es))
	}
}

// quiet is how long the time alone is not worth a commit.
const quiet = 10 * time.Minute

// commit keeps the usage of all that moved something since the last time. last: also
// the time, if nobody did.
func (u *Users) commit(last bool) {
	u.committing.Lock()
	defer u.committing.Unlock()
	var pending []*entry
	for _, e := range u.byKey.all() {
		a := e.account.Load()
		if a == nil && !e.dirty.Load() {
			continue
		}
		usage := e.usage()
		if usage.payload() != e.committed || e.dirty.Load() {
			pending = append(pending, e)
		}
	}
	if len(pending) > 0 || last || u.opt.Now().Sub(time.Unix(0, u.clock.committed.Load())) >= quiet {
		u.unkept(u.commitLocked(pending))
	}
}

// commitOf keeps the usage of these.
func (u *Users) commitOf(es []*entry) error {
	u.committing.Lock()
	defer u.committing.Unlock()
	return u.commitLocked(es)
}

// commitLocked hands usages over as they are when the keeper asks for them.
func (u *Users) commitLocked(es []*entry) error {
	for _, e := range es { // after this commit nobody could tell that it moved something
		usage := e.usage()
		u.seen(e, &usage, usage.payload() != e.committed)
	}
	moved := make([]uint64, 0, len(es))
	now, plausible := u.clock.wall()
	err := u.keeper.Commit(now, func(yield func(flow.UserKey, Usage) bool) {
		for _, e := range es {
			e.dirty.Store(false) // what comes now is for the next one
			usage := e.usage()
			moved = append(moved, usage.payload())
			if !yield(e.key, usage) {
				return
			}
		}
	})
	if err != nil {
		for _, e := range es {
			e.dirty.Store(true)
		}
		return err
	}
	if plausible {
		u.clock.commit(now)
	}
	for i, n := range moved {
		es[i].committed = n
	}
	return nil
}

// unkept says once that commits fail, and once that they work again.
func (u *Users) unkept(err error) {
	failed := err != nil
	switch before := u.failing.Swap(failed); {
	case failed && !before:
		u.opt.Log.Warn("usage is counted in memory only: it could not be kept", "err", err)
	case !failed && before:
		u.opt.Log.Info("usage is kept again")
	}
}

// nearly are the percents of the traffic at which user.near is told, once in a period.
var nearly = [...]uint64{80, 95}

// seen stamps a user that moved something since the last commit, and tells of the
// highest of nearly that it passed since.
func (u *Users) seen(e *entry, usage *Usage, moved bool) {
	if moved {
		now := u.now()
		u.amend(e, func(usage *Usage) { usage.LastSeen = now })
	}
	limits := e.limits()
	p := policyOf(&limits, usage)
	if e.nearOf != usage.Generation {
		e.nearOf, e.near = usage.Generation, 0
	}
	passed := uint64(0)
	for _, percent := range nearly {
		if p.passed(percent, usage) {
			passed = percent
		}
	}
	if passed <= e.near || p.used(usage) {
		return
	}
	e.near = passed
	u.tell(Event{Kind: "user.near", Percent: int(passed)}, e)
}
