package netstack

import (
	"bytes"
	"crypto/sha256"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"pgregory.net/rapid"

	"gatewayd/flow"
)

func TestBuffersWithinAPartAreValidAndNeverLarger(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(minWindow, 8<<20)
		b := Buffers{Recv: size.Draw(t, "recv"), Send: size.Draw(t, "send")}
		b.RecvMax, b.SendMax = max(b.Recv, size.Draw(t, "most recv")), max(b.Send, size.Draw(t, "most send"))
		w := b.Within(rapid.IntRange(1, 1000).Draw(t, "part"), rapid.IntRange(0, minWindow).Draw(t, "least"))
		if w.Recv > b.Recv || w.RecvMax > b.RecvMax || w.Send > b.Send || w.SendMax > b.SendMax {
			t.Fatalf("%+v within is %+v", b, w)
		}
		if w.Recv > w.RecvMax || w.Send > w.SendMax || min(w.Recv, w.Send) < MinBuffer {
			t.Fatalf("gVisor refuses %+v", w)
		}
		if w := b.Within(1, minWindow); w != b {
			t.Fatalf("the whole of %+v is %+v", b, w)
		}
	})
}

// Fact 9: an endpoint that lives when the maxima change does not grow over them.
func TestFact9TheMaximaAreReadLive(t *testing.T) {
	small := Buffers{Recv: 64 << 10, RecvMax: 96 << 10, Send: 64 << 10, SendMax: 96 << 10} // less than the first growth
	grown := func(t *testing.T, before func(*Stack)) (recvSize, sendSize int64) {
		b := newBed(t, true, func(c *Config) {
			c.Buffers = DefaultBuffers
			c.Buffers.Recv, c.Buffers.Send = small.Recv, small.Send
		})
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			io.Copy(c, io.LimitReader(c, 64<<20))
			c.Close()
		}))
		c := b.mustDial(dst4)
		s := recv(t, sessions)
		before(b.stack)
		go io.Copy(c, newPattern(64<<20))
		if n, err := io.Copy(io.Discard, c); n != 64<<20 || err != nil {
			t.Fatalf("%d bytes came back, %v", n, err)
		}
		o := s.conn.ep.SocketOptions()
		recvSize, sendSize = o.GetReceiveBufferSize(), o.GetSendBufferSize()
		c.Close()
		if err := s.wait(t); err != nil {
			t.Fatal(err)
		}
		return recvSize, sendSize
	}
	t.Run("large", func(t *testing.T) {
		if r, s := grown(t, func(*Stack) {}); r <= int64(small.RecvMax) || s <= int64(small.SendMax) {
			t.Fatalf("the buffers grew to %d and %d bytes: the test shows nothing", r, s)
		}
	})
	t.Run("lowered", func(t *testing.T) {
		if r, s := grown(t, func(s *Stack) { s.setBuffers(small) }); r > int64(small.RecvMax) || s > int64(small.SendMax) {
			t.Fatalf("the buffers grew to %d and %d bytes over a maximum of %d", r, s, small.RecvMax)
		}
	})
}

// smallest is what the governor leaves at worst.
var smallest = DefaultBuffers.Within(1<<10, MinBuffer)

// flicker sets buffers of all sizes, again and again, until the returned function
// is called, or for two seconds; the smallest hold then.
func flicker(s *Stack) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	tick := time.NewTicker(2 * time.Millisecond)
	enough := time.After(2 * time.Second)
	go func() {
		defer close(done)
		defer tick.Stop()
		defer s.SetBuffers(smallest)
		for part := 1; ; part = part * 8 % 4095 { // 1, 8, 64, 512, 1, …
			s.SetBuffers(DefaultBuffers.Within(part, MinBuffer))
			select {
			case <-tick.C:
			case <-enough:
				return
			case <-quit:
				return
			}
		}
	}()
	return func() { close(quit); <-done }
}

