package track

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// Sizes that Options stand for when they are zero.
const (
	DefaultClosed = 1000 // records of closed flows
	DefaultEvents = 1024 // events that a subscriber may fall behind
)

// Options are what a Tracker is built with.
type Options struct {
	Interval time.Duration // between ticks of the sampler; more than 0
	Closed   int           // records of closed flows to keep; 0: DefaultClosed
	Events   int           // events to keep for slow subscribers; 0: DefaultEvents
}

// Tracker is the registry of live flows and everything that watches it. It outlives
// every change of configuration.
type Tracker struct {
	interval time.Duration
	began    time.Time
	next     atomic.Uint64 // the last id given out
	live     atomic.Int64
	shards   [shardCount]shard
	closed   closedRing
	events   events
	sampler  sampler
}

// New makes an empty tracker. It starts nothing: the sampler works while Run does.
func New(o Options) (*Tracker, error) {
	switch {
	case o.Interval <= 0:
		return nil, fmt.Errorf("sample interval %v: must be more than zero", o.Interval)
	case o.Closed < 0:
		return nil, fmt.Errorf("closed records %d: must not be negative", o.Closed)
	case o.Events < 0:
		return nil, fmt.Errorf("kept events %d: must not be negative", o.Events)
	}
	t := &Tracker{interval: o.Interval, began: time.Now()}
	t.closed.init(cmp.Or(o.Closed, DefaultClosed))
	t.events.limit = cmp.Or(o.Events, DefaultEvents)
	t.sampler.init(t.began)
	for i := range t.shards {
		t.shards[i].init()
	}
	return t, nil
}

func (t *Tracker) shardOf(id flow.ID) *shard { return &t.shards[id%shardCount] }

// Open registers a flow whose dial succeeded, and sends the opened event. end is
// called at most once, by the first End (a kill, a drain, the shutdown, …), on the
// goroutine of who ends it: it must not block, may be called before Open returns, and
// may still run while Close does. It may be nil. Who opens a flow has to Close it.
func (t *Tracker) Open(m Meta, end func(cause error)) *Flow {
	f := &Flow{
		tracker: t,
		id:      flow.ID(t.next.Add(1)),
		started: time.Now(),
		end:     end,
		meta:    m,
	}
	t.live.Add(1)
	t.shardOf(f.id).open(f)
	if t.events.wanted() {
		var r Record
		r.fill(&sight{flow: f})
		t.events.publish(Opened, &r)
	}
	return f
}

// Kill ends one flow with ErrKilled and reports whether it is registered: true again
// for one that was ended before and is not gone yet.
func (t *Tracker) Kill(id flow.ID) bool {
	s, ok := t.shardOf(id).get(id)
	if ok {
		s.flow.End(ErrKilled)
	}
	return ok
}

// KillWhere kills every live flow that pred picks and that nothing ended before. It
// returns how many it killed: 0 the second time.
func (t *Tracker) KillWhere(pred func(*Record) bool) int { return t.EndWhere(ErrKilled, pred) }

// EndWhere is KillWhere with another cause. The record is pred's during the call only.
// pred may use the tracker. A flow that opens or closes meanwhile may be missed.
func (t *Tracker) EndWhere(cause error, pred func(*Record) bool) int {
	n := 0
	lives := func(f *Flow) bool { return f.Cause() == nil }
	t.visit(lives, func(f *Flow, r *Record) bool {
		if pred(r) && f.endOnce(cause) {
			n++
		}
		return true
	})
	return n
}

// Get is the record of a live flow.
func (t *Tracker) Get(id flow.ID) (Record, bool) {
	s, ok := t.shardOf(id).get(id)
	if !ok {
		return Record{}, false
	}
	var r Record
	r.fill(&s)
	return r, true
}

// Flows lists all live flows by id, oldest first.
func (t *Tracker) Flows() []Record { return t.Page(0, 0, nil) }

// Page lists the live flows that pred picks (nil: all) and whose id is larger than
// after, oldest first: the first limit ones, or all for 0. It makes no more than twice
// limit records to keep. What is said of EndWhere's pred holds for pred.
func (t *Tracker) Page(after flow.ID, limit int, pred func(*Record) bool) []Record {
	var found []Record
	if pred == nil && limit == 0 {
		found = make([]Record, 0, t.Live())
	}
	end := flow.ID(math.MaxUint64) // of the ids that may still be on the page
	cut := func() {
		slices.SortFunc(found, func(a, b Record) int { return cmp.Compare(a.ID, b.ID) })
		if limit > 0 && len(found) >= limit {
			found = found[:limit]
			end = found[limit-1].ID
		}
	}
	onPage := func(f *Flow) bool { return f.id > after && f.id < end }
	t.visit(onPage, func(_ *Flow, r *Record) bool {
		if pred == nil || pred(r) {
			if found = append(found, *r); len(found) == 2*limit {
				cut()
			}
		}
		return true
	})
	cut()
	return found
}

// Each calls visit for every live flow, in no order, until it returns false. The
// record is visit's during the call only; visit may use the tracker. A flow that is
// live throughout is visited once; one that opens or closes meanwhile once or never.
func (t *Tracker) Each(visit func(*Record) bool) {
	t.EachFlow(func(_ *Flow, r *Record) bool { return visit(r) })
}

// EachFlow is Each with the flows themselves.
func (t *Tracker) EachFlow(visit func(*Flow, *Record) bool) {
	t.visit(func(*Flow) bool { return true }, visit)
}

// visit collects a chunk under the shard's lock. Without it, it makes the records of the
// flows that are wanted, and calls each with them.
func (t *Tracker) visit(wanted func(*Flow) bool, each func(*Flow, *Record) bool) {
	seen := make([]sight, 0, scanChunk)
	var r Record
	stopped := false
	t.chunks(scanChunk, func(sh *shard, from int) (more bool) {
		if stopped {
			return false
		}
		seen, more = sh.look(seen[:0], from)
		for i := range seen {
			if !wanted(seen[i].flow) {
				continue
			}
			r.fill(&seen[i])
			if stopped = !each(seen[i].flow, &r); stopped {
				return false
			}
		}
		return more
	})
}

// chunks calls visit for one chunk of every shard, then for the next of each that has
// more: whoever waited for a shard's lock has it long before its next chunk. It goes
// the other way than ids do: flows that open would follow it from lock to lock.
func (t *Tracker) chunks(size int, visit func(sh *shard, from int) (more bool)) {
	for from, left := 0, true; left; from += size {
		left = false
		for i := range t.shards {
			if visit(&t.shards[shardCount-1-i], from) {
				left = true
			}
		}
	}
}

// Live is the number of live flows.
func (t *Tracker) Live() int { return int(t.live.Load()) }

// Counts is how many flows have opened and how many have closed since the start.
func (t *Tracker) Counts() (opened, closed uint64) {
	closed = t.closed.total()
	return t.next.Load(), closed
}

// Closed lists the last closed flows, oldest first.
func (t *Tracker) Closed() []Record { return t.closed.list() }
