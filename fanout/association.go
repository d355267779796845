package fanout

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"

	"gatewayd/flow"
)

const (
	maxSubs      = 64 // sub-links of one association; the least recently sent-to goes first
	maxDecisions = 64 // destinations whose decision is remembered
)

// association is one client socket: what it sends is decided per destination and
// carried by sub-links. It lives in its shard until it is idle or evicted, and
// is dead from then on; only the shard's remover sets dead.
type association struct {
	t          *Table
	key        key
	client     Client
	prev, next *association // in its source's list; guarded by the shard's lock, as is placed
	placed     int64        // what seen was when it got its place in that list
	seen       atomic.Int64 // when something was last sent or received
	proved     atomic.Bool  // its client sent again after it was answered: no forged source

	mu struct {
		sync.Mutex
		dead      bool
		turn      uint64 // grows with each datagram, orders subs by use
		hand      int    // decision to be replaced next
		last      int    // decision used last
		pinned    *Sub   // the sub-link of everything, if a rule asked for it
		decisions []decision
		subs      []*Sub // in the order of opening
	}
}

// decision says where one destination's datagrams go.
type decision struct {
	dest    flow.Destination
	gen     uint64
	until   int64
	blocked bool
	refusal refusal // of what is blocked
	sub     *Sub    // nil when blocked, or gone since
}

// refusal is why something is not sent: what it is counted as and, if the client
// is told, what.
type refusal struct {
	cause flow.Drop
	err   error
}

func (d *decision) holds(gen uint64, now int64) bool {
	return d.gen == gen && now < d.until && (d.blocked || d.sub != nil && !d.sub.over())
}

// handle carries trains. It returns false when the association is dead.
func (a *association) handle(f *flow.Flow, ts []flow.Train, now int64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.dead {
		return false
	}
	a.seen.Store(now)
	for len(ts) > 0 {
		f.Dest = ts[0].Peer
		s, no := a.chooseLocked(f, now)
		if s == nil {
			a.t.cfg.Drops.Add(no.cause, ts[0].Count())
			a.refuse(ts[0], no.err)
			ts = ts[1:]
			continue
		}
		if s.answered.Load() && !a.proved.Load() {
			a.prove(now)
		}
		a.mu.turn++
		s.used = a.mu.turn
		n := s.carryLocked(ts[:a.sameLocked(s, ts, now)], now)
		ts = ts[n:]
	}
	return true
}

// sameLocked is how many trains, of which the first goes through s, go through s by
// what is decided already.
func (a *association) sameLocked(s *Sub, ts []flow.Train, now int64) int {
	for i := 1; i < len(ts); i++ {
		if ts[i].Peer == ts[i-1].Peer {
			continue
		}
		if d := a.recallLocked(&ts[i].Peer); d == nil || d.sub != s || !d.holds(a.t.cfg.Gen(), now) {
			return i
		}
	}
	return len(ts)
}

// refuse tells the client why tr is not sent.
func (a *association) refuse(tr flow.Train, err error) {
	if tell := a.t.cfg.Refused; tell != nil && err != nil {
		tell(a.client, tr, err)
	}
}

// chooseLocked finds the sub-link for f.Dest, or why there is none.
func (a *association) chooseLocked(f *flow.Flow, now int64) (*Sub, refusal) {
	d := a.recallLocked(&f.Dest)
	if d == nil || !d.holds(a.t.cfg.Gen(), now) {
		var drop flow.Drop
		if d, drop = a.decideLocked(f, d); d == nil {
			return nil, refusal{cause: drop}
		}
	}
	if d.blocked {
		return nil, d.refusal
	}
	return d.sub, refusal{}
}

// recallLocked finds the remembered decision of a destination.
func (a *association) recallLocked(dest *flow.Destination) *decision {
	ds := a.mu.decisions
	if a.mu.last < len(ds) && ds[a.mu.last].dest == *dest {
		return &ds[a.mu.last]
	}
	for i := range ds {
		if ds[i].dest == *dest {
			a.mu.last = i
			return &ds[i]
		}
	}
	return nil
}

