package track

import (
	"context"
	"fmt"
	"math"
	"math/big"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

func TestBeforeTheFirstTickTheSnapshotIsEmpty(t *testing.T) {
	tr := newTracker(t, Options{})
	tr.Open(over("lan", "direct", 1), nil)
	s := tr.Snapshot()
	if s.Tick != 0 || s.Interval != 0 || s.Total != (Stats{}) || len(s.Inbounds)+len(s.Outbounds)+len(s.Users) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestTicksComeOnceAnIntervalAndOnceAtTheStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- tr.Run(ctx) }()
		at := func(after time.Duration, tick uint64, interval time.Duration) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			if s := tr.Snapshot(); s.Tick != tick || s.Interval != interval {
				t.Errorf("tick %d over %v, want tick %d over %v", s.Tick, s.Interval, tick, interval)
			}
		}
		at(time.Second-1, 0, 0)
		at(1, 1, time.Second)
		at(time.Second, 2, time.Second)
		f := tr.Open(over("lan", "direct", 1), nil)
		time.Sleep(time.Second / 4)
		f.Moved(flow.Up, 100)
		f.Close(nil)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		at(time.Hour, 3, time.Second/4)
		if s := tr.Snapshot(); s.Total != (Stats{Up: 100, UpRate: 400}) {
			t.Errorf("the last tick: %+v, want 100 bytes at 400 bytes/s", s.Total)
		}
	})
}

func TestLateTicksAreNotMadeUp(t *testing.T) {
	const interval, late = 20 * time.Millisecond, 200 * time.Millisecond
	tr := newTracker(t, Options{Interval: interval})
	tr.sampler.mu.Lock() // stands for a machine too busy to tick
	ctx, cancel := context.WithCancel(soon(t))
	done := make(chan error)
	go func() { done <- tr.Run(ctx) }()
	<-time.After(late)
	tr.sampler.mu.Unlock()
	for tick := uint64(0); tick < 4; {
		s, err := tr.Watch(ctx, tick)
		if err != nil {
			t.Fatal(err)
		}
		atLeast := interval
		if tick = s.Tick; tick == 1 {
			atLeast = late
		}
		if s.Interval < atLeast {
			t.Errorf("tick %d is over %v, want %v at least", tick, s.Interval, atLeast)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestASnapshotSumsByTagAndUser(t *testing.T) {
	tr := newTracker(t, Options{})
	now := tr.began
	tick := func(d time.Duration) *Snapshot {
		now = now.Add(d)
		tr.sampler.mu.Lock()
		tr.sampleLocked(now)
		tr.sampler.mu.Unlock()
		return tr.Snapshot()
	}
	ann := over("lan", "direct", 2)
	ann.UserName = "ann"
	a := tr.Open(ann, nil)
	b := tr.Open(over("road", "direct", 1), nil)
	dns := tr.Open(over("lan", "", 0), nil)
	a.Moved(flow.Up, 50)
	b.Moved(flow.Down, 30)
	dns.Moved(flow.Up, 1)
	dns.Close(nil)
	s := tick(time.Second / 2)
	if s.Total != (Stats{51, 30, 102, 60, 2}) {
		t.Errorf("total %+v", s.Total)
	}
	if len(s.Inbounds) != 2 || s.Inbounds["lan"] != (Stats{51, 0, 102, 0, 1}) || s.Inbounds["road"] != (Stats{0, 30, 0, 60, 1}) {
		t.Errorf("inbounds %+v", s.Inbounds)
	}
	if len(s.Outbounds) != 2 || s.Outbounds["direct"] != (Stats{50, 30, 100, 60, 2}) || s.Outbounds[""] != (Stats{1, 0, 2, 0, 0}) {
		t.Errorf("outbounds %+v", s.Outbounds)
	}
	want := []UserStats{{1, "", Stats{0, 30, 0, 60, 1}}, {2, "ann", Stats{50, 0, 100, 0, 1}}}
	if !slices.Equal(s.Users, want) {
		t.Errorf("users %+v, want %+v", s.Users, want)
	}
	if r, _ := tr.Get(a.ID()); !r.Active.Equal(now) {
		t.Errorf("active at %v, want %v", r.Active, now)
	}

	a.Moved(flow.Up, 5)
	a.Close(nil)
	if s = tick(time.Second); len(s.Users) != 2 || s.Users[1].Stats != (Stats{55, 0, 5, 0, 0}) {
		t.Errorf("after a close, users %+v", s.Users)
	}
	if s = tick(time.Second); len(s.Users) != 1 || s.Users[0].User != 1 {
		t.Errorf("users %+v, want the one with a live flow", s.Users)
	}
	b.Close(nil)
	s = tick(time.Second)
	if len(s.Users) != 0 || len(s.Inbounds) != 2 || len(s.Outbounds) != 2 || s.Total != (Stats{Up: 56, Down: 30}) {
		t.Errorf("idle: %+v", s)
	}
	if s.Inbounds["lan"] != (Stats{Up: 56}) {
		t.Errorf("idle inbound %+v", s.Inbounds["lan"])
	}
	tr.Open(ann, nil)
	if s = tick(time.Second); len(s.Users) != 1 || s.Users[0].Stats != (Stats{Up: 55, Flows: 1}) {
		t.Errorf("a user who came back: %+v, want the total since the start", s.Users)
	}
	groups := 0
	for i := range tr.shards {
		groups += len(tr.shards[i].groupIndex)
	}
	if groups != 1 {
		t.Errorf("%d groups are kept for one flow", groups)
	}
}

func TestAWatcherSkipsToTheNewestSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := tr.Watch(ctx, 0); err != context.DeadlineExceeded {
			t.Errorf("before the first tick: %v", err)
		}
		go func() {
			time.Sleep(time.Second)
			tr.Final()
		}()
		if s, err := tr.Watch(t.Context(), 0); err != nil || s.Tick != 1 {
			t.Errorf("%+v, %v; want tick 1", s, err)
		}
		for range 5 {
			tr.Final()
		}
		if s, err := tr.Watch(t.Context(), 1); err != nil || s.Tick != 6 {
			t.Errorf("%+v, %v; want tick 6", s, err)
		}
	})
}

