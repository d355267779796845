package user

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

const (
	macA = "02:00:00:00:00:0a"
	macB = "02:00:00:00:00:0b"
)

// device is who has the address, and the MAC if one is visible.
func device(addr, mac string) flow.Device {
	d := flow.Device{Name: addr, Addr: netip.MustParseAddr(addr), MAC: mac}
	if mac != "" {
		d.Name = "mac:" + mac
	}
	return d
}

func promote(t testing.TB, u *Users, d flow.Device, name string) {
	t.Helper()
	if _, err := u.Promote(d, name, 0, 0, nil); err != nil {
		t.Fatal(err)
	}
}

// belongs checks which user a device belongs to; 0: none.
func belongs(t testing.TB, u *Users, d flow.Device, want flow.UserKey) {
	t.Helper()
	if got, ok := u.UserOf(d); got != want || ok != (want != 0) {
		t.Errorf("%v belongs to %d (%v), want %d", d, got, ok, want)
	}
}

func TestADeviceIsFoundByMACThenHostThenLongestPrefix(t *testing.T) {
	u := newUsers(t, Options{})
	keys := make(map[string]flow.UserKey)
	for name, d := range map[string]string{
		"mac": "mac:" + macA, "host": "host:tablet", "one": "10.0.0.1", "net": "10.0.0.0/24", "wide": "10.0.0.0/8", "six": "fd00::/64",
	} {
		keys[name] = put(t, u, Spec{Name: name, Devices: []string{d}})
	}
	full := device("10.0.0.1", macA)
	full.Host = "tablet"
	belongs(t, u, full, keys["mac"])
	full.MAC = macB
	belongs(t, u, full, keys["host"])
	belongs(t, u, device("10.0.0.1", macB), keys["one"])
	belongs(t, u, device("::ffff:10.0.0.1", ""), keys["one"])
	belongs(t, u, device("10.0.0.2", ""), keys["net"])
	belongs(t, u, device("10.0.1.2", ""), keys["wide"])
	belongs(t, u, device("fd00::1", ""), keys["six"])
	belongs(t, u, device("11.0.0.1", ""), 0)
	if err := u.Delete("net"); err != nil {
		t.Fatal(err)
	}
	belongs(t, u, device("10.0.0.2", ""), keys["wide"])
}

func TestBindingsAreThoseOfAList(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := newBindings[int]()
		type bound struct {
			p netip.Prefix
			v int
		}
		var list []bound
		for i := range rapid.IntRange(1, 40).Draw(rt, "edits") {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(rapid.IntRange(0, 7).Draw(rt, "host"))})
			p, _ := a.Prefix(rapid.IntRange(28, 32).Draw(rt, "bits"))
			at := -1
			for j := range list {
				if list[j].p == p {
					at = j
				}
			}
			edit := b.edit()
			switch set := rapid.Bool().Draw(rt, "set"); {
			case set && at < 0:
				list = append(list, bound{p, i})
			case set:
				list[at].v = i
			case at >= 0:
				list = append(list[:at], list[at+1:]...)
			}
			edit.delete(flow.DeviceSet{Prefix: p})
			for _, l := range list {
				if l.p == p {
					edit.set(flow.DeviceSet{Prefix: p}, l.v)
				}
			}
			edit.publish()
		}
		for h := range 8 {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(h)})
			best := bound{v: -1}
			for _, l := range list {
				if l.p.Contains(a) && l.p.Bits() > best.p.Bits() {
					best = l
				}
			}
			got, ok := b.of(flow.Device{Addr: a})
			if ok != (best.v >= 0) || ok && got != best.v {
				rt.Fatalf("%v: %d (%v), want %d", a, got, ok, best.v)
			}
		}
	})
}

func TestAPromotionComesBeforeDefinitionsAndEndsByDemotion(t *testing.T) {
	u := newUsers(t, Options{})
	kids := put(t, u, Spec{Name: "kids", Devices: []string{"10.0.0.0/24"}})
	ann := put(t, u, Spec{Name: "ann"})
	d := device("10.0.0.5", macA)
	belongs(t, u, d, kids)
	promote(t, u, d, "ann")
	belongs(t, u, d, ann)
	belongs(t, u, device("fd00::7", macA), ann) // all its addresses
	belongs(t, u, device("10.0.0.6", macB), kids)
	if got := u.Promotions(); len(got) != 1 || got[0].Device != "mac:"+macA || got[0].User != ann {
		t.Errorf("promotions: %+v", got)
	}
	if err := u.Demote(d); err != nil {
		t.Fatal(err)
	}
	belongs(t, u, d, kids)
	isNot(t, u.Demote(d), ErrUnknown)
}

func TestAPromotedDeviceWhoseUserIsGoneIsRefused(t *testing.T) {
	u := newUsers(t, Options{})
	ann := put(t, u, Spec{Name: "ann"})
	d := device("10.0.0.5", "")
	promote(t, u, d, "ann")
	if err := u.Delete("ann"); err != nil {
		t.Fatal(err)
	}
	put(t, u, Spec{Name: "ann"}) // somebody else
	belongs(t, u, d, ann)
	_, err := u.Admit(ann, client(1))
	refusedAs(t, err, RefusedUnknown)
}

