package hostnet_test

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"gatewayd/internal/hostnet"
	"gatewayd/internal/hostnet/hostnettest"
)

// mirror is the neighbour table as WatchNeighbours tells it.
type mirror struct {
	mu     sync.Mutex
	table  map[netip.Addr]hostnet.Neighbour
	round  map[netip.Addr]bool // told of since the table began
	wholes int
}

func (m *mirror) take(n hostnet.NeighbourNews) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch n.Kind {
	case hostnet.TableBegins:
		m.round = map[netip.Addr]bool{}
	case hostnet.TableEnds:
		m.wholes++
		for a := range m.table {
			if !m.round[a] {
				delete(m.table, a)
			}
		}
	case hostnet.NeighbourChanged:
		if m.round != nil {
			m.round[n.Addr] = true
		}
		m.table[n.Addr] = n.Neighbour
		if n.MAC == (hostnet.MAC{}) {
			delete(m.table, n.Addr)
		}
	}
}

func (m *mirror) macOf(a string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n, ok := m.table[netip.MustParseAddr(a)]; ok {
		return n.MAC.String()
	}
	return ""
}

func (m *mirror) size() (addresses, wholes int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.table), m.wholes
}

func watchNeighbours(t *testing.T) *mirror {
	t.Helper()
	m := &mirror{table: map[netip.Addr]hostnet.Neighbour{}}
	run(t, func(ctx context.Context) error {
		return hostnet.WatchNeighbours(ctx, m.take)
	})
	return m
}

const clientMAC = "02:00:5e:00:53:01"

// client is a host at 10.1.2.9 and fd00:1::9, on d0 of this one.
func client(t *testing.T) *hostnettest.Host {
	t.Helper()
	h := hostnettest.NewHost(t)
	h.Connect(t, nil, "d0", "eth0", clientMAC)
	hostnettest.IP(t, "addr add 10.1.2.1/24 dev d0")
	hostnettest.IP(t, "addr add fd00:1::1/64 dev d0")
	h.Run(t, "ip addr add 10.1.2.9/24 dev eth0")
	h.Run(t, "ip addr add fd00:1::9/64 dev eth0")
	return h
}

// ping has the client send from an address as soon as it can: one of IPv6 is usable
// some time after it was added.
func ping(t *testing.T, h *hostnettest.Host, from, to string) {
	t.Helper()
	eventually(t, "a ping from "+from, func() bool { return h.Try("ping -c 1 -W 1 -I "+from+" "+to) == nil })
}

func TestNeighboursAreTold(t *testing.T) {
	h := client(t)
	hostnettest.IP(t, "neigh add 10.1.2.77 lladdr 02:00:5e:00:53:77 dev d0")
	m := watchNeighbours(t)
	eventually(t, "a neighbour that was there before", func() bool { return m.macOf("10.1.2.77") == "02:00:5e:00:53:77" })
	ping(t, h, "10.1.2.9", "10.1.2.1")
	ping(t, h, "fd00:1::9", "fd00:1::1")
	for _, a := range []string{"10.1.2.9", "fd00:1::9"} {
		eventually(t, a+" is told", func() bool { return m.macOf(a) == clientMAC })
	}
	hostnettest.IP(t, "neigh del 10.1.2.77 dev d0")
	eventually(t, "a deleted one is told", func() bool { return m.macOf("10.1.2.77") == "" })
}

func TestNeighboursThatWereLostAreToldAgain(t *testing.T) {
	client(t)
	m := watchNeighbours(t)
	eventually(t, "the watch begins", func() bool { _, n := m.size(); return n == 1 })
	hostnettest.IP(t, "neigh add 10.1.2.77 lladdr 02:00:5e:00:53:77 dev d0")
	eventually(t, "the first is told", func() bool { return m.macOf("10.1.2.77") != "" })

	// More than the socket holds while nobody reads, then one that goes.
	m.mu.Lock()
	var lines strings.Builder
	const many = 8000
	for i := range many {
		fmt.Fprintf(&lines, "neigh add 10.1.%d.%d lladdr 02:00:5e:01:%02x:%02x nud permanent dev d0\n", 100+i/250, i%250, i>>8, i&255)
	}
	lines.WriteString("neigh del 10.1.2.77 dev d0\n")
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(lines.String())
	out, err := cmd.CombinedOutput()
	m.mu.Unlock()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	eventually(t, "all are told, and the one that went", func() bool {
		n, wholes := m.size()
		return wholes > 1 && n >= many && m.macOf("10.1.2.77") == ""
	})
}

func TestOneNeighbourIsAskedFor(t *testing.T) {
	h := client(t)
	ping(t, h, "10.1.2.9", "10.1.2.1")
	ping(t, h, "fd00:1::9", "fd00:1::1")
	hostnettest.IP(t, "route add 10.44.0.0/16 via 10.1.2.9")
	index := find(t, "d0").Index
	for addr, want := range map[string]struct {
		known  bool
		onLink int
	}{
		"10.1.2.9": {true, index}, "fd00:1::9": {true, index}, "::ffff:10.1.2.9": {true, index},
		"10.1.2.200": {false, index}, // nobody is there
		"10.44.0.1":  {false, 0},     // behind the client
		"10.1.2.1":   {false, 0},     // this host's own
		"192.0.2.1":  {false, 0},     // no route
	} {
		a := netip.MustParseAddr(addr)
		n, ok, err := hostnet.NeighbourAt(a)
		if err != nil || ok != want.known || ok && (n.Addr != a.Unmap() || n.MAC.String() != clientMAC || n.Index != index) {
			t.Errorf("%s: %+v, %v, %v; want known %v", addr, n, ok, err, want.known)
		}
		if index, ok, err := hostnet.OnLink(a); err != nil || index != want.onLink || ok != (index != 0) {
			t.Errorf("%s: on link %d, %v, %v; want %d", addr, index, ok, err, want.onLink)
		}
	}
}
