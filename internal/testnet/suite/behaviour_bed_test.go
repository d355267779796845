package suite

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

const (
	// silence is how long a probe waits before it calls a side silent.
	silence = 700 * time.Millisecond
	// maxFrames bounds what a wire takes of an answer.
	maxFrames = 400
)

// world is where a probe runs: the client of one lab, over one family.
type world struct {
	t    *testing.T
	lab  *testnet.Lab
	f    udpFamily
	raw  string // an address of the client's link that only packets made by hand come from
	wire wire
	seen chan string // what the server's side of a probe saw
	port int         // the last source port of a packet made by hand

	marked *testnet.Rule // datagrams that reached the server with their DSCP
}

// newWorld prepares a lab, which the probes of one side share, for one family.
func newWorld(t *testing.T, lab *testnet.Lab, f udpFamily) *world {
	t.Helper()
	w := &world{t: t, lab: lab, f: f, raw: map[string]string{"IPv4": "10.10.0.9", "IPv6": "fd10::9"}[f.name], seen: make(chan string, 8), port: 20_000}
	lab.Cli.Run("ip", "addr", "add", netip.MustParsePrefix(w.raw+map[string]string{"IPv4": "/24", "IPv6": "/64"}[f.name]).String(), "dev", "eth0", "preferred_lft", "0")
	// The kernel must not answer for connections that it does not know.
	match := map[string]string{"IPv4": "ip saddr " + w.raw, "IPv6": "ip6 saddr " + w.raw + " icmpv6 type != { nd-neighbor-solicit, nd-neighbor-advert }"}[f.name]
	lab.Cli.Filter("output", match, "drop")
	if f.name == "IPv6" {
		lab.Cli.Filter("output", "ip6 saddr "+w.raw+" meta l4proto != icmpv6", "drop")
	}
	w.wire = openWire(t, lab)
	mark := map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.name] + " dscp ef"
	w.marked = lab.Srv.Filter("input", fmt.Sprintf("%s udp dport %d", mark, portMarked), "")
	w.serveTCP()
	w.serveUDP()
	w.serveSizes()
	w.serveWindows()
	return w
}

// newBehaviourBed is a lab without (plain) or with a gateway, with its filters and unhurried error limits.
func newBehaviourBed(t *testing.T, plain bool) *testnet.Lab {
	t.Helper()
	lab := testnet.New(t, testnet.Options{})
	for _, n := range []*testnet.Netns{lab.Cli, lab.GW, lab.Srv} {
		// A mask, since a rate of 0 also takes what the errors of routes are counted with.
		n.Run("sysctl", "-qw", "net.ipv4.icmp_ratemask=0", "net.ipv6.icmp.ratelimit=0", "net.ipv4.icmp_msgs_per_sec=100000")
	}
	for port, verdict := range map[int]string{
		82: "drop", 83: "reject with icmpx type host-unreachable", 84: "reject with icmpx type no-route",
		85: "reject with icmpx type admin-prohibited", 86: "reject with icmpx type port-unreachable",
	} {
		lab.Srv.Filter("input", fmt.Sprintf("tcp dport %d", port), verdict)
		lab.Srv.Filter("input", fmt.Sprintf("udp dport %d", port), verdict)
	}
	// Silent, and never sent back to the gateway by the server's default route.
	for _, dst := range []string{"ip daddr { 203.0.113.99, 169.254.0.0/16, 224.0.0.0/4 }", "ip6 daddr { 2001:db8:cb::99, fe80::7777, ff0e::99 }"} {
		lab.Srv.Filter("prerouting", dst, "drop")
	}
	lab.Srv.Run("sysctl", "-qw", "net.ipv4.ipfrag_time=1", "net.ipv6.ip6frag_time=1")
	for _, r := range []string{"prohibit 203.0.113.77/32", "unreachable 203.0.113.78/32"} {
		lab.GW.Run("ip", append([]string{"route", "add"}, strings.Fields(r)...)...)
	}
	for _, r := range []string{"prohibit 2001:db8:cb::77/128", "unreachable 2001:db8:cb::78/128"} {
		lab.GW.Run("ip", append([]string{"-6", "route", "add"}, strings.Fields(r)...)...)
	}
	narrow(t, lab)
	holes(t, lab)
	if plain {
		return lab
	}
	lab.Start(testnet.GatewayOptions{Config: udpBase, Device: "gw0"})
	return lab
}

// host is an address of the bed by its last label, far by default.
func (w *world) host(name string) string {
	v6 := w.f.name == "IPv6"
	pick := func(v4, six string) string {
		if v6 {
			return six
		}
		return v4
	}
	switch name {
	case "prohibited":
		return pick("203.0.113.77", "2001:db8:cb::77")
	case "unreachable":
		return pick("203.0.113.78", "2001:db8:cb::78")
	case "dead":
		return pick("192.0.2.99", "2001:db8:1::99")
	case "silent":
		return pick(deadV4, deadV6)
	case "narrow":
		return pick("198.18.0.9", "2001:db8:99::9")
	case "multicast":
		return pick("224.0.1.99", "ff0e::99")
	case "link-local":
		return pick("169.254.7.7", "fe80::7777")
	case "broadcast":
		return pick("192.0.2.255", "2001:db8:1::")
	case "lan":
		return pick(testnet.LANV4, testnet.LANV6)
	case "wan":
		return pick(testnet.WANV4, testnet.WANV6)
	case "near":
		return w.f.near
	}
	return w.f.far
}

