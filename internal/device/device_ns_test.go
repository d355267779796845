package device_test

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/internal/device"
	"gatewayd/internal/hostnet/hostnettest"
)

const (
	deadline             = 10 * time.Second
	clientMAC, routerMAC = "02:00:5e:00:53:01", "02:00:5e:00:53:02"
	otherMAC             = "02:00:5e:00:53:03"
)

// lan is a table of this host, which has a client on d0 and a router on d1, with a
// host behind it.
type lan struct {
	*device.Table
	client, router, behind *hostnettest.Host
	leases                 string

	mu   sync.Mutex
	told []device.Change
}

func newLAN(t *testing.T) *lan {
	t.Helper()
	l := &lan{client: hostnettest.NewHost(t), router: hostnettest.NewHost(t), behind: hostnettest.NewHost(t)}
	l.client.Connect(t, nil, "d0", "eth0", clientMAC)
	l.router.Connect(t, nil, "d1", "eth0", routerMAC)
	l.behind.Connect(t, l.router, "lan0", "eth0", "")
	for _, command := range []string{
		"addr add 10.1.0.1/24 dev d0", "addr add fd00:1::1/64 dev d0", "addr add 10.2.0.1/24 dev d1", "addr add fd00:2::1/64 dev d1",
		"route add 10.3.0.0/24 via 10.2.0.2", "-6 route add fd00:3::/64 via fd00:2::2",
	} {
		hostnettest.IP(t, command)
	}
	setUp(t, l.client, "addr add 10.1.0.2/24 dev eth0", "addr add fd00:1::2/64 dev eth0",
		"addr add fd00:1::a1b2/64 dev eth0", "addr add fd00:1::c3d4/64 dev eth0")
	setUp(t, l.router, "addr add 10.2.0.2/24 dev eth0", "addr add fd00:2::2/64 dev eth0", "addr add 10.3.0.1/24 dev lan0", "addr add fd00:3::1/64 dev lan0")
	setUp(t, l.behind, "addr add 10.3.0.9/24 dev eth0", "addr add fd00:3::9/64 dev eth0", "route add default via 10.3.0.1", "-6 route add default via fd00:3::1")

	l.leases = filepath.Join(t.TempDir(), "dhcp.leases")
	l.Table = device.New(device.Options{Leases: append(device.DefaultLeases(), l.leases), Changed: func(c device.Change) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.told = append(l.told, c)
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(deadline):
			t.Errorf("it did not end within %v of its context", deadline)
		}
		goleak.VerifyNone(t)
	})
	return l
}

func setUp(t *testing.T, h *hostnettest.Host, commands ...string) {
	t.Helper()
	for _, c := range commands {
		h.Run(t, "ip "+c)
	}
}

func (l *lan) nameOf(addr string) string { return l.Lookup(netip.MustParseAddr(addr)).Name }

func (l *lan) eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(deadline); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s; devices %+v", deadline, what, l.All())
		}
	}
}

// ping has a host send from one of its addresses, as soon as it can: an IPv6 address
// is usable some time after it was added.
func (l *lan) ping(t *testing.T, h *hostnettest.Host, from, to string) {
	t.Helper()
	l.eventually(t, "a ping from "+from, func() bool { return h.Try("ping -c 1 -W 1 -I "+from+" "+to) == nil })
}

func TestAClientIsOneDeviceUntilItsMACChanges(t *testing.T) {
	l := newLAN(t)
	addrs := map[string]string{"10.1.0.2": "10.1.0.1", "fd00:1::2": "fd00:1::1", "fd00:1::a1b2": "fd00:1::1", "fd00:1::c3d4": "fd00:1::1"}
	for from, to := range addrs {
		l.ping(t, l.client, from, to)
	}
	for a := range addrs {
		l.eventually(t, a+" is the client's", func() bool { return l.nameOf(a) == "mac:"+clientMAC })
	}
	all := l.All()
	i := slices.IndexFunc(all, func(e device.Entry) bool { return e.MAC == clientMAC })
	if i < 0 || all[i].Link != "d0" || len(all[i].Addrs) < 4 || all[i].Addrs[0].String() != "10.1.0.2" {
		t.Errorf("devices %+v", all)
	}

	if err := os.WriteFile(l.leases, []byte("0 "+clientMAC+" 10.1.0.2 Tablet *\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.eventually(t, "a privacy address has the lease's name", func() bool {
		return l.Lookup(netip.MustParseAddr("fd00:1::c3d4")).Host == "tablet"
	})

	l.client.Run(t, "ip link set eth0 down")
	l.client.Run(t, "ip link set eth0 address "+otherMAC)
	l.client.Run(t, "ip link set eth0 up")
	l.ping(t, l.client, "10.1.0.2", "10.1.0.1")
	l.eventually(t, "10.1.0.2 has another MAC", func() bool {
		return l.nameOf("10.1.0.2") == "mac:"+otherMAC
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	told := slices.ContainsFunc(l.told, func(c device.Change) bool {
		return c.Before.Addr.String() == "10.1.0.2" && c.Before.MAC == clientMAC && c.After.MAC == otherMAC
	})
	if !told {
		t.Errorf("told %+v", l.told)
	}
}

func TestAHostBehindARouterIsItsOwnAddress(t *testing.T) {
	l := newLAN(t)
	for from, to := range map[string]string{"10.3.0.9": "10.2.0.1", "fd00:3::9": "fd00:2::1"} {
		l.ping(t, l.behind, from, to)
	}
	l.eventually(t, "the router is known", func() bool { return l.nameOf("10.2.0.2") == "mac:"+routerMAC })
	for _, a := range []string{"10.3.0.9", "fd00:3::9"} {
		l.eventually(t, a+" is known by itself", func() bool {
			name := l.nameOf(a)
			if name != a {
				t.Fatalf("%s is %s", a, name)
			}
			return slices.ContainsFunc(l.All(), func(e device.Entry) bool { return e.Name == a })
		})
	}
	for _, e := range l.All() {
		if e.MAC == routerMAC && slices.ContainsFunc(e.Addrs, func(a netip.Addr) bool { return strings.Contains(a.String(), "3.0.9") }) {
			t.Errorf("the router has the host's address: %+v", e)
		}
	}
}

func TestANeighbourThatTheKernelForgotIsKnown(t *testing.T) {
	l := newLAN(t)
	const forgotten, marker = "10.1.0.78", "10.1.0.79"
	hostnettest.IP(t, "neigh add "+forgotten+" lladdr 02:00:5e:00:53:78 dev d0")
	l.eventually(t, "the address is the neighbour's", func() bool { return l.nameOf(forgotten) == "mac:02:00:5e:00:53:78" })
	hostnettest.IP(t, "neigh del "+forgotten+" dev d0")
	hostnettest.IP(t, "neigh add "+marker+" lladdr 02:00:5e:00:53:79 dev d0")
	l.eventually(t, "later news came", func() bool { return l.nameOf(marker) == "mac:02:00:5e:00:53:79" })
	if name := l.nameOf(forgotten); name != "mac:02:00:5e:00:53:78" {
		t.Errorf("forgotten at once: %s", name)
	}
}
