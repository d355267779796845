package user

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// maxPromotions bounds how many devices are promoted at once.
const maxPromotions = 65_536

// Promotion makes the flows of a device run under a user.
type Promotion struct {
	Device        string       // "mac:3c:22:fb:aa:bb:cc", an address or a prefix
	User          flow.UserKey // may be gone: the device gets no flow then
	MAC           string       // that was seen behind the address; empty: none
	Since         time.Time
	Idle, Session time.Duration // how long without traffic, and in all; 0: no limit
}

// promotion is one that holds.
type promotion struct {
	Promotion // MAC is in mac
	set       flow.DeviceSet
	mac       atomic.Pointer[string] // nil: not seen
	asked     atomic.Bool            // a flow was opened since the last look
	alarm     alarm                  // in time since the start

	// of looks, one after the other
	began  time.Time // monotonic
	active time.Time
	moved  uint64
}

func (p *promotion) alarmOf() *alarm { return &p.alarm }

// used notes that a flow was opened.
func (p *promotion) used() {
	if p.Idle > 0 && !p.asked.Load() {
		p.asked.Store(true)
	}
}

// holds tells whether the device is still the one: an address may be another one's now.
func (p *promotion) holds(d flow.Device) bool {
	mac := p.mac.Load()
	return mac == nil || d.MAC == "" || *mac == d.MAC
}

// view is the promotion as it is kept and shown.
func (p *promotion) view() Promotion {
	v := p.Promotion
	if mac := p.mac.Load(); mac != nil {
		v.MAC = *mac
	}
	return v
}

// newPromotion is the promotion after it lasted so long.
func (u *Users) newPromotion(of Promotion, set flow.DeviceSet, lasted time.Duration) *promotion {
	now := time.Now()
	p := &promotion{Promotion: of, set: set, began: now.Add(-lasted), active: now}
	if of.MAC != "" {
		p.mac.Store(&of.MAC)
	}
	p.alarm.at.Store(never)
	return p
}

// loadPromotions takes over those that were kept.
func (u *Users) loadPromotions(kept []Promotion) error {
	devices := u.promoted.edit()
	for _, of := range kept {
		set, err := flow.ParseDeviceSet(of.Device)
		if err != nil {
			return fmt.Errorf("promotion of %q: %w", of.Device, err)
		}
		p := u.newPromotion(of, set, max(u.opt.Now().Sub(of.Since), 0))
		u.promotions.of[set] = p
		devices.set(set, p)
		u.looks.set(p, 0)
	}
	devices.publish()
	return nil
}

// promotable is what is promoted of a device: its MAC if that is known.
func promotable(d flow.Device) (flow.DeviceSet, error) {
	switch a := d.Addr.Unmap(); {
	case d.MAC != "":
		return flow.ParseDeviceSet("mac:" + d.MAC)
	case a.IsValid():
		return flow.ParseDeviceSet(a.WithZone("").String())
	}
	return flow.ParseDeviceSet(d.Name)
}

// Promote makes the device's flows run under the user from now on, in place of whatever
// they ran under. live are its flows that are open and do not run under that user yet:
// each gets a lease, in their order, or none does and nothing changes: the error is a
// Refusal then. The same user again changes at most the limits of time, in which what
// passed stays. A device without an address is told by its name: a prefix, or "mac:…".
func (u *Users) Promote(d flow.Device, name string, idle, session time.Duration, live []Subject) ([]*Lease, error) {
	set, err := promotable(d)
	var wrong Invalid
	switch {
	case err != nil:
		wrong.add("", fmt.Sprintf("device %q", d.Name), "device", "%v", err)
	case set.Host != "":
		wrong.add("", fmt.Sprintf("device %q", d.Name), "device", "a host name may be anybody's; want its MAC or address")
	case idle < 0 || session < 0:
		wrong.add("", fmt.Sprintf("device %q", d.Name), "idle", "a limit of time is negative; 0 is none")
	}
	if err := wrong.err(); err != nil {
		return nil, err
	}
	u.promotions.Lock()
	defer u.promotions.Unlock()
	var key flow.UserKey // 0: unknown
	if e, err := u.find(name); err == nil {
		key = e.key
	}
	leases, err := u.admit(key, live)
	if err != nil {
		return nil, err
	}
	if err := u.promoteLocked(set, Promotion{Device: set.String(), User: key, Since: u.now(), Idle: idle, Session: session}); err != nil {
		for _, l := range leases {
			l.Release()
		}
		return nil, err
	}
	return leases, nil
}

func (u *Users) promoteLocked(set flow.DeviceSet, of Promotion) error {
	old := u.promotions.of[set]
	lasted := time.Duration(0)
	switch {
	case old == nil && len(u.promotions.of) >= maxPromotions:
		return fmt.Errorf("device %s: %d devices are promoted: %w", of.Device, maxPromotions, flow.ErrLimit)
	case old != nil && old.User == of.User && old.Idle == of.Idle && old.Session == of.Session:
		return nil
	case old != nil && old.User == of.User:
		of.Since, of.MAC, lasted = old.Since, old.view().MAC, time.Since(old.began)
	}
	if err := u.save(&Edit{Promotions: []Promotion{of}}); err != nil {
		return fmt.Errorf("device %s: %w", of.Device, err)
	}
	p := u.newPromotion(of, set, lasted)
	p.moved = u.activity(of.Device)
	if old != nil {
		u.looks.set(old, never)
	}
	u.promotions.of[set] = p
	devices := u.promoted.edit()
	devices.set(set, p)
	devices.publish()
	u.looks.set(p, u.sinceStart()) // the next look finds out when it is due
	u.promotionEvent("device.promoted", of, "")
	return nil
}

