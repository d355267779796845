package gateway

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/route"
)

// blockedEvents announces flows that a rule with `record` marked and that reject or
// drop refuses. A client that tries again and again must not drown what others do,
// nor the other events: what is over the rates is only counted.
type blockedEvents struct {
	suppressed atomic.Uint64

	mu    sync.Mutex
	rates admit.Rates // guarded by mu; the zero value limits nothing
}

// blockedRates are generous for people and what they misconfigure.
var blockedRates = admit.Rates{
	Address: admit.Rate{PerSecond: 10, Burst: 50},
	All:     admit.Rate{PerSecond: 100, Burst: 500},
}

func (b *blockedEvents) allow(source netip.Addr, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rates.Allow(source, now) {
		return true
	}
	b.suppressed.Add(1)
	return false
}

// announce tells of a refused flow, if a rule marked it.
func (g *Gateway) announce(f flow.Flow, who *party, d *route.Decision) {
	if d.Record && g.blocked.allow(f.Source.Addr(), time.Now()) {
		g.tracker.Block(metaOf(f, who, d, netip.AddrPort{}))
	}
}
