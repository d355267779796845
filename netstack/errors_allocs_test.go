//go:build !race

package netstack

import (
	"testing"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// A flood that is answered with errors, or not even that, makes no garbage.
func TestErrorsAreSentAndSuppressedWithoutAllocating(t *testing.T) {
	s, err := New(Config{Device: sink{}, Drops: new(flow.Drops)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.net.Close()
	packet := datagram(client6, dst6, count(100), nil)
	train := flow.Train{Peer: flow.Destination{Addr: dst4}, Payload: count(1200)}
	e := flow.ICMPError{Type: 3, Code: 1, Peer: dst4, Offender: gateway4, Payload: train.Payload}
	if n := testing.AllocsPerRun(1000, func() {
		s.sendOf(wire.TimeExceeded, packet)
		s.SendRefusal(flow.UDP, client4, train, flow.VerdictProhibited)
		s.SendUnreachable(flow.UDP, client4, e)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if s.cfg.Drops[flow.DropICMPLimit].Load() == 0 {
		t.Error("none was suppressed")
	}
}
