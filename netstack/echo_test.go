package netstack

import (
	"bytes"
	"net/netip"
	"testing"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// echoRequest is one with complete checksums; the client's port is the id.
func echoRequest(client netip.AddrPort, dst netip.Addr, seq uint16, payload []byte, change func(h *wire.Header)) []byte {
	h := wire.Header{Src: client.Addr(), Dst: dst, TTL: 64}
	if change != nil {
		change(&h)
	}
	return append(h.AppendEcho(nil, false, client.Port(), seq, payload), payload...)
}

func TestAnEchoRequestReachesTheHandlerAsADatagramOfItsStream(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		sizes := []int{0, 1, 56, 1400, smallView - 28, smallView - 27, 8000, 65507}
		for i, n := range sizes {
			b.put(echoRequest(client, dst.Addr(), uint16(65533+i), count(n), func(h *wire.Header) { h.TClass = 0x28; h.DontFragment = true }), Offload{})
		}
		if len(*got) != len(sizes) {
			t.Fatalf("%d requests arrived of %d: %v", len(*got), len(sizes), b.drops.Map())
		}
		want := flow.Flow{Inbound: "lan", Network: flow.ICMP, Source: client, Dest: flow.Destination{Addr: netip.AddrPortFrom(dst.Addr(), 0)}}
		for i, n := range sizes {
			g := (*got)[i]
			if g.f != want || g.t.Peer != want.Dest || g.t.Seq != uint16(65533+i) {
				t.Errorf("%d bytes: %+v toward %v, sequence number %d", n, g.f, g.t.Peer, g.t.Seq)
			}
			if !bytes.Equal(g.t.Payload, count(n)) || g.t.TClass != 0x28 || !g.t.DontFragment || g.t.Segment != 0 {
				t.Errorf("%d bytes: %d arrived, %+v", n, len(g.t.Payload), g.t)
			}
		}
		b.dropped(0, 0)
		if len(b.dev.out) != 0 {
			t.Error("the gateway answered in somebody's name")
		}
	})
}

func TestTheGatewaysOwnAddressesAnswerAndNoOthers(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		own := gateway4
		if dst.Addr().Is6() {
			own = gateway6
		}
		for i, n := range []int{0, 56, 1400} {
			b.put(echoRequest(client, own, uint16(7+i), count(n), func(h *wire.Header) { h.TTL = 1; h.TClass = 0x28 }), Offload{})
			w := b.written()
			p := b.parsed(w)
			if !p.IsEchoReply() || p.Src != own || p.Dst != client.Addr() || p.EchoID != client.Port() || p.EchoSeq != uint16(7+i) || p.TTL != replyTTL || p.TClass != 0x28 {
				t.Errorf("answered %+v", p)
			}
			if !bytes.Equal(w.b[p.PayloadOffset:], count(n)) {
				t.Errorf("%d bytes came back of %d", len(w.b)-p.PayloadOffset, n)
			}
		}
		b.put(echoRequest(client, own.Next().Next(), 1, nil, nil), Offload{}) // a neighbour
		if len(*got) != 1 || len(b.dev.out) != 0 {
			t.Errorf("%d flows, %d packets written", len(*got), len(b.dev.out))
		}
		b.dropped(0, 0)
	})
}

// A ping to one of the gateway's own addresses may be larger than the first view,
// and than the device's MTU.
func TestALargeEchoRequestToTheGatewayIsAnsweredInFragments(t *testing.T) {
	b := newTapBed(t, nil)
	b.put(echoRequest(client4, gateway4, 3, count(8000), nil), Offload{})
	var whole []byte
	for len(b.dev.out) > 0 {
		w := <-b.dev.out
		var p wire.Packet
		if cause, ok := wire.Parse(w.b, len(w.b), false, &p); !ok || !p.Fragment || p.FragOffset != len(whole) || len(w.b) > 1500 {
			t.Fatalf("%v: %d bytes at %d of a fragment %v", cause, len(w.b), p.FragOffset, p.Fragment)
		}
		whole = append(whole, w.b[p.HeaderLen:]...)
	}
	if len(whole) != 8008 || wire.Sum(whole, 0) != 0xffff || !bytes.Equal(whole[8:], count(8000)) {
		t.Fatalf("%d bytes came back", len(whole))
	}
}

