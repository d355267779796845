package gateway

import (
	"context"
	"runtime"
	"runtime/debug"
	"time"
)

// The collector runs when the heap has grown, so that what a flood or a rush hour
// left stays resident while little happens, until Go collects by itself every two
// minutes and then returns memory at leisure. A router has other uses for it.
const (
	memoryLook = time.Second
	rush       = 500 // things held at once that are worth a collection afterwards
	// A rush is over when less than this part of it is left.
	rushOver = 4
)

// freeAfterRush returns memory to the system after much was held at once and is
// gone, until ctx ends.
func (g *Gateway) freeAfterRush(ctx context.Context) error {
	tick := time.NewTicker(memoryLook)
	defer tick.Stop()
	var r rushes
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if r.over(g.held()) {
			runtime.GC() // what pools hold outlives one collection
			debug.FreeOSMemory()
		}
	}
}

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
