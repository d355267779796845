package netstack

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// told is the ICMP error that the stack wrote, and what it quotes.
func (b *tapBed) told() (p wire.Packet, quote []byte) {
	b.t.Helper()
	w := b.written()
	p = b.parsed(w)
	if !p.IsICMPError() {
		b.t.Fatalf("the stack wrote %+v", p)
	}
	return p, w.b[p.PayloadOffset:]
}

// aged is a packet with another TTL or hop limit.
func aged(packet []byte, ttl uint8) []byte {
	b := slices.Clone(packet)
	if b[0]>>4 == 6 {
		b[7] = ttl
		return b
	}
	b[8], b[10], b[11] = ttl, 0, 0
	binary.BigEndian.PutUint16(b[10:], ^wire.Sum(b[:20], 0))
	return b
}

func gatewayOf(dst netip.AddrPort) netip.Addr {
	if dst.Addr().Is4() {
		return gateway4
	}
	return gateway6
}

func TestAPacketWhoseHopsAreUsedUpIsAnsweredByTheGateway(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		sent := uint64(0)
		h := wire.Header{Src: client.Addr(), Dst: dst.Addr(), TTL: 64}
		for name, packet := range map[string][]byte{
			"udp":  datagram(client, dst, []byte("probe"), nil),
			"tcp":  segment{src: client, dst: dst, seq: 1, flags: wire.SYN, options: synOptions}.packet(),
			"echo": h.AppendEcho(nil, false, 7, 1, nil),
		} {
			for _, ttl := range []uint8{0, 1} {
				b.udp = func(flow.Flow, flow.Train) { t.Errorf("%s: carried on", name) }
				b.tcp = func(p *Pending) { t.Errorf("%s: carried on", name); p.Refuse(flow.VerdictSilent) }
				b.put(aged(packet, ttl), Offload{})
				p, quote := b.told()
				kind := uint8(11)
				if dst.Addr().Is6() {
					kind = 3
				}
				if p.ICMPType != kind || p.ICMPCode != 0 || p.Src != gatewayOf(dst) || p.Dst != client.Addr() {
					t.Errorf("%s: %+v", name, p)
				}
				if !bytes.Equal(quote, aged(packet, ttl)) {
					t.Errorf("%s: quotes % x", name, quote)
				}
				sent++
				b.dropped(flow.DropTTL, sent)
			}
		}
	})
}

func TestTheLastHopMayBeTheGatewayItself(t *testing.T) {
	b := newTapBed(t, nil)
	got := b.heardUDP()
	b.put(aged(datagram(client4, netip.AddrPortFrom(gateway4, 53), nil, nil), 1), Offload{})
	b.put(aged(datagram(client6, netip.AddrPortFrom(gateway6, 53), nil, nil), 1), Offload{})
	b.put(aged(datagram(client4, dst4, nil, nil), 2), Offload{})
	if len(*got) != 3 {
		t.Fatalf("%d datagrams arrived: %v", len(*got), b.drops.Map())
	}
}

func TestB28_AnUnknownProtocolIsUnreachable(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		h := wire.Header{Src: client.Addr(), Dst: dst.Addr(), TTL: 64}
		disguise := datagram(client, netip.AddrPortFrom(dst.Addr(), 53), []byte("query"), nil)
		disguise = disguise[len(disguise)-13:] // the UDP header and its payload
		b := newTapBed(t, nil)
		for i, proto := range []uint8{47, 50, 51, 132, 33, 253} {
			b.udp = func(f flow.Flow, _ flow.Train) { t.Errorf("protocol %d became %v", proto, f) }
			packet := append(h.AppendIP(nil, proto, len(disguise)), disguise...)
			b.put(packet, Offload{})
			p, quote := b.told()
			kind, code := uint8(3), uint8(2)
			if dst.Addr().Is6() {
				kind, code = 4, 1
			}
			if p.ICMPType != kind || p.ICMPCode != code || p.Src != gatewayOf(dst) || !bytes.Equal(quote, packet) {
				t.Errorf("protocol %d: %+v", proto, p)
			}
			b.dropped(flow.DropProtocol, uint64(i+1))
		}
	})
}

// ext6 is an IPv6 extension header of 8 bytes, padded.
func ext6(next uint8) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }

