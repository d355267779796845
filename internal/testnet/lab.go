package testnet

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Addresses of the bed, as in the package comment.
const (
	ClientV4, ClientV6   = "10.10.0.2", "fd10::2"
	LANV4, LANV6         = "10.10.0.1", "fd10::1"
	WANV4, WANV6         = "192.0.2.2", "2001:db8:1::2"
	WAN1V4, WAN1V6       = "198.51.100.2", "2001:db8:2::2"
	ServerV4, ServerV6   = "192.0.2.10", "2001:db8:1::10"
	Server1V4, Server1V6 = "198.51.100.10", "2001:db8:2::10" // on the second WAN
	FarV4, FarV6         = "203.0.113.10", "2001:db8:cb::10" // on the server, behind its link
)

// Devices of the gateway's namespace. The client's and the server's are eth0
// (and the server's on the second WAN eth1).
const (
	LANDevice  = "lan0"
	WANDevice  = "wan0"
	WAN1Device = "wan1"
)

// divertTable is the routing table of what Divert sends into a device.
const divertTable = 100

// Options choose what a lab has beyond the bed.
type Options struct {
	SecondWAN bool   // wan1, and Far reachable over it too
	Shim      string // LANDevice or WANDevice has a Shim between itself and its peer; "": none
}

// Lab is a set of namespaces that live as long as their test.
type Lab struct {
	Cli, GW, Srv *Netns
	Shim         *Shim // nil unless asked for

	t      T
	prefix string
	mu     struct {
		sync.Mutex
		closers []func() // run last in, first out
	}
	all []*Netns
}

// labs and rules number the labs and filter rules of this process, for their names.
var labs, rules atomic.Uint32

// New builds a lab and registers its removal with t. It first removes labs of
// processes that are gone.
func New(t T, o Options) *Lab {
	t.Helper()
	removeStale()
	l := &Lab{t: t, prefix: labPrefix(int(labs.Add(1)))}
	t.Cleanup(l.close)
	if err := l.build(o); err != nil {
		t.Fatalf("lab: %v", err)
	}
	return l
}

func (l *Lab) build(o Options) error {
	for name, dst := range map[string]**Netns{"cli": &l.Cli, "gw": &l.GW, "srv": &l.Srv} {
		ns, err := l.namespace(name)
		if err != nil {
			return err
		}
		*dst = ns
	}
	if err := l.connect(l.Cli, "eth0", l.GW, LANDevice, o.Shim == LANDevice); err != nil {
		return err
	}
	if err := l.connect(l.GW, WANDevice, l.Srv, "eth0", o.Shim == WANDevice); err != nil {
		return err
	}
	if o.SecondWAN {
		if err := connect(l.GW, WAN1Device, l.Srv, "eth1"); err != nil {
			return err
		}
	}
	return l.address(o)
}

// namespace makes an empty namespace with both families forwarding nothing, no
// duplicate address detection (it would delay every test by two seconds) and no
// reverse path filter (a TUN's packets come back another way).
func (l *Lab) namespace(role string) (*Netns, error) {
	n := &Netns{Name: l.prefix + role, lab: l}
	if err := ipBatch("", "", "netns add "+n.Name); err != nil {
		return nil, err
	}
	l.all = append(l.all, n)
	if err := n.ip("link set lo up"); err != nil {
		return nil, err
	}
	return n, n.sysctl(
		"net.ipv6.conf.default.accept_dad=0", "net.ipv6.conf.default.accept_ra=0", "net.ipv6.conf.default.router_solicitations=0",
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0", "net.ipv4.ping_group_range=0 2147483647",
		"net.ipv4.ip_local_port_range=1024 65535", "net.ipv4.tcp_tw_reuse=1")
}

// connect joins two namespaces by a veth pair and brings it up.
func connect(a *Netns, dev string, b *Netns, peer string) error {
	if err := ipBatch("", "", fmt.Sprintf("link add %s netns %s type veth peer name %s netns %s", dev, a.Name, peer, b.Name)); err != nil {
		return err
	}
	if err := a.ip("link set " + dev + " up"); err != nil {
		return err
	}
	return b.ip("link set " + peer + " up")
}

// connect is the function connect, with a Shim between if asked for. The client's
// side comes first.
func (l *Lab) connect(a *Netns, dev string, b *Netns, peer string, shim bool) error {
	if !shim {
		return connect(a, dev, b, peer)
	}
	n, err := l.namespace("shim")
	if err != nil {
		return err
	}
	if err := n.sysctl("net.ipv6.conf.default.disable_ipv6=1"); err != nil {
		return err
	}
	if err := errors.Join(n.wire(a, dev, "left"), n.wire(b, peer, "right")); err != nil {
		return err
	}
	if l.Shim, err = newShim(n, "left", "right"); err != nil {
		return err
	}
	l.onClose(l.Shim.close)
	return nil
}

// wire joins a device of another namespace with one of this namespace, where each packet
// comes alone: a lost super-packet would be 45 lost packets. They are cut on the way, as
// a network card does it. A limit on the far device is none for super-packets that come
// from a TUN device, which tell no number of segments, and a socket that knows it times
// each packet by itself, slower than one behind a router.
func (n *Netns) wire(far *Netns, dev, near string) error {
	bridge, port, cut := near+"-br", near+"-in", near+"-cut"
	if err := connect(far, dev, n, port); err != nil {
		return err
	}
	return n.ip("link add "+bridge+" up type bridge mcast_snooping 0", "link set "+port+" master "+bridge,
		"link add "+near+" up type veth peer name "+cut, "link set "+cut+" up master "+bridge+" gso_max_segs 1")
}

