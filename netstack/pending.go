package netstack

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/internal/shrink"
)

// pendingTable holds the connection attempts that no endpoint exists for yet:
// from the SYN until the verdict. It bounds them in all and per source, and ends
// those whose client gave up, which a client often does without a word.
type pendingTable struct {
	mu        sync.Mutex // guards what follows, and the fields of each Pending that say so
	byTuple   map[tuple]*Pending
	peak      int // of byTuple
	admission admission

	// handshakes are how many attempts are being accepted, by the client's port: every
	// segment asks it, and few have to look at the table.
	handshakes [handshakeSlots]atomic.Int32
}

const handshakeSlots = 1024

type tuple struct{ client, dest netip.AddrPort }

// A SYN that repeats is expected within twice the last gap and this much more.
// Before the first repetition the gap is the client's first timeout, 1 s (RFC 6298).
const (
	synGrace    = time.Second
	firstSYNGap = time.Second
	sweepEvery  = 250 * time.Millisecond
)

func (t *pendingTable) init(shares admit.Shares, rates admit.Rates, drops *flow.Drops) {
	t.byTuple = make(map[tuple]*Pending)
	t.admission = admission{shares: shares, rates: rates, drops: drops}
}

// synResult says what became of a SYN.
type synResult int

const (
	synNew      synResult = iota // a new attempt, registered
	synRepeated                  // belongs to an attempt in progress
	synRefused                   // over a limit, the cause tells which
)

// syn registers what begin makes of a new attempt, or finds that tp is known
// already. Only what is admitted costs an allocation: of a flood, little is.
func (t *pendingTable) syn(tp tuple, isn uint32, now time.Time, begin func() *Pending) (synResult, flow.Drop) {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.byTuple[tp]
	switch {
	case old != nil && old.isn == isn:
		old.gap, old.seen = max(old.gap, now.Sub(old.seen)), now // a copy of a SYN is no shorter gap
		return synRepeated, 0
	case old != nil: // the client began anew, its next SYN is taken
		old.cancel(errGaveUp)
		return synRepeated, 0
	}
	trusted, cause, ok := t.admitLocked(tp.client.Addr(), now)
	if !ok {
		return synRefused, cause
	}
	p := begin()
	p.trusted, p.seen, p.gap = trusted, now, firstSYNGap
	t.byTuple[tp] = p
	return synNew, 0
}

// reset ends the attempt of tp if seq is that of its SYN or the next one: nobody
// else knows them (RFC 5961, 3.2). It reports whether it did.
func (t *pendingTable) reset(tp tuple, seq uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byTuple[tp]
	if p == nil || seq-p.isn > 1 {
		return false
	}
	p.cancel(errGaveUp)
	return true
}

// accepting keeps an attempt from being cancelled for silence: the answer to its
// SYN is on its way, and repetitions are gVisor's from now on.
func (t *pendingTable) accepting(p *Pending) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.seen, p.gap, p.accepting = time.Now(), acceptTimeout, true
	t.handshakesOf(p.tuple).Add(1)
}

func (t *pendingTable) handshakesOf(tp tuple) *atomic.Int32 {
	return &t.handshakes[tp.client.Port()%handshakeSlots]
}

// answered notes the sequence number that the SYN of tp was answered with. The
// answer must not leave before.
func (t *pendingTable) answered(tp tuple, iss uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byTuple[tp]; p != nil {
		p.iss, p.answered = iss, true
	}
}

// acknowledges says whether an acknowledgement may reach the endpoint of tp: one
// that ends a handshake must know the number that the SYN was answered with, as
// nobody does who forged his address (RFC 9293, 3.10.7.4). gVisor's forwarder takes any.
func (t *pendingTable) acknowledges(tp tuple, ack uint32) bool {
	if t.handshakesOf(tp).Load() == 0 {
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byTuple[tp]
	return p == nil || !p.accepting || p.answered && ack == p.iss+1
}

func (t *pendingTable) get(tp tuple) *Pending {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byTuple[tp]
}

func (t *pendingTable) remove(p *Pending) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byTuple[p.tuple] != p {
		return
	}
	delete(t.byTuple, p.tuple)
	t.byTuple = shrink.Map(t.byTuple, &t.peak)
	if p.accepting {
		t.handshakesOf(p.tuple).Add(-1)
	}
	t.leaveLocked(p)
}

func (t *pendingTable) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byTuple)
}

// sweep cancels attempts whose client fell silent, until ctx ends.
func (t *pendingTable) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			t.cancelSilent(now)
		case <-ctx.Done():
			return
		}
	}
}

func (t *pendingTable) cancelSilent(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.byTuple {
		if now.Sub(p.seen) > 2*p.gap+synGrace {
			p.cancel(errGaveUp)
		}
	}
	t.admission.rates.Forget(now)
}

func (t *pendingTable) cancelAll(cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.byTuple {
		p.cancel(cause)
	}
}

var errGaveUp = &flow.Cause{Reason: flow.Reset, Text: "the client gave up connecting"}