// decideLocked asks for a decision and remembers it in d, if not nil, or in a
// place of its own. It returns nil when no sub-link can be had.
func (a *association) decideLocked(f *flow.Flow, d *decision) (*decision, flow.Drop) {
	target := a.t.cfg.Resolve(*f)
	fresh := decision{dest: f.Dest, gen: target.Gen, until: a.t.stamp(target.Until), blocked: target.Blocked, refusal: refusal{target.Cause, target.Refusal}}
	if !target.Blocked {
		var drop flow.Drop
		if fresh.sub, drop = a.subLocked(f, &target); fresh.sub == nil {
			return nil, drop
		}
		fresh.sub.widenLocked(f.Network, f.Dest.Addr.Port())
	}
	switch {
	case d != nil:
	case len(a.mu.decisions) < maxDecisions:
		a.mu.decisions = append(a.mu.decisions, decision{})
		a.mu.last = len(a.mu.decisions) - 1
		d = &a.mu.decisions[a.mu.last]
	default:
		a.mu.last = a.mu.hand
		a.mu.hand = (a.mu.hand + 1) % maxDecisions
		d = &a.mu.decisions[a.mu.last]
	}
	*d = fresh
	return d, 0
}

// subLocked finds the target's sub-link or begins to open one. A pinned
// association has one for all, unless that may reach this host and target may not.
func (a *association) subLocked(f *flow.Flow, target *Target) (*Sub, flow.Drop) {
	a.mu.subs = slices.DeleteFunc(a.mu.subs, func(s *Sub) bool { return s.over() })
	if p := a.mu.pinned; p != nil && !p.over() && p.allowHost == target.AllowHost {
		return p, 0
	}
	if target.Pin {
		for _, s := range a.mu.subs {
			if s.allowHost == target.AllowHost {
				a.pinLocked(s)
				return s, 0
			}
		}
	}
	for _, s := range a.mu.subs {
		if s.outbound == target.Outbound && s.allowHost == target.AllowHost {
			return s, 0
		}
	}
	return a.openLocked(f, target)
}

// openLocked adds a sub-link that opens in the background; the least recently
// sent-to makes room for it.
func (a *association) openLocked(f *flow.Flow, target *Target) (*Sub, flow.Drop) {
	if a.t.full() {
		return nil, flow.DropMemory
	}
	s := newSub(a, *f, *target)
	if !a.t.open(s) {
		return nil, flow.DropFlowLimit
	}
	if len(a.mu.subs) == maxSubs {
		oldest := slices.MinFunc(a.mu.subs, func(x, y *Sub) int { return cmp.Compare(x.used, y.used) })
		a.detachLocked(oldest)
		oldest.End(flow.ErrEvicted)
	}
	a.mu.subs = append(a.mu.subs, s)
	if target.Pin {
		a.pinLocked(s)
	}
	return s, 0
}

// pinLocked sends everything through s from now on, also what was decided before.
func (a *association) pinLocked(s *Sub) {
	a.mu.pinned = s
	for i := range a.mu.decisions {
		a.mu.decisions[i].sub = nil
	}
}

// detachLocked forgets a sub-link that is over or about to be.
func (a *association) detachLocked(s *Sub) {
	if i := slices.Index(a.mu.subs, s); i >= 0 {
		a.mu.subs = slices.Delete(a.mu.subs, i, i+1)
	}
	for i := range a.mu.decisions {
		if a.mu.decisions[i].sub == s {
			a.mu.decisions[i].sub = nil
		}
	}
	if a.mu.pinned == s {
		a.mu.pinned = nil
	}
}

func (a *association) detach(s *Sub) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.detachLocked(s)
}

// end makes an association that was taken out of its shard dead, and ends its sub-links.
func (a *association) end(cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.dead = true
	for _, s := range a.mu.subs {
		s.End(cause)
	}
	a.mu.subs, a.mu.decisions, a.mu.pinned = nil, nil, nil
}
