package fanout

import (
	"net/netip"
	"sync"
	"time"

	"gatewayd/internal/admit"
)

// Who forges source addresses makes an association with every datagram. Two
// things keep that from costing others: sources that are not known to be real
// begin new associations at a limited rate, each network and all together, and
// when there are too many associations, those that were not proved go first. A
// client proves itself by sending again on an association that was answered.

// opens limits how fast associations begin.
type opens struct {
	mu    sync.Mutex
	rates admit.Rates
}

// mayOpen asks for one more association of a source.
func (t *Table) mayOpen(source netip.Addr, now int64) bool {
	if t.cfg.Trusted != nil && t.cfg.Trusted(source) {
		return true
	}
	t.opens.mu.Lock()
	defer t.opens.mu.Unlock()
	return t.opens.rates.Allow(source, t.timeOf(now))
}

// forget gives back memory of what is over.
func (o *opens) forget(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rates.Forget(now)
}

// prove notes that an association's client is real.
func (a *association) prove(now int64) {
	a.proved.Store(true)
	o := &a.t.opens
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rates.Prove(a.client.Source.Addr(), a.t.timeOf(now))
}

// timeOf is the time of a stamp.
func (t *Table) timeOf(now int64) time.Time { return t.base.Add(time.Duration(now)) }

// rather reports whether a is to go before b.
func (a *association) rather(b *association) bool {
	if ap, bp := a.proved.Load(), b.proved.Load(); ap != bp {
		return bp
	}
	return a.seen.Load() < b.seen.Load()
}
