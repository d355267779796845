package netstack

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip/header"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

var (
	dst4 = netip.AddrPortFrom(serverIP4, 80)
	dst6 = netip.AddrPortFrom(serverIP6, 80)
)

// pattern is a reader of n pseudo-random bytes that hashes what it gave.
type pattern struct {
	r    *rand.ChaCha8
	left int
	sum  hash.Hash
}

func newPattern(n int) *pattern {
	return &pattern{r: rand.NewChaCha8([32]byte{1}), left: n, sum: sha256.New()}
}

func (p *pattern) Read(b []byte) (int, error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	b = b[:min(len(b), p.left)]
	p.r.Read(b)
	p.sum.Write(b)
	p.left -= len(b)
	return len(b), nil
}

func forLinks(t *testing.T, f func(t *testing.T, gso bool, dst netip.AddrPort)) {
	for _, c := range []struct {
		name string
		gso  bool
		dst  netip.AddrPort
	}{{"offloads v4", true, dst4}, {"offloads v6", true, dst6}, {"1500 v4", false, dst4}, {"1500 v6", false, dst6}} {
		t.Run(c.name, func(t *testing.T) { f(t, c.gso, c.dst) })
	}
}

func TestADownloadArrivesWholeAndIsCountedExactly(t *testing.T) {
	forLinks(t, func(t *testing.T, gso bool, dst netip.AddrPort) {
		const size = 20 << 20
		src := newPattern(size)
		b := newBed(t, gso, nil)
		served := make(chan struct{})
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			io.Copy(c, src)
			c.Close()
			close(served)
		}))
		c := b.mustDial(dst)
		sum := sha256.New()
		n, err := io.Copy(sum, c)
		if err != nil || n != size {
			t.Fatalf("read %d bytes, %v", n, err)
		}
		c.Close()
		s := recv(t, sessions)
		if err := s.wait(t); err != nil {
			t.Fatalf("ended with %v", err)
		}
		recv(t, served)
		if !bytes.Equal(sum.Sum(nil), src.sum.Sum(nil)) {
			t.Fatal("other bytes arrived than were sent")
		}
		if up, down := s.meter.moved(flow.Up), s.meter.moved(flow.Down); up != 0 || down != size {
			t.Fatalf("counted %d up, %d down", up, down)
		}
	})
}

func TestAnUploadArrivesWholeAndIsCountedExactly(t *testing.T) {
	forLinks(t, func(t *testing.T, gso bool, dst netip.AddrPort) {
		const size = 20 << 20
		sums := make(chan []byte, 1)
		b := newBed(t, gso, nil)
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			sum := sha256.New()
			io.Copy(sum, c)
			sums <- sum.Sum(nil)
			c.Close()
		}))
		c := b.mustDial(dst)
		src := newPattern(size)
		if n, err := io.Copy(c, src); err != nil || n != size {
			t.Fatalf("wrote %d bytes, %v", n, err)
		}
		c.CloseWrite()
		if !bytes.Equal(recv(t, sums), src.sum.Sum(nil)) {
			t.Fatal("other bytes arrived than were sent")
		}
		s := recv(t, sessions)
		if err := s.wait(t); err != nil {
			t.Fatalf("ended with %v", err)
		}
		if up := s.meter.moved(flow.Up); up != size {
			t.Fatalf("counted %d up", up)
		}
		c.Close()
	})
}

// An endpoint's lock is held while it is read. If the relay blocked in a write
// there, acknowledgements of the other direction could never be processed and
// both would wait for ever.
func TestASingleThreadedEchoServerNeverDeadlocks(t *testing.T) {
	size := 256 << 20
	if testing.Short() {
		size = 64 << 20
	}
	b := newBed(t, true, nil)
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		buf := make([]byte, 32<<10)
		for {
			n, err := c.Read(buf)
			if err != nil {
				break
			}
			if _, err := c.Write(buf[:n]); err != nil {
				break
			}
		}
		c.Close()
	}))
	c := b.mustDial(dst4)
	go func() {
		io.Copy(c, newPattern(size))
		c.CloseWrite()
	}()
	// The client reads nothing until both directions are full.
	s := recv(t, sessions)
	waitStill(t, func() uint64 { return s.meter.moved(flow.Up) })
	want := newPattern(size)
	io.Copy(io.Discard, want)
	sum := sha256.New()
	c.SetReadDeadline(time.Now().Add(60 * time.Second))
	if n, err := io.Copy(sum, c); err != nil || n != int64(size) {
		t.Fatalf("%d of %d bytes came back: %v", n, size, err)
	}
	if !bytes.Equal(sum.Sum(nil), want.sum.Sum(nil)) {
		t.Fatal("other bytes came back than were sent")
	}
	if err := s.wait(t); err != nil {
		t.Fatalf("ended with %v", err)
	}
	c.Close()
}

