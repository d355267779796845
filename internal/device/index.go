package device

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// key is an address as the index has it: IPv4 in its mapped form, link-local IPv6
// with the number of its link in the bits that are zero in every such address.
type key struct{ hi, lo uint64 }

func keyOf(a netip.Addr) key {
	b := a.As16()
	return key{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func keyOn(a netip.Addr, link int) key {
	k := keyOf(a)
	if a.Is6() && a.IsLinkLocalUnicast() {
		k.hi |= uint64(uint32(link))
	}
	return k
}

// hash spreads keys; whoever chooses addresses doesn't know the seed.
func (t *Table) hash(k key) uint64 {
	h := (k.hi ^ t.seed) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32 ^ k.lo) * 0x9e3779b97f4a7c15
	return h ^ h>>32
}

// The answers are in shards, since a change copies one of them.
const (
	shards    = 1 << shardBits
	shardBits = 6
)

func shardOf(h uint64) uint64 { return h >> (64 - shardBits) }

// index is the answers of one shard: an open-addressed table, at most half full, that
// is never changed, so that readers need no lock. It is twice as fast as a map, of
// which it needs nothing else.
type index struct {
	slots []slot // a power of two
	n     int    // that are taken
}

type slot struct {
	k key
	e *answer // nil: free
}

// find is the answer for a key with its hash, or nil. A nil index has none.
func (x *index) find(h uint64, k key) *answer {
	if x == nil {
		return nil
	}
	for mask := uint64(len(x.slots) - 1); ; h++ {
		if s := &x.slots[h&mask]; s.e == nil || s.k == k {
			return s.e
		}
	}
}

// publish puts an answer where Lookup finds it, or takes that of k away (nil).
func (t *Table) publish(k key, e *answer) {
	h := t.hash(k)
	shard := &t.shards[shardOf(h)]
	var old []slot
	if x := shard.Load(); x != nil {
		old = x.slots
	}
	n := 1
	for i := range old {
		if old[i].e != nil && old[i].k != k {
			n++
		}
	}
	next := &index{slots: make([]slot, 1<<bits.Len(uint(2*n-1)))}
	put := func(h uint64, s slot) {
		mask := uint64(len(next.slots) - 1)
		for next.slots[h&mask].e != nil {
			h++
		}
		next.slots[h&mask] = s
		next.n++
	}
	for i := range old {
		if s := old[i]; s.e != nil && s.k != k {
			put(t.hash(s.k), s)
		}
	}
	if e != nil {
		put(h, slot{k, e})
	}
	shard.Store(next)
}
