package track

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

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
			what: rapid.SampledFrom([]string{"open", "open", "move", "move", "move", "close", "kill", "change", "wait", "tick"}).Draw(rt, "what"),
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
	for _, k := range keys(meta) {
		v := m[k]
		v[dir] += uint64(n)
		m[k] = v
	}
}

// keys are what a flow is filed under.
func keys(m Meta) []string {
	all := []string{"total", "in " + m.Inbound, "out " + m.Outbound}
	if m.User != 0 {
		all = append(all, fmt.Sprint("user ", m.User))
	}
	return all
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
		g.truth.add(m, flow.Up, 0) // listed once seen
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
	case st.what == "change":
		return g.change(p, st)
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

func (g *game) change(p *player, st step) error {
	to := Principal{uint64(st.n), st.user, fmt.Sprint("user ", st.user)}
	if !p.Change(to) {
		return fmt.Errorf("%v is not registered", p.ID())
	}
	p.meta.Session, p.meta.User, p.meta.UserName = to.Session, to.User, to.UserName
	if r, ok := g.tr.Get(p.ID()); !ok || r.Meta != p.meta {
		return fmt.Errorf("%v shows %+v (%v), want %+v", p.ID(), r.Meta, ok, p.meta)
	}
	return nil
}

func (g *game) close(p *player) error {
	p.Close(nil)
	if p.Change(Principal{}) {
		return fmt.Errorf("%v changed after its close", p.ID())
	}
	g.open = slices.DeleteFunc(g.open, func(o *player) bool { return o == p })
	closed := g.tr.Closed()
	if r := closed[len(closed)-1]; r.ID != p.ID() || r.Up != p.bytes[0] || r.Down != p.bytes[1] || r.Meta != p.meta {
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
	live := map[string]int{"total": 0}
	for _, p := range g.open {
		for _, key := range keys(p.meta) {
			live[key]++
		}
	}
	shown := lines(s)
	for key, st := range shown {
		was := g.sampled[key]
		if st.UpRate != rate(st.Up-was[0], s.Interval) || st.DownRate != rate(st.Down-was[1], s.Interval) || st.Flows != live[key] {
			return fmt.Errorf("tick %d: %s is %+v after %v in %v with %d flows", s.Tick, key, st, was, s.Interval, live[key])
		}
	}
	for key, want := range g.truth {
		_, isShown := shown[key]
		if active := live[key] > 0 || want != g.sampled[key]; isShown != (active || !strings.HasPrefix(key, "user ")) {
			return fmt.Errorf("tick %d: %s is shown: %v; active: %v", s.Tick, key, isShown, active)
		}
		if st := shown[key]; isShown && [2]uint64{st.Up, st.Down} != want {
			return fmt.Errorf("tick %d: %s sampled %+v, moved %v", s.Tick, key, st, want)
		}
		g.sampled[key] = want
	}
	if !slices.IsSortedFunc(s.Users, func(a, b UserStats) int { return cmp.Compare(a.User, b.User) }) {
		return fmt.Errorf("tick %d: users are not in the order of their keys: %+v", s.Tick, s.Users)
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