// role names an address for the table.
func (w *world) role(a netip.Addr) string {
	switch a.Unmap().String() {
	case w.f.far:
		return "the server"
	case w.f.near:
		return "the server's other address"
	case w.host("lan"), wireRouter[w.f.name].String():
		return "the gateway"
	case w.host("wan"):
		return "the gateway's WAN address"
	}
	return a.String()
}

// nextPort is a source port that no probe of this world had.
func (w *world) nextPort() int {
	w.port++
	return w.port
}

// told is what the server's side of the probe saw.
func (w *world) told() string {
	select {
	case s := <-w.seen:
		return s
	case <-time.After(5 * time.Second):
		return "the server saw nothing"
	}
}

// wire sends and hears whole packets on the client's link, past its kernel.
type wire struct {
	fd    int
	index int
	to    net.HardwareAddr // the gateway's
}

func openWire(t *testing.T, lab *testnet.Lab) (wi wire) {
	t.Helper()
	wi.fd = -1
	err := lab.GW.Do(func() error {
		link, err := net.InterfaceByName(testnet.LANDevice)
		if err == nil {
			wi.to = link.HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatalf("the gateway's link: %v", err)
	}
	err = lab.Cli.Do(func() error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		wi.index = link.Index
		wi.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8
		return unix.Bind(wi.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Index})
	})
	if err != nil {
		t.Fatalf("packet socket: %v", err)
	}
	t.Cleanup(func() { unix.Close(wi.fd) })
	return wi
}

func (wi wire) send(p []byte) error {
	proto := uint16(unix.ETH_P_IP)
	if p[0]>>4 == 6 {
		proto = unix.ETH_P_IPV6
	}
	to := &unix.SockaddrLinklayer{Protocol: proto<<8 | proto>>8, Ifindex: wi.index, Halen: 6}
	copy(to.Addr[:], wi.to)
	return unix.Sendto(wi.fd, p, 0, to)
}

// drain forgets what came in before.
func (wi wire) drain() {
	for buf := make([]byte, 1<<16); ; {
		if _, _, err := unix.Recvfrom(wi.fd, buf, 0); err != nil && err != unix.EINTR {
			return
		}
	}
}

// next is the next packet that is for dst.
func (wi wire) next(dst string, limit time.Duration) []byte {
	want, buf := netip.MustParseAddr(dst), make([]byte, 1<<16)
	fds := []unix.PollFd{{Fd: int32(wi.fd), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); time.Now().Before(end); {
		n, from, err := unix.Recvfrom(wi.fd, buf, 0)
		if err != nil {
			unix.Poll(fds, 1+int(time.Until(end)/time.Millisecond)) //nolint:errcheck // asked again
			continue
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if p := buf[:n]; len(p) >= 20 && p[0]>>4 == 4 && want.Is4() && [4]byte(p[16:20]) == want.As4() ||
			len(p) >= 40 && p[0]>>4 == 6 && want.Is6() && [16]byte(p[24:40]) == want.As16() && !isNeighbour(p) {
			return append([]byte(nil), p...)
		}
	}
	return nil
}

// next is the next packet for the probe: what is late for an earlier one has another port.
func (w *world) next(limit time.Duration) []byte {
	for end := time.Now().Add(limit); ; {
		p := w.wire.next(w.raw, time.Until(end))
		if p == nil || w.isMine(p) {
			return p
		}
	}
}

// isMine reports whether a packet is for the last source port, quotes it or has none.
func (w *world) isMine(p []byte) bool {
	proto, b := carried(p)
	at := 2
	if (proto == protoICMP || proto == protoICMPv6) && len(b) > 8+40 && (b[8]>>4 == 4 || b[8]>>4 == 6) {
		proto, b = carried(b[8:])
		at = 0
	}
	return proto != protoTCP && proto != protoUDP || len(b) < at+2 || int(b[at])<<8|int(b[at+1]) == w.port
}

// carried is the protocol that follows an IP header, and what it carries.
func carried(p []byte) (proto int, b []byte) {
	if p[0]>>4 == 6 {
		return int(p[6]), p[40:]
	}
	return int(p[9]), p[min(int(p[0]&15)*4, len(p)):]
}

// isNeighbour tells neighbour discovery, which is the link's own talk.
func isNeighbour(p []byte) bool {
	return p[6] == protoICMPv6 && len(p) > 40 && p[40] >= 133 && p[40] <= 137
}

// exchange sends packets made by hand and says what comes back, until silence.
func (w *world) exchange(packets ...[]byte) (string, error) {
	w.wire.drain()
	for _, p := range packets {
		if err := w.wire.send(p); err != nil {
			return "", fmt.Errorf("send: %w", err)
		}
	}
	var all []string
	for limit := silence; len(all) < maxFrames; limit = silence / 3 {
		p := w.next(limit)
		if p == nil {
			break
		}
		all = append(all, w.describe(p))
	}
	return counted(all), nil
}

// counted joins what was heard; the same thing twice is said once, with its number.
func counted(all []string) string {
	if len(all) == 0 {
		return "nothing"
	}
	var out []string
	for i := 0; i < len(all); {
		n := 1
		for i+n < len(all) && all[i+n] == all[i] {
			n++
		}
		if text := all[i]; n > 1 {
			out = append(out, fmt.Sprintf("%d× %s", n, text))
		} else {
			out = append(out, text)
		}
		i += n
	}
	return strings.Join(out, ", ")
}

// pause is for what shows only that it is over by nothing more happening.
func (w *world) pause() { time.Sleep(silence / 4) }
