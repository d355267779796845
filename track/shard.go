package track

import (
	"math/bits"
	"sync"

	"gatewayd/flow"
)

const (
	shardCount  = 64                      // flows are spread over the shards by id
	blockSize   = 64                      // slots of a block: one word says which are free
	chunkBlocks = 4                       // blocks visited in one hold of a shard's lock
	scanChunk   = chunkBlocks * blockSize // slots, likewise
	groupChunk  = 64                      // groups, likewise
)

// slot is the hot part of a flow: one cache line, without pointers.
//
// States: free (its bit in the block's free) and live. Only open makes a free slot
// live and only close frees it, both under the shard's lock. up and down may be
// added to at any time by the relay of the live flow; the rest belongs to the lock.
type slot struct {
	up, down    counter // of the flow's life
	sampledUp   uint64  // bytes that samples took so far: how far they came in the counters
	sampledDown uint64
	active      int64   // last sample that found bytes, in ns since the tracker began; 0: none
	session     uint64  // of a changed principal; the rest of it is the group's
	group       uint32  // index in shard.groups
	at          uint32  // its own index in the shard
	low         uint32  // low half of the flow's id
	changed     bool    // the principal is not the Meta's any more
	_           [3]byte // to 64 bytes
}

// block is a run of slots that never moves, beside the flows in them. The slots are
// pointer-free memory, which begins on a cache line at this size. What few blocks say
// of many flows lies together.
type block struct {
	free  uint64 // a bit for each free slot
	slots *[blockSize]slot
	flows *[blockSize]*Flow // nil where free
}

const allFree = 1<<blockSize - 1

// groupKey is what the sampler sums flows by.
type groupKey struct {
	inbound, outbound string
	user              flow.UserKey
}

// group collects what flows with one key moved since the last tick, live and closed
// ones alike. A tick takes it in one piece, so that the totals, inbounds, outbounds and
// users of a snapshot agree. A group without flows goes with the tick that takes it.
type group struct {
	key      groupKey
	name     string // of the user
	up, down uint64 // bytes since the last tick
	flows    int    // live now
	used     bool

	// The sampler's, of these three; found by the first tick.
	inbound, outbound *tally
	person            *userTally
}

// shard is one part of the registry.
type shard struct {
	mu sync.Mutex
	// guarded by mu
	blocks     []block
	lowest     int // no block before it has a free slot
	groups     []group
	groupIndex map[groupKey]uint32
	freeGroups []uint32
	lastGroup  uint32 // that a flow joined; the next one often joins the same
	_          [32]byte
}

func (s *shard) init() { s.groupIndex = make(map[groupKey]uint32) }

// open registers f and gives it a slot.
func (s *shard) open(f *Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.freeSlotLocked()
	b, i := &s.blocks[at/blockSize], at%blockSize
	b.free &^= 1 << i
	b.flows[i] = f
	p := &b.slots[i]
	p.active = 0
	p.at, p.low, p.changed = at, uint32(f.id), false
	p.group = s.joinLocked(groupKey{f.meta.Inbound, f.meta.Outbound, f.meta.User}, f.meta.UserName)
	f.slot, f.generation = p, p.up.generation()
}

// freeSlotLocked finds the first free slot, so that flows stay close together and the
// last blocks empty.
func (s *shard) freeSlotLocked() uint32 {
	for ; s.lowest < len(s.blocks); s.lowest++ {
		if free := s.blocks[s.lowest].free; free != 0 {
			return uint32(s.lowest*blockSize + bits.TrailingZeros64(free))
		}
	}
	slots := make([][blockSize]slot, blocksAfter(s.lowest))
	for i := range slots {
		s.blocks = append(s.blocks, block{free: allFree, slots: &slots[i], flows: new([blockSize]*Flow)})
	}
	return uint32(s.lowest * blockSize)
}

// blocksAfter is how many blocks come and go together after the first n: one at first,
// and then a chunk, which lies in one piece. Scans go through memory from its end to its
// begin, and would wait for every block where the processor foresees the other direction.
func blocksAfter(n int) int {
	if n < chunkBlocks {
		return 1
	}
	return chunkBlocks
}

// freeLocked gives a slot back, and blocks at the end that are empty then, but one.
func (s *shard) freeLocked(at uint32) {
	b, i := &s.blocks[at/blockSize], at%blockSize
	b.free |= 1 << i
	b.flows[i] = nil
	s.lowest = min(s.lowest, int(at/blockSize))
	for n := len(s.blocks); n > 1; n = len(s.blocks) {
		rest := n - blocksAfter(n-1)
		for _, b := range s.blocks[rest-1:] {
			if b.free != allFree {
				return
			}
		}
		clear(s.blocks[rest:])
		s.blocks = s.blocks[:rest]
	}
}

// joinLocked counts one more live flow in the group of key.
func (s *shard) joinLocked(key groupKey, name string) uint32 {
	i := s.lastGroup
	if int(i) >= len(s.groups) || !s.groups[i].used || s.groups[i].key != key {
		i = s.groupLocked(key)
		s.lastGroup = i
	}
	g := &s.groups[i]
	g.flows++
	g.name = name
	return i
}

// groupLocked finds or makes the group of key.
func (s *shard) groupLocked(key groupKey) uint32 {
	i, ok := s.groupIndex[key]
	if ok {
		return i
	}
	if n := len(s.freeGroups); n > 0 {
		i = s.freeGroups[n-1]
		s.freeGroups = s.freeGroups[:n-1]
	} else {
		i = uint32(len(s.groups))
		s.groups = append(s.groups, group{})
	}
	s.groups[i] = group{key: key, used: true}
	s.groupIndex[key] = i
	return i
}

