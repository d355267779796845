package suite

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestEmptyDatagramsPassBothWaysInOrderAndCostNothing(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		// Every third datagram has a payload; the server answers each one in kind, and
		// the first one, which opens the flow, is empty.
		server := lab.Srv.UDPEcho(hostPort(f.far, 7))
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		before := g.API.Status().Drops
		const rounds = 60
		var want uint64
		for i := range rounds {
			payload := ""
			if i%3 == 2 {
				payload = fmt.Sprintf("datagram %d", i)
			}
			c.sendTo(peer, payload)
			if i%10 == 9 { // ten in flight: their order must hold
				for j := i - 9; j <= i; j++ {
					expected := ""
					if j%3 == 2 {
						expected = fmt.Sprintf("datagram %d", j)
					}
					c.want(peer, expected)
				}
			}
			want += uint64(len(payload))
		}
		if n, bytes := server.Received(); n != rounds || bytes != want {
			t.Errorf("the server received %d datagrams, %d bytes; want %d, %d", n, bytes, rounds, want)
		}
		flow := onlyFlow(t, g, "source="+f.client)
		if flow.Up != want || flow.Down != want {
			t.Errorf("charged %d up, %d down; want %d each", flow.Up, flow.Down, want)
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

func TestOneSocketLooksTheSameToEveryServerAndHearsEveryone(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		far, near := lab.Srv.UDPEcho(hostPort(f.far, 1001)), lab.Srv.UDPEcho(hostPort(f.near, 1002))
		stranger := openUDP(t, lab.Srv, f.far)
		c := openUDP(t, lab.Cli, f.client)
		for _, peer := range []netip.AddrPort{addrPort(f.far, 1001), addrPort(f.near, 1002)} {
			c.sendTo(peer, "hello")
			c.want(peer, "hello")
		}
		mapped := onlyFlow(t, g, "source="+f.client).Egress
		for _, server := range []*testnet.UDPServer{far, near} {
			for from := range server.Sources() {
				if from.String() != mapped || len(server.Sources()) != 1 {
					t.Errorf("the server saw %v, the flow leaves from %s", server.Sources(), mapped)
				}
			}
		}
		// Endpoint-independent filtering: one who was never sent to is heard, too.
		stranger.sendTo(netip.MustParseAddrPort(mapped), "from a stranger")
		c.want(addrPort(f.far, stranger.port()), "from a stranger")
	})
}

func TestFilteringLetsInOnlyWhomTheClientSentTo(t *testing.T) {
	for _, tt := range []struct {
		filtering          string
		samePeer, sameHost bool // who else is heard beside the very endpoint
	}{
		{"endpoint-independent", true, true},
		{"address-dependent", false, true},
		{"address-and-port-dependent", false, false},
	} {
		t.Run(tt.filtering, func(t *testing.T) {
			lab, g := udpBed(t, udpBase+fmt.Sprintf("outbounds: [{tag: direct, type: direct, filtering: %s}]\n", tt.filtering))
			eachFamily(t, func(t *testing.T, f udpFamily) {
				lab.Srv.UDPEcho(hostPort(f.far, 7))
				c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
				c.sendTo(peer, "hello")
				c.want(peer, "hello")
				mapped := netip.MustParseAddrPort(onlyFlow(t, g, "source="+f.client).Egress)
				for _, other := range []struct {
					host  string
					heard bool
				}{{f.near, tt.samePeer}, {f.far, tt.sameHost}} {
					before := g.API.Status().Drops
					s := openUDP(t, lab.Srv, other.host)
					s.sendTo(mapped, "from "+other.host)
					if other.heard {
						c.want(addrPort(other.host, s.port()), "from "+other.host)
						continue
					}
					testnet.Until(t, udpPatience, "the datagram is counted as filtered", func() bool { return drops(g, before)["filter"] == 1 })
					c.sendTo(peer, "still here")
					c.want(peer, "still here") // and nothing before it
				}
			})
		})
	}
}

