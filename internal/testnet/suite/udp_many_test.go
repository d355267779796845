package suite

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// Many destinations: hosts of the far networks times ports.
const (
	manyHosts = 250
	manyPorts = 20
	manyFirst = 20_000 // the first port
)

// echoEverywhere answers datagrams to every address of the far network, on
// manyPorts ports, from the address that they were sent to.
func echoEverywhere(t *testing.T, n *testnet.Netns, f udpFamily, firstPort int) {
	t.Helper()
	version, network := "-4", "203.0.113.0/24"
	level, options := unix.IPPROTO_IP, []int{unix.IP_PKTINFO}
	if f.name == "IPv6" { // which lets nobody send from addresses that only a route makes local
		version, network = "-6", "2001:db8:cb::/64"
		level, options = unix.IPPROTO_IPV6, []int{unix.IPV6_RECVPKTINFO, unix.IPV6_FREEBIND}
	}
	n.Run("ip", version, "route", "add", "local", network, "dev", "lo")
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	for port := firstPort; port < firstPort+manyPorts; port++ {
		c, err := n.ListenUDP(t.Context(), hostPort(f.any, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		cerr := raw.Control(func(fd uintptr) {
			for _, o := range options {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), level, o, 1))
			}
		})
		if err := errors.Join(cerr, err); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			buf, info := make([]byte, 2000), make([]byte, 100)
			for {
				n, in, _, from, err := c.ReadMsgUDPAddrPort(buf, info)
				if err != nil {
					return
				}
				c.WriteMsgUDPAddrPort(buf[:n], info[:in], from) //nolint:errcheck // the client counts
			}
		})
	}
}

// manyDestination is the i-th of manyHosts × manyPorts.
func manyDestination(f udpFamily, firstPort, i int) netip.AddrPort {
	a := netip.MustParseAddr(f.far).AsSlice()
	a[len(a)-1] = byte(1 + i/manyPorts)
	addr, _ := netip.AddrFromSlice(a)
	return netip.AddrPortFrom(addr, uint16(firstPort+i%manyPorts))
}

func TestDescriptorsGrowWithSubLinksNotWithDestinations(t *testing.T) {
	const (
		destinations = manyHosts * manyPorts
		active       = 50
		batch        = 100
	)
	// Three outbounds: one association has three sub-links.
	lab, g := udpBed(t, udpBase+`outbounds: [{tag: odd, type: direct}, {tag: far, type: direct}]
route: {rules: [{port: [20003, 20005, 21003, 21005], outbound: odd}, {ip: [203.0.113.128/25, "2001:db8:cb::80/121"], outbound: far}]}
`)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		first := manyFirst
		if f.name == "IPv6" {
			first += 1000
		}
		echoEverywhere(t, lab.Srv, f, first)
		c := openUDP(t, lab.Cli, f.client)
		before := g.Process().FDs
		dropped := g.API.Status().Drops
		most := 0
		for i := 0; i < destinations; i += batch {
			wanted := map[netip.AddrPort]string{}
			for j := i; j < i+batch; j++ {
				wanted[manyDestination(f, first, j)] = fmt.Sprintf("new %d", j)
			}
			if i == 0 { // the openings queue 16 datagrams each
				for _, one := range []int{0, 3, destinations - 1} {
					c.sendTo(manyDestination(f, first, one), "open")
					c.want(manyDestination(f, first, one), "open")
				}
			}
			for j := range active { // the same ones all the time, spread over hosts and ports
				wanted[manyDestination(f, first, j*97)] = fmt.Sprintf("active %d of round %d", j, i/batch)
			}
			for to, payload := range wanted {
				c.sendTo(to, payload)
			}
			for len(wanted) > 0 {
				got, from, err := c.next(udpPatience)
				if err != nil || wanted[from] != got {
					t.Fatalf("batch %d: received %q from %v, %v; want %q; %d replies missing", i/batch, got, from, err, wanted[from], len(wanted))
				}
				delete(wanted, from)
			}
			most = max(most, g.Process().FDs)
		}
		// Three sub-links, each with a socket; the connection of the API besides.
		if most > before+3+2 {
			t.Errorf("%d descriptors while %d destinations were talked to, %d before", most, destinations, before)
		}
		if flows := g.API.Flows("source=" + f.client); len(flows) != 3 {
			t.Errorf("%d flows, want one for each outbound: %+v", len(flows), flows)
		}
		if s := g.API.Status(); s.Associations > 2 {
			t.Errorf("%d associations", s.Associations)
		}
		if d := drops(g, dropped); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}
