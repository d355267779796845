package netstack

import (
	"github.com/sagernet/gvisor/pkg/buffer"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// Datagrams on their way in: what a client sends is gathered while its batch is
// delivered, and goes to the handler at once, so that what looking it up, locking
// and sending cost is paid for many. Payloads stay in the batch's views. Datagrams of
// one client keep their order, those of several have none.

const (
	maxBursts = 4        // clients whose datagrams are gathered at once
	spareRoom = 16 << 10 // bytes of burst.spare
)

// bursts are what clients sent, as far as it was not handed on yet.
type bursts struct {
	open [maxBursts]burst
	hand int // the one that makes room next
}

// burst is what one client sent.
type burst struct {
	f     flow.Flow
	n     int
	ts    [BatchSize]flow.Train
	spare []byte // room for datagrams that lie in both views of their packet
	used  int    // bytes of spare
}

// of is the burst of f's client, with room for n trains more and so many bytes of
// spare. What is in the way is handed on.
func (b *bursts) of(h Handler, f *flow.Flow, n, spare int) *burst {
	at := -1
	for i := range b.open {
		if r := &b.open[i]; r.n == 0 {
			at = i
		} else if r.is(f) {
			at = i
			break
		}
	}
	if at < 0 {
		at = b.hand
		b.hand = (at + 1) % maxBursts
	}
	r := &b.open[at]
	if r.n > 0 && !r.is(f) || r.n+n > len(r.ts) || r.used+spare > spareRoom {
		r.flush(h)
	}
	if r.n == 0 {
		r.f = *f
	}
	return r
}

// flush hands on all that was gathered.
func (b *bursts) flush(h Handler) {
	for i := range b.open {
		b.open[i].flush(h)
	}
}

// is reports whether the burst is of f's client.
func (r *burst) is(f *flow.Flow) bool { return r.f.Source == f.Source && r.f.Network == f.Network }

// add gathers a train, for which there is room.
func (r *burst) add(t *flow.Train) {
	r.ts[r.n] = *t
	r.n++
}

// flush hands on what was gathered.
func (r *burst) flush(h Handler) {
	if r.n > 0 {
		h.HandleDatagrams(r.f, r.ts[:r.n])
	}
	r.n, r.used = 0, 0
}

// take is room for n bytes until the next flush, if there are as many.
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
	if len(second) > 0 && t.Segment > 0 && t.Segment <= smallView {
		addSplit(b.bursts.of(s.cfg.Handler, &f, 3, t.Segment), t, first, second)
		return
	}
	t.Payload = first
	s.gather(b, &f, &t, second)
}

// gather adds a train to the burst of f's client. Its payload goes on in second, if
// that is not empty: it is put together, and the burst handed on at once.
func (s *Stack) gather(b *Batch, f *flow.Flow, t *flow.Train, second []byte) {
	r := b.bursts.of(s.cfg.Handler, f, 1, 0)
	if len(second) == 0 {
		r.add(t)
		return
	}
	whole := joined(t.Payload, second)
	defer whole.Release()
	t.Payload = whole.AsSlice()
	r.add(t)
	r.flush(s.cfg.Handler)
}

// addSplit gathers a train that lies in both views: the whole datagrams in the first
// one, the one that begins there and ends in the second, and the others.
func addSplit(r *burst, t flow.Train, first, second []byte) {
	var middle []byte
	across := len(first) % t.Segment
	if across > 0 {
		middle = r.take(min(t.Segment, across+len(second)))
		n := copy(middle, first[len(first)-across:])
		second = second[copy(middle[n:], second):]
	}
	for _, part := range [...][]byte{first[:len(first)-across], middle, second} {
		if t.Payload = part; len(part) > 0 {
			r.add(&t)
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
