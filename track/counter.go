package track

import "sync/atomic"

const (
	generationShift = 48
	byteMask        = 1<<generationShift - 1
)

// counter holds what a slot moved in one direction since its last sample: bytes in
// the low 48 bits, the slot's generation above them. Both live in one word so that
// a relay which reports late, while its flow closes, is either counted before the
// close or not at all, and never credited to the flow that has the slot next.
//
// Writers: the flow's relay adds; whoever holds the shard's lock takes and retires.
type counter struct{ v atomic.Uint64 }

// add counts n bytes for the flow of generation gen, and nothing once it closed.
// Without a sampler it stops at 2⁴⁸-1 bytes.
func (c *counter) add(gen uint16, n uint64) {
	for {
		old := c.v.Load()
		if uint16(old>>generationShift) != gen {
			return
		}
		sum := min(old&byteMask+n, byteMask)
		if c.v.CompareAndSwap(old, old&^byteMask|sum) {
			return
		}
	}
}

// generation is the generation of the slot's present or next flow.
func (c *counter) generation() uint16 { return uint16(c.v.Load() >> generationShift) }

// pending is the bytes since the last take.
func (c *counter) pending() uint64 { return c.v.Load() & byteMask }

// take returns the bytes since the last take and starts again at zero. An idle
// counter is only read, so that a scan leaves its cache line alone.
func (c *counter) take() uint64 {
	n := c.pending()
	if n > 0 {
		c.v.Add(-n) // at least so much is there: only who takes makes it less
	}
	return n
}

// retire returns the bytes since the last take and begins the next generation, at zero.
func (c *counter) retire() uint64 {
	for {
		old := c.v.Load()
		if c.v.CompareAndSwap(old, (old>>generationShift+1)<<generationShift) {
			return old & byteMask
		}
	}
}
