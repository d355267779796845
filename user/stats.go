package user

import (
	"sync/atomic"
	"time"
)

// Counts are sums over all users.
type Counts struct {
	States   map[string]int    // users by state
	Refusals map[string]uint64 // flows that were refused, by cause

	// Enforced is how often a user's flows were ended because of its state. Latency is
	// the time from the moment at which that was due until the last flow was told, in
	// all, and Slowest the longest.
	Enforced         uint64
	Latency, Slowest time.Duration
}

// refusals in the order of admission.
var refusals = [...]Refusal{RefusedUnknown, RefusedDisabled, RefusedExpired, RefusedTraffic, RefusedConnections, RefusedIPs}

type stats struct {
	refusals         [len(refusals)]atomic.Uint64
	enforcements     atomic.Uint64
	latency, slowest atomic.Int64 // ns
}

// Refused counts a flow that was refused without being asked for, as one of datagrams
// whose user's state is known to refuse it.
func (u *Users) Refused(r Refusal) { u.stats.refused(r) }

func (s *stats) refused(err error) {
	for i := range refusals {
		if err == refusals[i] {
			s.refusals[i].Add(1)
		}
	}
}

func (s *stats) enforced(late time.Duration) {
	s.enforcements.Add(1)
	s.latency.Add(int64(late))
	for {
		old := s.slowest.Load()
		if int64(late) <= old || s.slowest.CompareAndSwap(old, int64(late)) {
			return
		}
	}
}

// Counts are what the metrics show.
func (u *Users) Counts() Counts {
	c := Counts{
		States: make(map[string]int), Refusals: make(map[string]uint64), Enforced: u.stats.enforcements.Load(),
		Latency: time.Duration(u.stats.latency.Load()), Slowest: time.Duration(u.stats.slowest.Load()),
	}
	for i := range stateNames {
		c.States[stateNames[i]] = 0
	}
	for i, r := range refusals {
		c.Refusals[string(r)] = u.stats.refusals[i].Load()
	}
	for _, e := range u.byKey.all() {
		c.States[e.state().String()]++
	}
	return c
}
