package track

import (
	"context"
	"sync"
)

const (
	followed   = 8192 // records that are kept for who follows them
	closedRead = 256  // records read in one hold of the ring's lock
)

// closedRing keeps the records of the flows that closed last. Full, it overwrites
// the oldest. It is larger once somebody follows it, so that many ends at once can
// be read one after the other.
type closedRing struct {
	limit int // that list shows
	fresh bell

	mu      sync.Mutex
	size    int      // guarded by mu; what records grows to: limit, or followed
	records []Record // guarded by mu
	oldest  int      // guarded by mu; where the next record goes once full
	count   uint64   // guarded by mu; of all records ever
}

func (c *closedRing) init(limit int) { c.limit, c.size = limit, limit }

func (c *closedRing) add(r *Record) {
	c.put(r)
	c.fresh.strike()
}

func (c *closedRing) put(r *Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	if len(c.records) < c.size {
		c.records = append(c.records, *r)
	} else {
		c.records[c.oldest] = *r
		c.oldest = (c.oldest + 1) % len(c.records)
	}
}

func (c *closedRing) total() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count
}

func (c *closedRing) list() []Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	shown := min(len(c.records), c.limit)
	return c.lastLocked(make([]Record, 0, shown), shown)
}

// lastLocked appends the n newest records, oldest first.
func (c *closedRing) lastLocked(to []Record, n int) []Record {
	for i := len(c.records) - n; i < len(c.records); i++ {
		to = append(to, c.records[(c.oldest+i)%len(c.records)])
	}
	return to
}

// follow makes the ring as large as followers need, and tells how many records there
// were so far.
func (c *closedRing) follow() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.size < followed {
		c.records = c.lastLocked(nil, len(c.records)) // in order, so that it can grow
		c.size, c.oldest = followed, 0
	}
	return c.count
}

// since appends some of the records that came after the first n ones, and tells how
// many of those are not kept any more.
func (c *closedRing) since(to []Record, n uint64) (_ []Record, missed uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n >= c.count {
		return to, 0
	}
	kept := uint64(len(c.records))
	if c.count-n > kept {
		missed = c.count - n - kept
	}
	first := int(kept - (c.count - n - missed))
	for i := first; i < min(len(c.records), first+closedRead); i++ {
		to = append(to, c.records[(c.oldest+i)%len(c.records)])
	}
	return to, missed
}

// ClosedReader reads the records of closed flows in the order of their ends, each
// once. It belongs to one goroutine.
type ClosedReader struct {
	ring *closedRing
	next uint64 // records read or missed so far
}

// FollowClosed reads what closes from now on. A reader may fall 8,192 records behind
// before it misses some; no flow ever waits for it.
func (t *Tracker) FollowClosed() *ClosedReader { return &ClosedReader{&t.closed, t.closed.follow()} }

// Next appends what was not read yet to records, up to 256 at once. It blocks until
// there is something or ctx ends (its error). missed is how many records before these
// were overwritten unread.
func (r *ClosedReader) Next(ctx context.Context, records []Record) (_ []Record, missed uint64, err error) {
	for {
		got, missed := r.ring.since(records, r.next)
		if n := uint64(len(got) - len(records)); n > 0 {
			r.next += missed + n
			return got, missed, nil
		}
		if ctx.Err() != nil {
			return records, 0, ctx.Err()
		}
		r.ring.fresh.wait(ctx.Done(), nil, func() bool { return r.ring.total() > r.next })
	}
}
