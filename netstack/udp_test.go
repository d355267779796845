package netstack

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/sagernet/gvisor/pkg/tcpip"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// datagram is a UDP packet with complete checksums.
func datagram(src, dst netip.AddrPort, payload []byte, change func(h *wire.Header)) []byte {
	h := wire.Header{Src: src.Addr(), Dst: dst.Addr(), TTL: 64}
	if change != nil {
		change(&h)
	}
	return append(h.AppendUDP(nil, src.Port(), dst.Port(), payload, false), payload...)
}

// count returns n bytes that tell their place.
func count(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)
	}
	return b
}

// heardUDP makes the bed keep what HandleDatagrams gets.
func (b *tapBed) heardUDP() *[]heardDatagram {
	var got []heardDatagram
	b.udp = func(f flow.Flow, t flow.Train) {
		t.Payload = slices.Clone(t.Payload)
		got = append(got, heardDatagram{f, t})
	}
	return &got
}

type heardDatagram struct {
	f flow.Flow
	t flow.Train
}

func TestADatagramReachesTheHandlerAsItWasSent(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		dst = netip.AddrPortFrom(dst.Addr(), 53)
		// On both sides of the first view's end, and up to the largest.
		sizes := []int{0, 1, 512, 1472, smallView - 48, smallView - 28, smallView - 27, 2048, 9000, 65507}
		for _, n := range sizes {
			b.put(datagram(client, dst, count(n), func(h *wire.Header) { h.TClass = 0xb8; h.DontFragment = n == 512 }), Offload{})
		}
		if len(*got) != len(sizes) {
			t.Fatalf("%d datagrams arrived of %d: %v", len(*got), len(sizes), b.drops.Map())
		}
		for i, n := range sizes {
			g := (*got)[i]
			want := flow.Flow{Inbound: "lan", Network: flow.UDP, Source: client, Dest: flow.Destination{Addr: dst}}
			if g.f != want || g.t.Peer != want.Dest {
				t.Errorf("%d bytes: %+v toward %v", n, g.f, g.t.Peer)
			}
			if !bytes.Equal(g.t.Payload, count(n)) {
				t.Errorf("%d bytes: other %d bytes arrived", n, len(g.t.Payload))
			}
			if g.t.TClass != 0xb8 || g.t.Segment != 0 || g.t.DontFragment != (n == 512 || dst.Addr().Is6()) {
				t.Errorf("%d bytes: %+v", n, g.t)
			}
		}
		b.dropped(0, 0)
	})
}

func TestAUSOPacketReachesTheHandlerAsATrain(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		data := count(1200*40 + 7)
		for _, n := range []int{1200 + 7, len(data)} { // in the first view, and over both
			h := wire.Header{Src: client.Addr(), Dst: dst.Addr(), TTL: 64}
			packet := append(h.AppendUDP(nil, client.Port(), dst.Port(), data[:n], true), data[:n]...)
			head := len(packet) - n
			b.put(packet, Offload{
				Flags: OffloadNeedsCsum, GSO: GSOUDP, GSOSize: 1200,
				HdrLen: uint16(head), CsumStart: uint16(head - 8), CsumOffset: 6,
			})
			// A packet in two views is handed on in parts, to be sent together again.
			parts := 1
			if n > smallView {
				parts = 3
			}
			if len(*got) != parts {
				t.Fatalf("%d trains, want %d", len(*got), parts)
			}
			if ds := datagramsOf(*got); len(ds) != (n+1199)/1200 || !bytes.Equal(bytes.Join(ds, nil), data[:n]) || len(ds[0]) != 1200 {
				t.Fatalf("%d datagrams, the first one of %d bytes", len(ds), len(ds[0]))
			}
			*got = nil
		}
	})
}

