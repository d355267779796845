package netstack

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/buffer"
	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/faketime"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
	"github.com/sagernet/gvisor/pkg/waiter"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// The facts about views and endpoints; see assumptions_test.go for the others.

// Fact 7: a packet's MemSize is its data's, not that of the chunk which it pins,
// so that gVisor's buffer limits do not see what is really held.
func TestFact7ASmallPacketInALargeViewPinsItUnseen(t *testing.T) {
	v := buffer.NewViewSize(64 << 10)
	v.CapLength(100)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(v)})
	defer pkt.DecRef()
	if n := pkt.MemSize(); n > 4<<10 {
		t.Fatalf("MemSize tells of %d bytes: gVisor sees the chunk now", n)
	}
	if n := v.Capacity(); n < 64<<10 {
		t.Fatalf("the view pins %d bytes", n)
	}
}

// Fact 7, our side: what leaves a batch pins at most twice its size, or 2 KiB if it
// is larger than 512 bytes; only a tail of 16 KiB or more takes the 64 KiB view along.
func TestFact7WhatABatchGivesAwayPinsLittle(t *testing.T) {
	for _, n := range []int{1, 40, copySmall, copySmall + 1, 1500, smallView, smallView + 1, smallView + copyTail - 1, smallView + copyTail, 40 << 10, 65535} {
		b := NewBatch(func(*Batch) {})
		add(b, wirePacket{make([]byte, n), Offload{}})
		large := b.packets[0].large
		buf := b.take(0, n)
		pinned := 0
		buf.SubApply(0, n, func(v *buffer.View) { pinned += v.Capacity() })
		limit := max(2*n, smallView)
		if n <= copySmall {
			limit = max(2*n, 64)
		}
		if pinned > limit+64<<10*b2i(n >= smallView+copyTail) {
			t.Errorf("%d bytes pin %d", n, pinned)
		}
		if kept := b.packets[0].large == large; large != nil && kept != (n < smallView+copyTail) {
			t.Errorf("%d bytes: the large view stays with the batch: %v", n, kept)
		}
		buf.Release()
		b.Deliver()
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// blocking is a writer that waits for release, as one with a full socket would.
type blocking struct {
	entered chan struct{}
	release chan struct{}
}

func (w *blocking) Write(b []byte) (int, error) {
	close(w.entered)
	<-w.release
	return len(b), nil
}

// Fact 8: ep.Read holds the endpoint's lock while it writes. A writer that blocks
// stops acknowledgements, and Abort; that is why the relay's never does.
func TestFact8AWriterThatBlocksStopsAcknowledgementsAndAbort(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	h.send(wire.ACK|wire.PSH, []byte("first"))
	waitFor(t, func() bool { return c.ep.Readiness(waiter.ReadableEvents) != 0 })
	b.drain()

	w := &blocking{make(chan struct{}), make(chan struct{})}
	read := make(chan struct{})
	go func() { c.ep.Read(w, tcpip.ReadOptions{}); close(read) }()
	recv(t, w.entered)
	h.send(wire.ACK|wire.PSH, []byte("second"))
	aborted := make(chan struct{})
	go func() { c.ep.Abort(); close(aborted) }()
	select {
	case <-aborted:
		t.Error("Abort did not wait for the writer")
	case <-b.dev.out:
		t.Error("the second segment was acknowledged while a writer blocked")
	case <-time.After(300 * time.Millisecond):
	}
	close(w.release)
	recv(t, read)
	recv(t, aborted)
}

// drain takes what the stack wrote until it has been silent for a while.
func (b *tapBed) drain() {
	for {
		select {
		case <-b.dev.out:
		case <-time.After(150 * time.Millisecond):
			return
		}
	}
}

// short takes one byte less than it was given, without an error.
type short struct{}

func (short) Write(b []byte) (int, error) { return len(b) - 1, nil }

// Fact 8: a short write has to come with an error.
func TestFact8AShortWriteWithoutAnErrorPanics(t *testing.T) {
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData([]byte("data"))})
	defer pkt.DecRef()
	defer func() {
		if recover() == nil {
			t.Fatal("a short write without an error did not panic")
		}
	}()
	pkt.Data().ReadTo(short{}, false) //nolint:errcheck // what an endpoint's Read calls
}

// dry gives less than it said, and then nothing for ever, without an error.
type dry struct {
	left, asked int
	after       int // askings until it fails, lest the test runs for ever
}

