package user

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"gatewayd/flow"
)

// View is one user as it is now.
type View struct {
	Spec               // as it was written; its ID is never 0, its Devices are not to be changed
	Effective   Limits // of user and group
	State       State
	Usage       Usage
	Connections int          // live flows, dials in progress included
	IPs         []netip.Addr // sources that hold a slot
	ExpiresAt   time.Time    // the earlier of the two, extensions included; zero: never
	PeriodEnd   time.Time    // when the traffic's period begins anew; zero: never
}

// Get is the user of that name, or of that number if it is one; ErrUnknown.
func (u *Users) Get(name string) (View, error) {
	e, err := u.find(name)
	if err != nil {
		return View{}, err
	}
	return e.view(u.now()), nil
}

// List is up to limit users (0: all of them) in the order of their names, from the
// first one after the name.
func (u *Users) List(after string, limit int) []View {
	u.mu.RLock()
	i, found := u.place(after)
	if found {
		i++
	}
	page := u.sorted[i:]
	if limit > 0 && len(page) > limit {
		page = page[:limit]
	}
	page = slices.Clone(page)
	u.mu.RUnlock()

	views := make([]View, len(page))
	for i, e := range page {
		views[i] = e.view(u.now())
	}
	return views
}

// Key is the number of the user of that name.
func (u *Users) Key(name string) (key flow.UserKey, ok bool) {
	e, err := u.find(name)
	if err != nil {
		return 0, false
	}
	return e.key, true
}

// Groups are all groups in the order of their names.
func (u *Users) Groups() []Group {
	u.mu.RLock()
	defer u.mu.RUnlock()
	groups := make([]Group, 0, len(u.groups))
	for _, g := range u.groups {
		groups = append(groups, *g)
	}
	slices.SortFunc(groups, func(a, b Group) int { return strings.Compare(a.Name, b.Name) })
	return groups
}

func (e *entry) view(now time.Time) View {
	v := View{Spec: e.spec(), Effective: e.limits(), State: e.state(), Usage: e.usage()}
	if a := e.account.Load(); a != nil {
		v.Connections, v.IPs = a.gauges()
	}
	v.ExpiresAt = expiry(&v.Expires, &v.Usage)
	if v.Usage.PeriodStart.IsZero() {
		v.Usage.PeriodStart = v.Effective.Traffic.Reset.start(now)
	}
	v.PeriodEnd = periodEnd(&v.Effective.Traffic.Reset, &v.Usage)
	return v
}

// find is the user of that name or number; ErrUnknown.
func (u *Users) find(name string) (*entry, error) {
	u.mu.RLock()
	i, found := u.place(name)
	var e *entry
	if found {
		e = u.sorted[i]
	}
	u.mu.RUnlock()
	if !found {
		id, err := strconv.ParseUint(name, 10, 64)
		if err == nil {
			e, found = u.byKey.get(flow.UserKey(id))
		}
	}
	if !found {
		return nil, fmt.Errorf("user %q: %w", name, ErrUnknown)
	}
	return e, nil
}

// place is where the user of that name is, or would be, in sorted. u.mu is held.
func (u *Users) place(name string) (int, bool) {
	return slices.BinarySearchFunc(u.sorted, name, func(e *entry, name string) int { return strings.Compare(e.def.Load().name, name) })
}
