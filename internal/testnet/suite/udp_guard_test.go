package suite

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// Addresses that a device without configured ones gets, with its neighbours in
// the device's networks.
var (
	tunV4 = []string{"172.31.255.252", "172.31.255.253", "172.31.255.254", "172.31.255.255"}
	tunV6 = []string{"fd86:6761:7465::", "fd86:6761:7465::1", "fd86:6761:7465::2", "fd86:6761:7465::3"}
)

// noise is what a LAN is full of and no gateway may carry.
func noise() map[string][]byte {
	const cli4, cli6, link = testnet.ClientV4, testnet.ClientV6, "fe80::2"
	solicitation := []byte{133, 0, 0, 0, 0, 0, 0, 0}
	igmp := []byte{0x16, 0, 0, 0, 224, 0, 0, 251}
	return map[string][]byte{
		"mDNS":                         udpPacket(cli4, 5353, "224.0.0.251", 5353, "query"),
		"SSDP":                         udpPacket(cli4, 1900, "239.255.255.250", 1900, "M-SEARCH"),
		"DHCP":                         udpPacket("0.0.0.0", 68, "255.255.255.255", 67, "discover"),
		"limited broadcast":            udpPacket(cli4, 9, "255.255.255.255", 9, "x"),
		"NetBIOS to the TUN's network": udpPacket(cli4, 137, tunV4[3], 137, "name"),
		"NetBIOS to the LAN":           udpPacket(cli4, 137, "10.10.0.255", 137, "name"),
		"NetBIOS to the WAN":           udpPacket(cli4, 137, "192.0.2.255", 137, "name"),
		"SYN to the WAN's broadcast":   synPacket(cli4, 4000, "192.0.2.255", 80),
		"ping to the LAN's broadcast":  echoPacket(cli4, "10.10.0.255", 7, 1),
		"one hop to the LAN":           withHops(udpPacket(cli4, 137, "10.10.0.255", 137, "name"), 1),
		"SCTP to the LAN's broadcast":  withProtocol(udpPacket(cli4, 137, "10.10.0.255", 137, "name"), 132),
		"IPv4 link-local":              udpPacket(cli4, 9, "169.254.7.7", 9, "x"),
		"IGMP report":                  packet(cli4, "224.0.0.22", protoIGMP, igmp),
		"SYN to a group":               synPacket(cli4, 4000, "224.0.0.251", 80),
		"mDNS over IPv6":               udpPacket(cli6, 5353, "ff02::fb", 5353, "query"),
		"LLMNR over IPv6":              udpPacket(link, 5355, "ff02::1:3", 5355, "query"),
		"to all routers":               udpPacket(cli6, 9, "ff02::2", 9, "x"),
		"site-wide group":              udpPacket(cli6, 9, "ff05::1:3", 9, "x"),
		"to a link-local address":      udpPacket(cli6, 9, "fe80::1", 9, "x"),
		"from a link-local address":    udpPacket(link, 9, testnet.FarV6, 7, "x"),
		"router solicitation":          packet(link, "ff02::2", protoICMPv6, solicitation),
		"router solicitation of none":  packet("::", "ff02::2", protoICMPv6, solicitation),

		// Neighbour discovery (RFC 4861) and listener discovery (RFC 3810), which never leave a link.
		"neighbour solicitation":                packet(cli6, "ff02::1:ff00:10", protoICMPv6, neighbour(135, testnet.FarV6)),
		"duplicate address detection":           packet("::", "ff02::1:ff00:2", protoICMPv6, neighbour(135, cli6)),
		"neighbour advertisement to all":        packet(cli6, "ff02::1", protoICMPv6, neighbour(136, cli6)),
		"router advertisement":                  packet(link, "ff02::1", protoICMPv6, append([]byte{134, 0, 0, 0, 64, 0, 7, 8}, make([]byte, 8)...)),
		"solicitation of a link-local address":  packet(link, "fe80::1", protoICMPv6, neighbour(135, "fe80::1")),
		"solicitation from a link-local one":    packet(link, tunV6[1], protoICMPv6, neighbour(135, tunV6[1])),
		"listener report":                       listening(link, "ff02::16", append([]byte{143, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0}, make([]byte, 16)...)),
		"listener report before an address":     listening("::", "ff02::16", append([]byte{143, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0}, make([]byte, 16)...)),
		"old listener report":                   listening(link, "ff02::fb", append([]byte{131, 0, 0, 0, 0, 0, 0, 0}, make([]byte, 16)...)),
		strange + "neighbour solicitation":      packet(cli6, tunV6[1], protoICMPv6, neighbour(135, tunV6[1])),
		strange + "solicitation with hops used": withHops(packet(cli6, testnet.FarV6, protoICMPv6, neighbour(135, testnet.FarV6)), 63),
		strange + "neighbour advertisement":     packet(cli6, testnet.FarV6, protoICMPv6, neighbour(136, cli6)),
		strange + "redirect":                    packet(cli6, testnet.FarV6, protoICMPv6, append(neighbour(137, cli6), make([]byte, 16)...)),
	}
}

