package netstack

import (
	"github.com/sagernet/gvisor/pkg/buffer"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// Datagrams on their way in: what one client sent one after the other is gathered
// while its batch is delivered, and goes to the handler at once, so that what
// looking it up, locking and sending cost is paid for many. Payloads stay in the
// batch's views.

// burst is what the same client sent, as far as it was not handed on yet.
type burst struct {
	f     flow.Flow
	n     int
	ts    [BatchSize]flow.Train
	spare []byte // room for datagrams that lie in both views of their packet
	used  int    // bytes of spare
}

// spareRoom is the bytes of burst.spare.
const spareRoom = 16 << 10

// add gathers a train. It hands on first what another client sent.
func (r *burst) add(h Handler, f *flow.Flow, t *flow.Train) {
	r.prepare(h, f, 1, 0)
	r.ts[r.n] = *t
	r.n++
}

// prepare hands on what was gathered, unless it is of the same client and n trains
// more, and so many bytes of spare, have room.
func (r *burst) prepare(h Handler, f *flow.Flow, n, spare int) {
	switch {
	case r.n == 0:
		r.f = *f
	case r.f.Source != f.Source || r.f.Network != f.Network || r.n+n > len(r.ts) || r.used+spare > spareRoom:
		r.flush(h)
		r.f = *f
	}
}

// flush hands on what was gathered.
func (r *burst) flush(h Handler) {
	if r.n > 0 {
		h.HandleDatagrams(r.f, r.ts[:r.n])
	}
	r.n, r.used = 0, 0
}

// take is room for n bytes until the next flush, after prepare.
func (r *burst) take(n int) []byte {
	if r.spare == nil {
		r.spare = make([]byte, spareRoom)
	}
	r.used += n
	return r.spare[r.used-n : r.used]
}

// deliverUDP gathers a datagram, or the train that a USO packet is.
func (s *Stack) deliverUDP(b *Batch, head, tail []byte, p *wire.Packet, off Offload) {
	f := flow.Flow{Inbound: s.cfg.Tag, Network: flow.UDP, Source: p.Source()}
	t := flow.Train{
		Peer:         flow.Destination{Addr: p.Destination()},
		TClass:       p.TClass,
		DontFragment: p.DontFragment,
	}
	if off.GSO == GSOUDP {
		t.Segment = int(off.GSOSize)
	}
	first, second := parts(head, tail, p)
	switch {
	case len(second) == 0:
		t.Payload = first
		b.burst.add(s.cfg.Handler, &f, &t)
	case t.Segment > 0 && t.Segment <= smallView:
		s.deliverSplit(b, &f, t, first, second)
	default:
		whole := joined(first, second)
		t.Payload = whole.AsSlice()
		b.burst.add(s.cfg.Handler, &f, &t)
		b.burst.flush(s.cfg.Handler)
		whole.Release()
	}
}

// deliverSplit gathers a train that lies in both views: the whole datagrams in the
// first one, the one that begins there and ends in the second, and the others.
func (s *Stack) deliverSplit(b *Batch, f *flow.Flow, t flow.Train, first, second []byte) {
	across := len(first) % t.Segment
	var middle []byte
	b.burst.prepare(s.cfg.Handler, f, 3, t.Segment)
	if across > 0 {
		middle = b.burst.take(min(t.Segment, across+len(second)))
		n := copy(middle, first[len(first)-across:])
		second = second[copy(middle[n:], second):]
	}
	for _, part := range [...][]byte{first[:len(first)-across], middle, second} {
		if t.Payload = part; len(part) > 0 {
			b.burst.add(s.cfg.Handler, f, &t)
		}
	}
}

// parts are a packet's payload, in the first view and in the second, which only
// packets over 2 KiB have.
func parts(head, tail []byte, p *wire.Packet) (first, second []byte) {
	first = head[min(p.PayloadOffset, len(head)):min(p.PayloadOffset+p.PayloadLen, len(head))]
	return first, tail[:min(p.PayloadLen-len(first), len(tail))]
}

// joined is a copy of a payload in one piece, to be released.
func joined(first, second []byte) *buffer.View {
	whole := buffer.NewView(len(first) + len(second))
	whole.Write(first)  //nolint:errcheck // grows as needed
	whole.Write(second) //nolint:errcheck
	return whole
}
