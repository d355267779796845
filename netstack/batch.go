package netstack

import (
	"github.com/sagernet/gvisor/pkg/buffer"
)

const (
	// BatchSize is how many packets a Batch holds at most.
	BatchSize = 64
	smallView = 2048
)

// Batch is room for packets that a Device reads. It belongs to one goroutine,
// which fills it and delivers it, over and over:
//
//	for b.Next() { n, o := read(b.Bufs()); b.Add(n, o) }; b.Deliver()
//
// Packets are read into a 2 KiB view and what does not fit there into a 64 KiB
// view, so that a small packet never pins a large chunk.
type Batch struct {
	deliver func(*Batch)
	large   *buffer.View
	n       int
	packets [BatchSize]received
	bufs    [2][]byte
	runs    []run  // of its packets, while they are delivered
	bursts  bursts // of its datagrams, as above
}

type received struct {
	small, large *buffer.View // large is nil when the packet fitted into small
	offload      Offload

	// Of a packet in a run: where its payload is in small, and the one after it.
	start, end uint16
	next       uint8
}

// NewBatch makes a batch whose packets go to deliver, which may keep none of
// what Packet returns. A Stack makes its own; this one is for a Device's tests.
func NewBatch(deliver func(*Batch)) *Batch {
	return &Batch{deliver: deliver, runs: make([]run, 0, maxRuns)}
}

// Len is the number of packets in the batch.
func (b *Batch) Len() int { return b.n }

// Packet is packet i: its first bytes, the rest if it was larger than the first
// view, and its offload. Valid while the batch is being delivered.
func (b *Batch) Packet(i int) (head, tail []byte, o Offload) {
	p := &b.packets[i]
	head = p.small.AsSlice()
	if p.large != nil {
		tail = p.large.AsSlice()
	}
	return head, tail, p.offload
}

// Full reports that no further packet fits; Deliver makes room.
func (b *Batch) Full() bool { return b.n == BatchSize }

// Bufs is where to read the next packet, scattered over both. They stay the
// same until Add. Not to be called on a full batch.
func (b *Batch) Bufs() [][]byte {
	p := &b.packets[b.n]
	if p.small == nil {
		p.small = buffer.NewViewSize(smallView)
	}
	if b.large == nil {
		b.large = buffer.NewViewSize(MaxPacket - smallView)
	}
	restore(p.small, smallView)
	restore(b.large, MaxPacket-smallView)
	b.bufs[0], b.bufs[1] = p.small.AsSlice(), b.large.AsSlice()
	return b.bufs[:]
}

// restore gives a view that was cut to its packet its full size again.
func restore(v *buffer.View, size int) {
	if v.Size() < size {
		v.Reset()
		v.Grow(size)
	}
}

// Add says that a packet of n bytes was read into Bufs.
func (b *Batch) Add(n int, o Offload) {
	p := &b.packets[b.n]
	p.offload = o
	p.large = nil
	if n <= smallView {
		p.small.CapLength(n)
	} else {
		p.large, b.large = b.large, nil
		p.large.CapLength(n - smallView)
	}
	b.n++
}

// replace makes packet i one of n bytes, at most MaxPacket, without offload, and
// gives the room for them. What the packet was is lost.
func (b *Batch) replace(i, n int) (head, tail []byte) {
	p := &b.packets[i]
	p.offload = Offload{}
	b.recycle(p)
	restore(p.small, smallView)
	if n <= smallView {
		p.small.CapLength(n)
		return p.small.AsSlice(), nil
	}
	if p.large, b.large = b.large, nil; p.large == nil {
		p.large = buffer.NewViewSize(MaxPacket - smallView)
	}
	restore(p.large, MaxPacket-smallView)
	p.large.CapLength(n - smallView)
	return p.small.AsSlice(), p.large.AsSlice()
}

// Deliver hands the packets over and empties the batch. It returns when each
// packet was taken or dropped, and does not wait for anything else.
func (b *Batch) Deliver() {
	if b.n > 0 {
		b.deliver(b)
		for i := range b.n {
			b.recycle(&b.packets[i])
		}
		b.n = 0
	}
}

// recycle keeps one 64 KiB view that nobody took for the next packet.
func (b *Batch) recycle(p *received) {
	switch {
	case p.large == nil:
	case b.large == nil:
		b.large = p.large
	default:
		p.large.Release()
	}
	p.large = nil
}
