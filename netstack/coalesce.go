package netstack

import (
	"bytes"
	"encoding/binary"

	"github.com/sagernet/gvisor/pkg/buffer"

	"gatewayd/netstack/wire"
)

// Coalescing: a device without offloads gives packets of the MTU's size, and what
// gVisor does with one costs several times what it costs to read it. Segments of
// one flow that follow each other in a batch therefore go on as one packet, as if
// the kernel's GRO had joined them.
//
// A run is such segments. They differ in nothing but their bytes, sequence numbers
// and lengths (and the IPv4 id, which is for fragments and means nothing any more);
// PSH and FIN are allowed in the last one. Whatever else comes from the flow ends
// its run first, so that a flow's packets stay in order; the end of the batch ends
// all. Nothing waits for a later batch.
type run struct {
	flow        tuple
	first, last uint8  // packets of the batch
	next        uint32 // the sequence number after its last byte
	length      int    // of the IP packet that it becomes
	version     uint8
}

const (
	// maxRuns is how many flows of a batch can have a run at once. One more ends
	// the run that began first.
	maxRuns = 8
	// maxRun is the longest IP packet that a run becomes, in bytes.
	maxRun = 65535
)

// coalesce takes packet i, which is TCP and begins with head, into a run of its
// flow, or delivers it.
func (s *Stack) coalesce(b *Batch, i int, head []byte, p *wire.Packet) {
	if len(b.runs) == 0 && !joins(head, p) {
		s.deliverTCP(b, i, p)
		return
	}
	tp := tuple{client: p.Source(), dest: p.Destination()}
	at := b.runOf(tp)
	if !joins(head, p) {
		if at >= 0 {
			s.endRun(b, at)
		}
		s.deliverTCP(b, i, p)
		return
	}
	if at >= 0 && !b.continues(&b.runs[at], head, p) {
		s.endRun(b, at)
		at = -1
	}
	if at < 0 {
		if len(b.runs) == maxRuns {
			s.endRun(b, 0)
		}
		at = b.begin(tp, i, p)
	}
	b.extend(&b.runs[at], i, head, p)
	if p.TCPFlags&(wire.PSH|wire.FIN) != 0 {
		s.endRun(b, at)
	}
}

// joins reports whether a segment may be in a run at all: it is nothing but data.
// A mark of congestion is an event (RFC 3168) that has to stay one.
func joins(head []byte, p *wire.Packet) bool {
	const congestion = 3
	bare := wire.IPv4HeaderLen
	if p.Version == 6 {
		bare = wire.IPv6HeaderLen
	}
	return p.PayloadLen > 0 && p.TCPFlags&^(wire.PSH|wire.FIN) == wire.ACK &&
		p.HeaderLen == bare && p.Length <= len(head) && p.TClass&congestion != congestion
}

// runOf finds the run of a flow, or gives -1.
func (b *Batch) runOf(tp tuple) int {
	for at := range b.runs {
		if b.runs[at].flow == tp {
			return at
		}
	}
	return -1
}

// begin adds a run that packet i will be the first of.
func (b *Batch) begin(tp tuple, i int, p *wire.Packet) (at int) {
	b.runs = append(b.runs, run{
		flow: tp, first: uint8(i), last: uint8(i), length: p.PayloadOffset, version: p.Version,
	})
	return len(b.runs) - 1
}

// extend makes packet i the last of a run.
func (b *Batch) extend(r *run, i int, head []byte, p *wire.Packet) {
	q := &b.packets[i]
	q.start, q.end = uint16(p.PayloadOffset), uint16(p.PayloadOffset+p.PayloadLen)
	b.packets[r.last].next = uint8(i)
	r.last = uint8(i)
	r.next = binary.BigEndian.Uint32(head[p.HeaderLen+4:]) + uint32(p.PayloadLen)
	r.length += p.PayloadLen
}

// continues reports whether a segment that joins follows on a run of its flow.
func (b *Batch) continues(r *run, head []byte, p *wire.Packet) bool {
	first := &b.packets[r.first]
	if int(first.start) != p.PayloadOffset || r.length+p.PayloadLen > maxRun {
		return false
	}
	f := first.small.AsSlice()
	ip := f[0] == head[0] && f[1] == head[1] // version, header length, traffic class
	if p.Version == 4 {
		ip = ip && bytes.Equal(f[6:9], head[6:9]) // DF, TTL
	} else {
		ip = ip && f[2] == head[2] && f[3] == head[3] && f[7] == head[7] // flow label, hop limit
	}
	if !ip {
		return false
	}
	f, t := f[p.HeaderLen:p.PayloadOffset], head[p.HeaderLen:p.PayloadOffset]
	return binary.BigEndian.Uint32(t[4:]) == r.next &&
		bytes.Equal(f[8:13], t[8:13]) && // acknowledgement, header length
		bytes.Equal(f[14:16], t[14:16]) && // window
		bytes.Equal(f[18:], t[18:]) // urgent pointer, options
}

// endRun delivers a run and forgets it.
func (s *Stack) endRun(b *Batch, at int) {
	s.deliverRun(b, &b.runs[at])
	b.runs = append(b.runs[:at], b.runs[at+1:]...)
}

// deliverRuns delivers what runs are left, at the end of a batch.
func (s *Stack) deliverRuns(b *Batch) {
	for at := range b.runs {
		s.deliverRun(b, &b.runs[at])
	}
	b.runs = b.runs[:0]
}

// deliverRun gives gVisor the packet that a run becomes. Its bytes are copied: in
// one piece they are read and written at once later, and a view for each packet
// would cost more than the copy.
func (s *Stack) deliverRun(b *Batch, r *run) {
	if r.first == r.last {
		s.deliverIP(r.version, b.take(int(r.first), r.length))
		return
	}
	first := &b.packets[r.first]
	v := buffer.NewView(r.length)
	v.Write(first.small.AsSlice()[:first.end]) //nolint:errcheck // it has the room
	for i := r.first; i != r.last; {
		i = b.packets[i].next
		q := &b.packets[i]
		v.Write(q.small.AsSlice()[q.start:q.end]) //nolint:errcheck
	}
	last := &b.packets[r.last]
	flags := last.small.AsSlice()[tcpFlagsAt(r.version)]
	relength(v.AsSlice(), r.version, flags)
	s.deliverIP(r.version, buffer.MakeWithView(v))
}

// tcpFlagsAt is where a packet without extension headers or options has its flags.
func tcpFlagsAt(version uint8) int {
	if version == 6 {
		return wire.IPv6HeaderLen + 13
	}
	return wire.IPv4HeaderLen + 13
}

// relength makes the header of a run's first packet that of the whole, flags
// being those of its last. The TCP checksum stays that of the first packet: those
// of all were verified, and gVisor trusts that.
func relength(b []byte, version, flags uint8) {
	b[tcpFlagsAt(version)] = flags
	if version == 6 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-wire.IPv6HeaderLen))
		return
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], ^wire.Sum(b[:wire.IPv4HeaderLen], 0))
}
