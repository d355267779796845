package suite

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// Addresses that ICMP errors of the gateway come from: the neighbours of its own
// on the device.
var wireRouter = map[string]netip.Addr{"IPv4": netip.MustParseAddr(tunV4[2]), "IPv6": netip.MustParseAddr(tunV6[2])}

// unreachables are what routers and hosts say instead of an answer.
var unreachables = []string{
	"reject with icmpx type port-unreachable",
	"reject with icmpx type host-unreachable",
	"reject with icmpx type no-route",
	"reject with icmpx type admin-prohibited",
}

// wireBed is a gateway whose far side tells all its ICMP errors.
func wireBed(t *testing.T, config string) (*testnet.Lab, *testnet.Gateway) {
	t.Helper()
	lab, g := udpBed(t, config)
	for _, n := range []*testnet.Netns{lab.Srv, lab.GW} {
		n.Run("sysctl", "-qw", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0", "net.ipv4.icmp_msgs_per_sec=100000")
	}
	return lab, g
}

// direct is what a client sees of a probe without the gateway.
func direct(t *testing.T, lab *testnet.Lab, p probe, to netip.AddrPort) heard {
	t.Helper()
	lab.Undivert()
	defer lab.Divert("gw0")
	return p.send(t, lab.Cli, to, udpPatience)
}

func TestB23_ICMPErrorsOfTheFarSideReachTheUDPClient(t *testing.T) {
	lab, g := wireBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		to := addrPort(f.far, 81)
		for _, verdict := range append([]string{"accept"}, unreachables...) { // the port is closed
			lab.Srv.Filter("input", "udp dport 81", verdict)
			want := direct(t, lab, probe{payload: 100}, to)
			got := probe{payload: 100}.send(t, lab.Cli, to, udpPatience)
			if want.errno == 0 || got != want {
				t.Errorf("%s: %v with %d bytes quoted, on the direct path %v with %d", verdict, got, got.quoted, want, want.quoted)
			}
			lab.Srv.Unfilter()
		}
	})
	if d := drops(g, nil); d["icmp_limit"] != 0 {
		t.Errorf("dropped %v", d)
	}
}

func TestB23_OneErrorDoesNotCloseTheFlow(t *testing.T) {
	lab, g := wireBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		before := len(g.API.Flows(""))
		lab.Srv.UDPEcho(hostPort(f.far, 7))
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		for i := range 3 {
			c.sendTo(addrPort(f.far, 81), "to nobody")
			c.sendTo(peer, fmt.Sprint("hello ", i))
			c.want(peer, fmt.Sprint("hello ", i))
		}
		if n := len(g.API.Flows("")) - before; n != 1 {
			t.Errorf("%d flows, want one", n)
		}
	})
	if closed := g.API.Closed(); len(closed) != 0 {
		t.Errorf("closed %+v", closed)
	}
}

const wireRules = udpBase + `route:
  rules:
    - {name: no-syslog, port: 514, outbound: reject}
    - {name: no-tftp, port: 69, outbound: drop}
`

func TestRulesRefuseDatagramsAsAFilterDoes(t *testing.T) {
	lab, g := wireBed(t, wireRules)
	left := lab.GW.Filter("postrouting", `oifname "wan0" meta l4proto udp`, "")
	eachFamily(t, func(t *testing.T, f udpFamily) {
		got := probe{payload: 100}.send(t, lab.Cli, addrPort(f.far, 514), udpPatience)
		want := heard{errno: syscall.EHOSTUNREACH, kind: 3, code: 13, offender: wireRouter[f.name], quoted: 100}
		if f.name == "IPv6" {
			want.errno, want.kind, want.code = syscall.EACCES, 1, 1
		}
		if got != want {
			t.Errorf("reject: %v, want %v", got, want)
		}
		if got := (probe{payload: 100}).send(t, lab.Cli, addrPort(f.far, 69), time.Second); got.errno != 0 {
			t.Errorf("drop: %v", got)
		}
	})
	if n := left.Packets(); n != 0 {
		t.Errorf("%d datagrams left", n)
	}
	if d := drops(g, nil); d["blocked"] != 4 || len(d) != 1 {
		t.Errorf("dropped %v", d)
	}
}

