package user

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// lawful is a registry with the flows that a model says it has.
type lawful struct {
	t     *rapid.T
	u     *Users
	flows map[flow.UserKey][]*flowOf // not released, by the number that they were admitted under
}

var lawNames = []string{"a", "b", "c"}

func (l *lawful) name() string { return rapid.SampledFrom(lawNames).Draw(l.t, "name") }

// spec is some user, right or wrong.
func (l *lawful) spec() Spec {
	s := Spec{
		Name: l.name(), Disabled: rapid.IntRange(0, 3).Draw(l.t, "disabled") == 0,
		Limits: Limits{
			Connections: rapid.IntRange(-1, 4).Draw(l.t, "connections"), IPs: rapid.IntRange(0, 2).Draw(l.t, "ips"),
			Traffic: Traffic{Total: uint64(rapid.IntRange(0, 2).Draw(l.t, "total")) * 1000},
		},
	}
	if rapid.Bool().Draw(l.t, "has a device") {
		s.Devices = []string{fmt.Sprintf("10.0.0.%d", rapid.IntRange(1, 3).Draw(l.t, "device"))}
	}
	if rapid.IntRange(0, 9).Draw(l.t, "in a group") == 0 {
		s.Group = "nowhere"
	}
	return s
}

// shape is all that can be seen of the registry.
func (l *lawful) shape() string {
	s := fmt.Sprint(l.u.List("", 0), l.u.Groups(), l.u.Promotions())
	for i := range 5 {
		key, ok := l.u.UserOf(device(fmt.Sprintf("10.0.0.%d", i), ""))
		s += fmt.Sprint(key, ok)
	}
	return s
}

// edit does something to the definitions; what is refused must change nothing.
func (l *lawful) edit(*rapid.T) {
	before := l.shape()
	var err error
	switch rapid.IntRange(0, 5).Draw(l.t, "edit") {
	case 0:
		err = l.u.Delete(l.name())
	case 1:
		specs := []Spec{l.spec(), l.spec()}
		for i := range specs {
			specs[i].Name = "file-" + specs[i].Name
		}
		var c *Change
		if c, err = l.u.Prepare(nil, specs); err == nil && rapid.Bool().Draw(l.t, "commit") {
			c.Commit()
		} else if err == nil {
			c.Discard()
			err = errors.New("discarded")
		}
	case 2:
		err = l.u.Update(l.name(), func(s Spec) (Spec, error) {
			s.Name = l.name()
			return s, nil
		})
	default:
		err = l.u.Put(l.spec())
	}
	if err != nil && l.shape() != before {
		l.t.Fatalf("refused with %v:\n%s\nbecame\n%s", err, before, l.shape())
	}
}

// admit begins a flow, which the limits of the user must allow.
func (l *lawful) admit(*rapid.T) {
	v, err := l.u.Get(l.name())
	if err != nil {
		return
	}
	lease, err := l.u.Admit(v.ID, client(rapid.IntRange(1, 3).Draw(l.t, "from")))
	limit := v.Effective.Connections
	switch {
	case err == nil && (v.Disabled || limit > 0 && v.Connections >= limit):
		l.t.Fatalf("admitted: %+v", v)
	case err == nil:
		l.flows[v.ID] = append(l.flows[v.ID], watch(lease))
	case !v.Disabled && v.State != StateExhausted && (limit == 0 || v.Connections < limit) && err != RefusedIPs:
		l.t.Fatalf("refused with %v: %+v", err, v)
	}
}

// promote moves a device with a flow to a user.
func (l *lawful) promote(*rapid.T) {
	name := l.name()
	before := l.shape()
	leases, err := l.u.Promote(device("10.0.0.2", ""), name, 0, 0, []Subject{client(2), client(2)})
	if err != nil {
		if l.shape() != before {
			l.t.Fatalf("refused with %v:\n%s\nbecame\n%s", err, before, l.shape())
		}
		return
	}
	key := get(l.t, l.u, name).ID
	for _, lease := range leases {
		l.flows[key] = append(l.flows[key], watch(lease))
	}
}

func (l *lawful) move(*rapid.T) {
	if f := l.some(); f != nil {
		f.move(rapid.IntRange(0, 700).Draw(l.t, "bytes"))
	}
}

func (l *lawful) release(*rapid.T) {
	v, err := l.u.Get(l.name())
	if err != nil || len(l.flows[v.ID]) == 0 {
		return
	}
	l.flows[v.ID][0].Release()
	l.flows[v.ID] = l.flows[v.ID][1:]
}

func (l *lawful) usage(*rapid.T) {
	name := l.name()
	if rapid.Bool().Draw(l.t, "reset") {
		_ = l.u.Reset(name)
	} else {
		_ = l.u.TopUp(name, 500)
	}
}

