package suite

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

func TestDatagramsLargerThanTheMTUPassBothWays(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		server := lab.Srv.UDPEcho(hostPort(f.far, 7))
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		before := g.API.Status().Drops
		var total uint64
		// The first one opens the flow. 1,453 is the first that IPv6 fragments.
		for _, size := range []int{1473, 1453, 3000, 9000, 65507, 1, 65507} {
			payload := strings.Repeat("0123456789 and so on; ", size/22+1)[:size]
			c.sendTo(peer, payload)
			c.want(peer, payload)
			total += uint64(size)
		}
		if n, bytes := server.Received(); n != 7 || bytes != total {
			t.Errorf("the server received %d datagrams, %d bytes; want 7, %d", n, bytes, total)
		}
		if flow := onlyFlow(t, g, "source="+f.client); flow.Up != total || flow.Down != total {
			t.Errorf("charged %d up, %d down; want %d each", flow.Up, flow.Down, total)
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

// Over IPv6 this host's kernel drops what does not fit, and tells the far side.
func TestRepliesPassALANWithASmallerMTUThanTheDevice(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	lab.GW.Run("ip", "link", "set", testnet.LANDevice, "mtu", "1400")
	lab.Cli.Run("ip", "link", "set", "eth0", "mtu", "1400")
	eachFamily(t, func(t *testing.T, f udpFamily) {
		lab.Srv.UDPEcho(hostPort(f.far, 7))
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		before := g.API.Status().Drops
		for _, size := range []int{1353, 1452, 1453, 9000} {
			payload := strings.Repeat("x", size)
			c.sendTo(peer, payload)
			c.want(peer, payload)
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

// fragmentPacket is a fragment of a datagram from the place offset on, in bytes.
func fragmentPacket(src, dst string, id uint32, offset int, more bool, data []byte) []byte {
	s, d := netip.MustParseAddr(src), netip.MustParseAddr(dst)
	flag := map[bool]uint16{true: 1}[more]
	if s.Is6() {
		h := []byte{0x60, 0, 0, 0, 0, 0, 44, 64}
		binary.BigEndian.PutUint16(h[4:], uint16(8+len(data)))
		h = append(append(h, s.AsSlice()...), d.AsSlice()...)
		h = binary.BigEndian.AppendUint16(append(h, protoUDP, 0), uint16(offset)|flag)
		return append(binary.BigEndian.AppendUint32(h, id), data...)
	}
	h := []byte{0x45, 0, 0, 0}
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(data)))
	h = binary.BigEndian.AppendUint16(h, uint16(id))
	h = binary.BigEndian.AppendUint16(h, flag<<13|uint16(offset/8))
	h = append(append(append(h, 64, protoUDP, 0, 0), s.AsSlice()...), d.AsSlice()...)
	binary.BigEndian.PutUint16(h[10:], internetSum(h))
	return append(h, data...)
}

func TestAFloodOfIncompleteFragmentsIsBoundedAndStopsNobody(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	in := injectInto(t, lab.GW, "gw0")
	eachFamily(t, func(t *testing.T, f udpFamily) {
		lab.Srv.UDPEcho(hostPort(f.far, 7))
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		honest := strings.Repeat("honest ", 1300)
		before := g.API.Status().Drops
		sent, data := 0, make([]byte, 1400)
		// 84 MB, of one source and of 4,000: what would be kept without limits.
		var first, last uint64
		const rounds, each = 600, 100
		for round := range rounds {
			for i := range each {
				src := netip.MustParseAddr(f.client).AsSlice()
				if i%2 == 0 {
					binary.BigEndian.PutUint16(src[len(src)-2:], uint16(1000+sent%4000))
				} else {
					src[len(src)-1] = 66
				}
				from, _ := netip.AddrFromSlice(src)
				in.send(fragmentPacket(from.String(), f.far, uint32(sent), i%3*1400, true, data))
				sent++
			}
			c.sendTo(peer, honest)
			c.want(peer, honest)
			switch round {
			case rounds / 10:
				first = g.Process().RSS
			case rounds - 1:
				last = g.Process().RSS
			}
		}
		if last > first+16<<20 {
			t.Errorf("%d KiB resident became %d", first>>10, last>>10)
		}
		t.Logf("%d KiB resident, then %d", first>>10, last>>10)
		d := drops(g, before)
		if n := d["fragment"]; n < uint64(sent-1024) || n > uint64(sent) || len(d) != 1 {
			t.Errorf("drops %v of %d fragments", d, sent)
		}
		if flows := g.API.Flows("source=" + f.client); len(flows) != 1 {
			t.Errorf("%d flows", len(flows))
		}
	})
}

// narrow puts a router with a smaller MTU behind the gateway: addresses beyond
// the server's namespace are reached over a link that takes only so much.
func narrow(t *testing.T, lab *testnet.Lab) (passed map[string]*testnet.Rule) {
	t.Helper()
	for _, args := range []string{
		"link add beyond type veth peer name void", "link set beyond up", "link set void up",
		"addr add 198.18.0.1/24 dev beyond", "addr add 2001:db8:99::1/64 dev beyond nodad",
		"neigh add 198.18.0.9 lladdr 02:00:00:00:00:09 dev beyond", "neigh add 2001:db8:99::9 lladdr 02:00:00:00:00:09 dev beyond",
		"route add 198.18.0.9 dev beyond mtu lock 1200", "route add 2001:db8:99::9 dev beyond mtu lock 1280",
	} {
		lab.Srv.Run("ip", strings.Fields(args)...)
	}
	lab.Srv.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	return map[string]*testnet.Rule{
		"IPv4": lab.Srv.Filter("postrouting", `oifname "beyond" ip daddr 198.18.0.9`, ""),
		"IPv6": lab.Srv.Filter("postrouting", `oifname "beyond" ip6 daddr 2001:db8:99::9 meta l4proto udp`, ""),
	}
}

// connected is a client's socket that does not fragment by itself.
type connected struct {
	*net.UDPConn
	t  *testing.T
	v6 bool
}

func connectWhole(t *testing.T, n *testnet.Netns, peer netip.AddrPort) connected {
	t.Helper()
	conn, err := n.Dial(t.Context(), "udp", peer.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c := connected{conn.(*net.UDPConn), t, peer.Addr().Is6()}
	c.discover(unix.IP_PMTUDISC_DO)
	return c
}

// discover sets the mode of path MTU discovery, which both families number alike.
func (c connected) discover(mode int) {
	c.t.Helper()
	c.control(func(fd int) error {
		if c.v6 {
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, mode)
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, mode)
	})
}

// pathMTU is what the kernel knows of the way to the peer.
func (c connected) pathMTU() (mtu int) {
	c.t.Helper()
	c.control(func(fd int) (err error) {
		if c.v6 {
			mtu, err = unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU)
		} else {
			mtu, err = unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU)
		}
		return err
	})
	return mtu
}

func (c connected) control(f func(fd int) error) {
	c.t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		c.t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	if err := errors.Join(cerr, err); err != nil {
		c.t.Fatal(err)
	}
}

// tooBig sends a datagram that is too big for the path, until the client is told so.
func (c connected) tooBig(size, mtu int) {
	c.t.Helper()
	if _, err := c.Write(make([]byte, size)); err != nil {
		c.t.Fatalf("send: %v", err)
	}
	if err := c.SetReadDeadline(time.Now().Add(udpPatience)); err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 100)); !errors.Is(err, syscall.EMSGSIZE) {
		c.t.Fatalf("after %d bytes: %v, want %v", size, err, syscall.EMSGSIZE)
	}
	if got := c.pathMTU(); got != mtu {
		c.t.Fatalf("the path MTU is %d, want %d", got, mtu)
	}
}

