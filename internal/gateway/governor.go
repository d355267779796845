package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
	"time"

	"gatewayd/internal/api"
	"gatewayd/netstack"
)

// The governor keeps the gateway within its memory budget. One goroutine looks at
// what is in use, a few times a second and when many new flows come, and decides by
// that alone:
//
//	level      used from  TCP buffers, most      new flows
//	normal     0          the profile's          yes
//	elevated   60 %       a 16th of it           yes
//	high       75 %       a 64th                 yes
//	severe     85 %       16 KiB                 yes
//	full       90 %       16 KiB, 4 KiB to send  no
//
// A level is left once 5 % less is used than where it begins. Used is what lives:
// the heap that the last collection left, stacks, and the runtime's own. Garbage
// is the collector's business, which is told to run before garbage hides a level,
// and while memory is short often enough to see what was freed.
type governor struct {
	plan  memoryPlan
	log   *slog.Logger
	level atomic.Int32  // pressure
	used  atomic.Int64  // bytes
	asked atomic.Uint32 // how often full was asked
	crowd chan struct{} // capacity 1: many came since it was looked

	// Of the governor's goroutine.
	samples []metrics.Sample
	percent int       // GOGC that holds
	cycles  uint64    // collections so far
	fresh   time.Time // when one was last seen to have ended
	took    time.Duration
	told    pressure  // level of the last log line
	toldAt  time.Time // when that was
	rushes  rushes
	counted time.Time // when held was last asked
}

// pressure is how short memory is.
type pressure int32

const (
	pressureNormal pressure = iota
	pressureElevated
	pressureHigh
	pressureSevere
	pressureFull
)

var pressures = [len(api.MemoryLevels)]struct {
	from int64 // percent of the budget in use
	part int   // of each buffer's maximum that is left
	send int   // bytes of a send buffer that are left at least
}{{0, 1, 0}, {60, 16, 16 << 10}, {75, 64, 16 << 10}, {85, 1 << 10, 16 << 10}, {90, 1 << 10, netstack.MinBuffer}}

// String is the name in status.
func (p pressure) String() string { return api.MemoryLevels[p] }

const (
	leaveBelow = 5 // percent of the budget below a level's begin
	calmLook   = 250 * time.Millisecond
	tenseLook  = 25 * time.Millisecond // while garbage and all is more than a quarter of the budget, and beside a crowd
	crowded    = 32                    // new flows, of which each may take some 150 KB at once
	tellEvery  = 10 * time.Second
)

// levelOf is how short memory is with used of budget bytes in use, after previous.
func levelOf(used, budget int64, previous pressure) pressure {
	if budget <= 0 {
		return pressureNormal
	}
	part := used * 100 / budget
	level := pressureNormal
	for p := pressureElevated; p <= pressureFull; p++ {
		from := pressures[p].from
		if p <= previous {
			from -= leaveBelow
		}
		if part >= from {
			level = p
		}
	}
	return level
}

// gcPercent is the GOGC with which a collection comes no later than when live heap
// and garbage reach the first level, or a 16th of the budget is garbage.
func gcPercent(live, used, budget int64, most int) int {
	if budget <= 0 || live <= 0 {
		return most
	}
	room := max(budget*pressures[pressureElevated].from/100-used, budget/16)
	return int(min(room*100/live, int64(most)))
}

func newGovernor(p memoryPlan, log *slog.Logger) *governor {
	g := &governor{plan: p, log: log, crowd: make(chan struct{}, 1)}
	for _, name := range []string{
		"/gc/heap/live:bytes", // of the last collection
		"/memory/classes/heap/stacks:bytes",
		"/memory/classes/os-stacks:bytes",
		"/memory/classes/metadata/mcache/inuse:bytes",
		"/memory/classes/metadata/mspan/inuse:bytes",
		"/memory/classes/metadata/other:bytes",
		"/memory/classes/other:bytes",
		"/memory/classes/profiling/buckets:bytes",
		"/memory/classes/heap/objects:bytes", // live heap and garbage
		"/gc/cycles/total:gc-cycles",
	} {
		g.samples = append(g.samples, metrics.Sample{Name: name})
	}
	return g
}

// full reports that nothing new is let in. It is called for each, and has the governor
// look when many come: a budget of 64 MiB can be full before a calm look.
func (g *governor) full() bool {
	if g.asked.Add(1)%crowded == 0 {
		select {
		case g.crowd <- struct{}{}:
		default:
		}
	}
	return g.isFull()
}

func (g *governor) isFull() bool { return pressure(g.level.Load()) == pressureFull }

// measured is what look found, in bytes.
type measured struct {
	live     int64 // heap that the last collection left
	used     int64 // that, and what is no heap
	resident int64 // used and garbage
}

