package user

import (
	"sync"
	"sync/atomic"

	"gatewayd/flow"
)

// entry is one user: what was written about it, and what it used. It has an account
// from its first flow on: most of many users are away most of the time.
type entry struct {
	key     flow.UserKey
	account atomic.Pointer[account]    // set once, under mu
	def     atomic.Pointer[definition] // an edit replaces it
	group   atomic.Pointer[Group]      // of the definition; nil: none
	expires atomic.Int64               // UnixNano at which its time is up
	now     atomic.Uint32              // its State; numStates: not settled yet
	retired atomic.Bool                // set once; then it is in no table
	dirty   atomic.Bool                // the usage was changed otherwise than by traffic, and not committed
	alarm   alarm                      // for when it expires or its period ends

	mu   sync.Mutex
	idle *Usage // while there is no account; nil: zero

	settling atomic.Int32 // how many asked for it since somebody is at it
	settled               // of whoever is at it

	committed uint64 // of commits: payload that had ever moved
	near      uint64 // of commits: percent of which user.near was told last, in the generation nearOf
	nearOf    uint64
}

// settled is what the account was told last.
type settled struct {
	calendar *Reset
	cause    *flow.Cause // that it ended for; nil: it lives
}

func (e *entry) state() State    { return State(e.now.Load()) }
func (e *entry) alarmOf() *alarm { return &e.alarm }

// limits are those that hold.
func (e *entry) limits() Limits { return effective(*e.def.Load().limits, e.group.Load()) }

// calendar is the one of limits().
func (e *entry) calendar() *Reset {
	own := &e.def.Load().limits.Traffic.Reset
	if g := e.group.Load(); own.Every == Never && g != nil {
		return &g.Limits.Traffic.Reset
	}
	return own
}

// usage is what was used until now.
func (e *entry) usage() Usage {
	a := e.account.Load()
	if a == nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		if a = e.account.Load(); a == nil {
			return e.idleLocked()
		}
	}
	return a.usage()
}

func (e *entry) idleLocked() Usage {
	if e.idle == nil {
		return Usage{}
	}
	return *e.idle
}

// amend changes the usage, and with it the policy of the account. The limits are those
// of this moment, not of the call: an edit may have come between, and is not undone.
func (u *Users) amend(e *entry, change func(*Usage)) (p *policy) {
	update := func(usage *Usage) *policy {
		before := *usage
		change(usage)
		if *usage != before {
			e.dirty.Store(true)
		}
		limits := e.limits()
		p = u.policies.of(policyOf(&limits, usage))
		return p
	}
	if e.amendIdle(update) {
		return p
	}
	e.account.Load().update(update)
	return p
}

// amendIdle reports that there is no account, and does the change.
func (e *entry) amendIdle(update func(*Usage) *policy) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.account.Load() != nil {
		return false
	}
	usage := e.idleLocked()
	if update(&usage); usage != e.idleLocked() {
		e.idle = &usage
	}
	return true
}

// open is the account, made if this is the first flow.
func (u *Users) open(e *entry) *account {
	if a := e.account.Load(); a != nil {
		return a
	}
	e.mu.Lock()
	made := e.account.Load() == nil
	if made {
		limits, usage := e.limits(), e.idleLocked()
		e.account.Store(newAccount(&u.common, e.key, e.def.Load().name, usage, u.policies.of(policyOf(&limits, &usage))))
		e.idle = nil
	}
	e.mu.Unlock()
	if made {
		u.settle(e) // it may have to end at once
	}
	return e.account.Load()
}

// definition is a Spec as it is kept for many users: what several say alike, once.
type definition struct {
	name, group, notes, externalID string
	limits                         *Limits
	expires                        Expires
	devices                        []string
	disabled                       bool
	source                         Source
}

// define makes the definition of a valid Spec. editing is held.
func (u *Users) define(s *Spec) *definition {
	expires := s.Expires
	if !expires.At.IsZero() {
		expires.At = expires.At.Round(0).UTC() // comparable
	}
	return &definition{
		s.Name, s.Group, s.Notes, s.ExternalID, u.limitsOf.of(u.zoned(s.Limits)), expires, s.Devices, s.Disabled, s.Source,
	}
}

// spec is the definition as it was written, with the user's number.
func (e *entry) spec() Spec {
	d := e.def.Load()
	return Spec{
		Name: d.name, ID: e.key, Group: d.group, Disabled: d.disabled, Notes: d.notes, ExternalID: d.externalID,
		Limits: *d.limits, Expires: d.expires, Devices: d.devices, Source: d.source,
	}
}

// pool keeps one of each of the values that were asked for lately.
type pool[T comparable] struct {
	mu     sync.Mutex
	values map[T]*T
}

// maxPool bounds a pool; it is begun anew when it is full.
const maxPool = 4096

// of is a pointer to a value like v. Nobody changes it.
func (p *pool[T]) of(v T) *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.values[v]; known != nil {
		return known
	}
	if p.values == nil || len(p.values) >= maxPool {
		p.values = make(map[T]*T)
	}
	p.values[v] = &v
	return &v
}
