package netstack

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// joined puts written fragments together, and gives the parsed datagram with it.
func (b *tapBed) joined(ws []wirePacket) (p wire.Packet, whole []byte) {
	b.t.Helper()
	r := newBare(b.t, defaultFragmentLimits())
	for i, w := range ws {
		if w.o != (Offload{}) {
			b.t.Fatalf("a fragment has work left: %+v", w.o)
		}
		if len(w.b) > b.dev.mtu {
			b.t.Fatalf("a fragment of %d bytes", len(w.b))
		}
		if i < len(ws)-1 && len(w.b) <= b.dev.mtu-8 {
			b.t.Fatalf("fragment %d of %d has only %d bytes", i, len(ws), len(w.b))
		}
		if whole = r.put(w.b); whole != nil && i < len(ws)-1 {
			b.t.Fatalf("whole after %d of %d", i+1, len(ws))
		}
	}
	if cause, ok := wire.Parse(whole, len(whole), false, &p); !ok || !wire.VerifyTransport(whole, nil, &p) {
		b.t.Fatalf("a datagram of %d bytes: %s, %+v", len(whole), cause, p)
	}
	return p, whole
}

func TestRepliesLargerThanTheMTUAreFragmented(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
			b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = gso, uso })
			fit, largest := 1472, 65507
			if dst.Addr().Is6() {
				fit, largest = 1452, 65527
			}
			peer := flow.Destination{Addr: dst}
			if ws := b.sent(client, flow.Train{Peer: peer, Payload: count(fit)}); len(ws) != 1 || b.parsed(ws[0]).Fragment {
				t.Fatalf("a datagram of exactly the MTU became %d packets", len(ws))
			}
			for _, n := range []int{fit + 1, 3000, 9000, largest} {
				ws := b.sent(client, flow.Train{Peer: peer, Payload: count(n), TClass: 0xb8})
				if len(ws) < 2 {
					t.Fatalf("%d bytes became %d packets", n, len(ws))
				}
				p, whole := b.joined(ws)
				if p.Source() != dst || p.Destination() != client || p.TClass != 0xb8 || p.TTL != replyTTL || !bytes.Equal(whole[p.PayloadOffset:], count(n)) {
					t.Fatalf("%d bytes: %+v", n, p)
				}
			}
			b.dropped(0, 0)
		})
	})
}

func TestATrainOfRepliesLargerThanTheMTUIsFragmentedOneByOne(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = gso, uso })
		data := count(1473*4 + 100)
		ws := b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: data, Segment: 1473})
		if len(ws) != 9 {
			t.Fatalf("%d packets", len(ws))
		}
		var got []byte
		for i := range 4 {
			p, whole := b.joined(ws[2*i : 2*i+2])
			got = append(got, whole[p.PayloadOffset:]...)
		}
		got = append(got, ws[8].b[b.parsed(ws[8]).PayloadOffset:]...)
		if !bytes.Equal(got, data) {
			t.Fatal("other bytes were sent")
		}
	})
}

// Over IPv4 a reply may forbid it. Over IPv6 that is for routers only.
func TestAReplyThatMustNotBeFragmentedIsDroppedOverIPv4(t *testing.T) {
	b := newTapBed(t, nil)
	b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(1473), DontFragment: true})
	b.dropped(flow.DropTooBig, 1)
	ws := b.sent(client6, flow.Train{Peer: flow.Destination{Addr: dst6}, Payload: count(1453), DontFragment: true})
	if b.joined(ws); len(ws) != 2 {
		t.Fatalf("%d packets over IPv6", len(ws))
	}
	b.dropped(flow.DropTooBig, 1)
}

func TestLargeRepliesThatCannotBePacketsAreCounted(t *testing.T) {
	b := newTapBed(t, nil)
	b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst6}, Payload: count(3000)})
	b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(65508)})
	b.sent(client6, flow.Train{Peer: flow.Destination{Addr: dst6}, Payload: count(65528)})
	b.dropped(flow.DropMalformed, 3)
	b.dev.mtu = 20
	b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(100)})
	if n := b.drops[flow.DropTooBig].Load(); n != 1 || len(b.dev.out) > 0 {
		t.Fatalf("an MTU without room for anything: %d drops", n)
	}
}