// strange begins the names of what is no noise: no host sends it to a router to be
// forwarded, and it is dropped as of a protocol that is not carried.
const strange = "strange: "

// neighbour is a message of neighbour discovery about a target.
func neighbour(kind byte, target string) []byte {
	return append([]byte{kind, 0, 0, 0, 0, 0, 0, 0}, netip.MustParseAddr(target).AsSlice()...)
}

// listening is a message of listener discovery: one hop, behind a router alert
// (RFC 3810, 5).
func listening(src, group string, message []byte) []byte {
	return withHops(behind(packet(src, group, protoICMPv6, message), hopByHop, 5, 2, 0, 0, optionPadN, 0), 1)
}

func TestMulticastBroadcastAndLinkLocalNoiseGoesNowhere(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	in := injectInto(t, lab.GW, "gw0")
	escaped := []*testnet.Rule{
		lab.GW.Filter("postrouting", `oifname "wan0" ip daddr { 224.0.0.0/4, 255.255.255.255, 169.254.0.0/16, 10.10.0.255, 172.31.255.252/30, 192.0.2.255 }`, ""),
		lab.GW.Filter("postrouting", `oifname "wan0" meta l4proto udp ip6 daddr { ff00::/8, fe80::/10 }`, ""),
		lab.GW.Filter("postrouting", `oifname "wan0" meta l4proto tcp ip daddr 224.0.0.0/4`, ""),
		lab.Srv.Filter("prerouting", `meta l4proto udp meta pkttype { broadcast, multicast }`, ""),
		lab.GW.Filter("prerouting", `iifname "gw0" meta l4proto { tcp, icmp, icmpv6 }`, ""), // answers
	}
	kinds := noise()
	names := slices.Sorted(maps.Keys(kinds))
	// Each kind alone is counted under exactly one cause, once for each packet.
	for _, name := range names {
		before := g.API.Status().Drops
		for range 5 {
			in.send(kinds[name])
		}
		testnet.Until(t, udpPatience, name+" is counted five times", func() bool { return sum(drops(g, before)) >= 5 })
		cause := "multicast"
		if strings.HasPrefix(name, strange) {
			cause = "protocol"
		}
		if d := drops(g, before); d[cause] != 5 || len(d) != 1 {
			t.Errorf("%s: five packets were counted as %v, want %s", name, d, cause)
		}
	}

	// Then 1,000 packets a second of all kinds, beside a client that talks.
	lab.Srv.UDPEcho(hostPort(testnet.FarV4, 7))
	c, peer := openUDP(t, lab.Cli, testnet.ClientV4), addrPort(testnet.FarV4, 7)
	c.sendTo(peer, "hello")
	c.want(peer, "hello")
	const seconds, rate = 3, 1000
	sent, before, cpu := 0, g.API.Status().Drops, g.Process().CPU
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range seconds * 50 {
		for range rate / 50 {
			in.send(kinds[names[sent%len(names)]])
			sent++
		}
		payload := fmt.Sprintf("beside %d packets", sent)
		c.sendTo(peer, payload)
		c.want(peer, payload)
		<-tick.C
	}
	testnet.Until(t, udpPatience, "all noise is counted", func() bool { return sum(drops(g, before)) >= uint64(sent) })
	if d := drops(g, before); sum(d) != uint64(sent) {
		t.Errorf("%d packets were counted %d times: %v", sent, sum(d), d)
	}
	// A packet costs a few microseconds; what an opening would cost is a hundred.
	if used := g.Process().CPU - cpu; used > seconds*time.Second/8 {
		t.Errorf("%v of CPU time for %d packets in %d s", used, sent, seconds)
	}
	for i, r := range escaped {
		if n := r.Packets(); n != 0 {
			t.Errorf("filter %d: %d packets left", i, n)
		}
	}
	flow := onlyFlow(t, g, "")
	if s := g.API.Status(); flow.Destination != peer.String() || s.Associations > 1+len(kinds) {
		t.Errorf("flow %+v; %d associations", flow, s.Associations)
	}
	if last := g.API.Closed(); len(last) != 0 {
		t.Errorf("flows came and went: %+v", last)
	}
}