// route6 is a routing header without segments left.
func route6(next uint8) []byte { return []byte{next, 0, 0, 0, 0, 0, 0, 0} }

// chained puts extension headers between the IPv6 header of packet and the rest.
func chained(packet []byte, first uint8, headers ...[]byte) []byte {
	b := slices.Clone(packet[:wire.IPv6HeaderLen])
	b[6] = first
	for _, h := range headers {
		b = append(b, h...)
	}
	b = append(b, packet[wire.IPv6HeaderLen:]...)
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-wire.IPv6HeaderLen))
	return b
}

func TestB28_ThePointerLeadsToTheUnknownNextHeader(t *testing.T) {
	h := wire.Header{Src: clientIP6, Dst: serverIP6, TTL: 64}
	plain := append(h.AppendIP(nil, 132, 16), make([]byte, 16)...)
	b := newTapBed(t, nil)
	for _, c := range []struct {
		packet  []byte
		pointer byte
	}{
		{plain, 6},
		{chained(plain, 60, ext6(132)), 40},
		{chained(plain, 0, ext6(60), ext6(132)), 48},
	} {
		b.put(c.packet, Offload{})
		w := b.written()
		p := b.parsed(w)
		if p.ICMPType != 4 || p.ICMPCode != 1 || !bytes.Equal(w.b[p.HeaderLen+4:p.HeaderLen+8], []byte{0, 0, 0, c.pointer}) {
			t.Errorf("% x, want a pointer to %d", w.b[p.HeaderLen:p.HeaderLen+8], c.pointer)
		}
	}
}

func TestB28_ValidExtensionChainsCarryUDPAndTCP(t *testing.T) {
	atomic := []byte{0, 0, 0, 0, 0, 0, 0, 9}
	for name, chain := range map[string]func(proto uint8) (uint8, [][]byte){
		"hop-by-hop":          func(p uint8) (uint8, [][]byte) { return 0, [][]byte{ext6(p)} },
		"destination options": func(p uint8) (uint8, [][]byte) { return 60, [][]byte{ext6(p)} },
		"routing, at its end": func(p uint8) (uint8, [][]byte) { return 43, [][]byte{route6(p)} },
		"two chained":         func(p uint8) (uint8, [][]byte) { return 0, [][]byte{ext6(60), ext6(p)} },
		"an atomic fragment": func(p uint8) (uint8, [][]byte) {
			h := slices.Clone(atomic)
			h[0] = p
			return 44, [][]byte{h}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newTapBed(t, nil)
			got := b.heardUDP()
			first, headers := chain(wire.ProtoUDP)
			b.put(chained(datagram(client6, dst6, []byte("data"), nil), first, headers...), Offload{})
			if len(*got) != 1 || string((*got)[0].t.Payload) != "data" || (*got)[0].f.Dest.Addr != dst6 {
				t.Fatalf("arrived %+v: %v", *got, b.drops.Map())
			}
			h := b.hand(client6, dst6)
			first, headers = chain(wire.ProtoTCP)
			syn := segment{src: h.src, dst: h.dst, seq: h.seq, flags: wire.SYN, options: synOptions}.packet()
			b.put(chained(syn, first, headers...), Offload{})
			h.answered()
			c := recv(t, b.conns)
			t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
			for _, size := range []int{100, 1400} {
				data := segment{src: h.src, dst: h.dst, seq: h.seq, ack: h.ack, flags: wire.ACK, payload: count(size)}.packet()
				b.put(chained(data, first, headers...), Offload{})
				h.seq += uint32(size)
				if _, tcp := b.tcpWritten(); tcp.AckNumber() != h.seq {
					t.Fatalf("acknowledged %d, want %d", tcp.AckNumber(), h.seq)
				}
			}
		})
	}
}

