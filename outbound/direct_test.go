package outbound

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 10 * time.Second

// direct makes an outbound with a running poller.
func direct(t testing.TB, change func(c *DirectConfig)) (*Direct, *flow.Drops) {
	t.Helper()
	p, err := epoll.New()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("poller: %v", err)
		}
	})
	drops := &flow.Drops{}
	c := DirectConfig{Poller: p, Drops: drops, DialTimeout: patience}
	if change != nil {
		change(&c)
	}
	d, err := NewDirect(c)
	if err != nil {
		t.Fatal(err)
	}
	return d, drops
}

// toward is a flow that may reach this host.
func toward(network flow.Network, dest netip.AddrPort) flow.Flow {
	return flow.Flow{Inbound: "lan", Network: network, Dest: flow.Destination{Addr: dest}, AllowHost: true}
}

// listener accepts on an address of loopback.
func listener(t testing.TB, addr string) (*net.TCPListener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener), l.Addr().(*net.TCPAddr).AddrPort()
}

// descriptors counts the open ones. Those of an earlier test may still be
// closing, so that only more of them is a leak.
func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// eventually waits until ok, at most patience.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

var loopbacks = []string{"127.0.0.1:0", "[::1]:0"}

func TestADialledStreamCarriesBytesAndHalfCloses(t *testing.T) {
	for _, addr := range loopbacks {
		t.Run(addr, func(t *testing.T) {
			l, dest := listener(t, addr)
			go func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				b, _ := io.ReadAll(c) // until FIN
				c.Write(append([]byte("got "), b...))
			}()
			d, _ := direct(t, nil)
			s, err := d.DialStream(t.Context(), toward(flow.TCP, dest))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			s.SetDeadline(time.Now().Add(patience))
			if _, err := s.Write([]byte("bytes")); err != nil {
				t.Fatal(err)
			}
			if err := s.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(s); err != nil || string(b) != "got bytes" {
				t.Errorf("read %q, %v", b, err)
			}
			if got := s.RemoteAddr().(*net.TCPAddr).AddrPort(); got != dest {
				t.Errorf("remote %v, want %v", got, dest)
			}
			if got := s.LocalAddr().(*net.TCPAddr).AddrPort(); got.Port() == 0 || got.Addr() != dest.Addr() {
				t.Errorf("local %v", got)
			}
		})
	}
}

func TestTheDescriptorGoesToTheRelayNonBlockingAndUnwatched(t *testing.T) {
	l, dest := listener(t, "127.0.0.1:0")
	defer l.Close()
	d, _ := direct(t, func(c *DirectConfig) {
		c.Keepalive = Keepalive{Idle: 2 * time.Minute, Interval: 20 * time.Second, Probes: 4}
	})
	s, err := d.DialStream(t.Context(), toward(flow.TCP, dest))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := s.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		w := make(waiter, 1)
		if err := d.c.Poller.Add(int(fd), w); err != nil {
			t.Errorf("the relay cannot watch it: %v", err)
		}
		d.c.Poller.Remove(int(fd))
		if n, err := unix.Read(int(fd), make([]byte, 1)); err != unix.EAGAIN {
			t.Errorf("read: %d, %v; want EAGAIN", n, err)
		}
		for option, want := range map[int]int{unix.TCP_NODELAY: 1, unix.TCP_KEEPIDLE: 120, unix.TCP_KEEPINTVL: 20, unix.TCP_KEEPCNT: 4} {
			if got, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option); err != nil || got != want {
				t.Errorf("TCP option %d is %d (%v), want %d", option, got, err, want)
			}
		}
		if on, _ := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE); on != 1 {
			t.Error("no keepalive")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := raw.Control(func(uintptr) { t.Error("the descriptor of a closed stream") }); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Control after Close: %v", err)
	}
}

