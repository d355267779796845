package suite

import (
	"strings"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestB26_APingTakesAsLongAsThePathAndItsFlowCountsItsBytes(t *testing.T) {
	const delay = 20 * time.Millisecond
	eachEchoBed(t, testnet.Options{Shim: testnet.WANDevice}, func(t *testing.T, lab *testnet.Lab, g *testnet.Gateway) {
		lab.Shim.SetBoth(testnet.Link{Delay: delay})
		before := g.API.Status().Drops
		eachFamily(t, func(t *testing.T, f udpFamily) {
			for _, c := range []struct{ option, size string }{{"", "56"}, {"-Mdo", "1400"}, {"", "1400"}, {"", "8000"}} {
				args := []string{"-c", "3", "-s", c.size}
				if c.option != "" {
					args = append(args, c.option)
				}
				p := ping(t, lab, f.far, args...)
				if p.received != 3 || p.min < 2*delay || p.max > 10*delay {
					t.Errorf("%s bytes: %s", c.size, p.text)
				}
				want := map[string]uint64{"56": 3 * 56, "1400": 3 * 1400, "8000": 3 * 8000}[c.size]
				settled(t, g, want, want)
				flow := onlyFlow(t, g, "")
				if flow.Up != want || flow.Down != want {
					t.Errorf("%s bytes: the flow counts %d up, %d down, want %d", c.size, flow.Up, flow.Down, want)
				}
				if flow.Network != "icmp" || !strings.HasPrefix(flow.Source, netHost(f.client)) || flow.Destination != hostPort(f.far, 0) || flow.Outbound != "direct" || flow.Inbound != "lan" {
					t.Errorf("listed as %+v", flow)
				}
				if g.API.Kill(flow.ID) != 204 {
					t.Fatal("it cannot be killed")
				}
				if end := closedFlow(t, g, flow.ID); end.Reason != "killed" || end.Up != want || end.Down != want {
					t.Errorf("closed as %+v", end)
				}
			}
		})
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops: %v", d)
		}
	})
}

// netHost is host as it begins a text of host and port.
func netHost(host string) string { return strings.TrimSuffix(hostPort(host, 0), "0") }

func TestB26_NobodyAnswersForAHostThatDoesNot(t *testing.T) {
	eachEchoBed(t, testnet.Options{}, func(t *testing.T, lab *testnet.Lab, g *testnet.Gateway) {
		for _, dead := range []string{deadV4, deadV6} {
			before := g.API.Status().Drops
			p := ping(t, lab, dead, "-c", "4")
			if p.sent != 4 || p.received != 0 || p.errors != 0 {
				t.Errorf("a dead host: %s", p.text)
			}
			settled(t, g, 4*56, 0)
			flow := onlyFlow(t, g, "")
			if flow.Up != 4*56 || flow.Down != 0 || flow.Destination != hostPort(dead, 0) {
				t.Errorf("%+v", flow)
			}
			g.API.Kill(flow.ID)
			closedFlow(t, g, flow.ID)
			if d := drops(g, before); len(d) != 0 {
				t.Errorf("drops: %v", d)
			}
		}
	})
}

func TestB26_ABlockedPingIsAnsweredAsTheRuleSaysAndNeverLeaves(t *testing.T) {
	lab, g := echoBed(t, testnet.Options{}, true)
	left := lab.GW.Filter("postrouting", `oifname "wan0" icmp type echo-request`, "")
	left6 := lab.GW.Filter("postrouting", `oifname "wan0" icmpv6 type echo-request`, "")
	for _, c := range []struct{ dest, says string }{
		{rejectV4, "From " + tunV4[2] + " icmp_seq=1 Packet filtered"},
		{rejectV6, "From " + tunV6[2] + " icmp_seq=1 Destination unreachable: Administratively prohibited"},
		{droppedV4, ""},
		{droppedV6, ""},
	} {
		before := g.API.Status().Drops
		p := ping(t, lab, c.dest, "-c", "3")
		want := 0
		if c.says != "" {
			want = 3
		}
		if p.sent != 3 || p.received != 0 || p.errors != want || !strings.Contains(p.text, c.says) {
			t.Errorf("%s, want %q: %s", c.dest, c.says, p.text)
		}
		if d := drops(g, before); d["blocked"] != 3 || len(d) != 1 {
			t.Errorf("%s: drops %v", c.dest, d)
		}
	}
	if n := left.Packets() + left6.Packets(); n != 0 {
		t.Errorf("%d requests left", n)
	}
	if flows := g.API.Flows(""); len(flows) != 0 || len(g.API.Closed()) != 0 {
		t.Errorf("flows: %+v", flows)
	}
}

