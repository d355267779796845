package netstack

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip/faketime"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// clockBed is a tap whose gVisor has a clock that tests advance, and a relay to what
// serves, which then waits for the client's end.
type clockBed struct {
	*tapBed
	*hand
	clock *faketime.ManualClock
	conn  *Conn
	meter *counter
	done  chan error
}

func newClockBed(t *testing.T, serves func(c *net.TCPConn)) *clockBed {
	t.Helper()
	clock := faketime.NewManualClock()
	b := newTapBed(t, func(c *Config, _ *tap) { c.Clock = clock })
	done := make(chan error, 1)
	meter := new(counter)
	b.tcp = b.relays(serve(t, func(c *net.TCPConn) {
		serves(c)
		io.Copy(io.Discard, c)
		c.Close()
	}), meter, done)
	h := b.hand(client4, dst4)
	h.syn(0)
	h.answered()
	return &clockBed{b, h, clock, recv(t, b.conns), meter, done}
}

// timesOut advances the clock until the stack has written its next packet, and
// reports whether it is a reset. Goroutines of the stack may be behind the clock: what
// they arm counts from when they come to it, so that no number of seconds is enough.
func (b *clockBed) timesOut() (reset bool) {
	b.t.Helper()
	waitFor(b.t, func() bool {
		for range 100 {
			b.clock.Advance(time.Second)
			if len(b.dev.out) > 0 {
				return true
			}
		}
		return false
	})
	return b.resets()
}

// resets reports whether the next packet that the stack writes is a reset.
func (b *clockBed) resets() bool {
	b.t.Helper()
	_, h := b.tcpWritten()
	return h.Flags().Contains(header.TCPFlagRst)
}

func TestAClientThatTakesASuperPacketPieceByPieceIsNotSilent(t *testing.T) {
	b := newClockBed(t, func(c *net.TCPConn) { io.Copy(c, newPattern(10*1448)) })
	first := b.written()
	if len(first.b) < 8*1448 {
		t.Fatalf("the first packet has %d bytes: the test shows nothing", len(first.b))
	}
	timeouts := &b.conn.ep.Stats().(*tcp.Stats).SendErrors.Timeouts
	for timeouts.Value() < 3*maxTimeouts {
		if b.timesOut() {
			t.Fatalf("given up after %d time-outs", timeouts.Value())
		}
		b.ack += 10
		b.send(wire.ACK, nil)
	}
	b.conn.End(flow.ErrShutdown)
	recv(t, b.done)
}

func TestAClientThatAnswersNothingIsGivenUp(t *testing.T) {
	for name, c := range map[string]struct {
		serves func(c *net.TCPConn)
		begin  func(b *clockBed) // until something was sent for the first time
		over   bool              // the relay is, by then
		none   bool              // of the server's bytes are sent
	}{
		"data": {serves: func(c *net.TCPConn) {
			c.Write(make([]byte, 100)) // which is too short for a black hole
		}, begin: func(b *clockBed) {
			b.tcpWritten()
		}},
		"the end of an open flow": {serves: func(c *net.TCPConn) {
			c.CloseWrite()
		}, begin: func(b *clockBed) {
			b.tcpWritten()
		}},
		"the end of a flow that is over": {over: true, serves: func(*net.TCPConn) {
		}, begin: func(b *clockBed) {
			b.send(wire.FIN|wire.ACK, nil)
			b.tcpWritten() // acknowledged
			b.tcpWritten()
		}},
		"a probe of its closed window": {none: true, serves: func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			c.Write(make([]byte, 1000))
		}, begin: func(b *clockBed) {
			b.put(segment{src: b.src, dst: b.dst, seq: b.seq, ack: b.ack, flags: wire.ACK, closed: true, payload: []byte("x")}.packet(), Offload{})
			b.tcpWritten() // acknowledged
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newClockBed(t, c.serves)
			c.begin(b)
			if c.over {
				if err := recv(t, b.done); err != nil {
					t.Fatal(err)
				}
			}
			for i := range maxTimeouts + 1 {
				if b.timesOut() {
					t.Fatalf("given up after %d repetitions", i)
				}
			}
			if !b.resets() {
				t.Fatalf("not given up after %d repetitions", maxTimeouts+1)
			}
			if n := b.conn.sent.total.Load(); c.none && n != 0 {
				t.Errorf("%d bytes are counted", n)
			}
			if c.over {
				waitFor(t, func() bool { return b.stack.endpoint(tuple{client4, dst4}) == nil })
			} else if err := recv(t, b.done); flow.ReasonOf(err) != flow.Timeout {
				t.Errorf("ended with %v, want a time-out", err)
			}
		})
	}
}

func TestWhatASilentClientHadSentIsPassedOn(t *testing.T) {
	const last = "last words"
	got := make(chan string, 1)
	b := newClockBed(t, func(c *net.TCPConn) {
		c.Write(make([]byte, 100))
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	b.tcpWritten()
	b.meter.pause(flow.Up)
	b.send(wire.ACK, []byte(last))
	b.tcpWritten() // acknowledged
	for range maxTimeouts + 1 {
		if b.timesOut() {
			t.Fatal("reset before what it sent was passed on")
		}
	}
	waitFor(t, func() bool {
		b.conn.ep.LockUser()
		defer b.conn.ep.UnlockUser()
		return b.conn.silence.timeouts-b.conn.silence.before > maxTimeouts && !b.conn.has(epSilent)
	})
	b.meter.resume(flow.Up)
	if s := recv(t, got); s != last {
		t.Errorf("the server got %q", s)
	}
	if err := recv(t, b.done); flow.ReasonOf(err) != flow.Timeout {
		t.Errorf("ended with %v, want a time-out", err)
	}
}

func TestAClientOfADeviceThatTakesNothingIsGivenUp(t *testing.T) {
	b := newClockBed(t, func(c *net.TCPConn) { c.Write(make([]byte, 100)) })
	b.tcpWritten()
	b.dev.fails.Store(true)
	waitFor(t, func() bool { b.clock.Advance(100 * time.Second); return len(b.done) > 0 })
	if err := recv(t, b.done); flow.ReasonOf(err) != flow.Timeout {
		t.Errorf("ended with %v, want a time-out", err)
	}
}
