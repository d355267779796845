package gateway

import (
	"context"
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
	peak := 0
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		var over bool
		if peak, over = rushed(peak, g.held()); over {
			debug.FreeOSMemory()
		}
	}
}

// rushed is the peak to go on with, and whether a rush is over.
func rushed(peak, held int) (int, bool) {
	if peak < rush || held > peak/rushOver {
		return max(peak, held), false
	}
	return held, true
}

// held is how much the gateway holds that costs memory: flows, dials, associations.
func (g *Gateway) held() int {
	n := g.tracker.Live()
	for _, in := range g.inbounds {
		n += in.stack.Pending() + in.udp.Associations()
	}
	return n
}
