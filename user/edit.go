package user

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"gatewayd/flow"
)

// Edits of what the store has. Each holds for everybody when it returns, and is kept;
// an error means that nothing changed, unless it says otherwise.

// Create makes a new user. ErrClash if there is one of that name.
func (u *Users) Create(s Spec) error {
	u.editing.Lock()
	defer u.editing.Unlock()
	if _, err := u.named(s.Name); err == nil {
		return fmt.Errorf("user %q: %w", s.Name, ErrClash)
	}
	return u.putOne(nil, s)
}

// Put makes a user, or defines the one of that name otherwise: its number, usage, debt
// and live flows stay. An ID of 0 is the one that it has; another one than that is
// ErrClash, as is a number or a device of somebody else. ErrReadOnly, *Invalid.
func (u *Users) Put(s Spec) error {
	u.editing.Lock()
	defer u.editing.Unlock()
	e, _ := u.named(s.Name)
	return u.putOne(e, s)
}

// Update defines the user of that name as f says of what it is now; no other edit comes
// between. f may rename it, and must not call Users. An error of f is returned.
func (u *Users) Update(name string, f func(Spec) (Spec, error)) error {
	u.editing.Lock()
	defer u.editing.Unlock()
	e, err := u.find(name)
	if err != nil {
		return err
	}
	s := e.spec()
	s.Devices = slices.Clone(s.Devices)
	s, err = f(s)
	if err != nil {
		return err
	}
	return u.putOne(e, s)
}

// Delete retires a user: its flows end, its number is never used again, and a device
// that was promoted to it gets no flow any more.
func (u *Users) Delete(name string) error {
	u.editing.Lock()
	defer u.editing.Unlock()
	e, err := u.find(name)
	switch {
	case err != nil:
		return err
	case e.def.Load().source != FromStore:
		return fmt.Errorf("user %q: %w", name, ErrReadOnly)
	}
	u.committing.Lock() // a commit beside would keep usage of nobody
	defer u.committing.Unlock()
	c := &Change{u: u, groups: u.groups, remove: []*entry{e}, keep: Edit{DeleteUsers: []flow.UserKey{e.key}}}
	if err := c.save(); err != nil {
		return fmt.Errorf("user %q: %w", name, err)
	}
	c.apply()
	return nil
}

