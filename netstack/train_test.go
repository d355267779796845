package netstack

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// datagramsOf are the datagrams of what was heard.
func datagramsOf(heard []heardDatagram) (ds [][]byte) {
	for _, h := range heard {
		ds = append(ds, datagramsIn(h.t.Payload, h.t.Segment)...)
	}
	return ds
}

func datagramsIn(payload []byte, segment int) (ds [][]byte) {
	if segment == 0 || len(payload) <= segment {
		return [][]byte{payload}
	}
	return slices.Collect(slices.Chunk(payload, segment))
}

// drawTrain is a datagram or a train, likely to go well with the one before it.
func drawTrain(t *rapid.T, i int) (payload []byte, segment int) {
	size := rapid.SampledFrom([]int{0, 1, 64, 1200, 1200, 1200, 1472}).Draw(t, "size")
	n := rapid.SampledFrom([]int{1, 1, 1, 2, 3, 40}).Draw(t, "count")
	less := rapid.SampledFrom([]int{0, 0, 1, size / 2}).Draw(t, "less")
	payload = make([]byte, max(0, size*n-less))
	for j := range payload {
		payload[j] = byte(j*7 + j>>8 + i*31)
	}
	if len(payload) > size {
		return payload, size
	}
	return payload, 0
}

// named is a datagram as a short text that differs from others'.
func named(peer netip.AddrPort, class uint8, dontFragment bool, payload []byte) string {
	return fmt.Sprintf("%v %d %v %d:%08x", peer, class, dontFragment, len(payload), crc32.ChecksumIEEE(payload))
}

// compare fails for the first datagram that is another one.
func compare(t *rapid.T, way string, got, want []string) {
	for i := range max(len(got), len(want)) {
		g, w := append(got, "none")[min(i, len(got))], append(want, "none")[min(i, len(want))]
		if g != w {
			t.Fatalf("%s: datagram %d of %d is %s, want %s", way, i, len(want), g, w)
		}
	}
}

// Whatever clients send in one batch, as datagrams or trains: the handler gets each
// client's datagrams, with what their headers said, in the order of their arrival.
func TestEveryDatagramOfABatchReachesTheHandlerInOrder(t *testing.T) {
	b := newTapBed(t, nil)
	clients := []netip.AddrPort{client6}
	for port := range uint16(maxBursts) { // one more than bursts
		clients = append(clients, netip.AddrPortFrom(clientIP4, 40000+port))
	}
	var got map[netip.AddrPort][]string
	note := func(to map[netip.AddrPort][]string, client netip.AddrPort, tr flow.Train) {
		for _, d := range datagramsIn(tr.Payload, tr.Segment) {
			to[client] = append(to[client], named(tr.Peer.Addr, tr.TClass, tr.DontFragment, d))
		}
	}
	b.udp = func(f flow.Flow, tr flow.Train) { note(got, f.Source, tr) }
	rapid.Check(t, func(t *rapid.T) {
		got = map[netip.AddrPort][]string{}
		want := map[netip.AddrPort][]string{}
		for i := range rapid.IntRange(1, BatchSize).Draw(t, "packets") {
			client := rapid.SampledFrom(clients).Draw(t, "client")
			dst := dst4
			if client.Addr().Is6() {
				dst = dst6
			}
			dst = netip.AddrPortFrom(dst.Addr(), rapid.Uint16Range(9, 10).Draw(t, "port"))
			h := wire.Header{
				Src: client.Addr(), Dst: dst.Addr(), TTL: 64,
				TClass: rapid.SampledFrom([]uint8{0, 0, 3}).Draw(t, "class"), DontFragment: rapid.Bool().Draw(t, "df"),
			}
			payload, segment := drawTrain(t, i)
			head := h.AppendUDP(nil, client.Port(), dst.Port(), payload, segment > 0)
			var o Offload
			if segment > 0 {
				o = partialUDP(head)
				o.GSO, o.GSOSize, o.HdrLen = GSOUDP, uint16(segment), uint16(len(head))
			}
			add(b.batch, wirePacket{append(head, payload...), o})
			note(want, client, flow.Train{
				Peer: flow.Destination{Addr: dst}, Payload: payload, Segment: segment,
				TClass: h.TClass, DontFragment: h.DontFragment || client.Addr().Is6(),
			})
		}
		b.batch.Deliver()
		for _, c := range clients {
			compare(t, fmt.Sprintf("from %v", c), got[c], want[c])
		}
	})
}

// Whatever comes back, and whatever the device can do: the client gets these
// datagrams, in this order.
func TestEveryReplyReachesTheClientInOrder(t *testing.T) {
	forOffloads(t, func(t *testing.T, gso, uso bool) {
		b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso, d.out = gso, uso, make(chan wirePacket, 1000) })
		peers := []netip.AddrPort{dst4, netip.AddrPortFrom(dst4.Addr(), 53)}
		rapid.Check(t, func(t *rapid.T) {
			var ts []flow.Train
			var want []string
			total := 0
			for i := range rapid.IntRange(1, 20).Draw(t, "trains") {
				tr := flow.Train{
					Peer:   flow.Destination{Addr: rapid.SampledFrom(peers).Draw(t, "peer")},
					TClass: rapid.SampledFrom([]uint8{0, 0, 2}).Draw(t, "class"),
				}
				tr.Payload, tr.Segment = drawTrain(t, i)
				ts = append(ts, tr)
				total += len(tr.Payload)
				for _, d := range datagramsIn(tr.Payload, tr.Segment) {
					want = append(want, named(tr.Peer.Addr, tr.TClass, false, d))
				}
			}
			moved := b.stack.SendDatagrams(client4, ts)
			var got []string
			packets := len(b.dev.out)
			for range packets {
				w := b.written()
				p := b.parsed(w)
				for _, d := range datagramsIn(w.b[p.PayloadOffset:], int(w.o.GSOSize)) {
					got = append(got, named(p.Source(), p.TClass, p.DontFragment, d))
				}
			}
			compare(t, "back", got, want)
			if moved != total {
				t.Fatalf("%d of %d bytes moved", moved, total)
			}
		})
	})
}