func TestB28_BrokenChainsNeverMatch(t *testing.T) {
	udp := datagram(client6, netip.AddrPortFrom(dst6.Addr(), 53), []byte("query"), nil)
	segments := route6(wire.ProtoUDP)
	segments[3] = 1
	b := newTapBed(t, nil)
	sent := uint64(0)
	for name, packet := range map[string][]byte{
		"routing with segments left":     chained(udp, 43, segments),
		"hop-by-hop in the second place": chained(udp, 60, ext6(0), ext6(wire.ProtoUDP)),
		"an option to be understood":     chained(udp, 60, []byte{wire.ProtoUDP, 0, 0xc2, 4, 0, 0, 0, 0}),
		"a header longer than all":       chained(udp, 60, []byte{wire.ProtoUDP, 200, 1, 4, 0, 0, 0, 0}),
	} {
		b.udp = func(f flow.Flow, _ flow.Train) { t.Errorf("%s became %v", name, f) }
		b.put(packet, Offload{})
		sent++
		b.dropped(flow.DropMalformed, sent)
	}
}

func TestWhatIsWrongWithAChainIsTold(t *testing.T) {
	udp := datagram(client6, netip.AddrPortFrom(dst6.Addr(), 53), []byte("query"), nil)
	option := []byte{wire.ProtoUDP, 0, 0x80, 4, 0, 0, 0, 0}
	b := newTapBed(t, nil)
	b.put(chained(udp, 60, option), Offload{})
	w := b.written()
	if p := b.parsed(w); p.ICMPType != 4 || p.ICMPCode != 2 || w.b[p.HeaderLen+7] != 42 || p.Src != gateway6 || p.Dst != client6.Addr() {
		t.Errorf("%+v: % x", p, w.b[p.HeaderLen:p.HeaderLen+8])
	}
	b.dropped(flow.DropMalformed, 1)
	for _, dst := range []string{"[ff02::1]:53", "[fe80::1]:53", "[::1]:53"} {
		b.put(chained(datagram(client6, netip.MustParseAddrPort(dst), nil, nil), 60, option), Offload{})
	}
	b.put(chained(datagram(netip.MustParseAddrPort("[fe80::2]:1"), dst6, nil, nil), 60, option), Offload{})
	if len(b.dev.out) != 0 {
		t.Errorf("something else was answered: % x", b.written().b)
	}
}

// An error is sent neither about another error, nor about later fragments, nor
// toward or about more than one host.
func TestWhatMustNotBeAnsweredByAnErrorIsNot(t *testing.T) {
	h := wire.Header{Src: clientIP4, Dst: serverIP4, TTL: 1}
	late := h
	late.FragOffset = 64
	broadcast := netip.MustParseAddr("10.0.0.255")
	for name, c := range map[string]struct {
		packet []byte
		cause  flow.Drop
	}{
		"an ICMP error": {aged(wire.AppendUnreachable(nil, wire.Unreachable{Kind: wire.PortUnreachable, From: clientIP4},
			datagram(dst4, client4, nil, nil)), 1), flow.DropTTL},
		"a later fragment": {append(late.AppendIP(nil, wire.ProtoUDP, 16), make([]byte, 16)...), flow.DropTTL},
		"multicast":        {aged(datagram(client4, netip.MustParseAddrPort("224.0.0.251:5353"), nil, nil), 1), flow.DropMulticast},
		"multicast v6":     {aged(datagram(client6, netip.MustParseAddrPort("[ff02::fb]:5353"), nil, nil), 1), flow.DropMulticast},
		"broadcast":        {aged(datagram(client4, netip.AddrPortFrom(broadcast, 137), nil, nil), 1), flow.DropMulticast},
		"no next header":   {wireNoNext(), flow.DropProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			b := newTapBed(t, func(c *Config, _ *tap) { c.IsBroadcast = func(a netip.Addr) bool { return a == broadcast } })
			b.put(c.packet, Offload{})
			b.dropped(c.cause, 1)
			if len(b.dev.out) != 0 {
				t.Error("it was answered")
			}
		})
	}
}

func wireNoNext() []byte {
	h := wire.Header{Src: clientIP6, Dst: serverIP6, TTL: 64}
	return append(h.AppendIP(nil, wire.ProtoNoNext, 8), make([]byte, 8)...)
}

