package netstack

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/sagernet/gvisor/pkg/waiter"
	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// reused is a stream whose descriptor's number is another socket's as soon as it is
// closed. It has what a relay uses.
type reused struct {
	flow.Stream
	fd    number
	reuse func(fd int)
}

func (r *reused) SyscallConn() (syscall.RawConn, error) { return r.fd, nil }
func (r *reused) Close() error                          { r.reuse(int(r.fd)); return nil }

// number is a descriptor as a syscall.RawConn.
type number int

func (n number) Control(f func(uintptr)) error         { f(uintptr(n)); return nil }
func (n number) Read(func(uintptr) (done bool)) error  { return errors.ErrUnsupported }
func (n number) Write(func(uintptr) (done bool)) error { return errors.ErrUnsupported }

// readable gets a value when a descriptor was readable; an edge may be told twice.
type readable chan struct{}

func (r readable) Ready(ev epoll.Events) {
	if ev.Readable() {
		select {
		case r <- struct{}{}:
		default:
		}
	}
}

func descriptors(t *testing.T) (a, b int) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(p[0]); unix.Close(p[1]) })
	return p[0], p[1]
}

// A client's reset may end a relay while it begins. It must not have its socket
// watched after it closed it: another's of the same number would be deaf.
func TestARelayThatEndsWhileItBeginsLeavesTheNextSocketOfItsNumberAlone(t *testing.T) {
	const tries = 40
	b := newBed(t, true, nil)
	conns := make(chan *Conn, 1)
	b.handle = func(p *Pending) {
		if c, err := p.Accept(p.Context()); err == nil {
			conns <- c
		}
	}
	poller, enough := b.stack.cfg.Poller, make(chan struct{})
	var busy sync.WaitGroup
	for range 2 { // whoever adds a descriptor waits for others
		fd, _ := descriptors(t)
		busy.Go(func() {
			for !isClosed(enough) {
				poller.Add(fd, make(readable, 1))
				poller.Remove(fd)
			}
		})
	}
	defer busy.Wait()
	defer close(enough)
	for range tries {
		b.mustDial(dst4).Close()
		c := recv(t, conns)
		fd, _ := descriptors(t)
		next, far := descriptors(t)
		heard, over := make(readable, 1), make(chan struct{})
		out := &reused{fd: number(fd), reuse: func(fd int) {
			unix.Dup3(next, fd, unix.O_CLOEXEC)
			poller.Add(fd, heard)
		}}
		reset := error(syscall.ECONNRESET)
		c.cause.Store(&reset)
		busy.Go(func() {
			for !isClosed(over) {
				c.queue.Notify(waiter.ReadableEvents)
			}
		})
		if err := c.Relay(out, &counter{}, func(error) { close(over) }); err != nil {
			t.Fatal(err)
		}
		recv(t, over)
		unix.Write(far, []byte("x"))
		recv(t, heard)
		poller.Remove(fd)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
