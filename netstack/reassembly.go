package netstack

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sagernet/gvisor/pkg/buffer"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// The way of a fragment, on the goroutine that reads the device: its data is
// copied into its datagram's set, and the fragment that completes a set is
// replaced in the batch by the whole datagram, which is then parsed and verified
// like any packet. Nothing of a fragment is believed before: a set is a claim of
// one source, and costs only that source.
//
// A set is collecting, or spoilt: after an overlap it holds nothing and throws
// away what still comes of its datagram (RFC 5722). It leaves the table when it
// is whole, when its time is over, or when newer ones need the room. Of one whose
// time is over, and whose first fragment came, the sender is told.

// fragmentLimits bound a reassembler. Bytes count what data and bookkeeping take
// in memory, not what they tell.
type fragmentLimits struct {
	bytes, sourceBytes int // in all, and of one source address
	sets, sourceSets   int // as above
	pieces             int // of one set
	life4, life6       time.Duration
}

// defaultFragmentLimits hold for one device. A datagram of 64 KiB on a link with
// an MTU of 1,500 takes about 100 KiB. Over IPv4 Linux waits 30 s; the minute over
// IPv6 is RFC 8200's (4.5).
func defaultFragmentLimits() fragmentLimits {
	return fragmentLimits{
		bytes: 4 << 20, sourceBytes: 1 << 20,
		sets: 1024, sourceSets: 64,
		pieces: 256,
		life4:  30 * time.Second, life6: time.Minute,
	}
}

const (
	fragmentSweep = time.Second // between looks for sets whose time is over

	// A set that is used again has room for keptPieces at most: it is not charged
	// for that.
	keptPieces = 64

	setOverhead   = 512 // bytes of a set's own
	pieceOverhead = 192 // bytes of a piece beside its data

	congestion = 3 // of a traffic class: congestion experienced, or the mask of what tells of it
)

// fragmentKey names a datagram. Over IPv6 any header may follow the fragment
// header, and only the first fragment's counts: proto is 0.
type fragmentKey struct {
	src, dst [16]byte
	id       uint32
	proto    uint8
}

// piece is the data of one fragment.
type piece struct {
	off, end int // bytes of the datagram's payload
	data     *buffer.View
}

// fragmentSet is what came of one datagram so far.
type fragmentSet struct {
	key    fragmentKey
	until  time.Time
	spoilt bool
	bytes  int // of memory that it is charged

	// pieces are sorted and do not overlap. The payload has total bytes, once the
	// last fragment told (-1 before), of which have are there.
	pieces []piece
	have   int
	total  int

	// header and proto are the first fragment's, congested is any one's.
	header    wire.Header
	proto     uint8
	congested bool

	older, newer *fragmentSet
}

// fragmentShare is what the sets of one source take.
type fragmentShare struct{ sets, bytes int }

// reassembler keeps the fragments of one device until their datagrams are whole.
type reassembler struct {
	limits fragmentLimits
	drops  *flow.Drops
	tell   func(*fragmentSet) // that its time is over; called with no lock held
	pool   sync.Pool          // *fragmentSet

	mu struct {
		sync.Mutex
		sets    map[fragmentKey]*fragmentSet
		sources map[[16]byte]fragmentShare
		bytes   int
		ends    fragmentSet // of the list of sets by age: newer is the oldest, older the newest
	}
}

func newReassembler(limits fragmentLimits, drops *flow.Drops, tell func(*fragmentSet)) *reassembler {
	r := &reassembler{limits: limits, drops: drops, tell: tell}
	r.pool.New = func() any { return new(fragmentSet) }
	r.mu.sets = map[fragmentKey]*fragmentSet{}
	r.mu.sources = map[[16]byte]fragmentShare{}
	r.mu.ends.older, r.mu.ends.newer = &r.mu.ends, &r.mu.ends
	return r
}

// add copies the data of fragment p, whose bytes are head and tail. If that makes
// a datagram whole, the caller gets its set, to write and then to release.
func (r *reassembler) add(now time.Time, head, tail []byte, p *wire.Packet) *fragmentSet {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.setLocked(now, p)
	if s.spoilt {
		r.drops.Add(flow.DropFragment, 1)
		return nil
	}
	n := len(s.pieces)
	data := dataOf(head, tail, p)
	ok := s.place(data, p)
	if len(s.pieces) == n { // it came twice, or contradicts what came before
		data.Release()
		r.drops.Add(flow.DropFragment, 1)
	} else {
		r.chargeLocked(s, data.Capacity()+pieceOverhead)
	}
	switch {
	case !ok || len(s.pieces) > r.limits.pieces:
		r.spoilLocked(s)
	case s.have == s.total:
		r.removeLocked(s)
		return s
	}
	r.makeRoomLocked(s.key.src)
	return nil
}

