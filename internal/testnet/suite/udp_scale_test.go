package suite

import (
	"fmt"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

const (
	heldAssociations = 5000
	associationBytes = 8 << 10 // resident, of one that idles; the benchmark's limit is half of it
)

func TestB20_FiveThousandAssociationsHoldADescriptorEachAndNoGoroutine(t *testing.T) {
	lab, g := udpBed(t, udpBase+unlimited)
	lab.Srv.UDPEcho(hostPort(testnet.FarV4, 7))
	peer := addrPort(testnet.FarV4, 7)
	openUDP(t, lab.Cli, testnet.ClientV4).sendTo(peer, "warm")
	testnet.Until(t, udpPatience, "the first association", func() bool { return g.API.Status().Associations == 1 })
	goroutines, process := g.API.Status().Memory.Goroutines, g.Process()
	sockets := make([]udpSocket, heldAssociations)
	for i := range sockets {
		sockets[i] = openUDP(t, lab.Cli, testnet.ClientV4)
		for answered := false; !answered; { // more of them begin than one network may: it tries again
			sockets[i].sendTo(peer, "x")
			_, _, err := sockets[i].next(100 * time.Millisecond)
			answered = err == nil
		}
	}
	s, now := g.API.Status(), g.Process()
	t.Logf("%d associations: %d goroutines, %d descriptors, %d bytes resident each", s.Associations, s.Memory.Goroutines, now.FDs, (now.RSS-process.RSS)/heldAssociations)
	if s.Associations != heldAssociations+1 || s.Flows != heldAssociations+1 {
		t.Errorf("%d associations, %d flows", s.Associations, s.Flows)
	}
	if s.Memory.Goroutines > goroutines+8 || now.FDs > process.FDs+heldAssociations+4 {
		t.Errorf("%d goroutines and %d descriptors, %d and %d before", s.Memory.Goroutines, now.FDs, goroutines, process.FDs)
	}
	if now.RSS > process.RSS+heldAssociations*associationBytes {
		t.Errorf("resident memory grew from %d to %d KiB", process.RSS>>10, now.RSS>>10)
	}
	for i := 0; i < heldAssociations; i += 97 { // the old ones still work
		payload := fmt.Sprintf("again %d", i)
		sockets[i].sendTo(peer, payload)
		sockets[i].want(peer, payload)
	}
}

// churn has clients come and go at a rate, each with two datagrams, and looks that
// no limit is passed and nothing stays.
func churn(t *testing.T, limit int, rate float64, while time.Duration) {
	lab, g := udpBed(t, fmt.Sprintf("version: 1\napi: {listen: \"$API\"}\ntun: [{tag: lan, device: gw0}]\n"+
		"timeouts: {udp: {one_way: 2s, answered: 2s}}\nsweep: 100ms\n"+
		"limits: {flows: %d, per_source: {flows: 0, associations: 0}}\n", 2*limit))
	lab.GW.Filter("forward", `iifname "gw0" oifname "wan0"`, "drop") // answers to forged sources
	lab.Srv.UDPEcho(hostPort(testnet.FarV4, 7))
	in := injectInto(t, lab.GW, "gw0")
	next := func(n int) []byte { // each client twice, 50,000 ports of each address
		n /= 2
		return udpPacket(fmt.Sprintf("10.10.0.%d", 10+n/50_000%200), 1024+n%50_000, testnet.FarV4, 7, "x")
	}
	in.send(next(0))
	testnet.Until(t, udpPatience, "the first association came and went", func() bool {
		s := g.API.Status()
		return s.Associations == 0 && len(g.API.Closed()) == 1
	})
	before, process := g.API.Status(), g.Process()
	stop, looked := make(chan struct{}), make(chan struct{})
	most, goroutines := 0, 0
	go func() {
		defer close(looked)
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			select {
			case <-tick.C:
				s := g.API.Status()
				most, goroutines = max(most, s.Associations), max(goroutines, s.Memory.Goroutines)
			case <-stop:
				tick.Stop()
				return
			}
		}
	}()
	sent := pour(in, flood{next: next}, rate, while)
	close(stop)
	<-looked
	changed := drops(g, before.Drops)
	t.Logf("%d datagrams: at most %d associations and %d goroutines; drops %v", sent, most, goroutines, changed)
	if most > limit || most < limit*9/10 {
		t.Errorf("%d associations, the limit is %d", most, limit)
	}
	if changed["flow_limit"] == 0 {
		t.Errorf("no eviction was counted: %v", changed)
	}
	if goroutines > before.Memory.Goroutines+300 { // openers are at most 256
		t.Errorf("%d goroutines, %d before", goroutines, before.Memory.Goroutines)
	}
	testnet.Until(t, 30*time.Second, "nothing of them is left", func() bool {
		s := g.API.Status()
		return s.Associations == 0 && s.Flows == 0 && s.Memory.Goroutines <= before.Memory.Goroutines+before.Memory.Goroutines/10+1 && g.Process().FDs <= process.FDs+2
	})
}

func TestB20_ChurnPassesNoLimitAndLeavesNothing(t *testing.T) {
	churn(t, 1000, 5000, 3*time.Second)
}
