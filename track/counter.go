package track

import "sync/atomic"

const (
	generationShift = 48
	byteMask        = 1<<generationShift - 1
)

// counter holds what a slot's flow moved in one direction since it opened: bytes modulo
// 2⁴⁸ in the low bits, the slot's generation above them. Both live in one word so that
// a relay which reports late, while its flow closes, is either counted before the
// close or not at all, and never credited to the flow that has the slot next.
//
// Writers: the flow's relay adds; whoever closes the flow retires. Samples only read:
// they remember how far they came, and what is beyond that is exact as long as less
// than 2⁴⁸ bytes (256 TiB) move between two of them.
type counter struct{ v atomic.Uint64 }

// add counts n bytes for the flow of generation gen, and nothing once it closed.
func (c *counter) add(gen uint16, n uint64) {
	for {
		old := c.v.Load()
		if uint16(old>>generationShift) != gen {
			return
		}
		if c.v.CompareAndSwap(old, old&^byteMask|(old+n)&byteMask) {
			return
		}
	}
}

// generation is the generation of the slot's present or next flow.
func (c *counter) generation() uint16 { return uint16(c.v.Load() >> generationShift) }

// beyond is the bytes that moved after the first mark ones.
func (c *counter) beyond(mark uint64) uint64 { return (c.v.Load() - mark) & byteMask }

// retire returns the bytes that moved after the first mark ones and begins the next
// generation, at zero.
func (c *counter) retire(mark uint64) uint64 {
	for {
		old := c.v.Load()
		if c.v.CompareAndSwap(old, (old>>generationShift+1)<<generationShift) {
			return (old - mark) & byteMask
		}
	}
}