func sum(counts map[string]uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

func TestNothingIsCarriedTowardTheGatewayItself(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	in := injectInto(t, lab.GW, "gw0")
	opened := g.API.Events(t.Context(), "/v1/connections/events")
	onTUN := func() uint64 { s := lab.GW.Stats("gw0"); return s.RxPackets + s.TxPackets }
	start := onTUN()

	// As the LAN's client and as a program of the gateway itself would send them.
	sent := 0
	for _, f := range []struct {
		from [2]string
		to   []string
	}{
		{[2]string{testnet.ClientV4, tunV4[1]}, append([]string{testnet.LANV4, testnet.WANV4}, tunV4...)},
		{[2]string{testnet.ClientV6, tunV6[1]}, append([]string{testnet.LANV6, testnet.WANV6}, tunV6...)},
	} {
		for _, from := range f.from {
			for _, to := range f.to {
				in.send(udpPacket(from, 4000+sent, to, 5351, "x"))
				in.send(synPacket(from, 4001+sent, to, 5351))
				sent += 2
			}
		}
	}
	// And real programs: the client's packets to the device's network are diverted,
	// the gateway's own take its route.
	for _, n := range []*testnet.Netns{lab.Cli, lab.GW} {
		for _, peer := range []string{tunV4[2], tunV6[2]} {
			c, err := n.Dial(t.Context(), "udp", hostPort(peer, 5351))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			c.Close()
			begin := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), udpPatience)
			conn, err := n.Dial(ctx, "tcp", hostPort(peer, 5351))
			cancel()
			if err == nil {
				conn.Close()
			}
			if took := time.Since(begin); err == nil || errors.Is(err, context.DeadlineExceeded) || took > time.Second {
				t.Errorf("%s: a connection to %s: %v after %v, want a quick refusal", n.Name, peer, err, took)
			}
			sent += 2
		}
	}
	// A packet of its own and a refusal for each, and then silence.
	testnet.Until(t, udpPatience, "the device is silent", func() bool {
		before := onTUN()
		time.Sleep(500 * time.Millisecond)
		return onTUN() == before
	})
	if n := onTUN() - start; n > uint64(3*sent) {
		t.Errorf("%d packets on the device after %d were sent into it", n, sent)
	}
	settled := onTUN()
	time.Sleep(time.Second)
	if n := onTUN() - settled; n >= 5 {
		t.Errorf("%d packets on the device in a second of silence", n)
	}
	select {
	case e := <-opened:
		t.Errorf("a flow was opened: %s %s", e.Type, e.Data)
	default:
	}
	if flows := g.API.Flows(""); len(flows) != 0 {
		t.Errorf("flows %+v", flows)
	}
	if d := drops(g, nil); sum(d) == 0 {
		t.Error("nothing was counted as dropped")
	} else {
		t.Logf("%d packets: %v", sent, d)
	}
}
