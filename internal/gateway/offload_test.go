package gateway

import (
	"testing"

	"gatewayd/netstack"
)

func TestSuperPacketsAreGivenUpWhenNearlyAllGetLost(t *testing.T) {
	const mib = 1 << 20
	// What one look finds more than the look before.
	type step struct{ sent, lost, losses uint64 }
	repeat := func(n int, s ...step) (all []step) {
		for range n {
			all = append(all, s...)
		}
		return all
	}
	for _, c := range []struct {
		name  string
		steps []step
		after int // looks; 0: never
	}{
		{"nothing", repeat(1000, step{}), 0},
		{"a fast link that loses nothing", repeat(1000, step{500 * mib, 0, 0}), 0},
		{"a bad link", repeat(1000, step{mib, mib / 10, 80}), 0},
		{"a terrible link", repeat(1000, step{mib, mib / 3, 200}), 0},
		{"a driver that loses all, one flow", repeat(20, step{15 << 10, 15 << 10, 4}), 4},
		{"a driver that loses all, sent again a look later", append([]step{{15 << 10, 0, 0}}, repeat(20, step{15 << 10, 15 << 10, 4})...), 5},
		{"a driver that loses all, many flows", repeat(20, step{mib, mib, 500}), 4},
		{"a driver that loses most", repeat(20, step{mib, mib * 3 / 4, 500}), 4},
		{"a driver that begins to lose all in the middle", append(repeat(100, step{mib, 0, 0}), repeat(100, step{mib, mib, 300})...), 116},
		{"clients that vanish in the middle of downloads", repeat(1000, step{2 * mib, 1460, 1}), 0},
		{"a client that vanishes after little", append([]step{{60 << 10, 0, 0}}, repeat(10, step{0, 1460, 1}, step{})...), 0},
		{"a client that is away for a while and gets all again", append([]step{{mib, 0, 0}, {}, {}}, repeat(2, step{0, mib / 2, 40})...), 0},
		{"plain packets that get lost", repeat(100, step{0, 0, 0}), 0},
	} {
		var w superWatch
		var now netstack.SuperPackets
		after := 0
		for i, s := range c.steps {
			now.Sent += s.sent
			now.Lost += s.lost
			now.Losses += s.losses
			if w.look(now) {
				after = i + 1
				break
			}
		}
		if after != c.after {
			t.Errorf("%s: given up after %d looks, want %d", c.name, after, c.after)
		}
	}
}