func TestARefusalQuotesTheDatagramAsItWas(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		for _, size := range []int{0, 5, 2000} {
			tr := flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(size)}
			b.stack.SendRefusal(flow.UDP, client, tr, flow.VerdictProhibited)
			p, quote := b.told()
			if p.Src != gatewayOf(dst) || p.Dst != client.Addr() || p.ICMPType == 3 && p.ICMPCode != 13 || p.ICMPType == 1 && p.ICMPCode != 1 {
				t.Errorf("%+v", p)
			}
			want := datagram(client, dst, count(size), func(h *wire.Header) { h.DontFragment = true })
			if !bytes.HasPrefix(want, quote) || len(quote) < min(len(want), 500) {
				t.Errorf("%d bytes: quotes % x, want % x", size, quote[:28], want[:28])
			}
		}
		train := flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(30), Segment: 10}
		b.stack.SendRefusal(flow.UDP, client, train, flow.VerdictReset)
		if _, quote := b.told(); !bytes.HasSuffix(quote, count(10)) || len(b.dev.out) != 0 {
			t.Errorf("quotes % x of a train", quote)
		}
		b.stack.SendRefusal(flow.ICMP, netip.AddrPortFrom(client.Addr(), 77), flow.Train{Peer: flow.Destination{Addr: netip.AddrPortFrom(dst.Addr(), 0)}, Seq: 9}, flow.VerdictProhibited)
		_, quote := b.told()
		var inner wire.Packet
		if wire.Parse(quote, len(quote), false, &inner); !inner.IsEchoRequest() || inner.EchoID != 77 || inner.EchoSeq != 9 {
			t.Errorf("quotes %+v", inner)
		}
		b.stack.SendRefusal(flow.UDP, client, train, flow.VerdictSilent)
		if len(b.dev.out) != 0 {
			t.Error("silence was sent")
		}
	})
}

func TestErrorsAreLimitedForEachClientAndForTheDevice(t *testing.T) {
	var l errorLimiter
	l.init()
	allowed := func(client netip.Addr, at time.Duration, n int) (ok int) {
		for range n {
			if l.allowAt(client, int64(at)) {
				ok++
			}
		}
		return ok
	}
	if n := allowed(clientIP4, 0, 1000); n != clientErrorBurst {
		t.Errorf("%d at once to one client, want %d", n, clientErrorBurst)
	}
	if n := allowed(clientIP6, 0, 10); n != 10 {
		t.Errorf("%d of 10 to another client", n)
	}
	sent := 0
	for at := time.Second; at < 2*time.Second; at += time.Millisecond {
		sent += allowed(clientIP4, at, 10)
	}
	if sent < clientErrors || sent > clientErrors+clientErrorBurst {
		t.Errorf("%d in a second to one client, want %d and a burst", sent, clientErrors)
	}
	total := 0
	for at := time.Minute; at < time.Minute+time.Second; at += time.Millisecond {
		for i := range 50 { // a new client each time
			total += allowed(netip.AddrFrom4([4]byte{10, 1, byte(at / time.Millisecond), byte(i)}), at, 1)
		}
	}
	if total < deviceErrors || total > deviceErrors+deviceErrorBurst {
		t.Errorf("%d in a second of a device, want %d and a burst", total, deviceErrors)
	}
}

// In a crowded set a change of address does not bring a new burst.
func TestANewcomerInACrowdedSetTakesOverADebt(t *testing.T) {
	var l errorLimiter
	l.init()
	for i := range l.clients {
		for j := range l.clients[i] {
			l.clients[i][j] = errorBucket{client: [16]byte{1, byte(i), byte(j)}, full: int64(clientErrorBurst) * clientErrorGap}
		}
	}
	if l.allowAt(clientIP4, 0) {
		t.Error("allowed at once")
	}
	if !l.allowAt(clientIP4, clientErrorGap) {
		t.Error("not allowed after a gap")
	}
}

func TestSuppressedErrorsAreCounted(t *testing.T) {
	b := newTapBed(t, nil)
	b.udp = func(flow.Flow, flow.Train) {}
	probe := aged(datagram(client4, dst4, nil, nil), 1)
	for range 500 {
		b.put(probe, Offload{})
	}
	sent := len(b.dev.out)
	if sent < clientErrorBurst || sent > 2*clientErrorBurst {
		t.Errorf("%d errors about 500 packets", sent)
	}
	if n := b.drops[flow.DropICMPLimit].Load(); n != uint64(500-sent) {
		t.Errorf("%d suppressed, %d sent of 500", n, sent)
	}
	if n := b.drops[flow.DropTTL].Load(); n != 500 {
		t.Errorf("%d packets counted, want 500", n)
	}
}
