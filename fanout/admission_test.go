package fanout

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
)

func TestUnprovedSourcesBeginAssociationsAtALimitedRate(t *testing.T) {
	trusted := netip.MustParseAddr("10.9.9.9")
	bubble(t, func(c *Config) {
		c.Opens = admit.Rates{Network: admit.Rate{PerSecond: 10, Burst: 10}, All: admit.Rate{PerSecond: 15, Burst: 15}}
		c.Trusted = func(a netip.Addr) bool { return a == trusted }
	}, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.link(0).answer("192.0.1.1:7", "b")
		w.say(alice, "192.0.1.1:7", "goes on, so alice is real")
		w.drops[flow.DropOpenRate].Store(0)
		for i := range 40 {
			w.say(fmt.Sprintf("10.7.0.%d:1", i), "192.0.1.1:7", "forged")
		}
		if n := w.drops[flow.DropOpenRate].Load(); n != 30 || w.Associations() != 11 {
			t.Errorf("%d of 40 forged sources of a network are dropped, %d associations", n, w.Associations())
		}
		for i := range 20 {
			w.say(fmt.Sprintf("10.8.%d.1:1", i), "192.0.1.1:7", "forged")
		}
		if n := w.drops[flow.DropOpenRate].Load(); n != 45 {
			t.Errorf("%d of 60 forged sources are dropped, want 45", n)
		}
		opened := w.opened()
		w.say("10.0.0.2:999", "192.0.1.1:7", "alice again")
		w.say("10.9.9.9:1", "192.0.1.1:7", "known otherwise")
		if w.opened() != opened+2 {
			t.Error("real clients are dropped beside forged ones")
		}
		wait(time.Second)
		w.say("10.7.0.200:1", "192.0.1.1:7", "later")
		if w.opened() != opened+3 {
			t.Error("the rate does not recover")
		}
	})
}

func TestAssociationsThatWereNotProvedGoFirst(t *testing.T) {
	bubble(t, func(c *Config) { c.Associations = 30 }, func(t *testing.T, w *world) {
		for i := range 10 {
			client := fmt.Sprintf("10.0.0.2:%d", 1+i)
			w.say(client, "192.0.1.1:7", "x")
			w.link(i).answer("192.0.1.1:7", "y")
			w.say(client, "192.0.1.1:7", "z")
		}
		wait(10 * time.Second) // the idlest ones are real
		for i := range 300 {
			w.say(fmt.Sprintf("10.0.0.2:%d", 1000+i), "192.0.1.1:7", "new")
		}
		for i := range 10 {
			if w.link(i).isClosed() {
				t.Errorf("association %d made room for one that proved nothing", i)
			}
		}
	})
}
