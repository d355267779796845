//go:build !race

package outbound

import (
	"testing"

	"gatewayd/flow"
)

// The race detector makes pools forget at random, so that allocations are counted
// without it.

func TestEchoesAllocateNothing(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, _ := direct(t, nil)
		l, r := e.stream(t, d, e.live)
		d.c.Poller.Remove(int(l.send.socket.fd)) // the test receives by itself
		silent := &counter{}
		l.r = silent
		ts := []flow.Train{request(e.live, 1, bytesOf(1400))}
		in := d.inbox()
		n := testing.AllocsPerRun(200, func() {
			l.Send(ts)
			l.replies(in)
		})
		if n > 0 || silent.n < 200 || r.count() != 0 {
			t.Errorf("%v allocations for a request and its reply; %d replies", n, silent.n)
		}
	})
}

// counter is a Receiver that counts trains.
type counter struct{ n int }

func (c *counter) Receive(ts []flow.Train) (moved int) { c.n += len(ts); return 0 }
func (c *counter) Unreachable(flow.ICMPError)          {}
func (c *counter) Closed(error)                        {}
