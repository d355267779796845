// Package apitest has a registry of users and of devices for tests of the API and of
// its clients: plain maps that behave as the interfaces say.
package apitest

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/user"
)

// Users is an api.Users.
type Users struct {
	mu     sync.Mutex
	users  map[string]*user.View
	groups map[string]user.Group
	next   flow.UserKey

	Sums user.Counts // the answer of Counts
}

// NewUsers is a registry without users.
func NewUsers() *Users {
	return &Users{users: map[string]*user.View{}, groups: map[string]user.Group{}, next: 1}
}

// Change calls f with a user, which is made if it is not there.
func (u *Users) Change(name string, f func(*user.View)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	v := u.users[name]
	if v == nil {
		v = &user.View{Spec: user.Spec{Name: name, ID: u.next, Source: user.FromStore}}
		u.next++
		u.users[name] = v
	}
	f(v)
	u.settle(v)
}

// AddGroup adds or replaces a group of the configuration.
func (u *Users) AddGroup(g user.Group) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.groups[g.Name] = g
	for _, v := range u.users {
		u.settle(v)
	}
}

// settle makes what follows from a definition.
func (u *Users) settle(v *user.View) {
	v.Effective = v.Limits
	if !v.Effective.Multiplier.Set {
		v.Effective.Multiplier = u.groups[v.Group].Limits.Multiplier
	}
	if v.Effective.WhenExhausted == (user.Exhausted{}) {
		v.Effective.WhenExhausted = u.groups[v.Group].Limits.WhenExhausted
	}
	v.ExpiresAt = time.Time{}
	if !v.Expires.At.IsZero() {
		v.ExpiresAt = v.Expires.At.Add(v.Usage.Extended)
	}
	switch {
	case v.Disabled:
		v.State = user.StateDisabled
	case v.Usage.FirstUse.IsZero():
		v.State = user.StateUnused
	default:
		v.State = user.StateActive
	}
}

// List is the users by name.
func (u *Users) List(after string, limit int) (list []user.View) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for name, v := range u.users {
		if name > after {
			list = append(list, *v)
		}
	}
	slices.SortFunc(list, func(a, b user.View) int { return cmp.Compare(a.Name, b.Name) })
	if limit > 0 && len(list) > limit {
		list = list[:limit]
	}
	return list
}

// Get is one user.
func (u *Users) Get(name string) (user.View, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	v, err := u.find(name)
	if err != nil {
		return user.View{}, err
	}
	return *v, nil
}

// find is the user of that name or number.
func (u *Users) find(name string) (*user.View, error) {
	v := u.users[name]
	for _, each := range u.users {
		if strconv.FormatUint(uint64(each.ID), 10) == name {
			v = each
		}
	}
	if v == nil {
		return nil, fmt.Errorf("user %q: %w", name, user.ErrUnknown)
	}
	return v, nil
}

// Facts are a user's name, group and state.
func (u *Users) Facts(key flow.UserKey) (name, group, state string) {
	v, err := u.Get(strconv.FormatUint(uint64(key), 10))
	if err != nil {
		return "", "", ""
	}
	return v.Name, v.Group, v.State.String()
}

func problem(text string) error { return &user.Invalid{Problems: []user.Problem{{Text: text}}} }

// Put makes or replaces a user. Names of digits and unknown groups are invalid.
func (u *Users) Put(spec user.Spec) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	v, known := u.users[spec.Name]
	switch {
	case known && v.Source == user.FromConfig:
		return fmt.Errorf("user %q: %w", spec.Name, user.ErrReadOnly)
	case strings.Trim(spec.Name, "0123456789") == "":
		return problem("name " + spec.Name + ": want one that is not all digits")
	case spec.Group != "" && u.groups[spec.Group].Name == "":
		return problem("group: there is no group " + spec.Group)
	case spec.ID != 0 && u.taken(spec):
		return fmt.Errorf("id %d: %w", spec.ID, user.ErrClash)
	}
	if !known {
		v = &user.View{Usage: user.Usage{PeriodStart: time.Now()}}
		u.users[spec.Name] = v
	}
	if id := v.ID; spec.ID == 0 && id != 0 {
		spec.ID = id
	} else if spec.ID == 0 {
		spec.ID = u.next
		u.next++
	}
	v.Spec = spec
	u.settle(v)
	return nil
}

func (u *Users) taken(spec user.Spec) bool {
	for name, v := range u.users {
		if v.ID == spec.ID && name != spec.Name {
			return true
		}
	}
	return false
}

// Create makes a user.
func (u *Users) Create(spec user.Spec) error {
	if _, err := u.Get(spec.Name); err == nil {
		return fmt.Errorf("user %q: %w", spec.Name, user.ErrClash)
	}
	return u.Put(spec)
}

// Update replaces a definition.
func (u *Users) Update(name string, f func(user.Spec) (user.Spec, error)) error {
	v, err := u.Get(name)
	if err != nil {
		return err
	}
	next, err := f(v.Spec)
	if err != nil {
		return err
	}
	if next.Name != v.Name {
		u.mu.Lock()
		u.users[next.Name] = u.users[v.Name]
		delete(u.users, v.Name)
		u.mu.Unlock()
	}
	return u.Put(next)
}

// Delete removes a user.
func (u *Users) Delete(name string) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	v, err := u.find(name)
	if err != nil {
		return err
	}
	if v.Source == user.FromConfig {
		return fmt.Errorf("user %q: %w", name, user.ErrReadOnly)
	}
	delete(u.users, name)
	return nil
}

// Groups are all groups by name.
func (u *Users) Groups() (list []user.Group) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, g := range u.groups {
		list = append(list, g)
	}
	slices.SortFunc(list, func(a, b user.Group) int { return cmp.Compare(a.Name, b.Name) })
	return list
}

