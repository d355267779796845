package track

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/puzpuzpuz/xsync/v4"

	"gatewayd/flow"
)

// benchFlows is how many flows are live in benchmarks.
const benchFlows = 500_000

// registry is the part of a tracker that the benchmarks compare: who is live, and
// what they moved since somebody looked.
type registry interface {
	open(m *member)
	close(m *member)
	scan() // takes what every flow moved since the scan before
}

// member is a flow in any of them: a Flow for this package's, with counters and
// watermarks of its own for the others.
type member struct {
	Flow
	up, down, sampledUp, sampledDown atomic.Uint64
}

func (m *member) take() uint64 {
	up, down := m.up.Load(), m.down.Load()
	return up - m.sampledUp.Swap(up) + down - m.sampledDown.Swap(down)
}

// registries are this package's and what it could be instead.
var registries = []struct {
	name string
	make func(*Tracker) registry
}{
	{"slots", func(t *Tracker) registry { return slots{t} }},
	{"map+mutex", newShardedMap},
	{"sync.Map", func(*Tracker) registry { return new(syncMap) }},
	{"xsync.Map", func(*Tracker) registry { return &xsyncMap{flows: xsync.NewMap[flow.ID, *member]()} }},
}

type slots struct{ t *Tracker }

func (s slots) open(m *member)  { s.t.shardOf(m.id).open(&m.Flow) }
func (s slots) close(m *member) { s.t.shardOf(m.id).close(&m.Flow) }
func (s slots) scan()           { s.t.Final() }

type shardedMap struct {
	shards [shardCount]struct {
		sync.Mutex
		flows map[flow.ID]*member
		_     [48]byte
	}
	moved atomic.Uint64
}

func newShardedMap(*Tracker) registry {
	m := new(shardedMap)
	for i := range m.shards {
		m.shards[i].flows = make(map[flow.ID]*member)
	}
	return m
}

func (s *shardedMap) open(m *member) {
	sh := &s.shards[m.id%shardCount]
	sh.Lock()
	defer sh.Unlock()
	sh.flows[m.id] = m
}

func (s *shardedMap) close(m *member) {
	sh := &s.shards[m.id%shardCount]
	sh.Lock()
	defer sh.Unlock()
	delete(sh.flows, m.id)
	s.moved.Add(m.take())
}

func (s *shardedMap) scan() {
	for i := range s.shards {
		sh := &s.shards[i]
		sh.Lock()
		for _, m := range sh.flows {
			s.moved.Add(m.take())
		}
		sh.Unlock()
	}
}

type syncMap struct {
	flows sync.Map
	moved atomic.Uint64
}

func (s *syncMap) open(m *member) { s.flows.Store(m.id, m) }

func (s *syncMap) close(m *member) {
	s.flows.Delete(m.id)
	s.moved.Add(m.take())
}

func (s *syncMap) scan() {
	s.flows.Range(func(_, m any) bool {
		s.moved.Add(m.(*member).take())
		return true
	})
}

type xsyncMap struct {
	flows *xsync.Map[flow.ID, *member]
	moved atomic.Uint64
}

func (s *xsyncMap) open(m *member) { s.flows.Store(m.id, m) }

func (s *xsyncMap) close(m *member) {
	s.flows.Delete(m.id)
	s.moved.Add(m.take())
}

func (s *xsyncMap) scan() {
	s.flows.Range(func(_ flow.ID, m *member) bool {
		s.moved.Add(m.take())
		return true
	})
}

// BenchmarkRegistry closes a flow and opens another while benchFlows are live: one of
// the last 64 opened (short lives) or any one (long ones); with nothing else going on,
// or beside scans without a pause. The flows themselves are there already.
func BenchmarkRegistry(b *testing.B) {
	lives := map[string]func(n uint64) int{
		"short": func(n uint64) int { return int(n % 64) },
		"long":  func(n uint64) int { return int(n * 0x9e3779b97f4a7c15 >> 32 * benchFlows >> 32) },
	}
	for _, r := range registries {
		for _, life := range []string{"short", "long"} {
			for _, beside := range []string{"idle", "scans"} {
				b.Run(r.name+"/"+life+"/"+beside, func(b *testing.B) {
					t := newTracker(b, Options{})
					reg := r.make(t)
					members, meta := make([]member, benchFlows), over("lan", "direct", 0)
					open := func(m *member) {
						m.tracker, m.id, m.meta = t, flow.ID(t.next.Add(1)), meta
						reg.open(m)
					}
					for i := range members {
						open(&members[i])
					}
					runtime.GC()
					stop := scanning(b, beside == "scans", reg.scan)
					pick, n := lives[life], uint64(0)
					for b.Loop() {
						m := &members[pick(n)]
						reg.close(m)
						open(m)
						n++
					}
					stop()
				})
			}
		}
	}
}

// scanning scans without a pause until the function that it returns is called.
func scanning(b *testing.B, on bool, scan func()) (stop func()) {
	if !on {
		return func() {}
	}
	var over atomic.Bool
	var scanner sync.WaitGroup
	scans := 0
	scanner.Go(func() {
		for ; !over.Load(); scans++ {
			scan()
		}
	})
	return func() {
		over.Store(true)
		scanner.Wait()
		b.ReportMetric(float64(scans)/b.Elapsed().Seconds(), "scans/s")
	}
}