// named is the user of that very name.
func (u *Users) named(name string) (*entry, error) {
	e, err := u.find(name)
	if err == nil && e.def.Load().name != name {
		err = ErrUnknown
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

// putOne defines e, or a new user if it is nil. editing is held.
func (u *Users) putOne(e *entry, s Spec) error {
	if e != nil && e.def.Load().source != FromStore {
		return fmt.Errorf("user %q: %w", e.def.Load().name, ErrReadOnly)
	}
	s.Source = FromStore
	v := newValidator(1)
	for name := range u.groups {
		v.groups[name] = true
	}
	if err := v.all(nil, []Spec{s}); err != nil {
		return err
	}
	if e != nil && s.ID == 0 {
		s.ID = e.key
	}
	if e != nil && s.ID != e.key {
		return fmt.Errorf("user %q: id: it is %d for good: %w", s.Name, e.key, ErrClash)
	}
	if field, other := u.taken(&s, func(o *entry) bool { return o != e }); other != nil {
		return fmt.Errorf("user %q: %s: that of user %q: %w", s.Name, field, other.def.Load().name, ErrClash)
	}
	c := &Change{u: u, groups: u.groups}
	if s.ID == 0 {
		s.ID = u.editing.next
	}
	if s.ID >= u.editing.next {
		c.keep.Next = s.ID + 1
	}
	c.keep.Users = []Spec{s}
	if err := c.put(e, &s); err != nil {
		return err
	}
	if err := c.save(); err != nil {
		return fmt.Errorf("user %q: %w", s.Name, err)
	}
	c.apply()
	for _, p := range c.puts {
		kind := "user.changed"
		if p.made {
			kind = "user.added"
		}
		u.event(kind, p.entry)
	}
	return nil
}

// PutGroup makes a group, or gives it other limits, which hold for all its members.
func (u *Users) PutGroup(g Group) error {
	if err := Validate([]Group{g}, nil); err != nil {
		return err
	}
	u.editing.Lock()
	defer u.editing.Unlock()
	if old := u.groups[g.Name]; old != nil && old.Source != FromStore {
		return fmt.Errorf("group %q: %w", g.Name, ErrReadOnly)
	}
	groups := maps.Clone(u.groups)
	groups[g.Name] = u.group(g, FromStore)
	return u.putGroups(g.Name, groups, Edit{Groups: []Group{g}})
}

// DeleteGroup removes a group; ErrClash while it has members.
func (u *Users) DeleteGroup(name string) error {
	u.editing.Lock()
	defer u.editing.Unlock()
	switch old := u.groups[name]; {
	case old == nil:
		return fmt.Errorf("group %q: %w", name, ErrUnknown)
	case old.Source != FromStore:
		return fmt.Errorf("group %q: %w", name, ErrReadOnly)
	}
	for _, e := range u.byKey.all() {
		if d := e.def.Load(); d.group == name {
			return fmt.Errorf("group %q: user %q is a member: %w", name, d.name, ErrClash)
		}
	}
	groups := maps.Clone(u.groups)
	delete(groups, name)
	return u.putGroups(name, groups, Edit{DeleteGroups: []string{name}})
}

func (u *Users) putGroups(name string, groups map[string]*Group, keep Edit) error {
	c := &Change{u: u, groups: groups, keep: keep}
	if err := c.save(); err != nil {
		return fmt.Errorf("group %q: %w", name, err)
	}
	c.apply()
	return nil
}

// What follows is no definition: it is for users of the configuration, too. It is kept
// by a commit of the usage; where that fails it holds until the next commit, or until
// the gateway ends, and the error says so.

// Reset begins the user's traffic period anew: counters at 0, another generation.
func (u *Users) Reset(name string) error {
	return u.adjust(name, "user.reset", func(_ *definition, usage Usage, now time.Time) (Usage, error) {
		return cleared(usage, now, 0), nil
	})
}

// TopUp adds bytes to what the user may move in this period, in each direction and in
// all.
func (u *Users) TopUp(name string, bytes uint64) error {
	return u.adjust(name, "user.topup", func(_ *definition, usage Usage, _ time.Time) (Usage, error) {
		usage.Extra = saturate(usage.Extra, bytes)
		return usage, nil
	})
}

// Extend gives the user more time: after the day on which it expires, or after now if
// that is over. *Invalid if it does not expire.
func (u *Users) Extend(name string, by time.Duration) error {
	return u.adjust(name, "user.extended", func(d *definition, usage Usage, now time.Time) (Usage, error) {
		var problem Invalid
		switch at := expiry(&d.expires, &usage); {
		case by <= 0 || by > maxAfter:
			problem.add("", fmt.Sprintf("user %q", d.name), "extend", "%v is not within a hundred years from now", by)
		case d.expires == Expires{}:
			problem.add("", fmt.Sprintf("user %q", d.name), "expires", "it never does; set a date instead")
		case !at.IsZero() && at.Before(now):
			usage.Extended += now.Sub(at) + by
		default:
			usage.Extended += by
		}
		return usage, problem.err()
	})
}

// adjust changes what a user has used or may use.
func (u *Users) adjust(name, event string, f func(d *definition, usage Usage, now time.Time) (Usage, error)) error {
	u.editing.Lock() // or its definition could change beside
	defer u.editing.Unlock()
	e, err := u.find(name)
	if err != nil {
		return err
	}
	now := u.now()
	u.amend(e, func(usage *Usage) {
		var next Usage
		if next, err = f(e.def.Load(), *usage, now); err == nil {
			*usage = next
		}
	})
	if err != nil {
		return err
	}
	u.settle(e)
	u.event(event, e)
	if err := u.commitOf([]*entry{e}); err != nil {
		return fmt.Errorf("user %q: done, but not kept: %w", name, err)
	}
	return nil
}
