package user

import (
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// Users is the registry of all users. Its methods are safe for concurrent use.
//
// Three kinds of callers do not wait for each other: the data path looks users and
// devices up without a lock (Admit, Facts, UserOf); edits follow each other and say
// what holds from now on; settling brings one account in line with that and with the
// time, whoever notices that it has to (settle.go).
type Users struct {
	opt      Options
	clock    clock
	keeper   Keeper
	common   common
	policies pool[policy]
	limitsOf pool[Limits]
	stats    stats

	byKey    *shared[flow.UserKey, *entry]
	static   *bindings[flow.UserKey] // users[].devices
	promoted *bindings[*promotion]
	alarms   alarms[*entry]     // in UnixNano
	looks    alarms[*promotion] // in time since the start

	started   time.Time // by the clock
	monotonic time.Time
	edges     chan *entry // whose usage is to be committed now

	// editing is held by an edit from its first look to its last change, by that of the
	// configuration from Prepare to Commit. It guards what only edits use.
	editing struct {
		sync.Mutex
		names map[string]flow.UserKey // numbers of those that the configuration named and doesn't now
		peak  int                     // of names, for shrink
		zones map[string]*time.Location
		next  flow.UserKey           // the first number that was never given away
		left  map[flow.UserKey]Usage // of users that left the configuration
	}

	mu     sync.RWMutex // after editing
	sorted []*entry     // by name
	groups map[string]*Group

	promotions struct { // after editing
		sync.Mutex
		of map[flow.DeviceSet]*promotion
	}

	saving     sync.Mutex  // inside of the others: one Save at a time
	committing sync.Mutex  // one commit at a time; guards entry.committed and near
	failing    atomic.Bool // the last commit failed
}

// Options are what Users needs.
type Options struct {
	Keeper Keeper           // nil: nothing is kept over restarts
	Now    func() time.Time // nil: time.Now
	Log    *slog.Logger     // nil: none
	Drops  *flow.Drops      // counts datagrams that found a queue full
	Sweep  time.Duration    // the longest time between looks at what is due; 0: 1 s
	Commit time.Duration    // the longest time between commits of usage; 0: 30 s

	// The functions are called on any goroutine, also from within the methods of a Lease
	// and while an edit goes on; they must neither wait nor edit. Each may be nil.

	Changed  func(flow.UserKey)         // the state, name or group is another one: rules may decide otherwise
	Events   func(Event)                // something that an operator wants to know
	Demoted  func(Promotion)            // a promotion ended by itself; its device's flows are whose UserOf says
	Activity func(device string) uint64 // payload bytes that flows of the device moved so far, for the idle limit of promotions
}

// Event is something that happened to a user or to a promotion.
type Event struct {
	Kind   string // user.added, .changed (of the store), .removed, .reset, .topup, .extended, .near or its new state as in user.exhausted; device.promoted, .demoted
	User   flow.UserKey
	Name   string
	State  string // now
	Device string // of promotions
	Why    string // of device.demoted: idle, session, device, demoted

	Percent int // of user.near: 80 or 95, the part of its traffic that is used up
}

// never is the UnixNano of what does not come.
const never = math.MaxInt64

// New makes the registry with what the keeper has. Users of the configuration come
// with the first Prepare. Run has to be called for what happens by itself.
func New(o Options) (*Users, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Sweep == 0 {
		o.Sweep = time.Second
	}
	if o.Commit == 0 {
		o.Commit = 30 * time.Second
	}
	if o.Sweep < time.Millisecond || o.Commit < time.Millisecond {
		return nil, fmt.Errorf("sweep %v, commit %v: at least a millisecond", o.Sweep, o.Commit)
	}
	u := &Users{
		opt: o, keeper: o.Keeper,
		byKey: newShared[flow.UserKey, *entry](), static: newBindings[flow.UserKey](), promoted: newBindings[*promotion](),
		groups: make(map[string]*Group), edges: make(chan *entry, 1024),
	}
	if u.keeper == nil {
		u.keeper = memory{}
	}
	u.clock.now, u.started, u.monotonic = o.Now, o.Now(), time.Now()
	u.promotions.of = make(map[flow.DeviceSet]*promotion)
	u.editing.names, u.editing.zones, u.editing.left = make(map[string]flow.UserKey), make(map[string]*time.Location), make(map[flow.UserKey]Usage)
	u.editing.next = 1
	u.common.drops, u.common.firstUse, u.common.crossed, u.common.enforced = o.Drops, u.onFirstUse, u.onCrossed, u.stats.enforced
	if err := u.load(); err != nil {
		return nil, fmt.Errorf("load users: %w", err)
	}
	return u, nil
}

// now is the time that dates are compared with.
func (u *Users) now() time.Time {
	t, _ := u.clock.wall()
	return t
}

// Plausible reports whether the clock can be right. While it is not, nobody expires by
// date and no period ends.
func (u *Users) Plausible() bool {
	_, ok := u.clock.wall()
	return ok
}

// load takes over what the keeper has.
func (u *Users) load() error {
	kept, err := u.keeper.Load()
	if err != nil {
		return err
	}
	if !kept.Committed.IsZero() {
		u.clock.commit(kept.Committed)
	}
	for name, key := range kept.Names {
		u.editing.names[name] = key
		u.editing.next = max(u.editing.next, key+1)
	}
	u.editing.next = max(u.editing.next, kept.Next)
	c := &Change{u: u, groups: make(map[string]*Group)}
	for _, g := range kept.Groups {
		c.groups[g.Name] = u.group(g, FromStore)
	}
	v := newValidator(len(kept.Users))
	v.groups = nil // the configuration has others
	if err := v.all(kept.Groups, kept.Users); err != nil {
		return err
	}
	for i := range kept.Users {
		s := &kept.Users[i]
		s.Source = FromStore
		if s.ID == 0 {
			return fmt.Errorf("user %q has no number", s.Name)
		}
		u.editing.next = max(u.editing.next, s.ID+1)
		if err := c.put(nil, s); err != nil {
			return err
		}
	}
	c.apply()
	return u.loadPromotions(kept.Promotions)
}

// Admit lets one flow run under the user, or is the Refusal that it gets, counted.
// It neither blocks nor takes a lock of the registry.
func (u *Users) Admit(key flow.UserKey, s Subject) (*Lease, error) {
	leases, err := u.admit(key, []Subject{s})
	if err != nil {
		return nil, err
	}
	return leases[0], nil
}

// admit reserves for all of them or for none, and counts a refusal.
func (u *Users) admit(key flow.UserKey, ss []Subject) (leases []*Lease, err error) {
	defer func() {
		if err != nil {
			u.stats.refused(err)
		}
	}()
	e, known := u.byKey.get(key)
	if !known {
		return nil, RefusedUnknown
	}
	now, plausible := u.clock.wall()
	if plausible && now.UnixNano() >= e.alarm.at.Load() {
		u.settle(e) // before the sweep comes to it
	}
	switch {
	case e.def.Load().disabled:
		return nil, RefusedDisabled
	case plausible && now.UnixNano() >= e.expires.Load():
		return nil, RefusedExpired
	}
	return u.open(e).admitAll(ss)
}

// Facts are what rules look at; empty without such a user. It takes no lock.
func (u *Users) Facts(key flow.UserKey) (name, group, state string) {
	e, known := u.byKey.get(key)
	if !known {
		return "", "", ""
	}
	d := e.def.Load()
	return d.name, d.group, e.state().String()
}

// UserOf is the user that flows of the device run under: that of its promotion, else
// the one whose definition names it. The user may be gone: Admit refuses it then. It
// takes no lock.
func (u *Users) UserOf(d flow.Device) (key flow.UserKey, ok bool) {
	if p, ok := u.promoted.of(d); ok && p.holds(d) {
		return p.User, true
	}
	return u.static.of(d)
}

// Opened tells that a flow of the device was opened: its promotion is not idle, also if
// the flow is gone before anybody asks what it moved. It takes no lock.
func (u *Users) Opened(d flow.Device) {
	if p, ok := u.promoted.of(d); ok && p.holds(d) {
		p.used()
	}
}