func (l *Lab) address(o Options) error {
	cli := []string{
		"addr add " + ClientV4 + "/24 dev eth0", "addr add " + ClientV6 + "/64 dev eth0 nodad",
		"route add default via " + LANV4, "route add default via " + LANV6,
	}
	gw := []string{
		"addr add " + LANV4 + "/24 dev lan0", "addr add " + LANV6 + "/64 dev lan0 nodad",
		"addr add " + WANV4 + "/24 dev wan0", "addr add " + WANV6 + "/64 dev wan0 nodad",
		"route add default via " + ServerV4, "route add default via " + ServerV6,
	}
	srv := []string{
		"addr add " + ServerV4 + "/24 dev eth0", "addr add " + ServerV6 + "/64 dev eth0 nodad",
		"addr add " + FarV4 + "/32 dev lo", "addr add " + FarV6 + "/128 dev lo nodad",
		"route add default via " + WANV4, "route add default via " + WANV6,
	}
	if o.SecondWAN {
		gw = append(gw, "addr add "+WAN1V4+"/24 dev wan1", "addr add "+WAN1V6+"/64 dev wan1 nodad",
			"route add default via "+Server1V4+" metric 100", "route add default via "+Server1V6+" metric 2000")
		srv = append(srv, "addr add "+Server1V4+"/24 dev eth1", "addr add "+Server1V6+"/64 dev eth1 nodad")
	}
	for ns, lines := range map[*Netns][]string{l.Cli: cli, l.GW: gw, l.Srv: srv} {
		if err := ns.ip(lines...); err != nil {
			return err
		}
		for _, line := range lines {
			if f := strings.Fields(line); f[0] == "addr" && strings.Contains(f[2], ":") {
				addr, _, _ := strings.Cut(f[2], "/")
				ns.AwaitLocal(addr)
			}
		}
	}
	return l.GW.sysctl("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
}

// Guest is another host on the client's LAN: a namespace with a MAC of its own and these
// addresses, without their length.
func (l *Lab) Guest(name, v4, v6 string) *Netns {
	l.t.Helper()
	n, err := l.namespace(name)
	if err == nil { // a macvlan is on the same wire as the link below it
		err = l.Cli.ip("link add eth9 link eth0 netns " + n.Name + " type macvlan mode bridge")
	}
	if err == nil {
		err = n.ip("link set eth9 name eth0 up", "addr add "+v4+"/24 dev eth0", "addr add "+v6+"/64 dev eth0 nodad",
			"route add default via "+LANV4, "route add default via "+LANV6)
	}
	if err != nil {
		l.t.Fatalf("guest: %v", err)
	}
	n.AwaitLocal(v6)
	return n
}

// Divert routes what enters the gateway from the LAN into a device of the
// gateway, both families. Traffic to the gateway's own addresses stays (the
// kernel's local table comes first), and so does traffic within the LAN.
// Without the device LAN traffic is unreachable: a test can never pass since the
// kernel forwarded for a gateway that was down.
func (l *Lab) Divert(device string) {
	l.t.Helper()
	err := errors.Join(l.divert("-4", "10.10.0.0/24", device), l.divert("-6", "fd10::/64", device))
	if err != nil {
		l.t.Fatalf("divert into %s: %v", device, err)
	}
}

func (l *Lab) divert(family, lan, device string) error {
	table := fmt.Sprintf(" table %d", divertTable)
	return ipBatch(l.GW.Name, family,
		"route replace throw "+lan+table,
		"route replace unreachable default metric 9999"+table,
		"route replace default dev "+device+table,
		divertRule("add"))
}

// Undivert gives the LAN's traffic back to the kernel's forwarding.
func (l *Lab) Undivert() {
	l.t.Helper()
	err := errors.Join(ipBatch(l.GW.Name, "-4", divertRule("del")), ipBatch(l.GW.Name, "-6", divertRule("del")))
	if err != nil {
		l.t.Fatalf("undivert: %v", err)
	}
}

func divertRule(verb string) string {
	return fmt.Sprintf("rule %s iif %s priority %d lookup %d", verb, LANDevice, divertTable, divertTable)
}

// onClose has f run before the namespaces go.
func (l *Lab) onClose(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closers = append(l.mu.closers, f)
}

func (l *Lab) close() {
	l.mu.Lock()
	closers := l.mu.closers
	l.mu.closers = nil
	l.mu.Unlock()
	for i := range closers {
		closers[len(closers)-1-i]()
	}
	for _, n := range l.all {
		if err := removeNamespace(n.Name); err != nil {
			l.t.Logf("lab: %v", err)
		}
	}
}

// Until waits for a condition, asking every few milliseconds, and fails the test
// after the limit, saying what it waited for. Not for cleanup, when the test's
// context has ended.
func Until(t T, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for !condition() {
		select {
		case <-again.C:
		case <-t.Context().Done():
			t.Fatalf("the test ended while it waited: %s", what)
		case <-deadline.C:
			t.Fatalf("waited %v in vain: %s", limit, what)
		}
	}
}