// Takes reports whether a promotion of set holds for d: nobody promoted something in it
// that has d, as a prefix may have a device that is somebody else's. It takes no lock.
func (u *Users) Takes(set flow.DeviceSet, d flow.Device) bool {
	if !set.Has(d) {
		return false
	}
	p, ok := u.promoted.of(d)
	return !ok || set.MAC != "" || p.set.MAC == "" && p.set.Prefix.Bits() <= set.Prefix.Bits()
}

// Demote ends the promotion of a device: its new flows run under whoever its address
// belongs to, or nobody. The caller goes on with those that are open. ErrUnknown.
func (u *Users) Demote(d flow.Device) error {
	set, err := promotable(d)
	if err != nil {
		return fmt.Errorf("device %q: %w", d.Name, ErrUnknown)
	}
	u.promotions.Lock()
	defer u.promotions.Unlock()
	p := u.promotions.of[set]
	if p == nil {
		return fmt.Errorf("device %s: %w", set, ErrUnknown)
	}
	if err := u.save(&Edit{DeletePromotions: []string{p.Device}}); err != nil {
		return fmt.Errorf("device %s: %w", set, err)
	}
	u.forgetLocked(p, "demoted")
	return nil
}

// DeviceChanged tells of the MAC that is behind an address now. A promotion of the
// address ends if there was another one behind it.
func (u *Users) DeviceChanged(d flow.Device) {
	a := d.Addr.Unmap()
	if d.MAC == "" || !a.IsValid() {
		return
	}
	set, err := flow.ParseDeviceSet(a.WithZone("").String())
	if err != nil {
		return
	}
	u.promotions.Lock()
	p := u.promotions.of[set]
	switch {
	case p == nil, p.mac.Load() != nil && *p.mac.Load() == d.MAC:
		u.promotions.Unlock()
	case p.mac.Load() == nil: // it becomes visible
		p.mac.Store(&d.MAC)
		u.unkept(u.save(&Edit{Promotions: []Promotion{p.view()}}))
		u.promotions.Unlock()
	default:
		u.promotions.Unlock()
		u.endPromotion(p, "device")
	}
}

// Promotions are those that hold, by device.
func (u *Users) Promotions() []Promotion {
	u.promotions.Lock()
	defer u.promotions.Unlock()
	all := make([]Promotion, 0, len(u.promotions.of))
	for _, p := range u.promotions.of {
		all = append(all, p.view())
	}
	slices.SortFunc(all, func(a, b Promotion) int { return cmp.Compare(a.Device, b.Device) })
	return all
}

// promotionsDue looks at those of which a limit of time may have come.
func (u *Users) promotionsDue(ctx context.Context) {
	var owners [atOnce]*promotion
	for n := len(owners); n == len(owners) && ctx.Err() == nil; {
		n = u.looks.due(u.sinceStart(), owners[:])
		for _, o := range owners[:n] {
			u.look(o)
		}
	}
}

// look ends a promotion that is over, or plans the next look at it. How much the device
// moved is asked several times in the idle limit, so that it ends at most an eighth late.
func (u *Users) look(p *promotion) {
	now := time.Now()
	if moved := u.activity(p.Device); moved != p.moved || p.asked.Swap(false) {
		p.moved, p.active = moved, now
	}
	wait := time.Duration(never)
	if p.Session > 0 {
		wait = p.began.Add(p.Session).Sub(now)
	}
	if wait <= 0 {
		u.endPromotion(p, "session")
		return
	}
	if p.Idle > 0 {
		left := p.active.Add(p.Idle).Sub(now)
		if left <= 0 {
			u.endPromotion(p, "idle")
			return
		}
		wait = min(wait, left, max(p.Idle/8, u.opt.Sweep))
	}
	at := int64(never)
	if wait != never {
		at = u.sinceStart() + int64(wait)
	}
	u.promotions.Lock()
	defer u.promotions.Unlock()
	if u.promotions.of[p.set] == p {
		u.looks.set(p, at)
	}
}

// endPromotion ends one by itself, unless it ended already.
func (u *Users) endPromotion(p *promotion, why string) {
	u.promotions.Lock()
	holds := u.promotions.of[p.set] == p
	if holds {
		u.unkept(u.save(&Edit{DeletePromotions: []string{p.Device}}))
		u.forgetLocked(p, why)
	}
	u.promotions.Unlock()
	if holds && u.opt.Demoted != nil {
		u.opt.Demoted(p.view())
	}
}

func (u *Users) forgetLocked(p *promotion, why string) {
	u.looks.set(p, never)
	delete(u.promotions.of, p.set)
	devices := u.promoted.edit()
	devices.delete(p.set)
	devices.publish()
	u.promotionEvent("device.demoted", p.view(), why)
}

// activity is how much the device moved so far.
func (u *Users) activity(device string) uint64 {
	if u.opt.Activity == nil {
		return 0
	}
	return u.opt.Activity(device)
}

func (u *Users) promotionEvent(kind string, p Promotion, why string) {
	if u.opt.Events != nil {
		name, _, state := u.Facts(p.User)
		u.opt.Events(Event{Kind: kind, User: p.User, Name: name, State: state, Device: p.Device, Why: why})
	}
}

// sinceStart is the monotonic time since the registry was made, in ns.
func (u *Users) sinceStart() int64 { return int64(time.Since(u.monotonic)) }