func (d *dry) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if d.asked++; d.asked > d.after {
		return 0, io.ErrUnexpectedEOF
	}
	n := min(d.left, len(b))
	d.left -= n
	return n, nil
}

// Fact 8: Len has to be exact: gVisor asks for what is missing without end.
func TestFact8APayloaderThatHasLessThanItsLenIsAskedForEver(t *testing.T) {
	var buf buffer.Buffer
	defer buf.Release()
	d := &dry{left: 10, after: 1000}
	if _, err := buf.WriteFromReader(d, 20); err == nil || d.asked <= d.after {
		t.Fatalf("gave up by itself after %d askings: %v", d.asked, err)
	}
}

// Our payloader fails instead, and never gives more than its Len.
func TestADownlinkGivesExactlyItsLenOrFails(t *testing.T) {
	ours, theirs := socketPair(t)
	theirs.Write([]byte("0123456789"))
	waitFor(t, func() bool { return waiting(t, ours) == 10 })
	d := &downlink{fd: ours, left: 4}
	var buf buffer.Buffer
	defer buf.Release()
	if n, err := buf.WriteFromReader(d, int64(d.Len())); n != 4 || err != nil || d.Len() != 0 {
		t.Fatalf("read %d, %v; %d left", n, err, d.Len())
	}
	d.left = 20 // more than there is
	if _, err := buf.WriteFromReader(d, 20); err == nil || d.err == nil {
		t.Fatalf("a payloader that has too little went on: %v", err)
	}
}

// Fact 9: without ModerateRecvBuf the window stays where it began.
func TestFact9ModerateRecvBufGrowsTheWindow(t *testing.T) {
	size := func(t *testing.T, moderate bool) int64 {
		b := newBed(t, true, nil)
		conns := make(chan *Conn, 1)
		b.handle = func(p *Pending) {
			if c, err := p.Accept(p.Context()); err == nil {
				conns <- c
			}
		}
		client := b.mustDial(dst4)
		c := recv(t, conns)
		const size = 16 << 20
		written := make(chan error, 1)
		go func() {
			_, err := io.Copy(client, newPattern(size))
			client.Close()
			written <- err
		}()
		entry, readable := waiter.NewChannelEntry(waiter.ReadableEvents)
		c.queue.EventRegister(&entry)
		queued := func() int { n, _ := c.ep.GetSockOptInt(tcpip.ReceiveQueueSizeOption); return n }
		for left := size; left > 0; {
			// Only a window that is used up grows, and it begins at half of the buffer.
			for queued() < min(DefaultBuffers.Recv*7/16, left) {
				recv(t, readable)
			}
			r, err := c.ep.Read(io.Discard, tcpip.ReadOptions{})
			if err != nil {
				t.Fatal(err)
			}
			left -= r.Count
			if moderate {
				c.ep.ModerateRecvBuf(r.Count)
			}
		}
		if err := recv(t, written); err != nil {
			t.Fatal(err)
		}
		n := c.ep.SocketOptions().GetReceiveBufferSize()
		c.queue.EventUnregister(&entry)
		c.ep.Close()
		return n
	}
	var without, with int64
	t.Run("without", func(t *testing.T) { without = size(t, false) })
	t.Run("with", func(t *testing.T) { with = size(t, true) })
	if without != int64(DefaultBuffers.Recv) || with <= without {
		t.Fatalf("the receive buffer ends at %d bytes without and %d with it", without, with)
	}
}

// Fact 12: Abort throws the send queue away. The relay waits before it aborts.
func TestFact12AbortPurgesTheSendQueue(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	h.window = 1 // scaled by 7: 128 bytes
	c := h.open()
	const size = 50_000
	if n, err := c.ep.Write(&payload{left: size}, tcpip.WriteOptions{}); n != size || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	got := 0
	h.window = 0 // 65535 scaled: all there is
	c.ep.Abort()
	for reset := false; !reset; {
		p, tcp := b.tcpWritten()
		got += p.PayloadLen
		reset = tcp.Flags().Contains(header.TCPFlagRst)
	}
	h.send(wire.ACK, nil)
	b.drain()
	if got >= size {
		t.Fatal("all bytes left before the reset")
	}
}

// payload is a Payloader of zeros.
type payload struct{ left int }

func (p *payload) Len() int { return p.left }