func (g *governor) look(now time.Time) (m measured) {
	metrics.Read(g.samples)
	value := func(i int) uint64 {
		if v := g.samples[i].Value; v.Kind() == metrics.KindUint64 {
			return v.Uint64()
		}
		return 0
	}
	last := len(g.samples) - 1
	if n := value(last); n != g.cycles {
		g.cycles, g.fresh = n, now
	}
	m.live = int64(value(0))
	other := int64(0)
	for i := 1; i < last-1; i++ {
		other += int64(value(i))
	}
	m.used, m.resident = m.live+other, int64(value(last-1))+other
	return m
}

// Collections of the governor's own come at most so often, and take at most a part
// of the time.
const (
	staleAfter = 500 * time.Millisecond
	stalePart  = 20
)

// refresh collects if what was measured is old and memory seems short: who holds
// much may have gone since, and one who allocates nothing is never collected.
func (g *governor) refresh(now time.Time) {
	if pressure(g.level.Load()) == pressureNormal || now.Sub(g.fresh) < max(staleAfter, stalePart*g.took) {
		return
	}
	runtime.GC()
	g.took = time.Since(now)
}

// run governs until ctx ends; apply has the buffers of a level hold, and held is how
// much the gateway holds that costs memory.
func (g *governor) run(ctx context.Context, apply func(pressure), held func() int) error {
	if g.plan.budget > 0 {
		debug.SetMemoryLimit(g.plan.budget)
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	var looked time.Time
	for {
		select {
		case <-timer.C:
		case <-g.crowd:
			if wait := tenseLook - time.Since(looked); wait > 0 {
				timer.Reset(wait)
				continue
			}
		case <-ctx.Done():
			return nil
		}
		now := time.Now()
		looked = now
		g.refresh(now)
		m := g.look(now)
		g.used.Store(m.used)
		g.collect(m)
		before := pressure(g.level.Load())
		if level := levelOf(m.used, g.plan.budget, before); level != before {
			g.level.Store(int32(level))
			apply(level)
		}
		g.tell(now)
		if now.Sub(g.counted) >= memoryLook {
			g.counted = now
			if g.rushes.over(held()) {
				runtime.GC() // what pools hold outlives one collection
				debug.FreeOSMemory()
			}
		}
		wait := calmLook
		if g.plan.budget > 0 && m.resident > g.plan.budget/4 {
			wait = tenseLook
		}
		timer.Reset(wait)
	}
}

// collect sets how far the heap may grow until the next collection. To change that
// stops the world for a moment, so that small changes are not made.
func (g *governor) collect(m measured) {
	if g.plan.percent == 0 {
		return
	}
	p := gcPercent(m.live, m.used, g.plan.budget, g.plan.percent)
	if d := p - g.percent; d > g.percent/4 || -d > g.percent/4 {
		g.percent = p
		debug.SetGCPercent(p)
	}
}

// tell logs a level that changed, once in a while.
func (g *governor) tell(now time.Time) {
	level := pressure(g.level.Load())
	if level == g.told || now.Sub(g.toldAt) < tellEvery {
		return
	}
	severity := slog.LevelInfo
	if level == pressureFull {
		severity = slog.LevelWarn
	}
	g.log.Log(context.Background(), severity, "memory", "pressure", level, "before", g.told, "used", g.used.Load(), "budget", g.plan.budget)
	g.told, g.toldAt = level, now
}

// warning is what an operator should know; empty while there is nothing.
func (g *governor) warning() string {
	if !g.isFull() {
		return ""
	}
	return fmt.Sprintf("memory: %d MiB of a budget of %d MiB are in use: new flows are refused", g.used.Load()>>20, g.plan.budget>>20)
}

// status is the governor's part of the status.
func (g *governor) status() api.Memory {
	return api.Memory{Budget: uint64(g.plan.budget), Used: uint64(g.used.Load()), Level: pressure(g.level.Load()).String()}
}

// press has the buffers of a level hold on all devices.
func (g *Gateway) press(p pressure) {
	for _, in := range g.inbounds {
		in.stack.SetBuffers(g.memory.plan.buffers.Within(pressures[p].part, pressures[p].send))
	}
}

// The collector runs when the heap has grown, so that what a flood or a rush hour
// left stays resident while little happens, until Go collects by itself every two
// minutes and then returns memory at leisure. A router has other uses for it.
const (
	memoryLook = time.Second
	rush       = 500 // things held at once that are worth a collection afterwards
	// A rush is over when less than this part of it is left.
	rushOver = 4
)

// rushes is what was seen of how much is held: the most since the last rush, and
// the last.
type rushes struct{ peak, last int }

// over reports that a rush is over: little of it is left, and that goes no more.
// What still goes would be free space between what stays, in pages that stay too.
func (r *rushes) over(held int) bool {
	settled := held >= r.last
	r.last = held
	if r.peak < rush || held > r.peak/rushOver || !settled {
		r.peak = max(r.peak, held)
		return false
	}
	r.peak = held
	return true
}

// held is how much the gateway holds that costs memory: flows, dials, associations.
func (g *Gateway) held() int {
	n := g.tracker.Live()
	for _, in := range g.inbounds {
		n += in.stack.Pending() + in.udp.Associations()
	}
	return n
}
