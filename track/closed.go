package track

import "sync"

// closedRing keeps the records of the flows that closed last. Full, it overwrites
// the oldest.
type closedRing struct {
	limit int

	mu      sync.Mutex
	records []Record // guarded by mu; grows to limit
	oldest  int      // guarded by mu; where the next record goes once full
}

func (c *closedRing) add(r *Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.records) < c.limit {
		c.records = append(c.records, *r)
		return
	}
	c.records[c.oldest] = *r
	c.oldest = (c.oldest + 1) % c.limit
}

func (c *closedRing) list() []Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]Record, 0, len(c.records))
	all = append(all, c.records[c.oldest:]...)
	return append(all, c.records[:c.oldest]...)
}