func TestARefusedPromotionLeavesAllAsItWas(t *testing.T) {
	u := newUsers(t, Options{})
	bob := put(t, u, Spec{Name: "bob"})
	put(t, u, Spec{Name: "two", Limits: Limits{Connections: 2}})
	put(t, u, Spec{Name: "off", Disabled: true})
	d := device("10.0.0.5", macA)
	promote(t, u, d, "bob")
	for name, want := range map[string]Refusal{"two": RefusedConnections, "off": RefusedDisabled, "nobody": RefusedUnknown} {
		_, err := u.Promote(d, name, 0, 0, []Subject{client(1), client(1), client(1)})
		refusedAs(t, err, want)
		belongs(t, u, d, bob)
		if v, err := u.Get(name); err == nil && v.Connections != 0 {
			t.Errorf("%s holds %d slots", name, v.Connections)
		}
	}
	if got := u.Counts().Refusals; got["connections"] != 1 || got["disabled"] != 1 || got["unknown"] != 1 {
		t.Errorf("refusals are counted as %v", got)
	}
	leases, err := u.Promote(d, "two", 0, 0, []Subject{client(1), client(1)})
	if err != nil || len(leases) != 2 || get(t, u, "two").Connections != 2 {
		t.Errorf("%d leases, %v", len(leases), err)
	}
	for _, wrong := range []flow.Device{{Name: "host:x"}, {Name: "10.0.0.1/24"}, {}} {
		if _, err := u.Promote(wrong, "bob", 0, 0, nil); err == nil {
			t.Errorf("%+v was promoted", wrong)
		}
	}
}

func TestAPrefixIsPromoted(t *testing.T) {
	u := newUsers(t, Options{})
	ann := put(t, u, Spec{Name: "ann"})
	promote(t, u, flow.Device{Name: "10.9.0.0/16"}, "ann")
	belongs(t, u, device("10.9.8.7", macA), ann)
	belongs(t, u, device("10.8.8.7", macA), 0)
}

func TestAPromotionOfAnAddressEndsWhenAnotherMACIsBehindIt(t *testing.T) {
	var ended []Promotion
	u := newUsers(t, Options{Demoted: func(p Promotion) { ended = append(ended, p) }})
	ann := put(t, u, Spec{Name: "ann"})
	promote(t, u, device("10.0.0.5", ""), "ann")
	u.DeviceChanged(device("10.0.0.5", macA)) // it becomes visible
	belongs(t, u, device("10.0.0.5", macA), ann)
	belongs(t, u, device("10.0.0.5", macB), 0) // somebody was faster than the news
	u.DeviceChanged(device("10.0.0.5", macB))
	belongs(t, u, device("10.0.0.5", ""), 0)
	if len(ended) != 1 || ended[0].MAC != macA {
		t.Errorf("told of %+v", ended)
	}
}

func TestPromotionsEndAfterTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var moved atomic.Uint64 // by 10.0.0.3
		var mu sync.Mutex
		var ended []string // guarded by mu
		u, stop := running(t, Options{
			Activity: func(device string) uint64 {
				if device == "10.0.0.3" {
					return moved.Load()
				}
				return 0
			},
			Events: func(e Event) {
				if e.Kind == "device.demoted" {
					mu.Lock()
					ended = append(ended, e.Device+" "+e.Why)
					mu.Unlock()
				}
			},
		})
		defer stop()
		put(t, u, Spec{Name: "ann"})
		start := time.Now()
		for _, c := range []struct {
			device        string
			idle, session time.Duration
		}{{"10.0.0.1", 10 * time.Minute, 0}, {"10.0.0.2", 0, time.Hour}, {"10.0.0.3", 10 * time.Minute, 2 * time.Hour}} {
			if _, err := u.Promote(device(c.device, ""), "ann", c.idle, c.session, nil); err != nil {
				t.Fatal(err)
			}
		}
		for range 40 { // 10.0.0.3 moves something every five minutes
			moved.Add(1)
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			mu.Lock()
			why := slices.Clone(ended)
			mu.Unlock()
			switch since := time.Since(start); {
			case since == 5*time.Minute && len(why) != 0,
				since == 15*time.Minute && fmt.Sprint(why) != "[10.0.0.1 idle]",
				since == 65*time.Minute && fmt.Sprint(why) != "[10.0.0.1 idle 10.0.0.2 session]",
				since == 115*time.Minute && len(why) != 2,
				since == 125*time.Minute && fmt.Sprint(why[2:]) != "[10.0.0.3 session]":
				t.Fatalf("after %v: %v", since, why)
			}
		}
	})
}

func TestARepeatedPromotionKeepsItsAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, stop := running(t, Options{})
		defer stop()
		ann := put(t, u, Spec{Name: "ann"})
		d := device("10.0.0.1", "")
		for _, session := range []time.Duration{time.Hour, time.Hour, 90 * time.Minute} {
			if _, err := u.Promote(d, "ann", 0, session, nil); err != nil {
				t.Fatal(err)
			}
			time.Sleep(29 * time.Minute)
		}
		belongs(t, u, d, ann)
		time.Sleep(4 * time.Minute)
		synctest.Wait()
		belongs(t, u, d, 0)
	})
}
