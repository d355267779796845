package track

import (
	"errors"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"gatewayd/flow"
)

func TestOptionsThatCanNotWorkAreRefused(t *testing.T) {
	for _, o := range []Options{{}, {Interval: -1}, {Interval: 1, Closed: -1}, {Interval: 1, Events: -1}} {
		if tr, err := New(o); err == nil || tr != nil {
			t.Errorf("New(%+v) = %v, %v; want an error", o, tr, err)
		}
	}
}

func TestAFlowIsRegisteredFromOpenToClose(t *testing.T) {
	tr := newTracker(t, Options{})
	m := over("lan", "direct", 7)
	m.UserName, m.RuleName, m.Rule, m.Epoch = "ann", "web", 3, 9
	before := time.Now()
	f := tr.Open(m, nil)
	f.Moved(flow.Up, 5)
	f.Moved(flow.Down, 11)
	r, ok := tr.Get(f.ID())
	if !ok || r.ID != 1 || r.Meta != m || r.Up != 5 || r.Down != 11 || r.Killed || !r.Ended.IsZero() {
		t.Fatalf("Get = %+v, %v", r, ok)
	}
	if r.Started.Before(before) || r.Started.After(time.Now()) {
		t.Errorf("started %v", r.Started)
	}
	if tr.Live() != 1 || len(tr.Flows()) != 1 || len(tr.Closed()) != 0 {
		t.Errorf("live %d, flows %d, closed %d; want 1, 1, 0", tr.Live(), len(tr.Flows()), len(tr.Closed()))
	}
	f.Close(nil)
	if _, ok := tr.Get(f.ID()); ok || tr.Live() != 0 || len(tr.Flows()) != 0 {
		t.Errorf("a closed flow is still registered")
	}
	f.Close(syscall.ECONNRESET)
	closed := tr.Closed()
	if len(closed) != 1 || closed[0].Up != 5 || closed[0].Down != 11 || closed[0].Reason != flow.EOF || closed[0].Ended.IsZero() {
		t.Errorf("closed records %+v; want one, with the first reason and the final counters", closed)
	}
}

func TestFlowsAreListedOldestFirst(t *testing.T) {
	tr := newTracker(t, Options{})
	var open []*Flow
	for range 3000 { // more than a chunk, in every shard more than a block
		open = append(open, tr.Open(over("lan", "direct", 0), nil))
	}
	for _, f := range open[:1500] {
		f.Close(nil)
	}
	for range 10 { // these reuse slots
		tr.Open(over("lan", "direct", 0), nil)
	}
	all := tr.Flows()
	if len(all) != 1510 {
		t.Fatalf("%d flows, want 1510", len(all))
	}
	for i, r := range all {
		if r.ID != flow.ID(1501+i) {
			t.Fatalf("flow %d is %v, want %v", i, r.ID, flow.ID(1501+i))
		}
	}
	n := 0
	tr.Each(func(*Record) bool { n++; return n < 4 })
	if n != 4 {
		t.Errorf("Each visited %d flows after it was told to stop at 4", n)
	}
}

func TestALongScanVisitsEachFlowOnce(t *testing.T) {
	tr := newTracker(t, Options{})
	const flows = shardCount * (2*scanChunk + 5)
	for range flows {
		tr.Open(over("lan", "direct", 0), nil).Moved(flow.Up, 1)
	}
	seen := make(map[flow.ID]int)
	tr.Each(func(r *Record) bool { seen[r.ID]++; return true })
	if len(seen) != flows {
		t.Errorf("visited %d flows, want %d", len(seen), flows)
	}
	tr.Final()
	if s := tr.Snapshot().Total; s.Up != flows || s.Flows != flows {
		t.Errorf("total %+v, want %d bytes and flows", s, flows)
	}
}

