package fanout

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// world is a Table with fake outbounds: Resolve takes the version from route,
// or from the destination's third byte.
type world struct {
	*Table
	drops flow.Drops
	log   lockedBuffer
	stop  func()

	mu      sync.Mutex
	gen     uint64
	route   func(f flow.Flow) Target
	openErr error
	hold    chan struct{} // Open waits for it, if not nil
	links   []*fakeLink   // all, in the order of opening
	closes  []closed
	replies []string
	refused []refused
	asked   int
}

// refused is what a client was told.
type refused struct {
	client, peer netip.AddrPort
	payload      string
	err          error
}

type closed struct {
	link  *fakeLink
	cause error
}

// fakeLink records what is sent through it; its flow's id is its number, from 1.
type fakeLink struct {
	id       int
	f        flow.Flow
	name     string
	sub      *Sub
	mu       sync.Mutex
	sent     []string
	err      error
	closed   bool
	counted  int // bytes received, counted by the meter around Down
	onSend   func()
	quiet    bool // record nothing
	sends    int
	overlaps int
}

func (l *fakeLink) Send(ts []flow.Train) (taken, moved int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.onSend != nil {
		l.onSend()
	}
	if l.closed {
		l.overlaps++
	}
	if l.err != nil {
		return 0, 0, l.err
	}
	l.sends += len(ts)
	for i := range ts {
		if !l.quiet {
			l.sent = append(l.sent, string(ts[i].Payload))
		}
		moved += len(ts[i].Payload)
	}
	return len(ts), moved, nil
}

func (l *fakeLink) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	return nil
}

func (l *fakeLink) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

func (l *fakeLink) LocalAddr() netip.AddrPort { return netip.AddrPort{} }

func (l *fakeLink) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string{}, l.sent...)
}

// meter counts what passes down, as the tracker would.
type meter struct {
	flow.Receiver
	l *fakeLink
}

func (m meter) Receive(ts []flow.Train) (moved int) {
	moved = m.Receiver.Receive(ts)
	m.l.mu.Lock()
	defer m.l.mu.Unlock()
	m.l.counted += moved
	return moved
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) has(s string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Contains(b.b.Bytes(), []byte(s))
}

func (w *world) resolve(f flow.Flow) Target {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked++
	t := Target{Gen: w.gen}
	if w.route != nil {
		t = w.route(f)
		t.Gen = w.gen
		return t
	}
	n := f.Dest.Addr.Addr().As4()[2]
	t.Outbound, t.Name = n, fmt.Sprintf("out%d@v1", n)
	return t
}

func (w *world) open(ctx context.Context, f flow.Flow, t Target, s *Sub) (Opened, error) {
	w.mu.Lock()
	hold, err := w.hold, w.openErr
	w.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return Opened{}, context.Cause(ctx)
		}
	}
	if err != nil {
		return Opened{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	l := &fakeLink{id: len(w.links) + 1, f: f, name: t.Name, sub: s}
	w.links = append(w.links, l)
	return Opened{Link: l, Receiver: meter{s.Down(), l}, Close: func(cause error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.closes = append(w.closes, closed{l, cause})
	}}, nil
}

func (w *world) reply(c Client, ts []flow.Train) (moved int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range ts {
		w.replies = append(w.replies, fmt.Sprintf("%v<%v %s", c.Source, ts[i].Peer.Addr, ts[i].Payload))
		moved += len(ts[i].Payload)
	}
	return moved
}

func (w *world) link(i int) *fakeLink {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.links[i]
}

func (w *world) opened() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.links)
}

func (w *world) live() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.links) - len(w.closes)
}

func (w *world) closedWith(t *testing.T, l *fakeLink) error {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	var causes []error
	for _, c := range w.closes {
		if c.link == l {
			causes = append(causes, c.cause)
		}
	}
	if len(causes) != 1 {
		t.Fatalf("flow %d closed %d times, want once (%v)", l.id, len(causes), causes)
	}
	return causes[0]
}

// bubble runs f in a synctest bubble with a running table.
func bubble(t *testing.T, change func(c *Config), f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, change)
		defer w.stop()
		f(t, w)
	})
}

type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

func newWorld(t fataler, change func(c *Config)) *world {
	t.Helper()
	w := &world{gen: 1}
	c := Config{
		Resolve: w.resolve, Open: w.open, Reply: w.reply, Drops: &w.drops,
		Gen: func() uint64 { w.mu.Lock(); defer w.mu.Unlock(); return w.gen },
		Refused: func(c Client, tr flow.Train, err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.refused = append(w.refused, refused{c.Source, tr.Peer.Addr, string(tr.Payload), err})
		},
		Log: slog.New(slog.NewTextHandler(&w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if change != nil {
		change(&c)
	}
	table, err := New(c)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	w.Table = table
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- table.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if n := w.live(); n != 0 {
			t.Errorf("%d flows were never closed", n)
		}
		if n := table.queued.Load(); n != 0 {
			t.Errorf("%d bytes are still counted as queued", n)
		}
		if n := table.dying.Load(); n != 0 {
			t.Errorf("%d sub-links are still dying", n)
		}
		if n := table.Associations(); n != 0 {
			t.Errorf("%d associations are left", n)
		}
	})
	return w
}

func udp(client, dest string) flow.Flow {
	return flow.Flow{Inbound: "lan", Network: flow.UDP, Source: netip.MustParseAddrPort(client), Dest: flow.Destination{Addr: netip.MustParseAddrPort(dest)}}
}

func payload(s string) flow.Train { return flow.Train{Payload: []byte(s)} }

// hand hands one train over.
func (w *world) hand(f flow.Flow, tr flow.Train) {
	tr.Peer = f.Dest
	w.Handle(f, []flow.Train{tr})
}

// say sends one datagram and waits until everything settled.
func (w *world) say(client, dest, text string) {
	w.hand(udp(client, dest), payload(text))
	synctest.Wait()
}

func (l *fakeLink) answer(from, text string) {
	l.sub.Receive([]flow.Train{{Peer: flow.Destination{Addr: netip.MustParseAddrPort(from)}, Payload: []byte(text)}})
	synctest.Wait()
}

var errTest = errors.New("test failure")

const (
	alice = "10.0.0.2:1000"
	bob   = "10.0.0.3:1000"
)

func wait(d time.Duration) { time.Sleep(d); synctest.Wait() } // in a bubble: the fake clock