// dataOf copies what fragment p carries into memory of its size.
func dataOf(head, tail []byte, p *wire.Packet) *buffer.View {
	data := buffer.NewView(p.PayloadLen)
	first := head[min(p.PayloadOffset, len(head)):min(p.Length, len(head))]
	data.Write(first)                                          //nolint:errcheck // grows as needed
	data.Write(tail[:min(p.PayloadLen-len(first), len(tail))]) //nolint:errcheck
	return data
}

// setLocked finds or begins the set of p's datagram.
func (r *reassembler) setLocked(now time.Time, p *wire.Packet) *fragmentSet {
	k := fragmentKey{src: p.Src.As16(), dst: p.Dst.As16(), id: p.ID}
	life := r.limits.life6
	if p.Version == 4 {
		k.proto, life = p.Proto, r.limits.life4
	}
	s := r.mu.sets[k]
	if s != nil && now.Before(s.until) {
		return s
	}
	if s != nil {
		r.dropLocked(s)
	}
	s = r.pool.Get().(*fragmentSet)
	*s = fragmentSet{key: k, until: now.Add(life), pieces: s.pieces[:0], total: -1}
	r.mu.sets[k] = s
	s.older, s.newer = r.mu.ends.older, &r.mu.ends
	s.older.newer, s.newer.older = s, s
	share := r.mu.sources[k.src]
	share.sets++
	r.mu.sources[k.src] = share
	r.chargeLocked(s, setOverhead)
	return s
}

// place adds data to the set, unless it was there already. It returns false when
// p contradicts what came before: it overlaps, or goes beyond the end.
func (s *fragmentSet) place(data *buffer.View, p *wire.Packet) bool {
	off, end := p.FragOffset, p.FragOffset+p.PayloadLen
	i, same := slices.BinarySearchFunc(s.pieces, off, func(x piece, off int) int { return cmp.Compare(x.off, off) })
	if same {
		x := &s.pieces[i]
		return x.end == end && p.MoreFragments == (end != s.total) && bytes.Equal(x.data.AsSlice(), data.AsSlice())
	}
	if i > 0 && s.pieces[i-1].end > off || i < len(s.pieces) && s.pieces[i].off < end {
		return false
	}
	if s.total >= 0 && (!p.MoreFragments || end >= s.total) || !p.MoreFragments && i < len(s.pieces) {
		return false
	}
	s.pieces = slices.Insert(s.pieces, i, piece{off, end, data})
	s.have += end - off
	if !p.MoreFragments {
		s.total = end
	}
	if off == 0 {
		s.header = wire.Header{Src: p.Src, Dst: p.Dst, TClass: p.TClass, TTL: p.TTL, ID: p.ID}
		s.proto = p.Proto
	}
	s.congested = s.congested || p.TClass&congestion == congestion
	return true
}

func (r *reassembler) chargeLocked(s *fragmentSet, n int) {
	s.bytes += n
	r.mu.bytes += n
	share := r.mu.sources[s.key.src]
	share.bytes += n
	r.mu.sources[s.key.src] = share
}

// makeRoomLocked drops the oldest sets of a source that has more than its share,
// and then the oldest of all.
func (r *reassembler) makeRoomLocked(src [16]byte) {
	for s := r.mu.ends.newer; s != &r.mu.ends; {
		next := s.newer
		share := r.mu.sources[src]
		if share.sets <= r.limits.sourceSets && share.bytes <= r.limits.sourceBytes {
			break
		}
		if s.key.src == src {
			r.dropLocked(s)
		}
		s = next
	}
	for len(r.mu.sets) > r.limits.sets || r.mu.bytes > r.limits.bytes {
		r.dropLocked(r.mu.ends.newer)
	}
}

// spoilLocked throws away what a set holds, and keeps it for what still comes.
func (r *reassembler) spoilLocked(s *fragmentSet) {
	r.drops.Add(flow.DropFragment, len(s.pieces))
	s.releasePieces()
	s.spoilt = true
	r.chargeLocked(s, setOverhead-s.bytes)
}