func TestWhatTheGatewayCannotReachIsUnreachableToItsClients(t *testing.T) {
	lab, _ := wireBed(t, udpBase)
	lab.GW.Run("ip", "route", "add", "prohibit", "203.0.113.77/32")
	lab.GW.Run("ip", "route", "add", "unreachable", "203.0.113.78/32")
	lab.GW.Run("ip", "-6", "route", "add", "prohibit", "2001:db8:cb::77/128")
	lab.GW.Run("ip", "-6", "route", "add", "unreachable", "2001:db8:cb::78/128")
	for _, c := range []struct {
		to         string
		kind, code uint8
	}{
		{"203.0.113.77:9", 3, 13},
		{"203.0.113.78:9", 3, 1},
		{"[2001:db8:cb::77]:9", 1, 1},
		{"[2001:db8:cb::78]:9", 1, 3},
		// A neighbour that does not answer, found out after three seconds.
		{"192.0.2.99:9", 3, 1},
		{"[2001:db8:1::99]:9", 1, 3},
	} {
		to := netip.MustParseAddrPort(c.to)
		from := wireRouter["IPv4"]
		if to.Addr().Is6() {
			from = wireRouter["IPv6"]
		}
		for _, p := range []probe{{payload: 10}, {tcp: true}} {
			got := p.send(t, lab.Cli, to, udpPatience)
			if got.kind != c.kind || got.code != c.code || got.offender != from {
				t.Errorf("%s, tcp %v: %v, want type %d code %d from %v", c.to, p.tcp, got, c.kind, c.code, from)
			}
		}
	}
}

func TestB01_TheICMPErrorOfARefusedDialIsTheDirectPathsOne(t *testing.T) {
	lab, _ := wireBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		to := addrPort(f.far, 81)
		for _, verdict := range unreachables[1:] {
			lab.Srv.Filter("input", "tcp dport 81", verdict)
			want := direct(t, lab, probe{tcp: true}, to)
			got := probe{tcp: true}.send(t, lab.Cli, to, udpPatience)
			if want.errno == 0 || got.errno != want.errno || got.kind != want.kind || got.code != want.code || got.offender != wireRouter[f.name] {
				t.Errorf("%s: %v, on the direct path %v", verdict, got, want)
			}
			lab.Srv.Unfilter()
		}
	})
}

// The kernel that routes into the device is a hop of its own before the gateway.
func TestTheGatewayIsAHopInATraceroute(t *testing.T) {
	testnet.Require(t, "traceroute")
	lab, g := wireBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		lab.Srv.Discard(hostPort(f.far, 80))
		lan := testnet.LANV4
		if f.name == "IPv6" {
			lan = testnet.LANV6
		}
		want := []string{lan, wireRouter[f.name].String(), f.far}
		for _, how := range [][]string{{"-U", "-p", "33434"}, {"-T", "-p", "80"}, {"-I"}} {
			out := lab.Cli.Run("traceroute", append(how, "-n", "-q", "1", "-w", "3", "-m", "5", f.far)...)
			var hops []string
			for _, line := range strings.Split(strings.TrimSpace(out), "\n")[1:] {
				if fields := strings.Fields(line); len(fields) > 1 {
					hops = append(hops, fields[1])
				}
			}
			if !slices.Equal(hops, want) {
				t.Errorf("traceroute %s: hops %v, want %v", how[0], hops, want)
			}
		}
	})
	if d := drops(g, nil); d["ttl"] == 0 {
		t.Errorf("dropped %v", d)
	}
}

