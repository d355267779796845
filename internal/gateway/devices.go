package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/device"
	"gatewayd/track"
	"gatewayd/user"
)

// registry is the users as the API edits them: who belongs to a device may be another
// one afterwards.
type registry struct {
	*user.Users
	changed func()
}

// Create makes a user.
func (r registry) Create(s user.Spec) error { return r.edited(r.Users.Create(s)) }

// Put makes or replaces a user.
func (r registry) Put(s user.Spec) error { return r.edited(r.Users.Put(s)) }

// Update changes a user.
func (r registry) Update(name string, f func(user.Spec) (user.Spec, error)) error {
	return r.edited(r.Users.Update(name, f))
}

// Delete retires a user.
func (r registry) Delete(name string) error { return r.edited(r.Users.Delete(name)) }

func (r registry) edited(err error) error {
	if err == nil {
		r.changed()
	}
	return err
}

// book is the devices as the API sees them.
type book struct{ gw *Gateway }

// List is every device that is known of, and those that are promoted.
func (b book) List() (out []api.Device) {
	promotions := b.promotions()
	for _, e := range b.gw.devices.All() {
		d := b.device(deviceOf(&e), promotions)
		d.LastSeen = api.Time(e.Seen)
		d.Addresses = d.Addresses[:0]
		for _, a := range e.Addrs {
			d.Addresses = append(d.Addresses, a.String())
		}
		out = append(out, d)
		delete(promotions, d.Device)
	}
	for name, p := range promotions { // of prefixes, and of those who are away
		out = append(out, api.Device{Device: name, User: b.reference(p.User), Bound: "promotion", Promotion: b.promotion(p)})
	}
	slices.SortFunc(out, func(x, y api.Device) int { return cmp.Compare(x.Device, y.Device) })
	return out
}

func deviceOf(e *device.Entry) flow.Device {
	d := flow.Device{Name: e.Name, MAC: e.MAC, Host: e.Host}
	if len(e.Addrs) > 0 {
		d.Addr = e.Addrs[0]
	}
	return d
}

// At is the device at an address, if it has a MAC or a user.
func (b book) At(a netip.Addr) (api.Device, bool) {
	d := b.gw.devices.Lookup(a)
	_, bound := b.gw.users.UserOf(d)
	return b.device(d, b.promotions()), bound || d.MAC != ""
}

func (b book) promotions() map[string]user.Promotion {
	m := make(map[string]user.Promotion)
	for _, p := range b.gw.users.Promotions() {
		m[p.Device] = p
	}
	return m
}

func (b book) device(d flow.Device, promotions map[string]user.Promotion) api.Device {
	out := api.Device{Device: d.Name, MAC: d.MAC, Host: d.Host}
	if d.Addr.IsValid() {
		out.Addresses = []string{d.Addr.String()}
	}
	key, ok := b.gw.users.UserOf(d)
	if !ok {
		return out
	}
	out.User = b.reference(key)
	if p, promoted := promotionOf(d, promotions); promoted {
		out.Bound, out.Promotion = "promotion", b.promotion(p)
	} else if v, err := b.gw.users.Get(out.User.Name); err == nil {
		out.Bound = entryOf(d, v.Devices)
	}
	return out
}

// promotionOf is the promotion that has d: its own, or the one of the longest prefix.
func promotionOf(d flow.Device, promotions map[string]user.Promotion) (best user.Promotion, found bool) {
	bits := -1
	for name, p := range promotions {
		set, err := flow.ParseDeviceSet(name)
		if err != nil || !set.Has(d) {
			continue
		}
		if n := specificity(set); n > bits {
			best, bits, found = p, n, true
		}
	}
	return best, found
}

func specificity(s flow.DeviceSet) int {
	if s.Prefix.IsValid() {
		return s.Prefix.Bits()
	}
	return 1 << 10
}

// entryOf is the entry of a user's devices that has d.
func entryOf(d flow.Device, entries []string) string {
	for _, e := range entries {
		if set, err := flow.ParseDeviceSet(e); err == nil && set.Has(d) {
			return e
		}
	}
	return ""
}

func (b book) reference(key flow.UserKey) *api.UserRef {
	name, _, _ := b.gw.users.Facts(key)
	return &api.UserRef{ID: uint64(key), Name: name}
}

func (b book) promotion(p user.Promotion) *api.Promotion {
	name, _, _ := b.gw.users.Facts(p.User)
	out := &api.Promotion{User: name, Idle: api.Duration(p.Idle), Session: api.Duration(p.Session), Since: api.Time(p.Since)}
	if p.Session > 0 {
		out.Until = api.Time(p.Since.Add(p.Session))
	}
	return out
}

// named is the device that a name stands for: that of the MAC, if one is seen behind
// an address.
func (b book) named(name string) (d flow.Device, set flow.DeviceSet, err error) {
	if set, err = flow.ParseDeviceSet(name); err != nil {
		return d, set, fmt.Errorf("device %q: %w", name, err)
	}
	switch {
	case set.MAC != "":
		d = flow.Device{Name: set.String(), MAC: set.MAC}
	case set.Prefix.IsSingleIP():
		if d = b.gw.devices.Lookup(set.Prefix.Addr()); d.MAC != "" {
			set = flow.DeviceSet{MAC: d.MAC}
		}
	default:
		d = flow.Device{Name: set.String()}
	}
	return d, set, nil
}

// Promote puts a device with its live flows under a user.
func (b book) Promote(name, who string, idle, session time.Duration) error {
	d, set, err := b.named(name)
	if err != nil {
		return err
	}
	g := b.gw
	g.managing.Lock()
	defer g.managing.Unlock()
	key, _ := g.users.Key(who)
	var meters []*meter
	var live []user.Subject
	g.tracker.EachFlow(func(f *track.Flow, r *track.Record) bool {
		m, ours := f.Owner().(*meter)
		if ours && r.User != key && g.users.Takes(set, g.devices.Lookup(r.Source.Addr())) {
			meters = append(meters, m)
			live = append(live, subjectOf(r.Inbound, r.Source))
		}
		return true
	})
	leases, err := g.users.Promote(d, who, idle, session, live)
	if err != nil {
		return err
	}
	userName, _, _ := g.users.Facts(key)
	for i, l := range leases {
		meters[i].hand(l, track.Principal{User: key, UserName: userName})
	}
	g.stir(func(r *restless) {
		r.users[key] = true // rules may refuse what was handed over
		r.bindings = true   // of flows that were opened meanwhile
	})
	return nil
}

// Demote ends a promotion: live flows go to whoever the device belongs to otherwise.
func (b book) Demote(name string) error {
	d, set, err := b.named(name)
	if err != nil {
		return err
	}
	if err := b.gw.users.Demote(d); err != nil {
		return err
	}
	b.gw.gen.Add(1)
	b.gw.rebind(func(r *track.Record) bool { return set.Has(b.gw.devices.Lookup(r.Source.Addr())) })
	return nil
}
