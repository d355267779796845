package track

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// preload counts n bytes each way for f, over as many ticks as that takes.
func preload(f *Flow, n uint64) {
	for n > 0 {
		k := min(n, byteMask)
		f.slot.up.add(f.generation, k)
		f.slot.down.add(f.generation, k)
		f.tracker.Final()
		n -= k
	}
}

func TestB76_CountersAreExactBeyond31And32And53Bits(t *testing.T) {
	const pushed, piece = 10 << 20, 16 << 10
	for _, start := range []uint64{1<<31 - 1, 1<<32 - 1, 1 << 53} {
		tr := newTracker(t, Options{})
		sub := tr.Subscribe()
		defer sub.Close()
		f := tr.Open(over("lan", "direct", 9), nil)
		preload(f, start)
		for range pushed / piece {
			f.Moved(flow.Up, piece)
			f.Moved(flow.Down, piece)
		}
		f.Moved(flow.Down, 1)
		up, down := start+pushed, start+pushed+1
		exact := func(where string, gotUp, gotDown uint64) {
			if gotUp != up || gotDown != down {
				t.Errorf("from %d: %s: %d up, %d down; want %d, %d", start, where, gotUp, gotDown, up, down)
			}
		}
		live, _ := tr.Get(f.ID())
		exact("live", live.Up, live.Down)
		tr.Final()
		sampled, _ := tr.Get(f.ID())
		exact("sampled", sampled.Up, sampled.Down)
		f.Close(nil)
		exact("closed", tr.Closed()[0].Up, tr.Closed()[0].Down)
		for range 2 {
			if ev, _, _ := sub.Next(soon(t)); ev.Kind == Closed {
				exact("event", ev.Record.Up, ev.Record.Down)
			}
		}
		tr.Final()
		s := tr.Snapshot()
		exact("total", s.Total.Up, s.Total.Down)
		exact("inbound", s.Inbounds["lan"].Up, s.Inbounds["lan"].Down)
		exact("outbound", s.Outbounds["direct"].Up, s.Outbounds["direct"].Down)
		again := tr.Open(over("lan", "direct", 9), nil) // so that the user is shown
		tr.Final()
		exact("user", tr.Snapshot().Users[0].Up, tr.Snapshot().Users[0].Down)
		again.Close(nil)
	}
}

func TestFiveThousandFlowsThatCloseInsideOneTickAreExact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const flows, relays = 5000, 50
		tr := newTracker(t, Options{})
		sub := tr.Subscribe()
		defer sub.Close()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- tr.Run(ctx) }()
		open := make([]*Flow, flows)
		for i := range open {
			open[i] = tr.Open(over(fmt.Sprint("in", i%2), fmt.Sprint("out", i%5), flow.UserKey(i%10)), nil)
			open[i].Moved(flow.Up, i)
		}
		time.Sleep(3 * time.Second / 2)
		first := tr.Snapshot()
		var closing sync.WaitGroup
		for relay := range relays {
			closing.Go(func() {
				for i := relay; i < flows; i += relays {
					open[i].Moved(flow.Up, 1)
					open[i].Moved(flow.Down, i)
					open[i].Close(nil)
					open[i].Close(nil)
				}
			})
		}
		closing.Wait()
		time.Sleep(time.Second)
		const sum = flows * (flows - 1) / 2
		if want := (Stats{Up: sum, UpRate: sum, Flows: flows}); first.Tick != 1 || first.Total != want {
			t.Errorf("tick %d: %+v, want %+v", first.Tick, first.Total, want)
		}
		second := tr.Snapshot()
		if want := (Stats{Up: sum + flows, Down: sum, UpRate: flows, DownRate: sum}); second.Tick != 2 || second.Total != want {
			t.Errorf("tick %d: %+v, want %+v", second.Tick, second.Total, want)
		}
		parts := map[string]Stats{}
		for key, st := range lines(second) {
			kind, _, _ := strings.Cut(key, " ")
			p := parts[kind]
			parts[kind] = Stats{p.Up + st.Up, p.Down + st.Down, p.UpRate + st.UpRate, p.DownRate + st.DownRate, p.Flows + st.Flows}
		}
		if parts["in"] != second.Total || parts["out"] != second.Total || len(second.Users) != 9 {
			t.Errorf("the parts are %+v, with %d users", parts, len(second.Users))
		}
		for i, u := range second.Users { // user k moved k, k+10, k+20, …
			k, n := uint64(u.User), uint64(flows/10)
			if want := n*k + 10*n*(n-1)/2; int(k) != i+1 || u.Down != want || u.DownRate != want || u.UpRate != n || u.Flows != 0 {
				t.Errorf("user %d: %+v, want %d down", k, u, want)
			}
		}
		for i := range DefaultEvents {
			want := uint64(0)
			if i == 0 {
				want = 2*flows - DefaultEvents
			}
			if ev, missed, err := sub.Next(ctx); err != nil || missed != want || ev.Kind != Closed {
				t.Errorf("event %d: %v, %d missed, %v; want closed, %d missed", i, ev.Kind, missed, err, want)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		last := tr.Snapshot()
		if want := (Stats{Up: sum + flows, Down: sum}); last.Tick != 3 || last.Total != want || len(last.Users) != 0 || tr.Live() != 0 {
			t.Errorf("the last tick, %d: %+v with %d users; want %+v", last.Tick, last.Total, len(last.Users), want)
		}
	})
}