// A batch full of trains that lie in two views each.
func TestMoreTrainsThanABurstHoldsAreHandedOnInOrder(t *testing.T) {
	for _, size := range []int{64, 1200} { // of many, the burst is full; of large ones, the room for what lies across
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			b := newTapBed(t, nil)
			got := b.heardUDP()
			var want []byte
			for i := range BatchSize {
				payload := count(40 * size)
				payload[0] = byte(i)
				w := usoPacket(payload)
				w.o.GSOSize = uint16(size)
				add(b.batch, w)
				want = append(want, payload...)
			}
			b.batch.Deliver()
			if ds := datagramsOf(*got); len(ds) != BatchSize*40 || !bytes.Equal(bytes.Join(ds, nil), want) {
				t.Errorf("%d datagrams, or other ones", len(ds))
			}
		})
	}
}

func TestClientsThatTakeTurnsAreHandedOnByTheBurst(t *testing.T) {
	b := newTapBed(t, nil)
	calls := 0
	b.burst = func(f flow.Flow, ts []flow.Train) {
		if calls++; len(ts) != BatchSize/maxBursts || f.Source.Addr() != clientIP4 {
			t.Errorf("%d trains of %v at once", len(ts), f.Source)
		}
	}
	for i := range BatchSize {
		client := netip.AddrPortFrom(clientIP4, uint16(40000+i%maxBursts))
		add(b.batch, wirePacket{datagram(client, dst4, count(100), nil), Offload{}})
	}
	b.batch.Deliver()
	if calls != maxBursts {
		t.Errorf("%d calls, want %d", calls, maxBursts)
	}
}

func TestEqualRepliesAreOnePacketWhereTheDeviceSegments(t *testing.T) {
	b := newTapBed(t, func(_ *Config, d *tap) { d.gso, d.uso = true, true })
	reply := flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(1200)}
	ts := slices.Repeat([]flow.Train{reply}, 10)
	ts[4].Payload = count(7) // a short one ends a train
	ts[8].TClass = 1
	var ids []uint16
	var sizes []int
	for _, w := range b.sent(client4, ts...) {
		p := b.parsed(w)
		ids, sizes = append(ids, uint16(p.ID)), append(sizes, p.PayloadLen)
	}
	if want := []int{4807, 3600, 1200, 1200}; !slices.Equal(sizes, want) {
		t.Errorf("packets of %d bytes, want %d", sizes, want)
	}
	// The device counts ids on from the first one.
	if ids[1]-ids[0] != 5 || ids[2]-ids[1] != 3 || ids[3]-ids[2] != 1 {
		t.Errorf("ids %d overlap", ids)
	}
}

func BenchmarkTrainIn(b *testing.B) {
	for _, c := range []struct {
		name   string
		packet func(payload []byte) wirePacket
		n      int // packets
		size   int // bytes of each
	}{
		{"datagrams", func(p []byte) wirePacket {
			return wirePacket{datagram(client4, dst4, p, nil), Offload{Flags: OffloadDataValid}}
		}, 40, 1200},
		{"USO", usoPacket, 1, 40 * 1200},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := &Stack{cfg: Config{Handler: idle{}, Drops: new(flow.Drops)}}
			batch, w := NewBatch(s.deliver), c.packet(count(c.size))
			b.SetBytes(int64(c.n * c.size))
			b.ReportAllocs()
			for b.Loop() {
				for range c.n {
					add(batch, w)
				}
				batch.Deliver()
			}
		})
	}
}

// idle is a Handler that does nothing.
type idle struct{}

func (idle) HandleTCP(*Pending)                      {}
func (idle) HandleDatagrams(flow.Flow, []flow.Train) {}

// usoPacket is a train of 1200-byte datagrams as the kernel hands it over.
func usoPacket(payload []byte) wirePacket {
	h := wire.Header{Src: client4.Addr(), Dst: dst4.Addr(), TTL: 64}
	head := h.AppendUDP(nil, client4.Port(), dst4.Port(), payload, true)
	o := partialUDP(head)
	o.GSO, o.GSOSize, o.HdrLen = GSOUDP, 1200, uint16(len(head))
	return wirePacket{append(head, payload...), o}
}

func BenchmarkTrainOut(b *testing.B) {
	s := &Stack{cfg: Config{Device: sink{uso: true}, Drops: new(flow.Drops)}}
	s.builder.New = func() any { return new(udpBuilder) }
	ts := slices.Repeat([]flow.Train{{Peer: flow.Destination{Addr: dst4}, Payload: count(1200)}}, 40)
	b.SetBytes(40 * 1200)
	b.ReportAllocs()
	for b.Loop() {
		s.SendDatagrams(client4, ts)
	}
}