func TestFragmentsWrittenAndReadAreInverse(t *testing.T) {
	b := newTapBed(t, nil)
	rapid.Check(t, func(rt *rapid.T) {
		client, dst := client4, dst4
		b.dev.mtu = rapid.IntRange(68, 2000).Draw(rt, "mtu")
		if rapid.Bool().Draw(rt, "v6") {
			client, dst = client6, dst6
			b.dev.mtu += 1212
		}
		// At most as many pieces as are put together again.
		n := rapid.IntRange(b.dev.mtu-27, min(65507, 200*((b.dev.mtu-48)&^7))).Draw(rt, "bytes")
		ws := b.sent(client, flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(n)})
		p, whole := b.joined(ws)
		if !bytes.Equal(whole[p.PayloadOffset:], count(n)) {
			rt.Fatalf("%d bytes became others", n)
		}
	})
}

// An id must not come twice while fragments of the first are on their way.
func TestDatagramIDsDoNotRepeatSoon(t *testing.T) {
	var ids datagramIDs
	ids.init()
	seen := map[uint16]bool{}
	for range 1 << 16 {
		seen[uint16(ids.next(dst4.Addr(), client4.Addr(), 1))] = true
	}
	if len(seen) != 1<<16 {
		t.Fatalf("%d ids over IPv4", len(seen))
	}
	// Not every pair of addresses counts with the same counter.
	before := ids.next(dst4.Addr(), client4.Addr(), 1)
	a := dst4.Addr()
	for range 100 {
		a = a.Next()
		ids.next(a, client4.Addr(), 1)
	}
	if n := ids.next(dst4.Addr(), client4.Addr(), 1) - before; n > 20 {
		t.Fatalf("%d ids went to other pairs", n)
	}
	var v6 []uint32
	for range 100 {
		v6 = append(v6, ids.next(dst6.Addr(), client6.Addr(), 1))
	}
	slices.Sort(v6)
	if v6[99]-v6[0] < 1<<30 || len(slices.Compact(v6)) < 99 {
		t.Fatalf("ids over IPv6 are not random: %v", v6)
	}
}

// tooBigAbout is what a router before the client says about a packet.
func tooBigAbout(packet []byte, mtu int) []byte {
	from := netip.MustParseAddr("10.0.0.9")
	if packet[0]>>4 == 6 {
		from = netip.MustParseAddr("fd00::9")
	}
	return wire.AppendUnreachable(nil, wire.Unreachable{Kind: wire.TooBig, From: from, MTU: mtu}, packet)
}

func TestRepliesFollowThePathMTUThatARouterBeforeTheClientTold(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
			b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = gso, uso })
			tr := flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(1400)}
			train := flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(4 * 1400), Segment: 1400}
			ws := b.sent(client, tr)
			b.put(tooBigAbout(ws[0].b, 1300), Offload{})
			b.dropped(0, 0)
			b.dev.mtu = 1300 // what joined checks
			if _, whole := b.joined(b.sent(client, tr)); !bytes.Equal(whole[len(whole)-1400:], tr.Payload) {
				t.Fatal("other bytes were sent")
			}
			if ws := b.sent(client, train); len(ws) != 8 {
				t.Fatalf("a train became %d packets", len(ws))
			}
			b.dev.mtu = 1500
			if ws := b.sent(client, tr); len(ws) != 2 {
				t.Fatalf("%d packets toward the client", len(ws))
			}
			other := netip.AddrPortFrom(client.Addr().Next(), client.Port())
			if ws := b.sent(other, tr); len(ws) != 1 {
				t.Fatalf("%d packets toward another client", len(ws))
			}
			b.dropped(0, 0)
		})
	})
}

func TestAPathMTUIsBoundedAndForgotten(t *testing.T) {
	var m pathMTUs
	now := time.Unix(1000, 0)
	m.learn(now, clientIP4, 68)
	m.learn(now, clientIP6, 68)
	for client, want := range map[netip.Addr]int{clientIP4: minPathMTU4, clientIP6: minPathMTU6} {
		if got := m.toward(now.Add(pathMTULife-1), client, 1500, nil); got != want {
			t.Errorf("%v: %d", client, got)
		}
		if got := m.toward(now.Add(pathMTULife), client, 1500, nil); got != 1500 {
			t.Errorf("%v: %d after its time", client, got)
		}
		if got := m.toward(now, client, 500, nil); got != 500 {
			t.Errorf("%v: %d over a device with an MTU of 500", client, got)
		}
	}
	a := serverIP6
	for range 2 * maxPathMTUs {
		a = a.Next()
		m.learn(now, a, 1400)
	}
	m.learn(now, a, 1350)
	if len(m.byClient) != maxPathMTUs || m.toward(now, a, 1500, nil) != 1350 {
		t.Errorf("%d clients, the last one has %d", len(m.byClient), m.toward(now, a, 1500, nil))
	}
}