func TestB26_AnErrorOfTheOutsideReachesThePingThatItIsAbout(t *testing.T) {
	eachEchoBed(t, testnet.Options{}, func(t *testing.T, lab *testnet.Lab, g *testnet.Gateway) {
		lab.Srv.Filter("input", `icmp type echo-request`, "reject with icmp type admin-prohibited")
		lab.Srv.Filter("input", `icmpv6 type echo-request`, "reject with icmpv6 type admin-prohibited")
		for dest, says := range map[string]string{
			testnet.FarV4: "From " + testnet.FarV4 + " icmp_seq=2 Packet filtered",
			testnet.FarV6: "From " + testnet.FarV6 + " icmp_seq=2 Destination unreachable: Administratively prohibited",
		} {
			p := ping(t, lab, dest, "-c", "3")
			if p.received != 0 || p.errors != 3 || !strings.Contains(p.text, says) {
				t.Errorf("want %q: %s", says, p.text)
			}
		}
	})
}

func TestB26_TheGatewayAnswersForItsOwnAddressesOnTheDevice(t *testing.T) {
	lab, g := echoBed(t, testnet.Options{}, true)
	for _, own := range []string{tunV4[2], tunV6[2]} {
		if p := ping(t, lab, own, "-c", "3", "-s", "1400"); p.received != 3 {
			t.Errorf("%s: %s", own, p.text)
		}
	}
	if flows := g.API.Flows(""); len(flows) != 0 || len(g.API.Closed()) != 0 {
		t.Errorf("flows: %+v", flows)
	}
}

// Windows sends every echo request with the same id.
func TestB26_PingsToSeveralHostsWithOneIDAreAFlowEach(t *testing.T) {
	eachEchoBed(t, testnet.Options{}, func(t *testing.T, lab *testnet.Lab, g *testnet.Gateway) {
		for _, dests := range [][]string{
			{testnet.FarV4, testnet.ServerV4, deadV4},
			{testnet.FarV6, testnet.ServerV6, deadV6},
		} {
			const id, requests, size = 1, 5, 1200
			c := openEcho(t, lab, dests[0])
			for i := range requests {
				for j, dest := range dests {
					payload := dest + wave(size-len(dest))
					seq := uint16(65533 + i) // beyond 65,535 it begins anew
					c.send(dest, id, seq, payload)
					if j < 2 {
						c.want(dest, id, seq, payload)
					}
				}
			}
			settled(t, g, 3*requests*size, 2*requests*size)
			flows := g.API.Flows("")
			if len(flows) != len(dests) {
				t.Fatalf("%d flows of %d hosts: %+v", len(flows), len(dests), flows)
			}
			for _, f := range flows {
				down := uint64(requests * size)
				if f.Destination == hostPort(dests[2], 0) {
					down = 0
				}
				if f.Source != hostPort(map[bool]string{true: testnet.ClientV4, false: testnet.ClientV6}[c.v4], id) || f.Up != requests*size || f.Down != down {
					t.Errorf("%+v", f)
				}
			}
			if n := g.API.KillWhere("outbound=direct"); n != len(dests) {
				t.Errorf("%d killed", n)
			}
			testnet.Until(t, udpPatience, "no flows", func() bool { return g.API.Status().Flows == 0 })
		}
	})
}

func TestB26_AKilledPingBeginsAnewAndAnIdleOneEnds(t *testing.T) {
	lab, g := echoBed(t, testnet.Options{}, true)
	c := openEcho(t, lab, testnet.FarV4)
	c.send(testnet.FarV4, 7, 1, "one")
	c.want(testnet.FarV4, 7, 1, "one")
	first := onlyFlow(t, g, "outbound=direct")
	g.API.Kill(first.ID)
	closedFlow(t, g, first.ID)
	c.send(testnet.FarV4, 7, 2, "again")
	c.want(testnet.FarV4, 7, 2, "again")
	last := time.Now()
	settled(t, g, 5, 5)
	second := onlyFlow(t, g, "outbound=direct")
	if second.ID == first.ID || second.Up != 5 || second.Down != 5 {
		t.Errorf("first %+v, then %+v", first, second)
	}
	testnet.Until(t, 15*time.Second, "the flow is idle", func() bool { return len(g.API.Flows("")) == 0 })
	if took := time.Since(last); took < 9*time.Second || took > 13*time.Second {
		t.Errorf("it was idle after %v", took)
	}
	if end := closedFlow(t, g, second.ID); end.Reason != "idle" {
		t.Errorf("closed as %+v", end)
	}
}
