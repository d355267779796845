package netstack

import (
	"net/netip"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
)

// Admission of connection attempts, with the pending table's lock held. A SYN
// meets three questions: does its source begin too many in too short a time, does
// it have too many in progress, and are there too many in all. Where the last two
// say no, the attempt may still take the place of another one: of somebody who
// has more of them than its own source. A flood of forged sources therefore
// shortens the life of attempts, its own for the most part, rather than keep
// everybody out; attempts of sources that completed a handshake of late are not
// taken.

// admission is the part of the pending table that limits it.
type admission struct {
	shares admit.Shares
	rates  admit.Rates
	drops  *flow.Drops
	full   func() bool // there is no memory for another attempt; nil: there is
	// displaced counts attempts that lost their place and did not get their verdict
	// yet: their dials are ending. They are in the table, and in shares no more.
	displaced int
}

const (
	// candidates is how many attempts are looked at for the one to be displaced.
	candidates = 16
	// maxDisplaced bounds dials that are ending, as a part of the table.
	maxDisplaced = 4
)

var errDisplaced = &flow.Cause{Reason: flow.Evicted, Text: "the attempt made room for another source's"}

// admitLocked takes a place for an attempt of src, which may be trusted, or tells
// the cause to drop its SYN for.
func (t *pendingTable) admitLocked(src netip.Addr, now time.Time) (trusted bool, cause flow.Drop, ok bool) {
	a := &t.admission
	if a.full != nil && a.full() {
		return false, flow.DropMemory, false // its next SYN may find room; a reset would be an answer for good
	}
	if !a.rates.Allow(src, now) {
		return false, flow.DropSYNRate, false
	}
	refused := a.shares.Take(src)
	if refused == admit.ByNetwork || refused == admit.ByAll {
		if t.displaceLocked(src, refused == admit.ByNetwork) {
			refused = a.shares.Take(src)
		}
	}
	return a.rates.Trusted(src, now), flow.DropSYNLimit, refused == admit.Admitted
}

// displaceLocked ends the attempt of whoever has most of them among a few, if
// that is more than src has; sameNetwork looks at those of src's network only.
func (t *pendingTable) displaceLocked(src netip.Addr, sameNetwork bool) bool {
	a := &t.admission
	if a.displaced >= max(a.shares.Max/maxDisplaced, 1) {
		return false
	}
	var victim *Pending
	most, looked := a.shares.Held(src), 0
	for _, p := range t.byTuple { // Go's maps begin anywhere
		if looked++; looked > candidates {
			break
		}
		other := p.tuple.client.Addr()
		if p.displaced || p.trusted || sameNetwork && !admit.SameNetwork(src, other) {
			continue
		}
		if n := a.shares.Held(other); n > most {
			victim, most = p, n
		}
	}
	if victim == nil {
		return false
	}
	a.drops.Add(flow.DropSYNLimit, 1)
	victim.displaced = true
	a.displaced++
	a.shares.Give(victim.tuple.client.Addr())
	victim.cancel(errDisplaced)
	return true
}

// leaveLocked gives p's place back.
func (t *pendingTable) leaveLocked(p *Pending) {
	if p.displaced {
		t.admission.displaced--
		return
	}
	t.admission.shares.Give(p.tuple.client.Addr())
}

// proved notes that p's client answered: its address is no forged one.
func (t *pendingTable) proved(p *Pending, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.admission.rates.Prove(p.tuple.client.Addr(), now)
}

// Trusted reports whether a client of this address completed a handshake of late.
func (s *Stack) Trusted(source netip.Addr) bool {
	t := &s.pending
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.admission.rates.Trusted(source, time.Now())
}