// PutGroup makes or replaces a group.
func (u *Users) PutGroup(g user.Group) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if old, known := u.groups[g.Name]; known && old.Source == user.FromConfig {
		return fmt.Errorf("group %q: %w", g.Name, user.ErrReadOnly)
	}
	u.groups[g.Name] = g
	return nil
}

// DeleteGroup removes a group without members.
func (u *Users) DeleteGroup(name string) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, known := u.groups[name]; !known {
		return fmt.Errorf("group %q: %w", name, user.ErrUnknown)
	}
	for _, v := range u.users {
		if v.Group == name {
			return fmt.Errorf("group %q: %w: user %q is a member", name, user.ErrClash, v.Name)
		}
	}
	delete(u.groups, name)
	return nil
}

func (u *Users) usage(name string, change func(*user.Usage)) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	v, err := u.find(name)
	if err != nil {
		return err
	}
	change(&v.Usage)
	u.settle(v)
	return nil
}

// Reset begins a period.
func (u *Users) Reset(name string) error {
	return u.usage(name, func(g *user.Usage) {
		g.Up, g.Down, g.ChargedUp, g.ChargedDown, g.Extra = 0, 0, 0, 0, 0
		g.Generation++
	})
}

// TopUp adds to the period's allowances.
func (u *Users) TopUp(name string, bytes uint64) error {
	return u.usage(name, func(g *user.Usage) { g.Extra += bytes })
}

// Extend moves the end.
func (u *Users) Extend(name string, by time.Duration) error {
	return u.usage(name, func(g *user.Usage) { g.Extended += by })
}

// Counts is Sums.
func (u *Users) Counts() user.Counts { return u.Sums }

// Billing is an api.Billing over the usage of Users.
type Billing struct {
	Users  *Users
	Points map[user.Payer][]user.Point // of any step and time

	mu    sync.Mutex
	takes map[flow.UserKey]*takes
}

// takes is what was taken of one user.
type takes struct {
	open  user.Taken // the last one
	acked bool       // it is acknowledged
	upTo  user.Moved // what the takes so far have told of
}

// Take is what was moved since the last acknowledged take.
func (b *Billing) Take(now time.Time, keys ...flow.UserKey) (all []user.Taken, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.takes == nil {
		b.takes = map[flow.UserKey]*takes{}
	}
	for _, key := range keys {
		v, err := b.Users.Get(strconv.FormatUint(uint64(key), 10))
		if err != nil {
			return nil, err
		}
		moved := v.Usage.Lifetime()
		if moved == (user.Moved{}) {
			continue
		}
		t := b.takes[key]
		if t == nil {
			t = &takes{acked: true}
			b.takes[key] = t
		}
		if t.acked {
			t.open = user.Taken{User: key, Sequence: t.open.Sequence + 1, From: t.open.To, To: now, Moved: user.Moved{
				Up: moved.Up - t.upTo.Up, Down: moved.Down - t.upTo.Down,
				ChargedUp: moved.ChargedUp - t.upTo.ChargedUp, ChargedDown: moved.ChargedDown - t.upTo.ChargedDown,
			}}
			t.acked, t.upTo = false, moved
		}
		all = append(all, t.open)
	}
	return all, nil
}

// Ack acknowledges the last take.
func (b *Billing) Ack(key flow.UserKey, sequence uint64, _ time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.takes[key]
	if t == nil || sequence != t.open.Sequence {
		return fmt.Errorf("take %d of user %d: %w", sequence, key, user.ErrSequence)
	}
	t.acked = true
	return nil
}

// Series are Points by their labels.
func (b *Billing) Series(q user.Query, _ time.Time) (map[string][]user.Point, error) {
	series := map[string][]user.Point{}
	for payer, points := range b.Points {
		if label, use := q.Label(payer); use {
			series[label] = append(series[label], points...)
		}
	}
	return series, nil
}

// Devices is an api.Devices over a list that does not change by itself.
type Devices struct {
	Users *Users // whom devices are promoted to

	mu   sync.Mutex
	list []api.Device
}

// Add adds a device that was seen.
func (d *Devices) Add(device api.Device) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, device)
}

// List is all devices.
func (d *Devices) List() []api.Device {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := slices.Clone(d.list)
	slices.SortFunc(list, func(a, b api.Device) int { return cmp.Compare(a.Device, b.Device) })
	return list
}

// At is the device that has the address.
func (d *Devices) At(a netip.Addr) (api.Device, bool) {
	for _, each := range d.List() {
		if slices.Contains(each.Addresses, a.String()) {
			return each, true
		}
	}
	return api.Device{}, false
}

// Promote puts a device under a user that is there and enabled.
func (d *Devices) Promote(device, name string, idle, session time.Duration) error {
	v, err := d.Users.Get(name)
	if err != nil {
		return err
	}
	if v.Disabled {
		return user.RefusedDisabled
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.list, func(e api.Device) bool { return e.Device == device })
	if i < 0 {
		d.list = append(d.list, api.Device{Device: device})
		i = len(d.list) - 1
	}
	d.list[i].User, d.list[i].Bound = &api.UserRef{ID: uint64(v.ID), Name: v.Name}, "promotion"
	d.list[i].Promotion = &api.Promotion{User: name, Idle: api.Duration(idle), Session: api.Duration(session)}
	return nil
}

// Demote ends a promotion.
func (d *Devices) Demote(device string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.list {
		if e := &d.list[i]; e.Device == device && e.Promotion != nil {
			e.User, e.Bound, e.Promotion = nil, "", nil
			return nil
		}
	}
	return fmt.Errorf("device %s is not promoted: %w", device, user.ErrUnknown)
}