// dropLocked takes a set that will not become whole out of the table.
func (r *reassembler) dropLocked(s *fragmentSet) {
	r.drops.Add(flow.DropFragment, len(s.pieces))
	r.removeLocked(s)
	r.release(s)
}

// removeLocked takes a set out of the table.
func (r *reassembler) removeLocked(s *fragmentSet) {
	r.chargeLocked(s, -s.bytes)
	share := r.mu.sources[s.key.src]
	if share.sets--; share.sets == 0 {
		delete(r.mu.sources, s.key.src)
	} else {
		r.mu.sources[s.key.src] = share
	}
	delete(r.mu.sets, s.key)
	s.older.newer, s.newer.older = s.newer, s.older
	s.older, s.newer = nil, nil
}

// release gives the memory of a set back that is in the table no more.
func (r *reassembler) release(s *fragmentSet) {
	s.releasePieces()
	r.pool.Put(s)
}

func (s *fragmentSet) releasePieces() {
	for i := range s.pieces {
		s.pieces[i].data.Release()
		s.pieces[i].data = nil
	}
	s.pieces = s.pieces[:0]
	if cap(s.pieces) > keptPieces {
		s.pieces = nil
	}
}

// size is the bytes of a whole datagram as a packet.
func (s *fragmentSet) size() int { return s.headerLen() + s.total }

func (s *fragmentSet) headerLen() int {
	if s.header.Dst.Is4() {
		return wire.IPv4HeaderLen
	}
	return wire.IPv6HeaderLen
}

// write writes a whole datagram as a packet into head and then tail, which have
// room for exactly that. Options and headers that every fragment had are left
// out: Parse let none pass that matters to anyone.
func (s *fragmentSet) write(head, tail []byte) {
	if s.congested && s.header.TClass&congestion != 0 { // RFC 3168, 5.3
		s.header.TClass |= congestion
	}
	room := head[len(s.header.AppendIP(head[:0], s.proto, s.total)):]
	for i := range s.pieces {
		data := s.pieces[i].data.AsSlice()
		n := copy(room, data)
		if room = room[n:]; n < len(data) {
			room = tail[copy(tail, data[n:]):]
		}
	}
}

// sweep drops sets whose time is over, until ctx ends.
func (r *reassembler) sweep(ctx context.Context) {
	tick := time.NewTicker(fragmentSweep)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			r.expire(now)
		case <-ctx.Done():
			return
		}
	}
}

func (r *reassembler) expire(now time.Time) {
	for _, s := range r.expired(now) {
		r.drops.Add(flow.DropFragment, len(s.pieces))
		if len(s.pieces) > 0 && s.pieces[0].off == 0 {
			r.tell(s)
		}
		r.release(s)
	}
}

// expired takes the sets whose time is over out of the table.
func (r *reassembler) expired(now time.Time) (over []*fragmentSet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for s := r.mu.ends.newer; s != &r.mu.ends; {
		next := s.newer
		if !now.Before(s.until) {
			r.removeLocked(s)
			over = append(over, s)
		}
		s = next
	}
	return over
}

// tellTimeOver tells the sender of a datagram that did not become whole (RFC 1122,
// 3.3.2; RFC 8200, 4.5), about its first fragment, whose headers are built again.
func (s *Stack) tellTimeOver(set *fragmentSet) {
	var room [wire.MaxUnreachable]byte
	data := set.pieces[0].data.AsSlice()
	h := set.header
	h.MoreFragments = true
	b := h.AppendIP(room[:0], set.proto, len(data))
	b = append(b, data[:min(len(data), len(room)-len(b))]...)
	s.sendOf(wire.ReassemblyTime, b)
}

// reassemble keeps the fragment that packet i of the batch is. If that makes its
// datagram whole, the datagram takes the packet's place, p tells of it, and it is
// true that there is a packet to go on with.
func (s *Stack) reassemble(b *Batch, i int, p *wire.Packet) bool {
	head, tail, _ := b.Packet(i)
	set := s.fragments.add(time.Now(), head, tail, p)
	if set == nil {
		return false
	}
	defer s.fragments.release(set)
	n := set.size()
	head, tail = b.replace(i, n)
	set.write(head, tail)
	cause, ok := wire.Parse(head, n, false, p)
	if ok && p.Fragment { // one inside of another
		cause, ok = flow.DropFragment, false
	}
	if !ok {
		s.cfg.Drops.Add(cause, 1)
	}
	p.DontFragment = false // its sender did it
	return ok
}