// waitStill waits until f has stopped changing.
func waitStill(t *testing.T, f func() uint64) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for last, still := f(), 0; still < 3; { // a machine with other work stands still at times
		<-tick.C
		now := f()
		if still++; now != last || now == 0 {
			last, still = now, 0
		}
		if time.Now().After(deadline) {
			t.Fatal("did not come to rest within 20 s")
		}
	}
}

func TestB05_HalfCloseInEitherDirectionKeepsTheOther(t *testing.T) {
	forLinks(t, func(t *testing.T, gso bool, dst netip.AddrPort) {
		b := newBed(t, gso, nil)
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			req, _ := io.ReadAll(c)
			c.Write(bytes.Repeat(req, 1000))
			c.Close()
		}))
		c := b.mustDial(dst)
		c.Write([]byte("request"))
		c.CloseWrite()
		got, err := io.ReadAll(c)
		if err != nil || len(got) != 7000 {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		c.Close()
		if err := recv(t, sessions).wait(t); err != nil {
			t.Fatalf("ended with %v", err)
		}

		got2 := make(chan int, 1)
		sessions = b.relayTo(serve(t, func(c *net.TCPConn) {
			c.CloseWrite()
			n, _ := io.Copy(io.Discard, c)
			got2 <- int(n)
			c.Close()
		}))
		c = b.mustDial(dst)
		if n, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Fatalf("read %d, %v: want the server's end", n, err)
		}
		for range 100 {
			if _, err := c.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		c.CloseWrite()
		if n := recv(t, got2); n != 100_000 {
			t.Fatalf("%d bytes arrived after the server's half-close", n)
		}
		c.Close()
		if err := recv(t, sessions).wait(t); err != nil {
			t.Fatalf("ended with %v", err)
		}
	})
}

func TestB07_AServersResetReachesTheClientAfterItsBytes(t *testing.T) {
	forLinks(t, func(t *testing.T, gso bool, dst netip.AddrPort) {
		b := newBed(t, gso, nil)
		written := make(chan struct{})
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			c.Write(make([]byte, 1<<20))
			<-written
			c.SetLinger(0)
			c.Close()
		}))
		c := b.mustDial(dst)
		n, err := io.ReadFull(c, make([]byte, 1<<20))
		if err != nil {
			t.Fatalf("%d bytes, %v", n, err)
		}
		close(written)
		if _, err = c.Read(make([]byte, 1)); !isReset(err) {
			t.Fatalf("read after the reset: %v", err)
		}
		s := recv(t, sessions)
		if err := s.wait(t); flow.ReasonOf(err) != flow.Reset {
			t.Fatalf("ended with %v", err)
		}
		if d := s.meter.moved(flow.Down); d != 1<<20 {
			t.Fatalf("counted %d", d)
		}
	})
}

func TestB07_AResetWaitsUntilALostPacketWasSentAgain(t *testing.T) {
	for _, end := range []string{"reset", "end and reset"} {
		t.Run(end, func(t *testing.T) {
			b := newBed(t, false, nil)
			const size = 100 << 10
			var packets atomic.Int64
			deliver := b.dev.out
			b.dev.out = func(p []byte, o Offload) {
				if len(p) < 1000 || packets.Add(1) != size/1460 { // near the end
					deliver(p, o)
				}
			}
			sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
				c.Write(make([]byte, size))
				if end != "reset" {
					c.CloseWrite()
				}
				for range time.Tick(time.Millisecond) {
					if unsentOf(c) == 0 {
						break
					}
				}
				c.SetLinger(0)
				c.Close()
			}))
			c := b.mustDial(dst4)
			n, err := io.Copy(io.Discard, c)
			if n != size || err != nil && !isReset(err) || err == nil && end == "reset" {
				t.Errorf("%d of %d bytes, then %v", n, size, err)
			}
			if err := recv(t, sessions).wait(t); flow.ReasonOf(err) != flow.Reset {
				t.Errorf("ended with %v", err)
			}
			if packets.Load() <= size/1460 {
				t.Error("no packet was lost")
			}
		})
	}
}