// sight is a flow as a look at its slot found it. Looking does not touch the flow.
type sight struct {
	flow      *Flow
	up, down  uint64
	active    int64
	changed   bool
	principal Principal // once changed
}

func (s *shard) sightLocked(p *slot, f *Flow) sight {
	seen := sight{
		flow: f, up: p.sampledUp + p.up.beyond(p.sampledUp), down: p.sampledDown + p.down.beyond(p.sampledDown),
		active: p.active, changed: p.changed,
	}
	if p.changed {
		g := &s.groups[p.group]
		seen.principal = Principal{p.session, g.key.user, g.name}
	}
	return seen
}

// liveLocked tells whether f is registered.
func (s *shard) liveLocked(f *Flow) bool {
	at := f.slot.at
	return int(at/blockSize) < len(s.blocks) && s.blocks[at/blockSize].flows[at%blockSize] == f
}

// close takes f out. What it moved since the last sample goes to its group, from which
// the next tick takes it. False: it is not registered any more.
func (s *shard) close(f *Flow) (final sight, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.liveLocked(f) {
		return sight{}, false
	}
	p := f.slot
	final = s.sightLocked(p, f)
	s.moveLocked(p, p.up.retire(p.sampledUp), p.down.retire(p.sampledDown))
	final.up, final.down = p.sampledUp, p.sampledDown
	p.sampledUp, p.sampledDown = 0, 0 // as its counters: a free slot holds nothing
	s.groups[p.group].flows--
	s.freeLocked(p.at)
	return final, true
}

// moveLocked credits bytes that the counters of a slot are beyond the samples to its group.
func (s *shard) moveLocked(p *slot, up, down uint64) {
	p.sampledUp += up
	p.sampledDown += down
	s.creditLocked(credit{p.group, up, down})
}

// credit is what goes to one group.
type credit struct {
	group    uint32
	up, down uint64
}

func (s *shard) creditLocked(c credit) {
	if c.up|c.down != 0 {
		g := &s.groups[c.group]
		g.up += c.up
		g.down += c.down
	}
}

// change gives f another principal, after a sample of it: what has moved stays with
// whom it was. False: it is not registered any more.
func (s *shard) change(f *Flow, to Principal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.liveLocked(f) {
		return false
	}
	p := f.slot
	s.moveLocked(p, p.up.beyond(p.sampledUp), p.down.beyond(p.sampledDown))
	s.groups[p.group].flows--
	p.session, p.changed = to.Session, true
	p.group = s.joinLocked(groupKey{f.meta.Inbound, f.meta.Outbound, to.User}, to.UserName)
	return true
}

// get looks one flow up. There is no index by id, which every open and close would
// have to keep: the slots of one shard are soon looked through.
func (s *shard) get(id flow.ID) (seen sight, ok bool) {
	for from, more := 0, id != 0; more && !ok; from += scanChunk {
		seen, ok, more = s.find(id, from)
	}
	return seen, ok
}

// find looks for a flow in one chunk of slots.
func (s *shard) find(id flow.ID, from int) (seen sight, ok, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	chunk, more := s.chunkLocked(from)
	for _, b := range chunk {
		for i := range b.slots {
			if p := &b.slots[i]; p.low == uint32(id) && b.flows[i] != nil && b.flows[i].id == id {
				return s.sightLocked(p, b.flows[i]), true, more
			}
		}
	}
	return sight{}, false, more
}

// chunkLocked is one chunk of slots; more tells that others follow it.
func (s *shard) chunkLocked(from int) (chunk []block, more bool) {
	first := min(from/blockSize, len(s.blocks))
	end := min(first+chunkBlocks, len(s.blocks))
	return s.blocks[first:end], end < len(s.blocks)
}

// look appends the live flows of one chunk of slots.
func (s *shard) look(seen []sight, from int) (_ []sight, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	chunk, more := s.chunkLocked(from)
	for _, b := range chunk {
		for live := ^b.free; live != 0; live &= live - 1 {
			i := bits.TrailingZeros64(live)
			seen = append(seen, s.sightLocked(&b.slots[i], b.flows[i]))
		}
	}
	return seen, more
}

// sample moves what one chunk of slots counted into their groups: of neighbours in one
// group in one piece. It reads free slots too: they hold nothing.
func (s *shard) sample(from int, now int64) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	chunk, more := s.chunkLocked(from)
	var sum credit
	for _, b := range chunk {
		if b.free == allFree {
			continue
		}
		for i := range b.slots {
			p := &b.slots[i]
			up, down := p.up.beyond(p.sampledUp), p.down.beyond(p.sampledDown)
			if up|down == 0 {
				continue
			}
			p.sampledUp += up
			p.sampledDown += down
			p.active = now
			if p.group != sum.group {
				s.creditLocked(sum)
				sum = credit{group: p.group}
			}
			sum.up += up
			sum.down += down
		}
	}
	s.creditLocked(sum)
	return more
}

// drain has one chunk of groups counted, empties them, and gives up those that no live
// flow is in. count runs under the lock.
func (s *shard) drain(from int, count func(*group)) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := min(from+groupChunk, len(s.groups))
	for i := from; i < end; i++ {
		g := &s.groups[i]
		if !g.used {
			continue
		}
		count(g)
		g.up, g.down = 0, 0
		if g.flows == 0 {
			delete(s.groupIndex, g.key)
			*g = group{}
			s.freeGroups = append(s.freeGroups, uint32(i))
		}
	}
	return end < len(s.groups)
}