// Over IPv6 the host's route to a client is asked once, and never for what always
// fits; what a router farther on tells is the smaller of both.
func TestRepliesFollowTheMTUOfTheHostsRoute(t *testing.T) {
	asked := 0
	b := newTapBed(t, func(c *Config, _ *tap) {
		c.MTUToward = func(client netip.Addr) int {
			if client != clientIP6 {
				t.Errorf("asked for %v", client)
			}
			asked++
			return 1400
		}
	})
	largest := func(client, dst netip.AddrPort, n int) (size int) {
		for _, w := range b.sent(client, flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(n)}) {
			size = max(size, len(w.b))
		}
		return size
	}
	largest(client6, dst6, 1200)
	largest(client4, dst4, 1450)
	if asked != 0 {
		t.Errorf("asked %d times for what fits", asked)
	}
	for range 3 {
		if n := largest(client6, dst6, 1440); n > 1400 || n < 1390 {
			t.Errorf("a packet of %d bytes", n)
		}
	}
	for _, mtu := range []int{1480, 1300, 1480} {
		b.stack.learnMTU(clientIP6, mtu)
		if n := largest(client6, dst6, 1440); n > min(mtu, 1400) || mtu > 1400 && n < 1280 {
			t.Errorf("a packet of %d bytes after %d was told", n, mtu)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	b.dropped(0, 0)
}

func TestARouteThatIsNotKnownIsNotAskedForAgain(t *testing.T) {
	var m pathMTUs
	asked, now := 0, time.Now()
	for range 3 {
		if got := m.toward(now, clientIP6, 1500, func(netip.Addr) int { asked++; return 0 }); got != 1500 {
			t.Errorf("%d", got)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
}

// A router before the client tells the gateway as it would tell the far side.
func TestTCPFollowsThePathMTUOverIPv6(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client6, dst6)
	c := h.open()
	c.ep.Write(&payload{left: 1400}, tcpip.WriteOptions{})
	b.put(tooBigAbout(b.written().b, 1280), Offload{})
	b.dropped(0, 0)
	h.ack += 1400 // all that was sent
	h.send(wire.ACK, nil)
	c.ep.Write(&payload{left: 4000}, tcpip.WriteOptions{})
	for sent := 0; sent < 4000; {
		w := b.written()
		if p := b.parsed(w); w.o.GSOSize > 1220 || w.o.GSO == GSONone && p.PayloadLen > 1220 {
			t.Fatalf("segments have %d bytes after a path MTU of 1,280", max(int(w.o.GSOSize), p.PayloadLen))
		} else {
			sent += p.PayloadLen
		}
	}
}

func TestLargeEchoRequestsAndRepliesPassInFragments(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		client = netip.AddrPortFrom(client.Addr(), 77)
		h := wire.Header{Src: client.Addr(), Dst: dst.Addr(), TTL: 64}
		b.putAll(fragments(append(h.AppendEcho(nil, false, 77, 5, count(8000)), count(8000)...), 1, 1480))
		if len(*got) != 1 || (*got)[0].t.Seq != 5 || !bytes.Equal((*got)[0].t.Payload, count(8000)) || (*got)[0].f.Source != client {
			t.Fatalf("%d requests: %v", len(*got), b.drops.Map())
		}
		b.stack.SendEchoReplies(client, []flow.Train{{Peer: flow.Destination{Addr: dst}, Payload: count(8000), Seq: 5}})
		var ws []wirePacket
		for len(b.dev.out) > 0 {
			ws = append(ws, <-b.dev.out)
		}
		p, whole := b.joined(ws)
		if !p.IsEchoReply() || p.EchoID != 77 || p.EchoSeq != 5 || p.Src != dst.Addr() || !bytes.Equal(whole[p.PayloadOffset:], count(8000)) {
			t.Fatalf("%+v", p)
		}
		b.dropped(0, 0)
	})
}
