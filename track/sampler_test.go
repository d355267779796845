package track

import (
	"context"
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

func TestATickOverNoTimeCountsBytesAndHasNoRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		f := tr.Open(over("lan", "direct", 1), nil)
		tr.Final()
		f.Moved(flow.Up, 100)
		tr.Final()
		if s := tr.Snapshot(); s.Tick != 2 || s.Interval != 0 || s.Total != (Stats{Up: 100, Flows: 1}) || s.Users[0].Stats != s.Total {
			t.Errorf("%+v", s)
		}
	})
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
