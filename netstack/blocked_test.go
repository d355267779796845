package netstack

import (
	"net"
	"testing"
	"time"

	"gatewayd/flow"
)

// Whatever a server does not read, the client's endpoint goes on: its lock is
// free, so that it acknowledges, and a kill gets through at once.
func TestAServerThatStopsReadingHoldsNothingUp(t *testing.T) {
	b := newBed(t, true, nil)
	release := make(chan struct{})
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		<-release
		c.Close()
	}))
	defer close(release)
	c := b.mustDial(dst4)
	written := make(chan int, 1)
	go func() {
		n := 0
		for {
			m, err := c.Write(make([]byte, 64<<10))
			if n += m; err != nil {
				written <- n
				return
			}
		}
	}()
	s := recv(t, sessions)
	waitStill(t, func() uint64 { return s.meter.moved(flow.Up) })

	locked := make(chan struct{})
	go func() {
		s.conn.ep.LockUser()
		s.conn.ep.UnlockUser()
		close(locked)
	}()
	select {
	case <-locked:
	case <-time.After(2 * time.Second):
		t.Error("the endpoint is locked while the server reads nothing")
	}
	begun := time.Now()
	s.conn.End(flow.ErrPolicy)
	if err := s.wait(t); err != flow.ErrPolicy || time.Since(begun) > time.Second {
		t.Fatalf("ended with %v after %s", err, time.Since(begun))
	}
	moved := s.meter.moved(flow.Up)
	if n := recv(t, written); uint64(n) < moved {
		t.Fatalf("%d bytes were counted of %d written", moved, n)
	}
}