func TestARateIsBytesOverTimeAndSaturates(t *testing.T) {
	for _, c := range []struct {
		n    uint64
		over time.Duration
		want uint64
	}{
		{50, time.Second / 2, 100},
		{50, 0, 0},
		{50, -1, 0},
		{math.MaxUint64, time.Second, math.MaxUint64},
		{math.MaxUint64, time.Second - 1, math.MaxUint64},
		{math.MaxUint64, 1, math.MaxUint64},
		{1, 2 * time.Second, 0},
	} {
		if got := rate(c.n, c.over); got != c.want {
			t.Errorf("rate(%d, %v) = %d, want %d", c.n, c.over, got, c.want)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		n, over := rapid.Uint64().Draw(rt, "n"), rapid.Int64Min(1).Draw(rt, "over")
		want := new(big.Int).SetUint64(n)
		want.Div(want.Mul(want, big.NewInt(1e9)), big.NewInt(over))
		if !want.IsUint64() {
			want.SetUint64(math.MaxUint64)
		}
		if got := rate(n, time.Duration(over)); got != want.Uint64() {
			rt.Fatalf("rate(%d, %d) = %d, want %v", n, over, got, want)
		}
	})
}

// step is one thing that happens to a tracker: what says which, the rest says how.
type step struct {
	what string
	pick int // of the open flows
	n    int
	dir  flow.Dir
	in   string
	out  string
	user flow.UserKey
}

func drawSteps(rt *rapid.T) []step {
	one := rapid.Custom(func(rt *rapid.T) step {
		return step{
			what: rapid.SampledFrom([]string{"open", "open", "move", "move", "move", "close", "kill", "wait", "tick"}).Draw(rt, "what"),
			pick: rapid.IntRange(0, 99).Draw(rt, "pick"),
			n:    rapid.IntRange(0, 2_000_000_000).Draw(rt, "n"),
			dir:  rapid.SampledFrom([]flow.Dir{flow.Up, flow.Down}).Draw(rt, "dir"),
			in:   rapid.SampledFrom([]string{"lan", "road"}).Draw(rt, "in"),
			out:  rapid.SampledFrom([]string{"direct", "vpn", ""}).Draw(rt, "out"),
			user: flow.UserKey(rapid.IntRange(0, 3).Draw(rt, "user")),
		}
	})
	return rapid.SliceOfN(one, 1, 80).Draw(rt, "steps")
}

// moved is the slow, obvious model: bytes up and down by everything they are filed under.
type moved map[string][2]uint64

func (m moved) add(meta Meta, dir flow.Dir, n int) {
	keys := []string{"total", "in " + meta.Inbound, "out " + meta.Outbound}
	if meta.User != 0 {
		keys = append(keys, fmt.Sprint("user ", meta.User))
	}
	for _, k := range keys {
		v := m[k]
		v[dir] += uint64(n)
		m[k] = v
	}
}