func TestWhatIsNotForwardedIsDroppedUnderItsCause(t *testing.T) {
	b4 := netip.MustParseAddrPort
	udp := func(src, dst string) []byte { return datagram(b4(src), b4(dst), []byte("data"), nil) }
	other := func(proto uint8, v6 bool) []byte {
		h := wire.Header{Src: clientIP4, Dst: serverIP4, TTL: 64}
		if v6 {
			h.Src, h.Dst = clientIP6, serverIP6
		}
		return append(h.AppendIP(nil, proto, 20), make([]byte, 20)...)
	}
	tcp4 := segment{src: client4, dst: dst4, flags: wire.SYN, options: synOptions}.packet()
	echo := wire.Header{Src: clientIP4, Dst: serverIP4, TTL: 64}
	for _, c := range []struct {
		name   string
		packet []byte
		cause  flow.Drop
	}{
		{"nothing", []byte{}, flow.DropMalformed},
		{"no known version", []byte{0x75, 0, 0, 20}, flow.DropMalformed},
		{"cut in the IP header", tcp4[:19], flow.DropMalformed},
		{"cut in the TCP header", tcp4[:39], flow.DropMalformed},
		{"a length beyond the packet", udp("10.0.0.2:1", "203.0.113.10:2")[:30], flow.DropMalformed},
		{"a wrong TCP checksum", spoilt(tcp4), flow.DropChecksum},
		{"a wrong UDP checksum", spoilt(udp("10.0.0.2:1", "203.0.113.10:2")), flow.DropChecksum},
		{"a wrong UDP checksum over IPv6", spoilt(udp("[fd00::2]:1", "[2001:db8::10]:2")), flow.DropChecksum},
		{"a wrong IP header checksum", func() []byte { p := slices.Clone(tcp4); p[10] ^= 1; return p }(), flow.DropChecksum},
		{"multicast", udp("10.0.0.2:1", "224.0.0.251:5353"), flow.DropMulticast},
		{"multicast over IPv6", udp("[fd00::2]:1", "[ff02::fb]:5353"), flow.DropMulticast},
		{"broadcast", udp("10.0.0.2:68", "255.255.255.255:67"), flow.DropMulticast},
		{"link-local", udp("10.0.0.2:1", "169.254.169.254:80"), flow.DropMulticast},
		{"link-local over IPv6", udp("[fd00::2]:1", "[fe80::1]:80"), flow.DropMulticast},
		{"a loopback destination", udp("10.0.0.2:1", "127.0.0.1:80"), flow.DropSelf},
		{"a loopback source", udp("127.0.0.1:1", "203.0.113.10:80"), flow.DropSource},
		{"port 0", udp("10.0.0.2:1", "203.0.113.10:0"), flow.DropDestinationZero},
		{"TCP port 0", segment{src: client4, dst: netip.AddrPortFrom(serverIP4, 0), flags: wire.SYN}.packet(), flow.DropDestinationZero},
		{"GRE", other(47, false), flow.DropProtocol},
		{"SCTP over IPv6", other(132, true), flow.DropProtocol},
		{"an echo reply", echo.AppendEcho(nil, true, 1, 1, nil), flow.DropProtocol},
		{"a wrong checksum of an echo request", spoilt(echo.AppendEcho(nil, false, 1, 1, nil)), flow.DropChecksum},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTapBed(t, nil)
			got := b.heardUDP()
			b.tcp = func(p *Pending) { t.Error("became a connection attempt"); p.Refuse(flow.VerdictSilent) }
			b.put(c.packet, Offload{})
			b.dropped(c.cause, 1)
			if len(*got) > 0 {
				t.Error("became a datagram")
			}
		})
	}
}

// Over IPv4 a datagram may come without a checksum; over IPv6 it may not.
func TestAZeroChecksumIsNoneOverIPv4Only(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		packet := datagram(client, dst, []byte("data"), nil)
		head := len(packet) - 4
		packet[head-2], packet[head-1] = 0, 0
		b.put(packet, Offload{})
		if want := b2i(dst.Addr().Is4()); len(*got) != want {
			t.Fatalf("%d datagrams, want %d", len(*got), want)
		}
	})
}

// sent makes the bed send trains and gives the packets that were written.
func (b *tapBed) sent(client netip.AddrPort, ts ...flow.Train) (ws []wirePacket) {
	b.stack.SendDatagrams(client, ts)
	for len(b.dev.out) > 0 {
		ws = append(ws, <-b.dev.out)
	}
	return ws
}

func forOffloads(t *testing.T, f func(t *testing.T, gso, uso bool)) {
	for _, c := range []struct{ gso, uso bool }{{false, false}, {true, false}, {true, true}} {
		t.Run(fmt.Sprintf("gso %v uso %v", c.gso, c.uso), func(t *testing.T) { f(t, c.gso, c.uso) })
	}
}

