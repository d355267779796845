package netstack

import (
	"net/netip"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// The way back of datagrams, on the goroutine of the outbound's receiver: build
// the headers in a pooled buffer, then write headers and payload to the device. What
// came at once and goes end to end is one USO packet, if the device takes those.

const (
	replyTTL = 64 // Linux's default; the gateway answers in the far side's name

	// maxSegmentsLen is what goes into an IPv4 packet, and into one USO packet.
	maxSegmentsLen = 65535 - wire.IPv4HeaderLen - wire.UDPHeaderLen
)

// udpBuilder is room for what a packet needs beside its payload.
type udpBuilder struct {
	header [wire.MaxHeader]byte
	icmp   [wire.MaxUnreachable]byte
	quote  [wire.MaxUnreachable]byte // of a datagram that was not kept
	bufs   [2][]byte
	parts  [1 + flow.MaxSegments][]byte // of a USO packet
}

// SendDatagrams sends trains to a client, each from its Peer's address. What
// does not fit the device's MTU is fragmented, or if that is forbidden dropped and
// counted. It returns the bytes of payload that the device took.
func (s *Stack) SendDatagrams(client netip.AddrPort, ts []flow.Train) (moved int) {
	b := s.builder.Get().(*udpBuilder)
	for len(ts) > 0 {
		c, n := s.together(b, client, ts)
		if c.Count > 1 {
			moved += s.sendSuper(b, client, &ts[0], c, b.parts[:1+n])
		} else {
			moved += s.sendTrain(b, client, &ts[0])
		}
		ts = ts[n:]
	}
	b.bufs = [2][]byte{}
	s.builder.Put(b)
	return moved
}

// together puts the payloads of the first n trains, which go into one USO packet, into
// b.parts, from the second on, and gives what they are. Without such a packet n is 1,
// and the Count at most 1.
func (s *Stack) together(b *udpBuilder, client netip.AddrPort, ts []flow.Train) (c flow.Coupler, n int) {
	if !s.cfg.Device.CanUSO() {
		return c, 1
	}
	for i := range ts[:min(len(ts), flow.MaxSegments)] {
		t := &ts[i]
		if i > 0 && !t.SameWay(&ts[0]) || !c.Couple(t.Payload, t.Segment, maxSegmentsLen) {
			break
		}
		n = i + 1
		b.parts[n] = t.Payload
	}
	if c.Count > 1 && !s.fits(client, c.Segment) {
		return flow.Coupler{}, 1
	}
	return c, n
}

// sendSuper sends the datagrams of c as one USO packet, sent like t. Its parts follow
// the first one, which is the headers' place.
func (s *Stack) sendSuper(b *udpBuilder, client netip.AddrPort, t *flow.Train, c flow.Coupler, parts [][]byte) (moved int) {
	h := s.replyHeader(client, t, c.Count)
	head := h.AppendUDPPartial(b.header[:0], t.Peer.Addr.Port(), client.Port(), c.Bytes)
	if head == nil {
		s.cfg.Drops.Add(flow.DropMalformed, c.Count)
		return 0
	}
	off := partialUDP(head)
	off.GSO, off.GSOSize, off.HdrLen = GSOUDP, uint16(c.Segment), uint16(len(head))
	parts[0] = head
	if s.write(hashOf(client), parts, off, c.Count) {
		moved = c.Bytes
	}
	clear(parts)
	return moved
}

// replyHeader is the IP header of n datagrams to a client.
func (s *Stack) replyHeader(client netip.AddrPort, t *flow.Train, n int) wire.Header {
	return wire.Header{
		Src: t.Peer.Addr.Addr(), Dst: client.Addr(), TTL: replyTTL,
		TClass: t.TClass, DontFragment: t.DontFragment, ID: s.ids.next(t.Peer.Addr.Addr(), client.Addr(), n),
	}
}

// partialUDP is the offload of a packet whose UDP checksum is the pseudo header's sum.
func partialUDP(head []byte) Offload {
	return Offload{Flags: OffloadNeedsCsum, CsumStart: uint16(len(head) - wire.UDPHeaderLen), CsumOffset: 6}
}

// sendTrain sends the datagrams of a train one by one.
func (s *Stack) sendTrain(b *udpBuilder, client netip.AddrPort, t *flow.Train) (moved int) {
	rest, n := t.Payload, t.Count()
	for range n {
		size := len(rest)
		if n > 1 {
			size = min(size, t.Segment)
		}
		moved += s.sendDatagram(b, client, t, rest[:size])
		rest = rest[size:]
	}
	return moved
}

// fits reports whether a datagram to client with n bytes of payload needs no
// fragmenting.
func (s *Stack) fits(client netip.AddrPort, n int) bool {
	size, always := wire.IPv4HeaderLen+wire.UDPHeaderLen+n, minPathMTU4
	if client.Addr().Is6() {
		size, always = wire.IPv6HeaderLen+wire.UDPHeaderLen+n, minPathMTU6
	}
	return size <= min(always, s.cfg.Device.MTU()) || size <= s.mtu(client.Addr())
}

// sendDatagram sends one datagram, and tells how many bytes of payload the device
// took: all or none.
func (s *Stack) sendDatagram(b *udpBuilder, client netip.AddrPort, t *flow.Train, payload []byte) (moved int) {
	h := s.replyHeader(client, t, 1)
	fits := s.fits(client, len(payload))
	partial := fits && s.cfg.Device.CanGSO()
	head := h.AppendUDP(b.header[:0], t.Peer.Addr.Port(), client.Port(), payload, partial)
	if head == nil {
		s.cfg.Drops.Add(flow.DropMalformed, 1)
		return 0
	}
	if !fits {
		if s.sendFragments(b, hashOf(client), h, wire.ProtoUDP, head, payload) {
			moved = len(payload)
		}
		return moved
	}
	var off Offload
	if partial {
		off = partialUDP(head)
	}
	b.bufs = [2][]byte{head, payload}
	if s.write(hashOf(client), b.bufs[:], off, 1) {
		moved = len(payload)
	}
	return moved
}

// write writes one packet, which holds n datagrams, and tells whether the device
// took it.
func (s *Stack) write(hash uint32, bufs [][]byte, off Offload, n int) bool {
	if s.cfg.Device.Write(hash, bufs, off) != nil {
		s.cfg.Drops.Add(flow.DropDeviceWrite, n)
		return false
	}
	return true
}

// hashOf keeps the packets of one client socket on one queue.
func hashOf(client netip.AddrPort) uint32 {
	a := client.Addr().As16()
	h := uint32(client.Port()) * 0x9e3779b1
	for _, b := range a[8:] {
		h = h*31 + uint32(b)
	}
	return h
}