// lines are the snapshot's, by the model's keys.
func lines(s *Snapshot) map[string]Stats {
	all := map[string]Stats{"total": s.Total}
	for tag, st := range s.Inbounds {
		all["in "+tag] = st
	}
	for tag, st := range s.Outbounds {
		all["out "+tag] = st
	}
	for _, u := range s.Users {
		all[fmt.Sprint("user ", u.User)] = u.Stats
	}
	return all
}

// game plays steps on a tracker and compares every tick with the model.
type game struct {
	tr      *Tracker
	open    []*player
	truth   moved // by now
	sampled moved // by the last tick that was checked
	tick    uint64
}

type player struct {
	*Flow
	meta  Meta
	bytes [2]uint64
}

func (g *game) play(steps []step) error {
	for _, st := range steps {
		if err := g.step(st); err != nil {
			return err
		}
	}
	for len(g.open) > 0 {
		if err := g.close(g.open[0]); err != nil {
			return err
		}
	}
	g.tr.Final()
	return g.check()
}

func (g *game) step(st step) error {
	var p *player
	if len(g.open) > 0 {
		p = g.open[st.pick%len(g.open)]
	}
	switch {
	case st.what == "open":
		m := over(st.in, st.out, st.user)
		g.open = append(g.open, &player{Flow: g.tr.Open(m, nil), meta: m})
	case st.what == "tick":
		g.tr.Final()
		return g.check()
	case st.what == "wait":
		for range 1 + st.pick%6 { // half an interval holds one tick at most, so that none is missed
			time.Sleep(time.Second / 2)
			synctest.Wait()
			if err := g.check(); err != nil {
				return err
			}
		}
	case p == nil:
	case st.what == "move":
		return g.move(p, st)
	case st.what == "kill":
		g.tr.Kill(p.ID())
	case st.what == "close":
		return g.close(p)
	}
	return nil
}

func (g *game) move(p *player, st step) error {
	p.Moved(st.dir, st.n)
	p.bytes[st.dir] += uint64(st.n)
	g.truth.add(p.meta, st.dir, st.n)
	if r, ok := g.tr.Get(p.ID()); !ok || r.Up != p.bytes[0] || r.Down != p.bytes[1] {
		return fmt.Errorf("%v shows %d up, %d down (%v); moved %v", p.ID(), r.Up, r.Down, ok, p.bytes)
	}
	return nil
}

func (g *game) close(p *player) error {
	p.Close(nil)
	g.open = slices.DeleteFunc(g.open, func(o *player) bool { return o == p })
	closed := g.tr.Closed()
	if r := closed[len(closed)-1]; r.ID != p.ID() || r.Up != p.bytes[0] || r.Down != p.bytes[1] {
		return fmt.Errorf("%v closed as %+v; moved %v", p.ID(), r, p.bytes)
	}
	return nil
}

// check compares a tick that was not seen before: its counters with what had moved,
// its rates with what moved since the tick before.
func (g *game) check() error {
	s := g.tr.Snapshot()
	switch s.Tick {
	case g.tick:
		return nil
	case g.tick + 1:
		g.tick = s.Tick
	default:
		return fmt.Errorf("tick %d follows %d", s.Tick, g.tick)
	}
	for key, st := range lines(s) {
		was := g.sampled[key]
		if st.UpRate != rate(st.Up-was[0], s.Interval) || st.DownRate != rate(st.Down-was[1], s.Interval) {
			return fmt.Errorf("tick %d: %s is %+v after %v in %v", s.Tick, key, st, was, s.Interval)
		}
		g.sampled[key] = [2]uint64{st.Up, st.Down}
	}
	for key, want := range g.truth {
		if g.sampled[key] != want {
			return fmt.Errorf("tick %d: %s sampled %v, moved %v", s.Tick, key, g.sampled[key], want)
		}
	}
	if s.Total.Flows != len(g.open) {
		return fmt.Errorf("tick %d: %d flows, want %d", s.Tick, s.Total.Flows, len(g.open))
	}
	return nil
}

func TestEveryByteIsInExactlyOneTick(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		steps := drawSteps(rt)
		var err error
		synctest.Test(t, func(t *testing.T) {
			tr := newTracker(t, Options{})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- tr.Run(ctx) }()
			g := game{tr: tr, truth: moved{}, sampled: moved{}}
			err = g.play(steps)
			cancel()
			<-done
		})
		if err != nil {
			rt.Fatal(err)
		}
	})
}