func TestAKillTellsWhetherTheFlowIsRegistered(t *testing.T) {
	tr := newTracker(t, Options{})
	var ends []error
	f := tr.Open(over("lan", "direct", 0), func(cause error) { ends = append(ends, cause) })
	first, second := tr.Kill(f.ID()), tr.Kill(f.ID())
	if !first || !second {
		t.Error("a registered flow was not found, or not the second time")
	}
	if len(ends) != 1 || ends[0] != ErrKilled {
		t.Errorf("ended with %v, want once with %v", ends, ErrKilled)
	}
	if _, err := f.Ready(flow.Up, nil); !errors.Is(err, ErrKilled) || !errors.Is(err, syscall.ECONNABORTED) {
		t.Errorf("Ready after the kill: %v", err)
	}
	if r, ok := tr.Get(f.ID()); !ok || !r.Killed {
		t.Errorf("record %+v, %v; want it registered and killed", r, ok)
	}
	f.Close(io.EOF)
	if tr.Kill(f.ID()) || tr.Kill(99) || tr.Kill(0) {
		t.Error("a flow that is not registered was found")
	}
	if c := tr.Closed(); len(c) != 1 || c[0].Reason != flow.Killed || !c[0].Killed {
		t.Errorf("closed records %+v, want one that was killed", c)
	}
}

func TestKillWhereKillsWhatIsPickedAndOnlyOnce(t *testing.T) {
	tr := newTracker(t, Options{})
	a := tr.Open(over("lan", "direct", 0), nil)
	b := tr.Open(over("lan", "direct", 0), nil)
	other := tr.Open(over("lan", "vpn", 0), nil)
	direct := func(r *Record) bool {
		tr.Get(r.ID) // a predicate may use the tracker
		return r.Outbound == "direct"
	}
	if n := tr.KillWhere(direct); n != 2 {
		t.Errorf("killed %d, want 2", n)
	}
	if n := tr.KillWhere(direct); n != 0 {
		t.Errorf("killed %d the second time, want 0", n)
	}
	if a.Cause() != ErrKilled || b.Cause() != ErrKilled || other.Cause() != nil {
		t.Errorf("causes %v, %v, %v", a.Cause(), b.Cause(), other.Cause())
	}
	if n, err := other.Ready(flow.Down, nil); n != maxTransfer || err != nil {
		t.Errorf("the flow that was not picked: %d, %v", n, err)
	}
}

func TestTheFirstCauseWins(t *testing.T) {
	tr := newTracker(t, Options{})
	calls := 0
	f := tr.Open(over("lan", "direct", 0), func(error) { calls++ })
	if n := tr.EndWhere(flow.ErrShutdown, func(*Record) bool { return true }); n != 1 {
		t.Errorf("ended %d, want 1", n)
	}
	f.End(flow.ErrIdle)
	if !tr.Kill(f.ID()) {
		t.Error("a flow that ended but is registered was not found")
	}
	if r, _ := tr.Get(f.ID()); r.Killed {
		t.Error("a kill after another cause marked the flow")
	}
	f.Close(syscall.ECONNRESET)
	if c := tr.Closed()[0]; c.Reason != flow.Shutdown || calls != 1 {
		t.Errorf("reason %v after %d calls, want %v after 1", c.Reason, calls, flow.Shutdown)
	}
}

func TestAnEndAfterCloseChangesNothing(t *testing.T) {
	tr := newTracker(t, Options{})
	f := tr.Open(over("lan", "direct", 0), func(error) { t.Error("the hook of a closed flow was called") })
	f.Close(nil)
	f.End(ErrKilled)
	if f.Cause() != io.EOF || tr.Closed()[0].Killed {
		t.Errorf("cause %v, record %+v", f.Cause(), tr.Closed()[0])
	}
	if n, err := f.Ready(flow.Up, nil); n != 0 || err != io.EOF {
		t.Errorf("Ready of a closed flow: %d, %v", n, err)
	}
}

func TestAnEndWithoutACauseIsTheOrdinaryOne(t *testing.T) {
	tr := newTracker(t, Options{})
	f := tr.Open(over("lan", "direct", 0), nil)
	f.End(nil)
	if _, err := f.Ready(flow.Up, nil); err != io.EOF {
		t.Errorf("Ready: %v, want %v", err, io.EOF)
	}
	f.Close(syscall.ECONNRESET)
	if r := tr.Closed()[0].Reason; r != flow.EOF {
		t.Errorf("reason %v, want %v", r, flow.EOF)
	}
}

