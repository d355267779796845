package epoll

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

type readyChan chan Events

func (c readyChan) Ready(ev Events) { c <- ev }

func socketpair(t *testing.T) (a, b int) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(p[0]); unix.Close(p[1]) })
	return p[0], p[1]
}

func next(t *testing.T, c readyChan) Events {
	t.Helper()
	select {
	case ev := <-c:
		return ev
	case <-time.After(10 * time.Second):
		t.Fatal("no event within 10 s")
		return 0
	}
}

func start(t *testing.T) *Poller {
	t.Helper()
	p, err := New()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		goleak.VerifyNone(t)
	})
	return p
}

func TestAReadyDescriptorIsToldOncePerEdge(t *testing.T) {
	p := start(t)
	a, b := socketpair(t)
	c := make(readyChan, 16)
	if err := p.Add(a, c); err != nil {
		t.Fatal(err)
	}
	if ev := next(t, c); !ev.Writable() || ev.Readable() {
		t.Fatalf("first event %#x: want writable alone", ev)
	}
	for range 3 {
		unix.Write(b, []byte("x"))
		if ev := next(t, c); !ev.Readable() {
			t.Fatalf("event %#x: want readable", ev)
		}
	}
	unix.Shutdown(b, unix.SHUT_WR)
	if ev := next(t, c); ev&unix.EPOLLRDHUP == 0 {
		t.Fatalf("event %#x: want the far end's shutdown", ev)
	}
}

func TestARemovedDescriptorIsSilentAndItsNumberReusable(t *testing.T) {
	p := start(t)
	a, b := socketpair(t)
	old, fresh := make(readyChan, 16), make(readyChan, 16)
	if err := p.Add(a, old); err != nil {
		t.Fatal(err)
	}
	next(t, old)
	p.Remove(a)
	if err := p.Add(a, fresh); err != nil {
		t.Fatal(err)
	}
	next(t, fresh)
	unix.Write(b, []byte("x"))
	next(t, fresh)
	if len(old) != 0 {
		t.Fatal("the former owner heard of it")
	}
	p.Remove(a)
	p.Remove(a)
}

func TestManyDescriptorsGrowTheTable(t *testing.T) {
	p := start(t)
	c := make(readyChan, 1024)
	for range 200 {
		a, b := socketpair(t)
		if err := p.AddReader(a, c); err != nil {
			t.Fatal(err)
		}
		unix.Write(b, []byte("x"))
	}
	for range 200 {
		if ev := next(t, c); !ev.Readable() {
			t.Fatalf("event %#x: want readable", ev)
		}
	}
}

func TestARearmedDescriptorIsToldAgainWhatItLeft(t *testing.T) {
	p := start(t)
	a, b := socketpair(t)
	c := make(readyChan, 16)
	if err := p.AddReader(a, c); err != nil {
		t.Fatal(err)
	}
	unix.Write(b, []byte("x"))
	for range 3 {
		if ev := next(t, c); !ev.Readable() || ev.Writable() {
			t.Fatalf("event %#x: want readable alone", ev)
		}
		p.Rearm(a)
	}
	p.Remove(a)
	p.Rearm(a) // nobody watches it
}
