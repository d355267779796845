package netstack

import (
	"io"
	"net"
	"testing"
	"time"

	"gatewayd/flow"
)

// pause changes what the meter answers, and tells the relay, as a wake does.
func (s *session) pause(d flow.Dir, err error) {
	s.meter.mu.Lock()
	s.meter.err[d] = err
	s.meter.mu.Unlock()
	s.conn.wake()
}

// The relay takes nothing beyond what it was allowed, says what it took each time, and
// nothing in between is lost: the fake panics otherwise.
func TestEveryReadyIsFollowedByOneTook(t *testing.T) {
	b := newBed(t, true, nil)
	b.prepare = func(s *session) { s.meter.max = 1000 }
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(c, c)
		c.Close()
	}))
	c := b.mustDial(dst4)
	s := recv(t, sessions)
	const size = 1 << 20
	go func() {
		c.Write(make([]byte, size))
		c.CloseWrite()
	}()
	if n, err := io.Copy(io.Discard, c); n != size || err != nil {
		t.Fatalf("%d bytes came back, %v", n, err)
	}
	c.Close()
	if err := s.wait(t); err != nil {
		t.Fatal(err)
	}
	for d := range s.meter.n {
		if s.meter.asked[d] || s.meter.took[d] != size || s.meter.n[d] != size || s.meter.left[d] != 0 {
			t.Errorf("%v: took %d, moved %d, left the line %d times, asked %v", flow.Dir(d), s.meter.took[d], s.meter.n[d], s.meter.left[d], s.meter.asked[d])
		}
	}
}

// What is taken and held because the socket is full is no byte that moved. Whether
// anything is held when the socket is full is a matter of luck, so that there are tries.
func TestWhatAFullSocketMakesTheRelayHoldIsTakenAndHasNotMoved(t *testing.T) {
	b := newBed(t, false, nil)
	quit := make(chan struct{})
	defer close(quit)
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) { <-quit }))
	for range 20 {
		c := b.mustDial(dst4)
		s := recv(t, sessions)
		go c.Write(make([]byte, 64<<20))
		waitStill(t, func() uint64 { return s.meter.moved(flow.Up) })
		s.conn.End(flow.ErrPolicy)
		s.wait(t)
		c.Close()
		took, moved := s.meter.took[flow.Up], s.meter.n[flow.Up]
		if moved == 0 || took < moved || took > moved+chunkBytes {
			t.Fatalf("took %d, moved %d", took, moved)
		}
		if took > moved {
			return
		}
	}
	t.Error("nothing was ever held")
}

// A direction in line whose far side broke can't use its turn: whoever waits behind it
// must not wait for it.
func TestAPausedDirectionThatCannotMoveAnyMoreLeavesItsPlace(t *testing.T) {
	b := newBed(t, true, nil)
	b.prepare = func(s *session) { s.meter.err[flow.Up] = flow.ErrPaused }
	broken := make(chan struct{})
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		<-broken
		c.SetLinger(0)
		c.Close()
	}))
	c := b.mustDial(dst4)
	defer c.Close()
	s := recv(t, sessions)
	c.Write([]byte("hello"))
	waitFor(t, func() bool { s.meter.mu.Lock(); defer s.meter.mu.Unlock(); return s.meter.waiting != nil })
	s.conn.wake() // asks again, and stays in line
	s.conn.wake()
	if n := leaves(s, flow.Up); n != 0 {
		t.Fatalf("left %d times while it could move", n)
	}
	close(broken)
	waitFor(t, func() bool { return leaves(s, flow.Up) > 0 })
	if s.wait(t); leaves(s, flow.Up) != 1 {
		t.Errorf("left %d times", leaves(s, flow.Up))
	}
}

// A receiver that takes nothing for the moment is as good as none.
func TestAPausedDirectionWhoseReceiverIsFullLeavesItsPlaceAndComesBack(t *testing.T) {
	b := newBed(t, true, nil)
	b.prepare = func(s *session) { s.meter.err[flow.Down] = flow.ErrPaused }
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		c.Write([]byte("hello"))
		c.Close()
	}))
	c := b.mustDial(dst4)
	defer c.Close()
	s := recv(t, sessions)
	waitFor(t, func() bool { s.meter.mu.Lock(); defer s.meter.mu.Unlock(); return s.meter.waiting != nil })
	s.conn.clear(epWritable) // as a write does that finds no room
	s.conn.wake()
	waitFor(t, func() bool { return leaves(s, flow.Down) == 1 })
	s.conn.set(epWritable) // as the endpoint's event does
	s.pause(flow.Down, nil)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if got, err := io.ReadAll(c); string(got) != "hello" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	if n := leaves(s, flow.Down); n != 1 {
		t.Errorf("left %d times", n)
	}
}

func leaves(s *session, d flow.Dir) int {
	s.meter.mu.Lock()
	defer s.meter.mu.Unlock()
	return s.meter.left[d]
}

// A user's traffic that is used up ends a flow like anything else, but whoever reads
// slowly gets all that was counted before the reset.
func TestTheLastOfAUsersTrafficIsDeliveredBeforeTheReset(t *testing.T) {
	quota := &flow.Cause{Reason: flow.Quota, Text: "the user's traffic is used up"}
	const size = 128 << 10
	type read struct {
		n   int64
		err error
	}
	b := newBed(t, true, nil)
	look := make(chan struct{})
	got := make(chan read, 1)
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		c.SetReadBuffer(4 << 10)
		c.Write(make([]byte, size))
		<-look
		n, err := io.Copy(io.Discard, c)
		got <- read{n, err}
		c.Close()
	}))
	c := b.mustDial(dst4)
	defer c.Close()
	s := recv(t, sessions)
	c.Write(make([]byte, size))
	waitStill(t, func() uint64 { return s.meter.moved(flow.Up) + s.meter.moved(flow.Down) })
	s.meter.mu.Lock()
	s.meter.err = [2]error{quota, quota}
	s.meter.mu.Unlock()
	s.conn.End(quota)
	close(look)
	down, err := io.Copy(io.Discard, c)
	if up := recv(t, got); up.n != size || !isReset(up.err) {
		t.Errorf("the server got %d bytes and %v", up.n, up.err)
	}
	if down != size || !isReset(err) {
		t.Errorf("the client got %d bytes and %v", down, err)
	}
	if err := s.wait(t); err != quota {
		t.Errorf("ended with %v", err)
	}
	if up, down := s.meter.moved(flow.Up), s.meter.moved(flow.Down); up != size || down != size {
		t.Errorf("counted %d up and %d down", up, down)
	}
}