func TestALateReportIsNotCreditedToTheNextFlowOfTheSlot(t *testing.T) {
	tr := newTracker(t, Options{})
	first := tr.Open(over("lan", "direct", 1), nil)
	first.Close(nil)
	var next *Flow
	for next == nil || next.slot != first.slot {
		next = tr.Open(over("lan", "direct", 2), nil)
	}
	first.Moved(flow.Up, 100)
	first.Moved(flow.Down, 100)
	next.Moved(flow.Up, 1)
	if r, _ := tr.Get(next.ID()); r.Up != 1 || r.Down != 0 {
		t.Errorf("the next flow shows %d up, %d down; want 1, 0", r.Up, r.Down)
	}
	tr.Final()
	if s := tr.Snapshot().Total; s.Up != 1 || s.Down != 0 {
		t.Errorf("total %d up, %d down; want 1, 0", s.Up, s.Down)
	}
}

func TestAPageIsTheOldestThatArePickedAndAsksOfNoneBefore(t *testing.T) {
	tr := newTracker(t, Options{})
	for range 3000 {
		tr.Open(over("lan", "direct", 0), nil)
	}
	for id := flow.ID(1); id <= 3000; id += 7 {
		tr.Kill(id) // still registered: still listed
	}
	third := func(r *Record) bool { return r.ID%3 == 0 }
	for _, pred := range []func(*Record) bool{nil, third} {
		for _, after := range []flow.ID{0, 1, 1500, 2990, 3000, 9000} {
			for _, limit := range []int{0, 1, 2, 64, 1000, 5000} {
				var want, got []flow.ID
				for id := after + 1; id <= 3000 && (limit == 0 || len(want) < limit); id++ {
					if pred == nil || third(&Record{ID: id}) {
						want = append(want, id)
					}
				}
				asked := pred
				if pred != nil {
					asked = func(r *Record) bool {
						if r.ID <= after {
							t.Errorf("after %d: asked about flow %d", after, r.ID)
						}
						return pred(r)
					}
				}
				page := tr.Page(after, limit, asked)
				for i := range page {
					got = append(got, page[i].ID)
				}
				if !slices.Equal(got, want) || limit > 0 && cap(page) > 4*limit {
					t.Errorf("%d after %d: %d flows %v, room for %d; want %d", limit, after, len(got), got, cap(page), len(want))
				}
			}
		}
	}
}

func TestACounterTurnsBelowItsGeneration(t *testing.T) {
	var c counter
	c.retire(0)
	c.add(1, byteMask-1)
	mark := c.beyond(0)
	c.add(1, 5)
	if n := c.beyond(mark); mark != byteMask-1 || n != 5 || c.generation() != 1 {
		t.Errorf("%#x and then %d bytes, generation %d", mark, n, c.generation())
	}
	mark += 1 << 53 // what is beyond 48 bits does not matter
	if n := c.retire(mark + 2); n != 3 {
		t.Errorf("retired with %d bytes, want 3", n)
	}
	for range 1<<16 - 1 {
		c.retire(0)
	}
	if n := c.beyond(0); c.generation() != 1 || n != 0 {
		t.Errorf("after a full turn: %d bytes, generation %d", n, c.generation())
	}
}

func TestTheClosedRingKeepsTheLastRecords(t *testing.T) {
	tr := newTracker(t, Options{Closed: 4})
	for n := range 11 {
		tr.Open(over("lan", "direct", 0), nil).Close(nil)
		var want []flow.ID
		for id := max(1, n-2); id <= n+1; id++ {
			want = append(want, flow.ID(id))
		}
		var got []flow.ID
		for _, r := range tr.Closed() {
			got = append(got, r.ID)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("after %d closes: %v, want %v", n+1, got, want)
		}
	}
}