func TestB28_PayloadsThatLookLikeDNSMatchNoRule(t *testing.T) {
	lab, g := wireBed(t, udpBase+"route: {rules: [{name: dns, port: 53, outbound: direct}]}\n")
	in := injectInto(t, lab.GW, "gw0")
	left := lab.GW.Filter("postrouting", `oifname "wan0" meta l4proto { udp, sctp, gre, esp }`, "")
	eachFamily(t, func(t *testing.T, f udpFamily) {
		match := "icmp type destination-unreachable icmp code prot-unreachable"
		if f.name == "IPv6" {
			match = "icmpv6 type parameter-problem icmpv6 code 1"
		}
		told := lab.Cli.Filter("input", match, "")
		query := udpPacket(f.client, 5000, f.far, 53, "query")
		for _, proto := range []byte{132, 47, 50} {
			p := slices.Clone(query)
			if f.name == "IPv6" {
				p[6] = proto
			} else {
				p[9], p[10], p[11] = proto, 0, 0
				sum := internetSum(p[:20])
				p[10], p[11] = byte(sum>>8), byte(sum)
			}
			in.send(p)
		}
		testnet.Until(t, udpPatience, "the client is told", func() bool { return told.Packets() == 3 })
	})
	if d := drops(g, nil); d["protocol"] != 6 || len(d) != 1 {
		t.Errorf("dropped %v", d)
	}
	if n := left.Packets() + uint64(len(g.API.Flows(""))); n != 0 {
		t.Errorf("%d packets or flows", n)
	}
}

// One client's dials to hosts that are silent must not delay another client's.
func TestB02_DeadDialsOfOneClientDoNotSlowAnother(t *testing.T) { deadDials(t, 5) }

// deadDials has one client dial 200 times at once, again and again for so many
// seconds, while another one connects.
func deadDials(t *testing.T, seconds int) {
	const dead, rate, patienceOfDead = 200, 20, 2 * time.Second
	b := newTCPBed(t, "")
	for _, f := range tcpFamilies() {
		other := map[string]string{"IPv4": "10.10.0.3", "IPv6": "fd10::3"}[f.name]
		b.Cli.Run("ip", "addr", "add", other+map[string]string{"IPv4": "/24", "IPv6": "/64"}[f.name], "dev", "eth0", "nodad")
		b.Cli.AwaitLocal(other)
		b.Srv.Filter("input", "tcp dport 81", "drop")
		b.Srv.Discard(f.addr(80))
		base := b.connects(t, f, other, rate, rate)
		var wg sync.WaitGroup
		var dials atomic.Int64
		before := b.gw.API.Status().Drops
		stop := make(chan struct{})
		for range dead {
			wg.Go(func() {
				for {
					ctx, cancel := context.WithTimeout(t.Context(), patienceOfDead)
					c, err := b.Cli.DialFrom(ctx, &net.TCPAddr{IP: net.ParseIP(f.client)}, "tcp", f.addr(81))
					cancel()
					dials.Add(1)
					if err == nil {
						c.Close()
						t.Error("a silent host answered")
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			})
		}
		testnet.Until(t, patience, "all dials are in progress", func() bool { return b.gw.Process().FDs > dead })
		beside := b.connects(t, f, other, seconds*rate, rate)
		close(stop)
		wg.Wait()
		b.Srv.Unfilter()
		t.Logf("%s: median and worst connect %v alone, %v beside %d dead dials, dropped %v", f.name, base, beside, dials.Load(), drops(b.gw, before))
		if beside[0] > 4*base[0]+5*time.Millisecond || beside[1] > prompt {
			t.Errorf("%s: median and worst connect %v, alone %v", f.name, beside, base)
		}
		testnet.Until(t, patience, "the dials ended with their clients' patience", func() bool { return b.gw.Process().FDs < dead })
	}
}

// connects opens n connections, some each second, one after the other, and gives
// the median and the longest time that took.
func (b *tcpBed) connects(t *testing.T, f family, from string, n, perSecond int) (took [2]time.Duration) {
	t.Helper()
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	all := make([]time.Duration, n)
	for i := range all {
		<-tick.C
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		begin := time.Now()
		c, err := b.Cli.DialFrom(ctx, &net.TCPAddr{IP: net.ParseIP(from)}, "tcp", f.addr(80))
		all[i] = time.Since(begin)
		cancel()
		if err != nil {
			t.Fatalf("%s: connection %d: %v", f.name, i, err)
		}
		c.Close()
	}
	slices.Sort(all)
	return [2]time.Duration{all[n/2], all[n-1]}
}
