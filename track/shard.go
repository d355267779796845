package track

import (
	"sync"

	"gatewayd/flow"
)

const (
	shardCount = 16   // flows are spread over the shards by id
	blockSize  = 64   // slots that a shard allocates at once
	scanChunk  = 1024 // slots or groups visited in one hold of a shard's lock
)

// slot is the hot part of a flow: one cache line, without pointers.
//
// States: free (no flow in the block's flows) and live. Only open makes a free slot
// live and only close frees it, both under the shard's lock. up and down may be
// added to at any time by the relay of the live flow; the rest belongs to the lock.
type slot struct {
	up, down    counter // since the last sample
	sampledUp   uint64  // bytes that samples took so far
	sampledDown uint64
	active      int64    // last sample that found bytes, in ns since the tracker began; 0: none
	group       uint32   // index in shard.groups
	_           [20]byte // to 64 bytes
}

// block is a run of slots that never moves, beside the flows in them. The slots are
// an allocation of their own: pointer-free memory of this size starts on a cache line.
type block struct {
	slots *[blockSize]slot
	flows [blockSize]*Flow // nil: the slot is free
}

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
}

// shard is one part of the registry.
type shard struct {
	mu sync.Mutex
	// guarded by mu
	index      map[flow.ID]uint32 // live flows to their slots
	blocks     []block
	slots      int      // slots in use once; blocks hold at least so many
	free       []uint32 // of those, the free ones
	groups     []group
	groupIndex map[groupKey]uint32
	freeGroups []uint32
}

func (s *shard) init() {
	s.index = make(map[flow.ID]uint32)
	s.groupIndex = make(map[groupKey]uint32)
}

// open registers f and gives it a slot.
func (s *shard) open(f *Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.freeSlotLocked()
	b := &s.blocks[i/blockSize]
	p := &b.slots[i%blockSize]
	p.sampledUp, p.sampledDown, p.active = 0, 0, 0
	p.group = s.joinLocked(&f.meta)
	f.slot, f.generation = p, p.up.generation()
	b.flows[i%blockSize] = f
	s.index[f.id] = i
}

func (s *shard) freeSlotLocked() uint32 {
	if n := len(s.free); n > 0 {
		i := s.free[n-1]
		s.free = s.free[:n-1]
		return i
	}
	if s.slots == len(s.blocks)*blockSize {
		s.blocks = append(s.blocks, block{slots: new([blockSize]slot)})
	}
	s.slots++
	return uint32(s.slots - 1)
}

// joinLocked counts one more live flow in the group that m belongs to.
func (s *shard) joinLocked(m *Meta) uint32 {
	key := groupKey{m.Inbound, m.Outbound, m.User}
	i, ok := s.groupIndex[key]
	if !ok {
		i = s.freeGroupLocked()
		s.groups[i] = group{key: key, used: true}
		s.groupIndex[key] = i
	}
	g := &s.groups[i]
	g.flows++
	g.name = m.UserName
	return i
}

func (s *shard) freeGroupLocked() uint32 {
	if n := len(s.freeGroups); n > 0 {
		i := s.freeGroups[n-1]
		s.freeGroups = s.freeGroups[:n-1]
		return i
	}
	s.groups = append(s.groups, group{})
	return uint32(len(s.groups) - 1)
}

// sight is a flow as a look at its slot found it.
type sight struct {
	flow     *Flow
	up, down uint64
	active   int64
}

func (p *slot) sight(f *Flow) sight {
	return sight{f, p.sampledUp + p.up.pending(), p.sampledDown + p.down.pending(), p.active}
}

// close takes the flow of id out. What it moved since the last sample goes to its
// group, from which the next tick takes it. False: no such flow, or not any more.
func (s *shard) close(id flow.ID) (final sight, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.index[id]
	if !ok {
		return sight{}, false
	}
	b := &s.blocks[i/blockSize]
	p := &b.slots[i%blockSize]
	up, down := p.up.retire(), p.down.retire()
	g := &s.groups[p.group]
	g.up += up
	g.down += down
	g.flows--
	final = sight{b.flows[i%blockSize], p.sampledUp + up, p.sampledDown + down, p.active}
	b.flows[i%blockSize] = nil
	s.free = append(s.free, i)
	delete(s.index, id)
	return final, true
}

// get looks one flow up.
func (s *shard) get(id flow.ID) (sight, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.index[id]
	if !ok {
		return sight{}, false
	}
	b := &s.blocks[i/blockSize]
	return b.slots[i%blockSize].sight(b.flows[i%blockSize]), true
}

// look appends the live flows of one chunk of slots; more tells that others follow it.
func (s *shard) look(seen []sight, from int) (_ []sight, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := min(from+scanChunk, s.slots)
	for i := from; i < end; i++ {
		b := &s.blocks[i/blockSize]
		if f := b.flows[i%blockSize]; f != nil {
			seen = append(seen, b.slots[i%blockSize].sight(f))
		}
	}
	return seen, end < s.slots
}

// sample moves what one chunk of slots counted into their groups. It reads free
// slots too: they hold nothing.
func (s *shard) sample(from int, now int64) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := min(from+scanChunk, s.slots)
	for i := from; i < end; i++ {
		p := &s.blocks[i/blockSize].slots[i%blockSize]
		up, down := p.up.take(), p.down.take()
		if up|down == 0 {
			continue
		}
		p.sampledUp += up
		p.sampledDown += down
		p.active = now
		g := &s.groups[p.group]
		g.up += up
		g.down += down
	}
	return end < s.slots
}

// drain appends one chunk of groups as they are, empties them, and gives up those
// that no live flow is in.
func (s *shard) drain(taken []group, from int) (_ []group, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := min(from+scanChunk, len(s.groups))
	for i := from; i < end; i++ {
		g := &s.groups[i]
		if !g.used {
			continue
		}
		taken = append(taken, *g)
		g.up, g.down = 0, 0
		if g.flows == 0 {
			delete(s.groupIndex, g.key)
			*g = group{}
			s.freeGroups = append(s.freeGroups, uint32(i))
		}
	}
	return taken, end < len(s.groups)
}