func (p *payload) Read(b []byte) (int, error) {
	n := min(p.left, len(b))
	p.left -= n
	return n, nil
}

// Fact 12: after the client's FIN its reset makes reads say end, as if all were
// well. Only the state tells.
func TestFact12AResetInCloseWaitReadsAsAnEnd(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	h.send(wire.FIN|wire.ACK, nil)
	waitFor(t, func() bool { return c.ep.EndpointState() == tcp.StateCloseWait })
	h.send(wire.RST|wire.ACK, nil)
	waitFor(t, func() bool { return c.ep.EndpointState() != tcp.StateCloseWait })
	_, err := c.ep.Read(io.Discard, tcpip.ReadOptions{})
	if _, ok := err.(*tcpip.ErrClosedForReceive); !ok {
		t.Errorf("a read after the reset says %v", err)
	}
	if st := c.ep.EndpointState(); st != tcp.StateClose {
		t.Errorf("the state is %s", st)
	}
	if _, err := c.ep.Write(&payload{left: 1}, tcpip.WriteOptions{}); err == nil {
		t.Error("a write after the reset succeeds")
	}
}

// Fact 14: gVisor's processors park outside of a bubble, but its timers follow the
// clock of Config: an idle client is probed, and its flow ends when it is silent.
func TestFact14AManualClockDrivesKeepalive(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		clock := faketime.NewManualClock()
		b := newTapBed(t, func(c *Config, _ *tap) {
			c.Clock = clock
			c.Keepalive = Keepalive{Idle: 2 * time.Minute, Interval: 20 * time.Second, Probes: 4}
		})
		done := make(chan error, 1)
		b.tcp = b.relays(serve(t, swallow), new(counter), done)
		h := b.hand(client, dst)
		h.syn(0)
		h.answered()
		recv(t, b.conns)

		clock.Advance(2*time.Minute - time.Second)
		b.silent(50 * time.Millisecond)
		clock.Advance(time.Second)
		for probe := range 4 {
			p, tcp := b.tcpWritten()
			if p.PayloadLen != 0 || tcp.SequenceNumber() != h.ack-1 {
				t.Fatalf("probe %d has %d bytes from %d on, want none from %d", probe, p.PayloadLen, tcp.SequenceNumber(), h.ack-1)
			}
			select {
			case err := <-done:
				t.Fatalf("ended with %v after %d probes", err, probe+1)
			default:
			}
			clock.Advance(20 * time.Second)
		}
		if err := recv(t, done); flow.ReasonOf(err) != flow.Timeout {
			t.Fatalf("ended with %v, want a time-out", err)
		}
	})
}

// Fact 14, the other half: a client that answers lives on.
func TestAClientThatAnswersProbesStays(t *testing.T) {
	clock := faketime.NewManualClock()
	b := newTapBed(t, func(c *Config, _ *tap) {
		c.Clock = clock
		c.Keepalive = Keepalive{Idle: 2 * time.Minute, Interval: 20 * time.Second, Probes: 4}
	})
	done := make(chan error, 1)
	b.tcp = b.relays(serve(t, swallow), new(counter), done)
	h := b.hand(client4, dst4)
	h.syn(0)
	h.answered()
	c := recv(t, b.conns)
	for range 20 {
		clock.Advance(2 * time.Minute)
		b.tcpWritten()
		h.send(wire.ACK|wire.PSH, []byte("x"))
		if _, tcp := b.tcpWritten(); tcp.AckNumber() != h.seq {
			t.Fatal("the client's byte was not acknowledged")
		}
		c.ep.LockUser() // the acknowledgement left before the timer was set anew
		c.ep.UnlockUser()
	}
	select {
	case err := <-done:
		t.Fatalf("ended with %v", err)
	default:
	}
	c.End(flow.ErrShutdown)
	recv(t, done)
}

// relays is a handler that dials addr, accepts and relays. Its Conns go to b.conns.
func (b *tapBed) relays(addr string, m *counter, done chan<- error) func(p *Pending) {
	return func(p *Pending) {
		out, err := net.Dial("tcp", addr)
		if err != nil {
			p.Refuse(flow.VerdictOf(err))
			return
		}
		c, err := p.Accept(p.Context())
		if err != nil {
			out.Close()
			return
		}
		if err := c.Relay(out.(*net.TCPConn), m, func(err error) { done <- err }); err != nil {
			done <- err
			return
		}
		b.conns <- c
	}
}
