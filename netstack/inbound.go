package netstack

import (
	"slices"

	"github.com/sagernet/gvisor/pkg/buffer"
	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// The way in, all on the goroutine that reads the device: parse and check the
// headers, verify the checksum unless the device did, then hand UDP to the handler
// and, once the segments of the batch that belong together are joined
// (coalesce.go), TCP to gVisor, which queues it for its own processors. The batch
// owns its views; what gVisor keeps is taken out of the batch and replaced.

const (
	// A packet up to copySmall bytes is copied into a view of its own size, and
	// one whose tail is shorter than copyTail leaves the 64 KiB view to the next.
	copySmall = 512
	copyTail  = 16 << 10
)

func (s *Stack) deliver(b *Batch) {
	for i := range b.n {
		s.deliverPacket(b, i)
	}
	s.deliverRuns(b)
	b.bursts.flush(s.cfg.Handler)
}

func (s *Stack) deliverPacket(b *Batch, i int) {
	head, tail, off := b.Packet(i)
	var p wire.Packet
	cause, ok := wire.Parse(head, len(head)+len(tail), off.GSO == GSOUDP, &p)
	if ok {
		cause, ok = wire.Deliverable(p.Src, p.Dst)
	}
	if ok {
		cause, ok = s.arrives(&p)
	}
	if ok && p.Fragment {
		if !s.reassemble(b, i, &p) {
			return
		}
		head, tail, off = b.Packet(i)
	}
	if ok {
		cause, ok = s.checked(head, tail, &p, off)
	}
	if !ok {
		s.cfg.Drops.Add(cause, 1)
		s.explain(cause, head, &p)
		return
	}
	switch {
	case p.Proto == wire.ProtoTCP:
		s.coalesce(b, i, head, &p)
	case p.Proto == wire.ProtoUDP:
		s.deliverUDP(b, head, tail, &p, off)
	case p.IsEchoRequest():
		s.deliverEcho(b, head, tail, &p)
	default: // an ICMP error
		s.deliverError(b, i, head, &p)
	}
}

// arrives says whether a packet may go through the gateway, which is one hop, or
// ends at it.
func (s *Stack) arrives(p *wire.Packet) (flow.Drop, bool) {
	if s.cfg.IsBroadcast != nil && s.cfg.IsBroadcast(p.Dst) {
		return flow.DropMulticast, false
	}
	return flow.DropTTL, p.TTL > 1 || slices.Contains(s.cfg.Addresses, p.Dst)
}

// explain tells the sender of a dropped packet what a router would tell it.
func (s *Stack) explain(cause flow.Drop, head []byte, p *wire.Packet) {
	switch {
	case cause == flow.DropTTL:
		s.sendOf(wire.TimeExceeded, head)
	case cause == flow.DropProtocol && p.Network() == 0: // ICMP of a kind that is not carried is not unknown
		s.sendOf(wire.ProtocolUnreachable, head)
	case p.Problem != wire.Problem{}:
		if _, ok := wire.Deliverable(p.Src, p.Dst); ok {
			s.sendError(wire.Unreachable{Kind: wire.ParameterProblem, From: s.router(p.Dst), Problem: p.Problem}, head)
		}
	}
}

// checked says whether a well-formed packet goes on. With its receive checksum
// capability gVisor trusts every packet, so that only verified ones may reach it.
func (s *Stack) checked(head, tail []byte, p *wire.Packet, off Offload) (flow.Drop, bool) {
	switch {
	case p.Proto == wire.ProtoTCP:
	case p.Proto == wire.ProtoUDP:
		if p.DstPort == 0 {
			return flow.DropDestinationZero, false
		}
	case p.IsEchoRequest():
	default:
		var inner wire.Packet
		if !wire.Quoted(head, p, &inner) || inner.Proto != wire.ProtoTCP && !tooBig(p, &inner) {
			return flow.DropProtocol, false
		}
	}
	trusted := off.Flags&(OffloadNeedsCsum|OffloadDataValid) != 0
	if !trusted && !wire.VerifyTransport(head, tail, p) {
		return flow.DropChecksum, false
	}
	return flow.DropHandshake, p.Proto != wire.ProtoTCP || s.acknowledges(head, p)
}

// deliverTCP gives packet i to gVisor as it is.
func (s *Stack) deliverTCP(b *Batch, i int, p *wire.Packet) {
	if p.TCPFlags&(wire.SYN|wire.ACK|wire.RST) == wire.SYN && s.reopens(b, i, p) {
		return
	}
	s.deliverIP(p.Version, b.take(i, p.Length))
}

// deliverIP gives a packet of that version of IP to gVisor.
func (s *Stack) deliverIP(version uint8, packet buffer.Buffer) {
	proto := tcpip.NetworkProtocolNumber(header.IPv4ProtocolNumber)
	if version == 6 {
		proto = header.IPv6ProtocolNumber
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: packet})
	s.link.dispatcher.DeliverNetworkPacket(proto, pkt)
	pkt.DecRef()
}

// deliverError gives an ICMP error that quotes TCP to gVisor, and keeps what
// another one tells.
func (s *Stack) deliverError(b *Batch, i int, head []byte, p *wire.Packet) {
	var quoted wire.Packet
	if wire.Quoted(head, p, &quoted); quoted.Proto == wire.ProtoTCP {
		s.deliverTCP(b, i, p)
		return
	}
	s.learnMTU(quoted.Dst, int(p.MTU))
}

// take moves the first n bytes of packet i out of the batch.
func (b *Batch) take(i, n int) buffer.Buffer {
	r := &b.packets[i]
	if n <= copySmall {
		return buffer.MakeWithView(buffer.NewViewWithData(r.small.AsSlice()[:n]))
	}
	if n < r.small.Size() {
		r.small.CapLength(n)
	}
	buf := buffer.MakeWithView(r.small)
	r.small = nil
	if r.large == nil || n <= smallView {
		return buf
	}
	if n -= smallView; n < copyTail {
		buf.Append(buffer.NewViewWithData(r.large.AsSlice()[:n])) //nolint:errcheck // a fresh view
		return buf
	}
	r.large.CapLength(n)
	buf.Append(r.large) //nolint:errcheck
	r.large = nil
	return buf
}