func TestAChangedPrincipalGetsWhatMovesFromThenOn(t *testing.T) {
	tr := newTracker(t, Options{})
	sub := tr.Subscribe()
	defer sub.Close()
	m := over("lan", "direct", 1)
	m.Session, m.UserName = 3, "ann"
	f := tr.Open(m, nil)
	f.Moved(flow.Up, 10)
	bob := Principal{Session: 4, User: 2, UserName: "bob"}
	if !f.Change(bob) {
		t.Fatal("a live flow is not registered")
	}
	f.Moved(flow.Up, 5)
	tr.Final()
	want := []UserStats{{1, "ann", Stats{Up: 10}}, {2, "bob", Stats{Up: 5, Flows: 1}}}
	for i, u := range tr.Snapshot().Users {
		u.UpRate = 0
		if len(tr.Snapshot().Users) != 2 || u != want[i] {
			t.Errorf("user %+v, want %+v", u, want[i])
		}
	}
	n := tr.KillWhere(func(r *Record) bool { return r.UserName == "ann" })
	if r, _ := tr.Get(f.ID()); n != 0 || r.UserName != "bob" || r.User != 2 || r.Session != 4 || r.Up != 15 {
		t.Errorf("record %+v, %d killed as ann's; want bob's with 15 bytes", r, n)
	}
	f.Change(Principal{})
	f.Moved(flow.Down, 7)
	f.Close(nil)
	if f.Change(bob) {
		t.Error("a closed flow was changed")
	}
	if r := tr.Closed()[0]; r.User != 0 || r.UserName != "" || r.Session != 0 || r.Up != 15 || r.Down != 7 {
		t.Errorf("closed as %+v, want nobody's", r)
	}
	tr.Final()
	if s := tr.Snapshot(); s.Total.Up != 15 || s.Total.Down != 7 || len(s.Users) != 0 {
		t.Errorf("%+v: want all in the total, and no user", s)
	}
	var next *Flow
	for next == nil || next.slot != f.slot {
		next = tr.Open(m, nil)
	}
	if r, _ := tr.Get(next.ID()); r.Meta != m {
		t.Errorf("the next flow of the slot is %+v, want %+v", r.Meta, m)
	}
}

func TestMemoryOfARushIsGivenBack(t *testing.T) {
	tr := newTracker(t, Options{})
	var open []*Flow
	for range 100 * shardCount * blockSize / 10 {
		open = append(open, tr.Open(over("lan", "direct", 0), nil))
	}
	for _, f := range open[shardCount:] {
		f.Close(nil)
	}
	blocks := 0
	for i := range tr.shards {
		blocks += len(tr.shards[i].blocks)
	}
	if blocks > 2*shardCount {
		t.Errorf("%d blocks for %d flows", blocks, tr.Live())
	}
	if n := len(tr.Flows()); n != shardCount {
		t.Errorf("%d flows, want %d", n, shardCount)
	}
}
