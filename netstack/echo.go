package netstack

import (
	"net/netip"
	"slices"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// Echo requests take the way of datagrams: the echo id stands for the client's
// port, and port 0 for the far side's. The gateway answers for nobody but its own
// addresses on the device; everybody else's answer is SendEchoReplies.

// deliverEcho gives an echo request to the handler, or answers it.
func (s *Stack) deliverEcho(b *Batch, head, tail []byte, p *wire.Packet) {
	first, second := parts(head, tail, p)
	t := flow.Train{
		Peer:         flow.Destination{Addr: p.Destination()},
		Payload:      first,
		TClass:       p.TClass,
		DontFragment: p.DontFragment,
		Seq:          p.EchoSeq,
	}
	if !slices.Contains(s.cfg.Addresses, p.Dst) {
		s.gather(b, &flow.Flow{Inbound: s.cfg.Tag, Network: flow.ICMP, Source: p.Source()}, &t, second)
		return
	}
	whole := joined(first, second)
	defer whole.Release()
	t.Payload, t.DontFragment = whole.AsSlice(), false
	s.sendEchoReply(p.Source(), &t)
}

// SendEchoReplies sends echo replies to a client, whose port is the echo id: each
// from its Peer's address and with its Seq. It returns the bytes of payload that
// the device took.
func (s *Stack) SendEchoReplies(client netip.AddrPort, ts []flow.Train) (moved int) {
	for i := range ts {
		if s.sendEchoReply(client, &ts[i]) {
			moved += len(ts[i].Payload)
		}
	}
	return moved
}

// sendEchoReply sends one echo reply, and tells whether the device took it. It may
// be about a payload in the device's batch, which it does not keep.
func (s *Stack) sendEchoReply(client netip.AddrPort, t *flow.Train) (ok bool) {
	h := s.replyHeader(client, t, 1)
	b := s.builder.Get().(*udpBuilder)
	defer s.builder.Put(b)
	head := h.AppendEcho(b.header[:0], true, client.Port(), t.Seq, t.Payload)
	switch {
	case head == nil:
		s.cfg.Drops.Add(flow.DropMalformed, 1)
	case len(head)+len(t.Payload) > s.mtu(client.Addr()):
		proto := uint8(wire.ProtoICMPv6)
		if client.Addr().Is4() {
			proto = wire.ProtoICMP
		}
		ok = s.sendFragments(b, hashOf(client), h, proto, head, t.Payload)
	default:
		b.bufs = [2][]byte{head, t.Payload}
		ok = s.write(hashOf(client), b.bufs[:], Offload{}, 1)
	}
	b.bufs = [2][]byte{}
	return ok
}