func unsentOf(c *net.TCPConn) (n int) {
	raw, err := c.SyscallConn()
	if err == nil {
		raw.Control(func(fd uintptr) { n = unsentBytes(int(fd)) })
	}
	return n
}

func TestB07_AReplyBeforeAResetIsDeliveredFirst(t *testing.T) {
	b := newBed(t, true, nil)
	const size = 3 << 20
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 1))
		c.Write(make([]byte, size))
		c.CloseWrite()
		io.ReadFull(c, make([]byte, 1)) // the client says that it has everything
		c.SetLinger(0)
		c.Close()
	}))
	c := b.mustDial(dst4)
	c.Write([]byte("x"))
	n, err := io.Copy(io.Discard, c)
	if err != nil || n != size {
		t.Fatalf("%d bytes, %v", n, err)
	}
	c.Write([]byte("x"))
	if err := recv(t, sessions).wait(t); flow.ReasonOf(err) != flow.Reset {
		t.Fatalf("ended with %v", err)
	}
}

func TestB07_AClientsResetReachesTheServer(t *testing.T) {
	b := newBed(t, true, nil)
	ends := make(chan error, 1)
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		n, err := io.Copy(io.Discard, c)
		if n != 100_000 {
			err = errors.New("bytes were lost")
		}
		ends <- err
		c.Close()
	}))
	c := b.mustDial(dst4)
	c.Write(make([]byte, 100_000))
	s := recv(t, sessions)
	waitStill(t, func() uint64 { return s.meter.moved(flow.Up) })
	b.client.Close() // resets nothing by itself: endpoints are aborted by hand
	resetClient(t, b)
	if err := recv(t, ends); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the server saw %v", err)
	}
	if err := s.wait(t); flow.ReasonOf(err) != flow.Reset {
		t.Fatalf("ended with %v", err)
	}
}

// resetClient aborts every endpoint of the client.
func resetClient(t *testing.T, b *bed) {
	t.Helper()
	for _, ep := range b.client.CleanupEndpoints() {
		ep.Abort()
	}
	for _, ep := range b.client.RegisteredEndpoints() {
		ep.Abort()
	}
}

func TestEndResetsBothSidesAtOnceAndCountsWhatCameToTheClient(t *testing.T) {
	forLinks(t, func(t *testing.T, gso bool, dst netip.AddrPort) {
		b := newBed(t, gso, nil)
		arrived := b.arrived()
		serverSaw := make(chan error, 1)
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			for {
				if _, err := c.Write(make([]byte, 64<<10)); err != nil {
					serverSaw <- err
					c.Close()
					return
				}
			}
		}))
		c := b.mustDial(dst)
		s := recv(t, sessions)
		if _, err := io.CopyN(io.Discard, c, 1<<20); err != nil {
			t.Fatal(err)
		}
		waitStill(t, func() uint64 { return s.meter.moved(flow.Down) }) // the client stopped reading
		cause := &flow.Cause{Reason: flow.Killed, Text: "the flow was killed"}
		s.conn.End(cause)
		s.conn.End(errors.New("too late"))
		if err := s.wait(t); err != cause {
			t.Fatalf("ended with %v", err)
		}
		rest, err := io.Copy(io.Discard, c)
		if !isReset(err) {
			t.Fatalf("the client saw %v", err)
		}
		// A full client may refuse the last of it: rounding its window takes some of it back.
		if got, came, counted := uint64(1<<20+rest), uint64(arrived.Load()), s.meter.moved(flow.Down); counted != came || got > came {
			t.Fatalf("%d bytes came to the client, which got %d, counted are %d", came, got, counted)
		}
		if err := recv(t, serverSaw); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Fatalf("the server saw %v", err)
		}
	})
}