func TestTrainsArriveWholeBothWays(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		const size, count = 1200, 40
		burst := make([]string, count)
		for i := range burst {
			burst[i] = fmt.Sprintf("%03d ", i) + strings.Repeat(string(rune('a'+i%26)), size-4)
		}
		burst[count-1] = burst[count-1][:500] // the last one of a train may be shorter
		train := []byte(strings.Join(burst, ""))
		before := g.API.Status().Drops

		server := openUDP(t, lab.Srv, f.far)
		setSegment(t, server.UDPConn, size)
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, server.port())
		c.sendTo(peer, "first") // opens the flow: only 16 datagrams would wait for that
		_, mapped, err := server.next(udpPatience)
		if err != nil {
			t.Fatal(err)
		}
		setSegment(t, c.UDPConn, size)
		c.sendTo(peer, string(train))
		for i := range burst {
			got, from, err := server.next(udpPatience)
			if err != nil || got != burst[i] || from != mapped {
				t.Fatalf("datagram %d: %d bytes %.10q from %v, %v", i, len(got), got, from, err)
			}
		}
		server.sendTo(mapped, string(train))
		for i := range burst {
			got, from, err := c.next(udpPatience)
			if err != nil || got != burst[i] || from != peer {
				t.Fatalf("reply %d: %d bytes %.10q from %v, %v", i, len(got), got, from, err)
			}
		}
		if flow := onlyFlow(t, g, "source="+f.client); flow.Up != uint64(len(train)+5) || flow.Down != uint64(len(train)) {
			t.Errorf("charged %d up, %d down, the train has %d bytes", flow.Up, flow.Down, len(train))
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

func TestDatagramsUpToTheMTUPassUncut(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		lab.Srv.UDPEcho(hostPort(f.far, 7))
		fragments := lab.Srv.Filter("prerouting", "ip frag-off & 0x3fff != 0", "")
		c, peer := openUDP(t, lab.Cli, f.client), addrPort(f.far, 7)
		largest := 1500 - 28
		if f.name == "IPv6" {
			largest = 1500 - 48
		}
		before := g.API.Status().Drops
		for _, size := range []int{1, 511, 512, 513, 1024, largest - 1, largest} {
			payload := strings.Repeat("m", size)
			c.sendTo(peer, payload)
			c.want(peer, payload)
		}
		if n := fragments.Packets(); n != 0 {
			t.Errorf("%d fragments reached the server", n)
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

func TestPortUnreachableReachesTheClient(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		c, err := lab.Cli.Dial(t.Context(), "udp", hostPort(f.far, 9))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("anybody?")); err != nil {
			t.Fatal(err)
		}
		if err := c.SetReadDeadline(time.Now().Add(udpPatience)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 100)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("reading from a closed port: %v, want a refusal", err)
		}
		// It is not fatal: once somebody listens there, the same flow carries on.
		flow := onlyFlow(t, g, "source="+f.client)
		lab.Srv.UDPEcho(hostPort(f.far, 9))
		if _, err := c.Write([]byte("and now?")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		if n, err := c.Read(buf); err != nil || string(buf[:n]) != "and now?" {
			t.Errorf("received %q, %v", buf[:n], err)
		}
		if after := onlyFlow(t, g, "source="+f.client); after.ID != flow.ID {
			t.Errorf("flow#%d became flow#%d", flow.ID, after.ID)
		}
	})
}

func TestARejectedDatagramOpensNothingAndIsFree(t *testing.T) {
	lab, g := udpBed(t, udpBase+`route: {rules: [{name: no, port: 13, outbound: reject}, {port: 14, outbound: drop}]}
`)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		sinks := []*testnet.UDPServer{lab.Srv.UDPSink(hostPort(f.far, 13)), lab.Srv.UDPSink(hostPort(f.far, 14))}
		lab.Srv.UDPEcho(hostPort(f.far, 7))
		before := g.API.Status().Drops
		c := openUDP(t, lab.Cli, f.client)
		for range 10 {
			c.sendTo(addrPort(f.far, 13), "x")
			c.sendTo(addrPort(f.far, 14), "x")
		}
		c.sendTo(addrPort(f.far, 7), "allowed")
		c.want(addrPort(f.far, 7), "allowed")
		for _, s := range sinks {
			if n, _ := s.Received(); n != 0 {
				t.Errorf("%d datagrams passed", n)
			}
		}
		if d := drops(g, before); d["blocked"] != 20 || len(d) != 1 {
			t.Errorf("drops %v, want 20 blocked", d)
		}
		if flow := onlyFlow(t, g, "source="+f.client); flow.Up != 7 {
			t.Errorf("charged %d bytes, want 7", flow.Up)
		}
	})
}

func TestUDPFlowsEndWhenIdleByTheLimitsOfTheConfiguration(t *testing.T) {
	const oneWay, answered, port, quic = 1200 * time.Millisecond, 3 * time.Second, 400 * time.Millisecond, 2200 * time.Millisecond
	lab, g := udpBed(t, fmt.Sprintf(`version: 1
api: {listen: "$API"}
tun: [{tag: lan, device: gw0}]
timeouts: {udp: {one_way: %v, answered: %v, ports: {53: %v, 443: %v}}}
sweep: 20ms
`, oneWay, answered, port, quic))
	for _, p := range []int{7, 53} {
		lab.Srv.UDPEcho(hostPort(testnet.FarV4, p))
		lab.Srv.UDPEcho(hostPort(testnet.FarV6, p))
	}
	for _, p := range []int{9, 443} {
		lab.Srv.UDPSink(hostPort(testnet.FarV4, p))
		lab.Srv.UDPSink(hostPort(testnet.FarV6, p))
	}
	for _, tt := range []struct {
		name  string
		ports []int
		want  time.Duration
	}{
		{"one way", []int{9}, oneWay},
		{"answered", []int{7}, answered},
		{"a port of its own", []int{53}, port},
		{"the longest of its ports", []int{53, 443}, quic},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			eachFamily(t, func(t *testing.T, f udpFamily) {
				t.Parallel()
				c := openUDP(t, lab.Cli, f.client)
				for _, p := range tt.ports {
					c.sendTo(addrPort(f.far, p), "x")
				}
				source := hostPort(f.client, c.port())
				var id uint64
				testnet.Until(t, udpPatience, "the flow is listed", func() bool {
					for _, flow := range g.API.Flows("source=" + f.client) {
						if flow.Source == source {
							id = flow.ID
						}
					}
					return id != 0
				})
				flow := closedFlow(t, g, id)
				if lived := flow.Ended.Sub(flow.Started); flow.Reason != "idle" || lived < tt.want-5*time.Millisecond || lived > tt.want+700*time.Millisecond {
					t.Errorf("closed as %s after %v, want idle after %v", flow.Reason, lived, tt.want)
				}
			})
		})
	}
}

