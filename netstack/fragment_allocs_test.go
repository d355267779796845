//go:build !race

package netstack

import (
	"testing"

	"gatewayd/flow"
)

func TestFragmentsAreReassembledWithoutAllocating(t *testing.T) {
	b := newTapBed(t, nil)
	n := 0
	b.udp = func(flow.Flow, flow.Train) { n++ }
	for name, packet := range map[string][]byte{
		"v4": datagram(client4, dst4, count(1600), nil), "v6 over both views": datagram(client6, dst6, count(9000), nil),
	} {
		fs := fragments(packet, 1, 1440)
		if got := testing.AllocsPerRun(1000, func() {
			b.putAll(fs)
		}); got > 0 {
			t.Errorf("%s: %v allocations for a datagram", name, got)
		}
	}
	spoilt := fragments(datagram(client4, dst4, count(3000), nil), 2, 1440)
	b.putAll(spoilt[:1])
	spoilt[0][40] ^= 1
	if got := testing.AllocsPerRun(1000, func() { b.putAll(spoilt[:2]) }); got > 0 {
		t.Errorf("%v allocations for what is dropped", got)
	}
	if n != 2*1001 {
		t.Errorf("%d datagrams arrived: %v", n, b.drops.Map())
	}
}

func TestLargeRepliesAreSentWithoutAllocating(t *testing.T) {
	s := &Stack{cfg: Config{Device: sink{uso: true}, Drops: new(flow.Drops)}}
	s.builder.New = func() any { return new(udpBuilder) }
	v4 := []flow.Train{
		{Peer: flow.Destination{Addr: dst4}, Payload: count(9000)},
		{Peer: flow.Destination{Addr: dst4}, Payload: count(15_000), Segment: 1500},
	}
	v6 := []flow.Train{{Peer: flow.Destination{Addr: dst6}, Payload: count(65_000)}}
	if n := testing.AllocsPerRun(100, func() { s.SendDatagrams(client4, v4); s.SendDatagrams(client6, v6) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
