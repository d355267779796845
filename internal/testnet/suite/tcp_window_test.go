package suite

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestAClientThatKeepsItsWindowClosedHoldsLittleAndCanBeKilled(t *testing.T) {
	b := newTCPBed(t, "")
	w := newWorld(t, b.Lab, behaviourFamilies()[0])
	var served atomic.Uint64
	b.Srv.Serve(hostPort(testnet.FarV4, 7201), func(c *net.TCPConn) {
		testnet.WritePattern(countingWriter{c, &served}, -1) //nolint:errcheck // ends with the client
	})
	rss := b.gw.Process().RSS
	for range slowClients {
		if _, err := w.openShut(7201); err != nil {
			t.Fatal(err)
		}
	}
	testnet.Until(t, patience, "buffers are full", stalled(&served))
	b.boundedRSS(t, rss, slowClientRSS)
	flows := b.gw.API.Flows("")
	if len(flows) != slowClients {
		t.Errorf("%d flows of %d clients", len(flows), slowClients)
	}
	last := addrPort(w.raw, w.port).String()
	for _, f := range flows {
		if f.Down > 1 { // a probe of the window has a byte
			t.Errorf("flow %d counts %d bytes down, nobody took any", f.ID, f.Down)
		}
		if f.Source != last {
			continue
		}
		w.wire.drain() // probes of all clients, which leave a reset no room
		if status := b.gw.API.Kill(f.ID); status != http.StatusNoContent {
			t.Errorf("kill: %d", status)
		}
		if !w.untilReset(prompt) {
			t.Error("the client was not reset at once")
		}
	}
	if n := b.gw.API.KillWhere("source=" + w.raw); n != slowClients-1 {
		t.Errorf("killed %d flows", n)
	}
	testnet.Until(t, patience, "no flow is left", func() bool { return b.gw.API.Status().Flows == 0 })
}

func TestAFlowThatItsServerEndedEndsThoughTheClientTakesNothing(t *testing.T) {
	b := newTCPBed(t, "timeouts: {tcp: {half_closed: 1s}}\n")
	for _, f := range behaviourFamilies() {
		w := newWorld(t, b.Lab, f)
		if _, err := w.openShut(portEnded); err != nil {
			t.Fatal(err)
		}
		if !w.untilReset(10 * time.Second) {
			t.Errorf("%s: the client was not reset", f.name)
		}
		b.endedIdle(t, addrPort(w.raw, w.port).String())
	}
}

// endedIdle waits until the flow of a client ended for want of traffic.
func (b *tcpBed) endedIdle(t *testing.T, source string) {
	t.Helper()
	testnet.Until(t, patience, "the flow of "+source+" ended as idle, and none is left", func() bool {
		for _, f := range b.gw.API.Closed() {
			if f.Source == source {
				return f.Reason == "idle" && b.gw.API.Status().Flows == 0
			}
		}
		return false
	})
}

// One side has ended, the other says nothing and stays.
func TestHalfClosedFlowsThatNeverFinishAreEnded(t *testing.T) {
	b := newTCPBed(t, "timeouts: {tcp: {half_closed: 1s}}\n")
	for _, f := range tcpFamilies() {
		for port, serverEnds := range map[int]bool{7202: true, 7203: false} {
			broken := make(chan bool, 1)
			b.Srv.Serve(f.addr(port), func(c *net.TCPConn) {
				if serverEnds {
					c.CloseWrite() //nolint:errcheck // the client would notice
				} else {
					io.Copy(io.Discard, c) //nolint:errcheck // until the client's end
				}
				end := time.Now().Add(patience)
				for time.Now().Before(end) && !socketBroken(c) {
					time.Sleep(5 * time.Millisecond)
				}
				broken <- socketBroken(c)
			})
			c := b.connect(t, f.addr(port))
			if serverEnds {
				io.ReadAll(c) //nolint:errcheck // until the server's end
			} else if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			b.endedIdle(t, c.LocalAddr().String())
			testnet.Until(t, patience, "the client was reset", func() bool { return socketBroken(c) })
			if !<-broken {
				t.Errorf("%s, the server ended first: %v: the server was not reset", f.name, serverEnds)
			}
		}
	}
}