func TestRepliesBecomePacketsThatParseBack(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
			b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = gso, uso })
			for _, n := range []int{0, 1, 2, 511, 1400} {
				ws := b.sent(client, flow.Train{Peer: flow.Destination{Addr: dst}, Payload: count(n), TClass: 0x2e << 2, DontFragment: true})
				if len(ws) != 1 {
					t.Fatalf("%d packets for a datagram of %d bytes", len(ws), n)
				}
				p := b.parsed(ws[0])
				if p.Source() != dst || p.Destination() != client || p.TClass != 0x2e<<2 || p.TTL != replyTTL || !p.DontFragment {
					t.Errorf("%d bytes: %+v", n, p)
				}
				if !bytes.Equal(ws[0].b[p.PayloadOffset:], count(n)) {
					t.Errorf("%d bytes: other bytes were sent", n)
				}
				if ws[0].o.GSO != GSONone {
					t.Errorf("one datagram is sent as a train: %+v", ws[0].o)
				}
			}
		})
	})
}

func TestATrainOfRepliesIsOnePacketWhereTheDeviceSegments(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
			b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = gso, uso })
			data := count(1000*30 + 1)
			ws := b.sent(client, flow.Train{Peer: flow.Destination{Addr: dst}, Payload: data, Segment: 1000})
			want := 31
			if uso {
				want = 1
			}
			if len(ws) != want {
				t.Fatalf("%d packets, want %d", len(ws), want)
			}
			var got []byte
			for i, w := range ws {
				p := b.parsed(w)
				part := w.b[p.PayloadOffset:]
				if !uso && len(part) != min(1000, len(data)-1000*i) {
					t.Fatalf("datagram %d has %d bytes", i, len(part))
				}
				got = append(got, part...)
			}
			if !bytes.Equal(got, data) {
				t.Fatal("other bytes were sent")
			}
			head := uint16(len(ws[0].b) - len(data))
			wantOff := Offload{
				Flags: OffloadNeedsCsum, GSO: GSOUDP, GSOSize: 1000,
				HdrLen: head, CsumStart: head - 8, CsumOffset: 6,
			}
			if uso && ws[0].o != wantOff {
				t.Fatalf("offload %+v, want %+v", ws[0].o, wantOff)
			}
		})
	})
}

func TestRepliesThatCannotBePacketsAreCounted(t *testing.T) {
	b := newTapBed(t, nil)
	b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst6}, Payload: count(10)})
	b.dropped(flow.DropMalformed, 1)
	b.dev.fails.Store(true)
	b.sent(client4, flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(10)})
	if n := b.drops[flow.DropDeviceWrite].Load(); n != 1 {
		t.Fatalf("%d drops of a device that takes nothing", n)
	}
}

// Whatever part of the replies the device takes: what is told to have moved, and
// what is dropped, is exactly that.
func TestOnlyRepliesThatTheDeviceTookHaveMoved(t *testing.T) {
	for _, c := range []struct {
		name    string
		uso     bool
		takes   int // packets
		train   flow.Train
		moved   int
		dropped uint64
	}{
		{"one", false, 1, flow.Train{Payload: count(900)}, 900, 0},
		{"none", false, 0, flow.Train{Payload: count(900)}, 0, 1},
		{"two of three", false, 2, flow.Train{Payload: count(2100), Segment: 1000}, 2000, 1},
		{"a super-packet", true, 1, flow.Train{Payload: count(2100), Segment: 1000}, 2100, 0},
		{"no super-packet", true, 0, flow.Train{Payload: count(2100), Segment: 1000}, 0, 3},
		{"all fragments", false, 3, flow.Train{Payload: count(4000)}, 4000, 0},
		{"two of three fragments", false, 2, flow.Train{Payload: count(4000)}, 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
				b := newTapBed(t, func(_ *Config, d *tap) { d.uso, d.out = c.uso, make(chan wirePacket, c.takes) })
				c.train.Peer = flow.Destination{Addr: dst}
				if moved := b.stack.SendDatagrams(client, []flow.Train{c.train}); moved != c.moved {
					t.Errorf("%d bytes moved, want %d", moved, c.moved)
				}
				b.dropped(flow.DropDeviceWrite, c.dropped)
				if c.train.Segment > 0 {
					return
				}
				for len(b.dev.out) > 0 {
					<-b.dev.out
				}
				if moved := b.stack.SendEchoReplies(client, []flow.Train{c.train}); moved != c.moved {
					t.Errorf("%d bytes of an echo reply moved, want %d", moved, c.moved)
				}
				b.dropped(flow.DropDeviceWrite, 2*c.dropped)
			})
		})
	}
	b := newTapBed(t, nil)
	tooBig := flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(1600), DontFragment: true}
	if moved := b.stack.SendDatagrams(client4, []flow.Train{tooBig}); moved != 0 {
		t.Errorf("%d bytes moved of what must not be fragmented", moved)
	}
	b.dropped(flow.DropTooBig, 1)
}