func TestOtherICMPOfClientsIsDroppedAndCounted(t *testing.T) {
	b := newTapBed(t, nil)
	got := b.heardUDP()
	h := wire.Header{Src: clientIP4, Dst: serverIP4, TTL: 64}
	n := 0
	for kind := range 256 {
		p := h.AppendEcho(nil, false, 1, 1, nil)
		if kind == int(p[20]) {
			continue
		}
		p[20] = byte(kind)
		p[22], p[23] = 0, 0
		sum := ^wire.Sum(p[20:], 0)
		p[22], p[23] = byte(sum>>8), byte(sum)
		b.put(p, Offload{})
		n++
	}
	b.dropped(flow.DropProtocol, uint64(n))
	if len(*got) != 0 || len(b.dev.out) != 0 {
		t.Errorf("%d became datagrams, %d were answered", len(*got), len(b.dev.out))
	}
}

func TestEchoRepliesCarryTheClientsIDAndTheFarSidesBytes(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
			b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = gso, uso })
			peer := flow.Destination{Addr: netip.AddrPortFrom(dst.Addr(), 0)}
			sizes := []int{0, 1, 56, 1400}
			var ts []flow.Train
			for i, n := range sizes {
				ts = append(ts, flow.Train{Peer: peer, Payload: count(n), TClass: 0x28, Seq: uint16(65534 + i)})
			}
			b.stack.SendEchoReplies(client, ts)
			for i, n := range sizes {
				w := b.written()
				p := b.parsed(w)
				if !p.IsEchoReply() || p.Src != dst.Addr() || p.Dst != client.Addr() || p.EchoID != client.Port() || p.EchoSeq != uint16(65534+i) {
					t.Errorf("%d bytes: %+v", n, p)
				}
				if p.TClass != 0x28 || p.TTL != replyTTL || !bytes.Equal(w.b[p.PayloadOffset:], count(n)) || w.o != (Offload{}) {
					t.Errorf("%d bytes: %+v, %+v", n, p, w.o)
				}
			}
			b.dropped(0, 0)
		})
	})
}

func TestEchoRepliesThatCannotBePacketsAreCounted(t *testing.T) {
	b := newTapBed(t, nil)
	b.stack.SendEchoReplies(client4, []flow.Train{{Peer: flow.Destination{Addr: dst6}, Payload: count(10)}})
	b.dropped(flow.DropMalformed, 1)
	b.dev.fails.Store(true)
	b.stack.SendEchoReplies(client4, []flow.Train{{Peer: flow.Destination{Addr: dst4}, Payload: count(10)}})
	if n := b.drops[flow.DropDeviceWrite].Load(); n != 1 {
		t.Fatalf("%d drops of a device that takes nothing", n)
	}
}

func TestAnICMPErrorAboutAnEchoRequestQuotesTheClientsOwn(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		peer := netip.AddrPortFrom(dst.Addr(), 0)
		far := netip.MustParseAddr("198.51.100.1")
		e := flow.ICMPError{Type: 3, Code: 1, Offender: far, Peer: peer, Payload: count(28), Seq: 777}
		if dst.Addr().Is6() {
			far = netip.MustParseAddr("2001:db8:9::1")
			e.Type, e.Code, e.Offender = 1, 3, far
		}
		b.stack.SendUnreachable(flow.ICMP, client, e)
		w := b.written()
		p := b.parsed(w)
		var inner wire.Packet
		if p.ICMPType != e.Type || p.ICMPCode != e.Code || p.Src != far || p.Dst != client.Addr() || !wire.Quoted(w.b, &p, &inner) {
			t.Fatalf("%+v", p)
		}
		if !inner.IsEchoRequest() || inner.Source() != client || inner.Dst != dst.Addr() || inner.EchoSeq != 777 {
			t.Errorf("quotes %+v", inner)
		}
		b.stack.SendRefusal(flow.ICMP, client, flow.Train{Peer: flow.Destination{Addr: peer}, Seq: 778, Payload: count(56)}, flow.VerdictProhibited)
		w = b.written()
		p = b.parsed(w)
		if !wire.Quoted(w.b, &p, &inner) || !inner.IsEchoRequest() || inner.Source() != client || inner.EchoSeq != 778 {
			t.Errorf("a refusal quotes %+v", inner)
		}
		b.stack.SendUnreachable(flow.ICMP, client, flow.ICMPError{Type: 200, Peer: peer})
		if len(b.dev.out) != 0 {
			t.Error("the client was told of an error that means nothing")
		}
	})
}