func TestNoByteIsLostAndNoFlowStallsWhileBuffersShrinkAndGrow(t *testing.T) {
	forLinks(t, func(t *testing.T, gso bool, dst netip.AddrPort) {
		const size = 4 << 20
		down := newPattern(size)
		ups := make(chan []byte, 1)
		b := newBed(t, gso, nil)
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			go func() {
				sum := sha256.New()
				io.Copy(sum, c)
				ups <- sum.Sum(nil)
			}()
			io.Copy(c, down)
			c.CloseWrite()
		}))
		c := b.mustDial(dst)
		s := recv(t, sessions)
		stop := flicker(b.stack)
		up, sum := newPattern(size+DefaultBuffers.RecvMax/2), sha256.New()
		sent, got := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := io.CopyN(c, up, size)
			sent <- err
		}()
		go func() {
			_, err := io.Copy(sum, c)
			got <- err
		}()
		if err := recvMoving(t, s, got); err != nil || !bytes.Equal(sum.Sum(nil), down.sum.Sum(nil)) {
			t.Errorf("%v, or other bytes went down than were sent", err)
		}
		if err := recvMoving(t, s, sent); err != nil {
			t.Error(err)
		}
		stop()
		go func() { // as much as the client may have been told
			_, err := io.Copy(c, up)
			sent <- err
		}()
		if err := recvMoving(t, s, sent); err != nil {
			t.Error(err)
		}
		c.CloseWrite()
		if !bytes.Equal(recvMoving(t, s, ups), up.sum.Sum(nil)) {
			t.Error("other bytes went up than were sent")
		}
		if o := s.conn.ep.SocketOptions(); o.GetReceiveBufferSize() > minWindow || o.GetSendBufferSize() > MinBuffer {
			t.Errorf("%d and %d bytes of buffers were left", o.GetReceiveBufferSize(), o.GetSendBufferSize())
		}
		c.Close()
		s.wait(t)
	})
}

// A window is a promise: without it each client would wait for its time-outs, over
// and over, until it had sent again what it was once told it may send.
func TestWhatAClientWasToldItMaySendHasRoomInABufferThatShrank(t *testing.T) {
	const told = 48 << 10 // of half of a buffer's first size
	b := newBed(t, false, nil)
	sessions := b.relayTo(serve(t, swallow))
	c := b.mustDial(dst4)
	s := recv(t, sessions)
	io.Copy(c, newPattern(told)) // the first window is smaller
	waitFor(t, func() bool { return s.meter.moved(flow.Up) == told })
	s.meter.pause(flow.Up)
	b.stack.SetBuffers(smallest)
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(c, newPattern(2*told))
		sent <- err
	}()
	waitFor(t, func() bool {
		n, _ := s.conn.ep.GetSockOptInt(tcpip.ReceiveQueueSizeOption)
		return n >= told
	})
	s.meter.resume(flow.Up)
	if err := recvMoving(t, s, sent); err != nil {
		t.Error(err)
	}
	waitFor(t, func() bool { return s.meter.moved(flow.Up) == 3*told })
	c.Close()
	s.wait(t)
}

func TestWhileMemoryIsShortNewConnectionsWaitAndLivingOnesGoOn(t *testing.T) {
	var full atomic.Bool
	b := newBed(t, true, func(c *Config) { c.Full = full.Load })
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(c, c)
		c.Close()
	}))
	old := b.mustDial(dst4)
	s := recv(t, sessions)
	full.Store(true)
	refused := make(chan struct{})
	go func() {
		defer close(refused)
		if c, err := b.dial(dst6); err == nil { // a SYN is repeated after a second
			c.Close()
		} else {
			t.Error(err)
		}
	}()
	waitFor(t, func() bool { return b.drops[flow.DropMemory].Load() > 0 })
	if _, err := old.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(old, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	if n := len(sessions); n != 0 {
		t.Fatalf("%d connections were made", n)
	}
	full.Store(false)
	recv(t, refused) // not refused in the end: its next SYN found room
	recv(t, sessions).wait(t)
	old.Close()
	s.wait(t)
}
