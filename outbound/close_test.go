package outbound

import (
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

func TestAFloodIsDrainedToItsEnd(t *testing.T) {
	d, _ := direct(t, nil)
	c, dest := peer(t, "127.0.0.1:0")
	l, r := open(t, d, dest)
	gate := make(chan struct{})
	r.hook(sync.OnceFunc(func() { <-gate })) // the first call waits until everything is queued
	n := 4 * rounds * inboxSize
	for range n {
		c.WriteToUDPAddrPort([]byte("x"), l.LocalAddr())
	}
	close(gate)
	eventually(t, "all datagrams", func() bool { return r.count() == n })
}

func TestCloseEndsReceivingAndReturnsTheDescriptor(t *testing.T) {
	d, _ := direct(t, nil)
	c, dest := peer(t, "127.0.0.1:0")
	before := descriptors(t)
	for range 10 {
		l, _ := open(t, d, dest)
		l.Close()
	}
	l, r := open(t, d, dest)
	local := l.LocalAddr()
	l.Close()
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second Close: %v", err)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
	if _, _, err := l.Send([]flow.Train{to(dest, "x")}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Send after Close: %v", err)
	}
	c.WriteToUDPAddrPort([]byte("x"), local)
	if r.count() != 0 {
		t.Error("something was received")
	}
}

func TestCloseFromWithinAReceiverCallReturnsAndEndsTheLink(t *testing.T) {
	d, _ := direct(t, nil)
	c, dest := peer(t, "127.0.0.1:0")
	before := descriptors(t)
	l, r := open(t, d, dest)
	r.hook(func() { l.Close() })
	c.WriteToUDPAddrPort([]byte("x"), l.LocalAddr())
	c.WriteToUDPAddrPort([]byte("x"), l.LocalAddr())
	eventually(t, "the descriptor is closed", func() bool { return descriptors(t) <= before })
}

func TestLinksCloseWhileTheyReceiveAndSend(t *testing.T) {
	d, _ := direct(t, nil)
	_, dest := echo(t, "127.0.0.1:0")
	_, six := echo(t, "[::1]:0")
	before := descriptors(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				r := newEar()
				heard := make(chan struct{})
				r.on = sync.OnceFunc(func() { close(heard) })
				l, err := d.OpenLink(t.Context(), toward(flow.UDP, dest), r)
				if err != nil {
					t.Error(err)
					return
				}
				var sender sync.WaitGroup
				sender.Go(func() {
					for range 200 {
						if _, _, err := l.Send([]flow.Train{to(dest, "x"), to(six, "y")}); err != nil {
							return
						}
					}
				})
				select {
				case <-heard:
				case <-time.After(patience):
					t.Error("nothing came back")
				}
				l.Close()
				sender.Wait()
			}
		})
	}
	wg.Wait()
	eventually(t, "all descriptors are closed", func() bool { return descriptors(t) <= before })
}

func TestSendingAndReceivingAllocateNothing(t *testing.T) {
	d, _ := direct(t, nil)
	c, dest := peer(t, "127.0.0.1:0")
	l, r := open(t, d, dest)
	ts := []flow.Train{to(dest, "x")}
	ts[0].TClass = 4
	send(t, l, ts...)
	train := append(slices.Repeat([]flow.Train{to(dest, "same")}, 40), ts...) // and another class: two messages
	for _, gso := range []int{maxSegmentsLen, noSegmentation} {
		l.(*link).send.sockets[1].gso = gso
		for _, ts := range [][]flow.Train{ts, train} {
			if n := testing.AllocsPerRun(500, func() { l.Send(ts) }); n != 0 {
				t.Errorf("%v allocations to send %d trains", n, len(ts))
			}
		}
	}
	_ = r
	s := &l.(*link).send.sockets[1]
	d.c.Poller.Remove(int(s.fd)) // the test reads itself
	l.(*link).r = deaf{}
	if n := testing.AllocsPerRun(500, func() {
		unix.Sendto(int(fdOf(t, c)), []byte("x"), 0, sockaddr(l.LocalAddr()))
		s.Ready(unix.EPOLLIN)
	}); n > 3 { // of the test's own Sendto
		t.Errorf("%v allocations for each datagram", n)
	}
}

type deaf struct{}

func (deaf) Receive([]flow.Train) (moved int) { return 0 }
func (deaf) Unreachable(flow.ICMPError)       {}
func (deaf) Closed(error)                     {}

func fdOf(t testing.TB, c *net.UDPConn) (fd uintptr) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(f uintptr) { fd = f })
	return fd
}
