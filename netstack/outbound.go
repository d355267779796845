package netstack

import (
	"net/netip"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// The way back of datagrams, on the goroutine of the outbound's receiver: build
// the headers in a pooled buffer, then write headers and payload to the device.

const replyTTL = 64 // Linux's default; the gateway answers in the far side's name

// udpBuilder is room for what a packet needs beside its payload.
type udpBuilder struct {
	header [wire.MaxHeader]byte
	icmp   [wire.MaxUnreachable]byte
	quote  [wire.MaxUnreachable]byte // of a datagram that was not kept
	bufs   [2][]byte
}

// SendDatagrams sends trains to a client, each from its Peer's address. What
// does not fit the device's MTU is fragmented, or if that is forbidden dropped and
// counted. It returns the bytes of payload that the device took.
func (s *Stack) SendDatagrams(client netip.AddrPort, ts []flow.Train) (moved int) {
	b := s.builder.Get().(*udpBuilder)
	for i := range ts {
		moved += s.sendTrain(b, client, &ts[i])
	}
	b.bufs = [2][]byte{}
	s.builder.Put(b)
	return moved
}

func (s *Stack) sendTrain(b *udpBuilder, client netip.AddrPort, t *flow.Train) (moved int) {
	if t.Segment > 0 && len(t.Payload) > t.Segment && s.cfg.Device.CanUSO() && s.fits(client, t.Segment) {
		return s.sendDatagram(b, client, t, t.Payload, t.Segment)
	}
	rest, n := t.Payload, t.Count()
	for range n {
		size := len(rest)
		if n > 1 {
			size = min(size, t.Segment)
		}
		moved += s.sendDatagram(b, client, t, rest[:size], 0)
		rest = rest[size:]
	}
	return moved
}

// fits reports whether a datagram to client with n bytes of payload needs no
// fragmenting.
func (s *Stack) fits(client netip.AddrPort, n int) bool {
	header := wire.IPv4HeaderLen + wire.UDPHeaderLen
	if client.Addr().Is6() {
		header = wire.IPv6HeaderLen + wire.UDPHeaderLen
	}
	return header+n <= s.mtu(client.Addr())
}

// sendDatagram sends one datagram, or with segment > 0 several as one USO packet,
// and tells how many bytes of payload the device took: all or none.
func (s *Stack) sendDatagram(b *udpBuilder, client netip.AddrPort, t *flow.Train, payload []byte, segment int) (moved int) {
	what := flow.Train{Payload: payload, Segment: segment}
	h := wire.Header{
		Src: t.Peer.Addr.Addr(), Dst: client.Addr(), TTL: replyTTL,
		TClass: t.TClass, DontFragment: t.DontFragment, ID: s.ids.next(t.Peer.Addr.Addr(), client.Addr()),
	}
	fits := segment > 0 || s.fits(client, len(payload))
	partial := segment > 0 || fits && s.cfg.Device.CanGSO()
	head := h.AppendUDP(b.header[:0], t.Peer.Addr.Port(), client.Port(), payload, partial)
	if head == nil {
		s.cfg.Drops.Add(flow.DropMalformed, what.Count())
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
		off = Offload{Flags: OffloadNeedsCsum, CsumStart: uint16(len(head) - wire.UDPHeaderLen), CsumOffset: 6}
	}
	if segment > 0 {
		off.GSO, off.GSOSize, off.HdrLen = GSOUDP, uint16(segment), uint16(len(head))
	}
	b.bufs = [2][]byte{head, payload}
	if s.write(hashOf(client), b.bufs[:], off, what.Count()) {
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