func (l *lawful) some() *flowOf {
	for _, name := range lawNames {
		if v, err := l.u.Get(name); err == nil && len(l.flows[v.ID]) > 0 {
			return l.flows[v.ID][0]
		}
	}
	return nil
}

// check: slots are those of the flows, and flows live if their user does.
func (l *lawful) check(*rapid.T) {
	alive := make(map[flow.UserKey]bool)
	for _, v := range l.u.List("", 0) {
		if v.Connections != len(l.flows[v.ID]) {
			l.t.Fatalf("%s holds %d slots for %d flows", v.Name, v.Connections, len(l.flows[v.ID]))
		}
		alive[v.ID] = !v.Disabled && v.State != StateExhausted
		if v.Disabled != (v.State == StateDisabled) {
			l.t.Fatalf("%s: disabled %v, state %v", v.Name, v.Disabled, v.State)
		}
	}
	for key, flows := range l.flows {
		for _, f := range flows {
			if !alive[key] && f.cause() == nil {
				l.t.Fatalf("a flow of user %d lives on", key)
			}
		}
	}
}

func TestSlotsStatesAndRefusedEditsOverAnyEdits(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		l := &lawful{rt, newUsers(rt, Options{}), make(map[flow.UserKey][]*flowOf)}
		rt.Repeat(map[string]func(*rapid.T){
			"edit": l.edit, "admit": l.admit, "promote": l.promote, "move": l.move, "release": l.release, "usage": l.usage, "": l.check,
		})
		for _, flows := range l.flows {
			for _, f := range flows {
				f.Release()
			}
		}
		for _, v := range l.u.List("", 0) {
			if v.Connections != 0 || len(v.IPs) != 0 {
				rt.Fatalf("%s holds %d slots and %v in the end", v.Name, v.Connections, v.IPs)
			}
		}
	})
}

// Meant for the race detector, and for what waits for each other.
func TestReloadsEditsAndTrafficBesideEachOther(t *testing.T) {
	var u *Users
	var changes sync.Map
	u = newUsers(t, Options{
		Keeper: newShelf(), Sweep: time.Millisecond, Commit: 2 * time.Millisecond,
		Changed: func(k flow.UserKey) { name, _, _ := u.Facts(k); changes.Store(k, name) },
		Events:  func(e Event) { u.UserOf(device("10.0.0.1", "")) },
	})
	groups, specs := many(50)
	apply(t, u, groups, specs)
	var keys []flow.UserKey
	for _, v := range u.List("", 0) {
		keys = append(keys, v.ID)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	beside := func(f func(r *rand.Rand)) {
		seed := rand.Uint64()
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, 0))
			for ctx.Err() == nil {
				f(r)
			}
		})
	}
	wg.Go(func() { _ = u.Run(ctx) })
	beside(func(r *rand.Rand) { // the configuration, with some users out, disabled, or with little to move
		some := make([]Spec, 0, len(specs))
		for _, s := range specs {
			s.Disabled = r.IntN(10) == 0
			s.Limits.Traffic.Total = uint64(r.IntN(3)) * 10_000
			if r.IntN(10) != 0 {
				some = append(some, s)
			}
		}
		apply(t, u, groups, some)
	})
	beside(func(r *rand.Rand) {
		name := fmt.Sprint("stored-", r.IntN(5))
		_ = u.Put(Spec{Name: name, Disabled: r.IntN(2) == 0})
		_ = u.Reset(name)
		_ = u.Delete(fmt.Sprint("stored-", r.IntN(5)))
		_ = u.PutGroup(Group{Name: "more", Limits: Limits{IPs: r.IntN(5)}})
	})
	beside(func(r *rand.Rand) {
		d := device(fmt.Sprint("10.0.1.", r.IntN(4)), "")
		leases, _ := u.Promote(d, fmt.Sprintf("user-%06d", r.IntN(50)), time.Millisecond, 0, []Subject{client(1)})
		for _, l := range leases {
			l.Release()
		}
		u.UserOf(d)
		d.MAC = macB
		u.DeviceChanged(d)
		_ = u.Demote(d)
	})
	beside(func(*rand.Rand) {
		u.List("", 10)
		u.Counts()
		u.Promotions()
	})
	for range 2 {
		beside(func(r *rand.Rand) {
			l, err := u.Admit(keys[r.IntN(len(keys))], client(r.IntN(3)))
			if err != nil {
				return
			}
			f := watch(l)
			f.move(r.IntN(3000))
			f.Release()
		})
	}
	wg.Wait()
	apply(t, u, groups, specs)
	for _, v := range u.List("", 0) {
		if v.Connections != 0 || v.Source == FromConfig && v.State != StateActive && v.State != StateUnused {
			t.Errorf("%s in the end: %d slots, %v", v.Name, v.Connections, v.State)
		}
		if v.Source == FromConfig {
			admit(t, u, v.ID).Release()
		}
	}
}
