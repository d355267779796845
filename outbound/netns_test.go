package outbound

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

func TestADialThatNobodyAnswersTimesOutAndACancelledOneClosesItsDescriptor(t *testing.T) {
	ns := namespace(t)
	d, _ := direct(t, func(c *DirectConfig) { c.DialTimeout = 200 * time.Millisecond })
	ns.do(func() {
		before := descriptors(t)
		dead := toward(flow.TCP, netip.MustParseAddrPort("192.0.2.99:80"))
		dead.AllowHost = false
		start := time.Now()
		_, err := d.DialStream(t.Context(), dead)
		if !errors.Is(err, unix.ETIMEDOUT) || flow.VerdictOf(err) != flow.VerdictSilent {
			t.Errorf("error %v", err)
		}
		if took := time.Since(start); took < 200*time.Millisecond || took > 5*time.Second {
			t.Errorf("timed out after %v", took)
		}
		d.c.DialTimeout = time.Minute
		cause := errors.New("the client gave up")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
		if _, err := d.DialStream(ctx, dead); !errors.Is(err, cause) {
			t.Errorf("error %v", err)
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	})
}

func TestANetworkWithoutRouteIsUnreachable(t *testing.T) {
	ns := namespace(t)
	d, _ := direct(t, nil)
	ns.do(func() {
		f := toward(flow.TCP, netip.MustParseAddrPort("203.0.113.1:80"))
		if _, err := d.DialStream(t.Context(), f); flow.VerdictOf(err) != flow.VerdictNetUnreachable {
			t.Errorf("dial: %v", err)
		}
		before := descriptors(t)
		if _, err := d.OpenLink(t.Context(), f, newEar()); flow.VerdictOf(err) != flow.VerdictNetUnreachable {
			t.Errorf("link: %v", err)
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	})
}

func TestALinkHearsPeersBesideTheOneItWasOpenedToward(t *testing.T) {
	ns := namespace(t)
	d, _ := direct(t, nil)
	for _, tt := range []struct{ first, other string }{
		{"127.0.0.1:0", "192.0.2.1:0"},
		{"[::1]:0", "[2001:db8::1]:0"},
	} {
		ns.do(func() {
			_, first := echo(t, tt.first)
			_, other := echo(t, tt.other)
			l, ear := open(t, d, first)
			send(t, l, to(first, "first"))
			send(t, l, to(other, "other"))
			eventually(t, "both answers", func() bool { return ear.count() == 2 })
		})
	}
}

// needs skips a test for a named missing capability; in CI that is a failure.
func needs(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("missing: %s", what)
	}
	t.Skipf("missing: %s", what)
}

// netns is a namespace with a device d0, 192.0.2.1/24 and 2001:db8::1/64, MTU
// 1500, whose neighbours 192.0.2.99 and 2001:db8::99 take everything and never answer.
type netns struct {
	t    *testing.T
	name string
}

func namespace(t *testing.T) *netns {
	t.Helper()
	ns := &netns{t, fmt.Sprintf("gwout%d", os.Getpid())}
	if out, err := exec.Command("ip", "netns", "add", ns.name).CombinedOutput(); err != nil {
		needs(t, fmt.Sprintf("network namespaces (ip netns add: %v %s)", err, out))
	}
	t.Cleanup(func() { exec.Command("ip", "netns", "del", ns.name).Run() })
	for _, line := range []string{
		"link set lo up", "link add d0 type veth peer name d1", "link set d1 up", "link set d0 up",
		"addr add 192.0.2.1/24 dev d0", "addr add 2001:db8::1/64 dev d0 nodad",
		"neigh add 192.0.2.99 lladdr 02:00:00:00:00:99 dev d0", "neigh add 2001:db8::99 lladdr 02:00:00:00:00:99 dev d0",
	} {
		if out, err := exec.Command("ip", append([]string{"-n", ns.name}, strings.Fields(line)...)...).CombinedOutput(); err != nil {
			needs(t, fmt.Sprintf("ip %s: %v %s", line, err, out))
		}
	}
	ns.own("2001:db8::1")
	return ns
}

// own waits until packets to an address stay in the namespace. The kernel adds the
// route of an IPv6 address in a work queue, after the address itself, nodad or not.
func (ns *netns) own(addr string) {
	ns.t.Helper()
	eventually(ns.t, addr+" is local", func() bool {
		out, err := exec.Command("ip", "-n", ns.name, "route", "get", addr).Output()
		return err == nil && strings.HasPrefix(string(out), "local ")
	})
}

// do runs f on a thread in the namespace, which ends with it.
func (ns *netns) do(f func()) {
	ns.t.Helper()
	done := make(chan error, 1)
	go func() {
		defer close(done) // f may end its goroutine
		done <- func() error {
			lockThread()
			fd, err := unix.Open("/run/netns/"+ns.name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
			if err == nil {
				f()
			}
			return err
		}()
	}()
	select {
	case err := <-done:
		if err != nil {
			needs(ns.t, fmt.Sprintf("setns: %v", err))
		}
	case <-time.After(time.Minute):
		ns.t.Fatal("not done within a minute")
	}
}

func BenchmarkDialAndClose(b *testing.B) {
	l, dest := listener(b, "127.0.0.1:0")
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	d, _ := direct(b, nil)
	f := toward(flow.TCP, dest)
	b.ReportAllocs()
	for b.Loop() {
		s, err := d.DialStream(b.Context(), f)
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}

func BenchmarkNetDialAndClose(b *testing.B) {
	l, dest := listener(b, "127.0.0.1:0")
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	b.ReportAllocs()
	for b.Loop() {
		c, err := net.Dial("tcp", dest.String())
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}
