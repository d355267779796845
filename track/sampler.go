package track

import (
	"cmp"
	"context"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// Stats are the counters of one tag, one user, or everything.
type Stats struct {
	Up, Down         uint64 // payload bytes since the start, closed flows included
	UpRate, DownRate uint64 // bytes/s over the tick
	Flows            int    // live at the tick
}

// UserStats are the counters of one user.
type UserStats struct {
	User flow.UserKey
	Name string
	Stats
}

// Snapshot is what one tick found. It is shared: read it only.
type Snapshot struct {
	Tick      uint64        // ticks since the start; 0: none yet
	Interval  time.Duration // that the rates are over, as measured
	Took      time.Duration // that the tick itself took
	Total     Stats
	Inbounds  map[string]Stats // every one that ever had a flow
	Outbounds map[string]Stats // by tag over all versions, likewise; the DNS service is ""
	Users     []UserStats      // those with a live flow or bytes in the tick, by key
}

// tally sums one line of the snapshot over the life of the tracker. What belongs to
// a tick is void in the next, so that lines which nothing touches need no visit.
type tally struct {
	up, down         uint64
	tick             uint64 // that the rest is of
	tickUp, tickDown uint64
	flows            int
}

type userTally struct {
	tally
	key  flow.UserKey
	name string
}

// sampler turns the groups of all shards into snapshots. Each tick first moves every
// slot's bytes into its group, then takes the groups.
type sampler struct {
	mu sync.Mutex // held for a whole tick
	// guarded by mu
	tick      uint64
	last      time.Time
	total     tally
	inbounds  map[string]*tally
	outbounds map[string]*tally
	users     map[flow.UserKey]*userTally // everyone seen: their totals go on when they return
	present   []*userTally                // users of this tick

	newest atomic.Pointer[Snapshot]
	ticked bell
}

func (s *sampler) init(now time.Time) {
	s.last = now
	s.inbounds = make(map[string]*tally)
	s.outbounds = make(map[string]*tally)
	s.users = make(map[flow.UserKey]*userTally)
	s.newest.Store(&Snapshot{Inbounds: map[string]Stats{}, Outbounds: map[string]Stats{}, Users: []UserStats{}})
}

// Run samples every interval until ctx ends, and once more then; it returns nil. The
// first tick is one interval after the start, each other one interval after the one
// before: late ticks are not made up. End ctx after the last flow closed, so that the
// last snapshot holds every byte.
func (t *Tracker) Run(ctx context.Context) error {
	timer := time.NewTimer(t.interval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			t.Final()
			return nil
		case <-timer.C:
			t.Final()
			timer.Reset(t.interval)
		}
	}
}

// Final samples now: one more tick, for flows that closed after Run had returned.
func (t *Tracker) Final() {
	t.sampler.mu.Lock()
	defer t.sampler.mu.Unlock()
	t.sampleLocked(time.Now())
}

// sampleLocked is one tick.
func (t *Tracker) sampleLocked(now time.Time) {
	s := &t.sampler
	s.tick++
	s.present = s.present[:0]
	since := int64(now.Sub(t.began))
	t.chunks(scanChunk, func(sh *shard, from int) bool { return sh.sample(from, since) })
	t.chunks(groupChunk, func(sh *shard, from int) bool { return sh.drain(from, s.countLocked) })
	interval := now.Sub(s.last)
	s.last = now
	snap := s.snapshotLocked(interval)
	snap.Took = time.Since(now)
	s.newest.Store(snap)
	s.ticked.strike()
}

// countLocked adds what one group took in this tick to every line that it belongs to.
func (s *sampler) countLocked(g *group) {
	if g.inbound == nil {
		s.findLocked(g)
	}
	s.total.add(s.tick, g)
	g.inbound.add(s.tick, g)
	g.outbound.add(s.tick, g)
	if g.person == nil || g.flows == 0 && g.up|g.down == 0 {
		return
	}
	if g.person.tick != s.tick {
		s.present = append(s.present, g.person)
	}
	g.person.name = g.name
	g.person.add(s.tick, g)
}

// findLocked finds or makes the lines that a group belongs to.
func (s *sampler) findLocked(g *group) {
	g.inbound = line(s.inbounds, g.key.inbound)
	g.outbound = line(s.outbounds, g.key.outbound)
	if g.key.user == 0 {
		return
	}
	if g.person = s.users[g.key.user]; g.person == nil {
		g.person = &userTally{key: g.key.user}
		s.users[g.key.user] = g.person
	}
}

func line(m map[string]*tally, tag string) *tally {
	a := m[tag]
	if a == nil {
		a = new(tally)
		m[tag] = a
	}
	return a
}

func (a *tally) add(tick uint64, g *group) {
	if a.tick != tick {
		a.tick, a.tickUp, a.tickDown, a.flows = tick, 0, 0, 0
	}
	a.up += g.up
	a.down += g.down
	a.tickUp += g.up
	a.tickDown += g.down
	a.flows += g.flows
}

func (a *tally) stats(tick uint64, interval time.Duration) Stats {
	st := Stats{Up: a.up, Down: a.down}
	if a.tick == tick {
		st.UpRate = rate(a.tickUp, interval)
		st.DownRate = rate(a.tickDown, interval)
		st.Flows = a.flows
	}
	return st
}

// rate is bytes per second, 0 over no time, and the largest number where it would be larger.
func rate(n uint64, over time.Duration) uint64 {
	if over <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(n, uint64(time.Second))
	if hi >= uint64(over) {
		return math.MaxUint64
	}
	perSecond, _ := bits.Div64(hi, lo, uint64(over))
	return perSecond
}

func (s *sampler) snapshotLocked(interval time.Duration) *Snapshot {
	snap := &Snapshot{
		Tick:      s.tick,
		Interval:  interval,
		Total:     s.total.stats(s.tick, interval),
		Inbounds:  make(map[string]Stats, len(s.inbounds)),
		Outbounds: make(map[string]Stats, len(s.outbounds)),
		Users:     make([]UserStats, 0, len(s.present)),
	}
	for tag, a := range s.inbounds {
		snap.Inbounds[tag] = a.stats(s.tick, interval)
	}
	for tag, a := range s.outbounds {
		snap.Outbounds[tag] = a.stats(s.tick, interval)
	}
	for _, u := range s.present {
		snap.Users = append(snap.Users, UserStats{u.key, u.name, u.stats(s.tick, interval)})
	}
	slices.SortFunc(snap.Users, func(a, b UserStats) int { return cmp.Compare(a.User, b.User) })
	return snap
}

// Snapshot is the newest snapshot: of the last tick, or an empty one of tick 0 before
// the first.
func (t *Tracker) Snapshot() *Snapshot { return t.sampler.newest.Load() }

// Watch blocks until there is a snapshot of a tick later than after, or ctx ends (its
// error). Who comes late gets the newest and misses those between.
func (t *Tracker) Watch(ctx context.Context, after uint64) (*Snapshot, error) {
	for {
		if snap := t.Snapshot(); snap.Tick > after {
			return snap, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		t.sampler.ticked.wait(ctx.Done(), nil, func() bool { return t.Snapshot().Tick > after })
	}
}