func TestB23_TooBigOnThePathReachesTheClientWithTheNextMTU(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	passed := narrow(t, lab)
	told := map[string]*testnet.Rule{
		"IPv4": lab.Cli.Filter("input", "ip saddr "+testnet.ServerV4+" icmp type destination-unreachable icmp code 4 icmp mtu 1200", ""),
		"IPv6": lab.Cli.Filter("input", "ip6 saddr "+testnet.ServerV6+" icmpv6 type packet-too-big icmpv6 mtu 1280", ""),
	}
	eachFamily(t, func(t *testing.T, f udpFamily) {
		peer, mtu, headers := addrPort("198.18.0.9", 7), 1200, 28
		if f.name == "IPv6" {
			peer, mtu, headers = addrPort("2001:db8:99::9", 7), 1280, 48
		}
		c := connectWhole(t, lab.Cli, peer)
		c.tooBig(1400, mtu)
		if n := told[f.name].Packets(); n != 1 {
			t.Errorf("%d messages of the router itself", n)
		}
		if n := passed[f.name].Packets(); n != 0 {
			t.Errorf("%d packets passed", n)
		}
		flow := onlyFlow(t, g, "source="+f.client)
		// What fits passes, and so does what the client fragments now, on the same flow.
		if _, err := c.Write(make([]byte, mtu-headers)); err != nil {
			t.Fatalf("a datagram of just the path MTU: %v", err)
		}
		testnet.Until(t, udpPatience, "it passes", func() bool { return passed[f.name].Packets() == 1 })
		c.discover(unix.IP_PMTUDISC_WANT)
		if _, err := c.Write(make([]byte, 3000)); err != nil {
			t.Fatal(err)
		}
		testnet.Until(t, udpPatience, "its fragments pass", func() bool { return passed[f.name].Packets() == 4 })
		if after := onlyFlow(t, g, "source="+f.client); after.ID != flow.ID {
			t.Errorf("flow#%d became flow#%d", flow.ID, after.ID)
		}
	})
}

