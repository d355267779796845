package netstack

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"time"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// ICMP errors toward clients, from whoever finds the reason: the device's reader
// (TTL, protocol, a rule), the goroutine of a dial, the receiver of an outbound.
// Each asks the limiter, then builds the message in a pooled buffer and writes it.

// How many ICMP errors may leave (RFC 1812, 4.3.2.8; RFC 4443, 2.4 (f)).
const (
	clientErrors     = 100 // per second, to one client address
	clientErrorBurst = 50
	deviceErrors     = 1000 // per second, to all clients of a device
	deviceErrorBurst = 200

	clientErrorGap = int64(time.Second) / clientErrors
	deviceErrorGap = int64(time.Second) / deviceErrors

	errorSets = 256 // of clients with a bucket of their own
	errorWays = 4
)

// errorLimiter bounds the ICMP errors of a device. It knows a fixed number of
// clients: in a crowded set a newcomer takes over the bucket that owes least,
// with what it owes, so that changing addresses gains nothing.
type errorLimiter struct {
	seed  maphash.Seed
	start time.Time

	mu      sync.Mutex // guards what follows
	device  int64      // when its bucket is full again, ns since start
	clients [errorSets][errorWays]errorBucket
}

type errorBucket struct {
	client [16]byte
	full   int64 // when it is full again, ns since start
}

func (l *errorLimiter) init() { l.seed, l.start = maphash.MakeSeed(), time.Now() }

// allow takes a token of client and one of the device, if there are both.
func (l *errorLimiter) allow(client netip.Addr) bool {
	return l.allowAt(client, int64(time.Since(l.start)))
}

func (l *errorLimiter) allowAt(client netip.Addr, now int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucketLocked(client.As16())
	if max(b.full, now)-now > (clientErrorBurst-1)*clientErrorGap ||
		max(l.device, now)-now > (deviceErrorBurst-1)*deviceErrorGap {
		return false
	}
	b.full = max(b.full, now) + clientErrorGap
	l.device = max(l.device, now) + deviceErrorGap
	return true
}

func (l *errorLimiter) bucketLocked(client [16]byte) *errorBucket {
	set := &l.clients[maphash.Bytes(l.seed, client[:])%errorSets]
	least := &set[0]
	for i := range set {
		if set[i].client == client {
			return &set[i]
		}
		if set[i].full < least.full {
			least = &set[i]
		}
	}
	least.client = client
	return least
}

// SendUnreachable tells a client of an ICMP error that the outside sent about a
// datagram or an echo request of its to e.Peer. Errors that mean nothing to a client
// are not sent.
func (s *Stack) SendUnreachable(n flow.Network, client netip.AddrPort, e flow.ICMPError) {
	kind, ok := wire.KindOf(e)
	if !ok {
		return
	}
	from := e.Offender
	if !from.IsValid() || from.Is4() != e.Peer.Addr().Is4() { // nobody outside, or translated on the way
		from = s.router(e.Peer.Addr())
	}
	t := flow.Train{Peer: flow.Destination{Addr: e.Peer}, Payload: e.Payload, Seq: e.Seq}
	s.sendAbout(wire.Unreachable{Kind: kind, From: from, MTU: e.MTU}, n, client, &t)
}

// SendRefusal tells a client of a verdict about a train that it sent: one error,
// about the first datagram.
func (s *Stack) SendRefusal(n flow.Network, client netip.AddrPort, t flow.Train, v flow.Verdict) {
	if kind, ok := wire.KindOfVerdict(v); ok {
		s.sendAbout(wire.Unreachable{Kind: kind, From: s.router(t.Peer.Addr.Addr())}, n, client, &t)
	}
}

// sendAbout sends an error about the first datagram of a train, whose headers
// were not kept: they are built again.
func (s *Stack) sendAbout(e wire.Unreachable, n flow.Network, client netip.AddrPort, t *flow.Train) {
	payload := t.Payload
	if t.Count() > 1 {
		payload = payload[:t.Segment]
	}
	h := wire.Header{Src: client.Addr(), Dst: t.Peer.Addr.Addr(), TClass: t.TClass, TTL: replyTTL, DontFragment: true}
	b := s.builder.Get().(*udpBuilder)
	defer s.builder.Put(b)
	var quote []byte
	if n == flow.ICMP {
		quote = h.AppendEcho(b.quote[:0], false, client.Port(), t.Seq, payload)
	} else {
		quote = h.AppendUDP(b.quote[:0], client.Port(), t.Peer.Addr.Port(), payload, false)
	}
	s.sendError(e, append(quote, payload[:min(len(payload), len(b.quote)-len(quote))]...))
}

// sendUnreachable tells the sender of a packet, whose first bytes are original,
// of a verdict.
func (s *Stack) sendUnreachable(v flow.Verdict, original []byte) {
	if kind, ok := wire.KindOfVerdict(v); ok {
		s.sendOf(kind, original)
	}
}

// sendOf tells the sender of a packet, whose first bytes are original, what
// became of it.
func (s *Stack) sendOf(kind wire.Kind, original []byte) {
	var p wire.Packet
	wire.Parse(original, len(original), false, &p)
	if p.Dst.IsValid() {
		s.sendError(wire.Unreachable{Kind: kind, From: s.router(p.Dst)}, original)
	}
}

// router is who tells a client that dst is not reached: the router of dst's
// family, or dst itself.
func (s *Stack) router(dst netip.Addr) netip.Addr {
	for _, a := range s.cfg.Addresses {
		if a.Is4() == dst.Is4() {
			return a
		}
	}
	return dst
}

// sendError sends the error e about the packet that begins with original, if one
// may be sent about it, and within the limits.
func (s *Stack) sendError(e wire.Unreachable, original []byte) {
	b := s.builder.Get().(*udpBuilder)
	if msg := wire.AppendUnreachable(b.icmp[:0], e, original); msg == nil {
		// None may be sent.
	} else if !s.errors.allow(receiverOf(msg)) {
		s.cfg.Drops.Add(flow.DropICMPLimit, 1)
	} else {
		b.bufs = [2][]byte{msg, nil}
		s.write(0, b.bufs[:1], Offload{}, 1)
	}
	b.bufs = [2][]byte{}
	s.builder.Put(b)
}

// receiverOf is the destination of a packet that was built here.
func receiverOf(packet []byte) netip.Addr {
	if packet[0]>>4 == 4 {
		return netip.AddrFrom4([4]byte(packet[16:20]))
	}
	return netip.AddrFrom16([16]byte(packet[24:40]))
}