func TestAnICMPErrorOfTheOutsideComesBackQuotingTheClient(t *testing.T) {
	for _, c := range []struct {
		name       string
		e          flow.ICMPError
		client     netip.AddrPort
		kind, code uint8
		mtu        uint32
		nobody     bool
	}{
		{name: "port unreachable", e: flow.ICMPError{Type: 3, Code: 3, Peer: dst4, Offender: dst4.Addr(), Payload: []byte("query")}, client: client4, kind: 3, code: 3},
		{name: "of a router", e: flow.ICMPError{Type: 3, Code: 1, Peer: dst4, Offender: netip.MustParseAddr("198.51.100.1")}, client: client4, kind: 3, code: 1},
		{name: "fragmentation needed", e: flow.ICMPError{Type: 3, Code: 4, MTU: 1300, Peer: dst4}, client: client4, kind: 3, code: 4, mtu: 1300},
		{name: "port unreachable v6", e: flow.ICMPError{Type: 1, Code: 4, Peer: dst6}, client: client6, kind: 1, code: 4},
		{name: "too big v6", e: flow.ICMPError{Type: 2, MTU: 1400, Peer: dst6}, client: client6, kind: 2, mtu: 1400},
		{name: "source quench", e: flow.ICMPError{Type: 4, Peer: dst4}, client: client4, nobody: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTapBed(t, nil)
			b.stack.SendUnreachable(flow.UDP, c.client, c.e)
			if c.nobody {
				if len(b.dev.out) != 0 {
					t.Fatal("the client was told")
				}
				return
			}
			w := b.written()
			p := b.parsed(w)
			from := c.e.Offender
			if !from.IsValid() { // of the gateway itself
				from = b.stack.router(c.e.Peer.Addr())
			}
			if p.ICMPType != c.kind || p.ICMPCode != c.code || p.MTU != c.mtu || p.Src != from || p.Dst != c.client.Addr() {
				t.Fatalf("%+v", p)
			}
			var inner wire.Packet
			if !wire.Quoted(w.b, &p, &inner) || inner.Source() != c.client || inner.Destination() != c.e.Peer || inner.Proto != wire.ProtoUDP {
				t.Fatalf("quotes %+v", inner)
			}
			quote := w.b[p.PayloadOffset:]
			if cause, ok := wire.Parse(quote, len(quote), false, &inner); !ok || string(quote[inner.PayloadOffset:]) != string(c.e.Payload) {
				t.Fatalf("quotes %q, %s", quote, cause)
			}
		})
	}
}

// An ICMP error of a client that quotes TCP is for gVisor; one that has nothing
// to say about a connection ends here.
func TestAClientsICMPErrorAboutTCPReachesTheEndpoint(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	n, err := c.ep.Write(&payload{left: 1000}, tcpip.WriteOptions{})
	if n != 1000 || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	quoted := b.written()
	icmp := wire.AppendUnreachable(nil, wire.Unreachable{Kind: wire.TooBig, From: netip.MustParseAddr("10.0.0.9"), MTU: 600}, quoted.b)
	b.put(icmp, Offload{})
	b.dropped(0, 0)
	h.ack += 1000 // all that was sent
	h.send(wire.ACK, nil)
	if n, err := c.ep.Write(&payload{left: 4000}, tcpip.WriteOptions{}); n != 4000 || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	for sent := 0; sent < 4000; {
		w := b.written()
		if size := int(w.o.GSOSize); size > 560 {
			t.Fatalf("segments have %d bytes after a path MTU of 600", size)
		}
		sent += b.parsed(w).PayloadLen
	}
}