// arrived is how many bytes of a connection to be came to the client's link, each once.
func (b *bed) arrived() *atomic.Uint32 {
	var first uint32
	n, deliver := new(atomic.Uint32), b.dev.out
	b.dev.out = func(packet []byte, o Offload) {
		var p wire.Packet
		wire.Parse(packet, len(packet), false, &p)
		h := header.TCP(packet[p.HeaderLen:])
		if h.Flags().Contains(header.TCPFlagSyn) {
			first = h.SequenceNumber() + 1
		} else if p.PayloadLen > 0 {
			n.Store(max(n.Load(), h.SequenceNumber()+uint32(p.PayloadLen)-first))
		}
		deliver(packet, o)
	}
	return n
}

func TestAPausedDirectionMovesNothingUntilItIsWoken(t *testing.T) {
	b := newBed(t, true, nil)
	b.prepare = func(s *session) { s.meter.err[flow.Up] = flow.ErrPaused }
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(c, c)
		c.Close()
	}))
	c := b.mustDial(dst4)
	s := recv(t, sessions)
	c.Write([]byte("hello"))
	waitFor(t, func() bool { s.meter.mu.Lock(); defer s.meter.mu.Unlock(); return s.meter.waiting != nil })
	if n := s.meter.moved(flow.Up); n != 0 {
		t.Fatalf("%d bytes moved while paused", n)
	}
	s.meter.mu.Lock()
	s.meter.err[flow.Up] = nil
	s.meter.max = 2
	s.meter.mu.Unlock()
	s.meter.waiting()
	if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	s.meter.mu.Lock()
	s.meter.err[flow.Down] = flow.ErrPolicy
	s.meter.mu.Unlock()
	c.Write([]byte("x"))
	if err := s.wait(t); err != flow.ErrPolicy {
		t.Fatalf("ended with %v", err)
	}
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatal("did not happen within 20 s")
		}
		<-tick.C
	}
}

func TestAnIdleFlowHoldsNoGoroutine(t *testing.T) {
	b := newBed(t, true, nil)
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(c, c)
		c.Close()
	}))
	c := b.mustDial(dst4)
	recv(t, sessions)
	echo(t, c)
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
	before := runtime.NumGoroutine()
	const n = 50
	for range n {
		c := b.mustDial(dst4)
		t.Cleanup(func() { c.Close() })
		echo(t, c)
	}
	// The test's own echo server parks one goroutine a connection.
	waitFor(t, func() bool { return runtime.NumGoroutine() <= before+n })
	c.Close()
}

func echo(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
}

func TestAHalfClosedFlowWithoutTrafficEnds(t *testing.T) {
	b := newBed(t, true, func(c *Config) { c.HalfClosed = 300 * time.Millisecond })
	release := make(chan struct{})
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(io.Discard, c)
		<-release
		c.Close()
	}))
	t.Cleanup(func() { close(release) })
	c := b.mustDial(dst4)
	c.CloseWrite()
	if err := recv(t, sessions).wait(t); err != flow.ErrIdle {
		t.Fatalf("ended with %v", err)
	}
}

func TestARefusedDialIsAResetAndNeverAHandshake(t *testing.T) {
	b := newBed(t, true, nil)
	b.handle = func(p *Pending) { p.Refuse(flow.VerdictReset) }
	if _, err := b.dial(dst4); err == nil || !contains(err.Error(), "refused") {
		t.Fatalf("dial: %v", err)
	}
	waitFor(t, func() bool { return b.stack.Pending() == 0 }) // the reset leaves before the handler returns
}

func TestGatewayPacketsToAnOffloadingClientAreSuperPackets(t *testing.T) {
	b := newBed(t, true, nil)
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(c, newPattern(8<<20))
		c.Close()
	}))
	c := b.mustDial(dst4)
	if n, err := io.Copy(io.Discard, c); err != nil || n != 8<<20 {
		t.Fatalf("%d bytes, %v", n, err)
	}
	c.Close()
	recv(t, sessions).wait(t)
	var largest int
	b.dev.sizes.Range(func(size, _ any) bool { largest = max(largest, size.(int)); return true })
	if largest < 32<<10 {
		t.Fatalf("the largest packet has %d bytes: gVisor does not see the link's GSO", largest)
	}
}
