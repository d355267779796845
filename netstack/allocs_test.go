//go:build !race

package netstack

import (
	"io"
	"net/netip"
	"testing"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/netstack/wire"
)

// The race detector makes pools forget at random, so that allocations are counted
// without it.

// Deliver neither allocates for a datagram nor for what it drops.
func TestDatagramsAreDeliveredWithoutAllocating(t *testing.T) {
	b := newTapBed(t, nil)
	n := 0
	b.udp = func(flow.Flow, flow.Train) { n++ }
	small := datagram(client4, dst4, count(1400), nil)
	large := datagram(client6, dst6, count(9000), nil)
	bad := spoilt(small)
	ping := echoRequest(client4, serverIP4, 1, count(56), nil)
	for _, c := range []struct {
		name   string
		packet wirePacket
	}{
		{"v4", wirePacket{b: small}},
		{"over both views", wirePacket{b: large}},
		{"dropped", wirePacket{b: bad}},
		{"echo", wirePacket{b: ping}},
		{"train", usoPacket(count(40 * 1200))},
	} {
		got := testing.AllocsPerRun(1000, func() {
			for range 10 {
				add(b.batch, c.packet)
			}
			b.batch.Deliver()
		})
		if got > 0 {
			t.Errorf("%s: %v allocations for 10 packets", c.name, got)
		}
	}
	if n == 0 {
		t.Fatal("nothing was delivered")
	}
}

func TestRepliesAreSentWithoutAllocating(t *testing.T) {
	for _, uso := range []bool{false, true} {
		s := &Stack{cfg: Config{Device: sink{uso: uso}, Drops: new(flow.Drops)}}
		s.builder.New = func() any { return new(udpBuilder) }
		ts := []flow.Train{
			{Peer: flow.Destination{Addr: dst4}, Payload: count(1200)},
			{Peer: flow.Destination{Addr: dst4}, Payload: count(12_000), Segment: 1200},
		}
		if n := testing.AllocsPerRun(1000, func() { s.SendDatagrams(client4, ts) }); n > 0 {
			t.Errorf("uso %v: %v allocations", uso, n)
		}
		if n := testing.AllocsPerRun(1000, func() { s.SendEchoReplies(client4, ts[:1]) }); n > 0 {
			t.Errorf("uso %v: %v allocations for an echo reply", uso, n)
		}
	}
}

// What gVisor makes of a segment is its own; the link adds nothing to it.
func TestTheLinkWritesAnAcknowledgementWithoutAllocating(t *testing.T) {
	l := &link{dev: sink{}, drops: new(flow.Drops), pending: new(pendingTable)}
	packet := segment{src: client4, dst: dst4, flags: wire.ACK}.packet()
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{ReserveHeaderBytes: len(packet)})
	defer pkt.DecRef()
	copy(pkt.TransportHeader().Push(20), packet[20:])
	copy(pkt.NetworkHeader().Push(20), packet[:20])
	pkt.Owner = new(Conn)
	if n := testing.AllocsPerRun(1000, func() { l.write(pkt) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// Beside gVisor's packet, which is pooled, and what the collector makes the pools
// forget.
func TestSegmentsAreJoinedWithoutAllocating(t *testing.T) {
	s := &Stack{cfg: Config{Drops: new(flow.Drops)}, link: &link{dispatcher: discard{}}}
	b := NewBatch(s.deliver)
	packets := stream(client4, dst4, BatchSize, 1440)
	n := testing.AllocsPerRun(1000, func() {
		for _, p := range packets {
			add(b, wirePacket{p, Offload{Flags: OffloadDataValid}})
		}
		b.Deliver()
	})
	if n > 0 {
		t.Errorf("%v allocations for %d segments", n, len(packets))
	}
}

// refusedSYNAllocs bounds what a SYN costs that a limit refuses: gVisor's hold on
// the address that it came to, and none of ours.
const refusedSYNAllocs = 1

func TestASYNThatIsRefusedCostsNoAllocationOfOurs(t *testing.T) {
	b := newTapBed(t, func(c *Config, _ *tap) { c.SYNs.All = admit.Rate{PerSecond: 1, Burst: 1} })
	b.tcp = func(p *Pending) { p.Refuse(flow.VerdictSilent) }
	syns := make([][]byte, 1100)
	for i := range syns {
		src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 1}), 40000)
		syns[i] = segment{src: src, dst: dst4, flags: wire.SYN}.packet()
	}
	add := func(packet []byte) {
		add(b.batch, wirePacket{packet, Offload{}})
		b.batch.Deliver()
	}
	add(syns[0])
	i := 0
	n := testing.AllocsPerRun(1000, func() {
		i++
		add(syns[i])
	})
	if refused := b.drops[flow.DropSYNRate].Load(); refused < 1000 {
		t.Fatalf("%d SYNs were refused", refused)
	}
	if n > refusedSYNAllocs {
		t.Errorf("%v allocations", n)
	}
}

// segmentAllocs bounds what a data segment and its acknowledgement cost: the tap's
// copy, about one of gVisor's (views, packets and segments are pooled), and what the
// collector makes the pools forget.
const segmentAllocs = 4

func TestASegmentAndItsAcknowledgementCostFewAllocations(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	s := segment{src: h.src, dst: h.dst, ack: h.ack, flags: wire.ACK | wire.PSH, payload: count(1000)}
	packets := make([][]byte, 1100)
	for i := range packets {
		s.seq = h.seq + uint32(i*len(s.payload))
		packets[i] = s.packet()
	}
	i := 0
	n := testing.AllocsPerRun(1000, func() {
		b.put(packets[i], Offload{})
		i++
		<-b.dev.out
		c.ep.Read(io.Discard, tcpip.ReadOptions{})
	})
	t.Logf("%v allocations", n)
	if n > segmentAllocs {
		t.Errorf("%v allocations, want at most %d", n, segmentAllocs)
	}
}