func TestB23_TooBigForTheGatewaysOwnLinkReachesTheClient(t *testing.T) {
	lab, _ := udpBed(t, udpBase)
	lab.GW.Run("ip", "link", "set", testnet.WANDevice, "mtu", "1300")
	lab.Srv.Run("ip", "link", "set", "eth0", "mtu", "1300")
	told := map[string]*testnet.Rule{
		"IPv4": lab.Cli.Filter("input", "icmp type destination-unreachable icmp code 4", ""),
		"IPv6": lab.Cli.Filter("input", "icmpv6 type packet-too-big", ""),
	}
	eachFamily(t, func(t *testing.T, f udpFamily) {
		server := lab.Srv.UDPEcho(hostPort(f.far, 7))
		c := connectWhole(t, lab.Cli, addrPort(f.far, 7))
		c.tooBig(1400, 1300)
		c.discover(unix.IP_PMTUDISC_WANT)
		if _, err := c.Write(make([]byte, 1400)); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 2000)); n != 1400 || err != nil {
			t.Fatalf("received %d bytes, %v", n, err)
		}
		if n, _ := server.Received(); n != 1 {
			t.Errorf("the server received %d datagrams", n)
		}
		if n := told[f.name].Packets(); n != 1 {
			t.Errorf("the client was told %d times", n)
		}
	})
}

// The device's MTU is larger than the LAN's. A client's MSS tells that; datagrams
// over IPv4 are fragmented on the way. Over IPv6 the kernel tells the far side,
// not the gateway, so that only what fits passes.
func TestALANWithASmallerMTUThanTheDevice(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	lab.GW.Run("ip", "link", "set", testnet.LANDevice, "mtu", "1280")
	lab.Cli.Run("ip", "link", "set", "eth0", "mtu", "1280")
	eachFamily(t, func(t *testing.T, f udpFamily) {
		const size = 4 << 20
		lab.Srv.Source(hostPort(f.far, 80), size)
		sink := lab.Srv.Discard(hostPort(f.far, 8080))
		down, up := dialTCP(t, lab, f, 80), dialTCP(t, lab, f, 8080)
		if n, err := testnet.ReadPattern(down); n != size || err != nil {
			t.Errorf("downloaded %d bytes: %v", n, err)
		}
		if n, err := testnet.WritePattern(up, size); n != size || err != nil {
			t.Errorf("uploaded %d bytes: %v", n, err)
		}
		testnet.Until(t, udpPatience, "the server has it all", func() bool { return sink.Received.Load() == size })

		lab.Srv.UDPEcho(hostPort(f.far, 7))
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		before := g.API.Status().Drops
		sizes := []int{1252, 1400, 9000}
		if f.name == "IPv6" {
			sizes = []int{1232}
		}
		for _, n := range sizes {
			payload := strings.Repeat("m", n)
			c.sendTo(peer, payload)
			c.want(peer, payload)
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

// dialTCP connects from the client to the far server, for a short while.
func dialTCP(t *testing.T, lab *testnet.Lab, f udpFamily, port int) net.Conn {
	t.Helper()
	c, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(f.far, port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}