func TestOpensClosesAndKillsBesideScansLoseNoByte(t *testing.T) {
	tr := newTracker(t, Options{})
	stop := make(chan struct{})
	var scans sync.WaitGroup
	for _, scan := range []func(){
		tr.Final,
		func() { tr.Flows() },
		func() { tr.EndWhere(flow.ErrIdle, func(r *Record) bool { return r.ID%7 == 0 }) },
	} {
		scans.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					scan()
					runtime.Gosched()
				}
			}
		})
	}
	var relays sync.WaitGroup
	var up, down, ends atomic.Uint64
	for g := range 1000 {
		relays.Go(func() {
			for i := range 5 {
				f := tr.Open(over("lan", "direct", flow.UserKey(g%3)), func(error) { ends.Add(1) })
				for n := range 10 {
					f.Moved(flow.Up, n)
					f.Moved(flow.Down, 2*n)
					up.Add(uint64(n))
					down.Add(uint64(2 * n))
				}
				if i == 3 {
					tr.Kill(f.ID())
				}
				f.Close(nil)
				f.Moved(flow.Up, 1) // too late
			}
		})
	}
	relays.Wait()
	close(stop)
	scans.Wait()
	tr.Final()
	s := tr.Snapshot()
	if s.Total.Up != up.Load() || s.Total.Down != down.Load() || s.Total.Flows != 0 || tr.Live() != 0 {
		t.Errorf("total %+v, live %d; want %d up, %d down, none live", s.Total, tr.Live(), up.Load(), down.Load())
	}
	if n := ends.Load(); n < 1000 || n > 5000 {
		t.Errorf("%d flows were ended", n)
	}
	for _, r := range tr.Closed() {
		if r.Up != 45 || r.Down != 90 {
			t.Fatalf("closed with %d up, %d down; want 45, 90", r.Up, r.Down)
		}
	}
}

func TestThePacketPathAllocatesNothing(t *testing.T) {
	tr := newTracker(t, Options{})
	f := tr.Open(over("lan", "direct", 0), nil)
	wake := func() {}
	if n := testing.AllocsPerRun(100, func() {
		_, _ = f.Ready(flow.Up, wake)
		f.Moved(flow.Up, 1500)
		f.Moved(flow.Down, 1500)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	m := over("lan", "direct", 0)
	if n := testing.AllocsPerRun(1000, func() { tr.Open(m, nil) }); n > 3 {
		t.Errorf("Open: %v allocations, want at most 3", n)
	}
	if n := testing.AllocsPerRun(1000, func() { tr.Open(m, nil).Close(nil) }); n > 3 {
		t.Errorf("Open and Close: %v allocations, want at most 3", n)
	}
}

func TestASlotIsOneCacheLine(t *testing.T) {
	if n := unsafe.Sizeof(slot{}); n != 64 {
		t.Errorf("%d bytes, want 64", n)
	}
	var s shard
	s.init()
	for range 20 * blockSize {
		s.freeSlotLocked()
	}
	for _, b := range s.blocks {
		if at := uintptr(unsafe.Pointer(b.slots)); at%64 != 0 {
			t.Errorf("a block begins at %#x", at)
		}
	}
}

func TestAnIdleFlowTakesAtMost700Bytes(t *testing.T) {
	const flows = 50_000
	tr := newTracker(t, Options{})
	m := over("lan", "direct", 1)
	heap := func() uint64 {
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	before := heap()
	for i := range flows {
		m.User = flow.UserKey(i) // the worst case: a group for each flow
		tr.Open(m, nil)
	}
	each := (heap() - before) / flows
	runtime.KeepAlive(tr)
	t.Logf("%d bytes a flow", each)
	if each > 700 {
		t.Errorf("%d bytes a flow, want at most 700", each)
	}
}

func TestTheOwnerIsFoundByTheFlowAndInNoRecord(t *testing.T) {
	tr := newTracker(t, Options{})
	m := over("lan", "direct", 0)
	owner := new(int)
	m.Owner = owner
	f := tr.Open(m, nil)
	visits := 0
	tr.EachFlow(func(got *Flow, r *Record) bool {
		visits++
		if got != f || got.Owner() != owner || r.ID != f.ID() || r.Owner != nil {
			t.Errorf("flow %v with owner %v, record %v with owner %v", got.ID(), got.Owner(), r.ID, r.Owner)
		}
		return true
	})
	f.Close(nil)
	if r := tr.Closed()[0]; r.Owner != nil || visits != 1 {
		t.Errorf("%d visits, and the closed record keeps %v", visits, r.Owner)
	}
}