// udpLoad is a client's socket that sends 2,000 datagrams a second until it is
// stopped, and counts the bytes that come back.
type udpLoad struct {
	c        udpSocket
	received atomic.Uint64
	stop     func()
}

func newUDPLoad(t *testing.T, c udpSocket, peer netip.AddrPort) *udpLoad {
	l, ended := &udpLoad{c: c}, make(chan struct{})
	l.stop = sync.OnceFunc(func() { close(ended) })
	var wg sync.WaitGroup
	t.Cleanup(func() {
		l.stop()
		c.Close()
		wg.Wait()
	})
	wg.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		payload := []byte(strings.Repeat("l", 100))
		for {
			for range 10 {
				c.WriteToUDPAddrPort(payload, peer) //nolint:errcheck // as lossy as the network
			}
			select {
			case <-tick.C:
			case <-ended:
				return
			}
		}
	})
	wg.Go(func() {
		buf := make([]byte, 2000)
		for {
			n, err := c.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			l.received.Add(uint64(n))
		}
	})
	return l
}

// closedEvent waits for the event of a flow's close.
func closedEvent(t *testing.T, events <-chan testnet.Event, id uint64) testnet.FlowRecord {
	t.Helper()
	deadline := time.After(udpPatience)
	for {
		select {
		case e := <-events:
			if flow, err := e.Flow(); err == nil && e.Type == "closed" && flow.ID == id {
				return flow
			}
		case <-deadline:
			t.Fatalf("no event of the close of flow#%d", id)
		}
	}
}

func TestAKilledUDPFlowEndsAtOnceAndMayReopenUnderANewID(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		lab.Srv.UDPEcho(hostPort(f.far, 7))
		selector := "source=" + f.client
		l := newUDPLoad(t, openUDP(t, lab.Cli, f.client), addrPort(f.far, 7))
		testnet.Until(t, udpPatience, "the load runs", func() bool { return l.received.Load() > 10_000 })

		events := g.API.Events(t.Context(), "/v1/connections/events")
		first := onlyFlow(t, g, selector)
		start := time.Now()
		if status := g.API.Kill(first.ID); status != 204 {
			t.Fatalf("kill: status %d", status)
		}
		seen := closedEvent(t, events, first.ID)
		if took := time.Since(start); took > time.Second || seen.Reason != "killed" || !seen.Killed || seen.Up < first.Up {
			t.Errorf("after %v: %+v", took, seen)
		}
		var second testnet.FlowRecord
		testnet.Until(t, udpPatience, "another flow carries the load", func() bool {
			flows := g.API.Flows(selector)
			if len(flows) == 1 {
				second = flows[0]
			}
			return len(flows) == 1 && second.ID != first.ID && second.Down > 10_000
		})
		if second.ID < first.ID || second.Source != first.Source {
			t.Errorf("flow %+v came after %+v", second, first)
		}
		// What the event said is final, whatever came since.
		if now := closedFlow(t, g, first.ID); now.Up != seen.Up || now.Down != seen.Down {
			t.Errorf("the event says %d up, %d down, the ring %d, %d", seen.Up, seen.Down, now.Up, now.Down)
		}
		if status := g.API.Kill(first.ID); status != 404 {
			t.Errorf("a kill of a closed flow: status %d, want 404", status)
		}

		l.stop()
		testnet.Until(t, udpPatience, "the load has settled", func() bool {
			before := l.received.Load()
			time.Sleep(50 * time.Millisecond)
			return l.received.Load() == before
		})
		if n := g.API.KillWhere(selector); n != 1 {
			t.Errorf("the selector closed %d flows, want 1", n)
		}
		if n := g.API.KillWhere(selector); n != 0 {
			t.Errorf("the second time it closed %d", n)
		}
		if again := closedFlow(t, g, second.ID); again.Reason != "killed" {
			t.Errorf("closed as %s", again.Reason)
		}
	})
}