func TestARefusedDialKeepsItsErrno(t *testing.T) {
	for _, addr := range loopbacks {
		l, dest := listener(t, addr)
		l.Close()
		d, _ := direct(t, nil)
		before := descriptors(t)
		var err error
		for range 10 {
			_, err = d.DialStream(t.Context(), toward(flow.TCP, dest))
			if !errors.Is(err, unix.ECONNREFUSED) || flow.VerdictOf(err) != flow.VerdictReset {
				t.Fatalf("error %v", err)
			}
		}
		if want := fmt.Sprintf("dial direct %v: connection refused", dest); err.Error() != want {
			t.Errorf("error %q, want %q", err, want)
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	}
}

func TestCloseWithUnreadBytesResetsAndCloseAfterReadingFinishes(t *testing.T) {
	l, dest := listener(t, "127.0.0.1:0")
	d, _ := direct(t, nil)
	for _, unread := range []bool{false, true} {
		s, err := d.DialStream(t.Context(), toward(flow.TCP, dest))
		if err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		if unread {
			c.Write([]byte("x"))
			eventually(t, "the byte arrives", func() bool {
				n := 0
				raw, _ := s.(syscall.Conn).SyscallConn()
				raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
				return n == 1
			})
		}
		s.Close()
		_, err = c.Read(make([]byte, 1))
		if want := map[bool]error{false: io.EOF, true: unix.ECONNRESET}[unread]; !errors.Is(err, want) {
			t.Errorf("unread %v: far side read %v, want %v", unread, err, want)
		}
		c.Close()
	}
}

func TestCloseEndsABlockedRead(t *testing.T) {
	_, dest := listener(t, "127.0.0.1:0")
	d, _ := direct(t, nil)
	s, err := d.DialStream(t.Context(), toward(flow.TCP, dest))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { _, err := s.Read(make([]byte, 1)); done <- err }()
	eventually(t, "the read begins", func() bool { st := s.(*stream); st.mu.Lock(); defer st.mu.Unlock(); return st.conn != nil })
	s.Close()
	select {
	case err := <-done:
		if err == nil {
			t.Error("the read returned data")
		}
	case <-time.After(patience):
		t.Fatal("the read goes on")
	}
}

func TestDialsTowardOurselvesAreProhibitedAndCounted(t *testing.T) {
	own := netip.MustParseAddr("203.0.113.1")
	d, drops := direct(t, func(c *DirectConfig) { c.Self = func(a netip.Addr) bool { return a == own } })
	addrs := []string{
		"127.0.0.1", "127.9.9.9", "0.0.0.0", "0.1.2.3", "169.254.1.1", "169.254.169.254", "224.0.0.1", "255.255.255.255", "203.0.113.1", "100.100.100.200",
		"::1", "::", "fe80::1", "ff02::1", "fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:203.0.113.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
		"64:ff9b::cb00:7101", "64:ff9b:1::7f00:1", "::127.0.0.1", "2002:7f00:1::1",
	}
	for i, addr := range addrs {
		f := toward(flow.TCP, netip.AddrPortFrom(netip.MustParseAddr(addr), 80))
		f.AllowHost = false
		_, err := d.DialStream(t.Context(), f)
		refusal, ok := errors.AsType[*flow.Refusal](err)
		if !ok || refusal.Verdict != flow.VerdictProhibited {
			t.Errorf("%s: %v", addr, err)
		}
		if n := drops[flow.DropSelf].Load(); n != uint64(i+1) {
			t.Errorf("%s: counted %d times", addr, n)
		}
		f.Network = flow.UDP
		if _, err := d.OpenLink(t.Context(), f, nil); !errors.Is(err, error(errSelf)) {
			t.Errorf("%s: link: %v", addr, err)
		}
	}
	for _, addr := range []string{"192.0.2.1", "2001:db8::1", "64:ff9b::c000:201", "10.0.0.1", "fd00::1"} {
		if err := d.check(netip.MustParseAddr(addr), false); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// names resolves from a table.
type table map[string][]netip.Addr

func (m table) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	if a, ok := m[host]; ok {
		return a, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

func name(host string, port uint16) flow.Destination {
	return flow.Destination{Addr: netip.AddrPortFrom(netip.MustParseAddr("198.18.0.1"), port), Domain: host, From: flow.FromClient}
}

func TestNamesAreResolvedCheckedAndTriedInOrder(t *testing.T) {
	_, dest := listener(t, "127.0.0.1:0")
	d, drops := direct(t, func(c *DirectConfig) {
		c.Resolver = table{
			"good.example":   {netip.MustParseAddr("127.0.0.9"), dest.Addr()}, // nobody listens on the first
			"rebind.example": {netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")},
		}
	})
	f := flow.Flow{Network: flow.TCP, Dest: name("good.example", dest.Port()), AllowHost: true}
	s, err := d.DialStream(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.(*stream).RemoteAddrPort(); got != dest {
		t.Errorf("connected to %v, want %v", got, dest)
	}
	s.Close()

	f = flow.Flow{Network: flow.TCP, Dest: name("rebind.example", dest.Port())}
	if _, err := d.DialStream(t.Context(), f); flow.VerdictOf(err) != flow.VerdictProhibited || drops[flow.DropSelf].Load() != 1 {
		t.Errorf("a name that resolves to this host: %v, counted %d", err, drops[flow.DropSelf].Load())
	}
	f.Dest = name("missing.example", 80)
	if _, err := d.DialStream(t.Context(), f); flow.VerdictOf(err) != flow.VerdictHostUnreachable {
		t.Errorf("a name that does not resolve: %v", err)
	}
}

func TestAFamilyThatIsNotUsedIsUnreachable(t *testing.T) {
	d, _ := direct(t, func(c *DirectConfig) { c.Family = IPv4Only })
	_, err := d.DialStream(t.Context(), toward(flow.TCP, netip.MustParseAddrPort("[2001:db8::1]:80")))
	if flow.VerdictOf(err) != flow.VerdictNetUnreachable {
		t.Errorf("error %v", err)
	}
}

func TestTheSourceAddressAndMarkOfTheOutboundAreUsed(t *testing.T) {
	l, dest := listener(t, "127.0.0.1:0")
	d, _ := direct(t, func(c *DirectConfig) { c.Source4, c.Mark = netip.MustParseAddr("127.0.0.77"), 0x02000000 })
	s, err := d.DialStream(t.Context(), toward(flow.TCP, dest))
	if errors.Is(err, unix.EPERM) {
		needs(t, "CAP_NET_ADMIN for SO_MARK")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := c.RemoteAddr().(*net.TCPAddr).AddrPort(); got.Addr() != d.c.Source4 || got != s.(*stream).LocalAddrPort() {
		t.Errorf("came from %v, local %v", got, s.LocalAddr())
	}
	raw, _ := s.(syscall.Conn).SyscallConn()
	raw.Control(func(fd uintptr) {
		if mark, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK); err != nil || mark != 0x02000000 {
			t.Errorf("mark %#x, %v", mark, err)
		}
	})
	r := newEar()
	_, peer := echo(t, "127.0.0.1:0")
	k, err := d.OpenLink(t.Context(), toward(flow.UDP, peer), r)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if got := k.LocalAddr(); got.Addr() != d.c.Source4 || got.Port() == 0 {
		t.Errorf("link's local address %v", got)
	}
}

func TestABadConfigurationIsRefused(t *testing.T) {
	p, err := epoll.New()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	defer p.Run(ctx)
	for what, c := range map[string]DirectConfig{
		"no poller":      {Drops: &flow.Drops{}},
		"v6 as source4":  {Poller: p, Drops: &flow.Drops{}, Source4: netip.MustParseAddr("::1")},
		"v4 as source6":  {Poller: p, Drops: &flow.Drops{}, Source6: netip.MustParseAddr("127.0.0.1")},
		"long interface": {Poller: p, Drops: &flow.Drops{}, Interface: strings.Repeat("x", 16)},
		"family":         {Poller: p, Drops: &flow.Drops{}, Family: 5},
	} {
		if _, err := NewDirect(c); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

func TestRejectAndDropRefuse(t *testing.T) {
	for o, want := range map[flow.Outbound]flow.Verdict{Reject(): flow.VerdictReset, Drop(): flow.VerdictSilent} {
		_, err := o.DialStream(t.Context(), flow.Flow{})
		if _, ok := errors.AsType[*flow.Refusal](err); !ok || flow.VerdictOf(err) != want {
			t.Errorf("dial: %v", err)
		}
		if _, err := o.OpenLink(t.Context(), flow.Flow{}, nil); flow.VerdictOf(err) != want {
			t.Errorf("link: %v", err)
		}
	}
}
