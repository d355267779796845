package suite

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// isProhibited reports whether an error is what Linux makes of "administratively
// prohibited": EHOSTUNREACH of IPv4, EACCES of IPv6.
func isProhibited(err error) bool {
	return errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.EACCES)
}

// tryUDP sends a datagram and waits for the client to hear of an error.
func (b *tcpBed) tryUDP(t *testing.T, address string) error {
	t.Helper()
	c, err := b.Cli.Dial(t.Context(), "udp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err = c.Read(make([]byte, 1))
	return err
}

// nat64 is the form of an IPv4 address that a translator makes it of (RFC 6052).
func nat64(prefix, v4 string) string {
	b := net.ParseIP(v4).To4()
	return fmt.Sprintf("%s%02x%02x:%02x%02x", prefix, b[0], b[1], b[2], b[3])
}

func TestB29_ClientsAreToldThatTheGatewayItselfIsProhibited(t *testing.T) {
	b := newTCPBed(t, "")
	b.GW.Run("ip", "-6", "route", "add", "64:ff9b::/32", "via", testnet.ServerV6) // dials would leave
	dialled := b.GW.Filter("output", `oifname { "wan0", "lo" } meta l4proto { tcp, udp } th dport 5351`, "")
	j := b.follow(t)
	for _, to := range []string{
		tunV4[2], tunV6[2], "100.100.100.200", "fd00:ec2::254", "fd20:ce::254",
		nat64("64:ff9b::", testnet.LANV4), nat64("64:ff9b::", testnet.WANV4), nat64("64:ff9b::", tunV4[1]),
		nat64("64:ff9b::", "127.0.0.1"), nat64("64:ff9b::", "169.254.169.254"), nat64("64:ff9b:1::", testnet.LANV4),
	} {
		for network, try := range map[string]func(address string) error{
			"tcp": func(a string) error { return b.try(t, a, 2*time.Second) },
			"udp": func(a string) error { return b.tryUDP(t, a) },
		} {
			before := b.gw.API.Status().Drops
			if err := try(hostPort(to, 5351)); !isProhibited(err) {
				t.Errorf("%s to %s: %v, want prohibited", network, to, err)
			}
			if d := drops(b.gw, before); d["self"] == 0 {
				t.Errorf("%s to %s is counted as %v, want self", network, to, d)
			}
		}
	}
	if n := dialled.Packets(); n != 0 {
		t.Errorf("%d packets left for refused destinations", n)
	}
	b.sawNothing(t, j)
}

// What no client's kernel sends, forged packets do.
func TestB29_ForgedPacketsTowardTheGatewayGoNowhere(t *testing.T) {
	b := newTCPBed(t, "")
	in := injectInto(t, b.GW, tcpDevice)
	out := b.GW.Filter("output", `oifname { "wan0", "lan0", "lo" } meta l4proto { tcp, udp } th dport 5351`, "")
	opened := b.gw.API.Events(t.Context(), "/v1/connections/events")
	n := 0
	for from, to := range map[string][]string{
		testnet.ClientV4: {"0.0.0.0", "0.1.2.3", "127.0.0.1", "127.1.2.3", "169.254.169.254", "255.255.255.255", testnet.LANV4, testnet.WANV4, tunV4[1], "10.10.0.255"},
		testnet.ClientV6: {"::", "::1", "fe80::1", "::ffff:127.0.0.1", "::ffff:10.10.0.1", "::10.10.0.1", "2002:0a0a:0001::1", testnet.LANV6, testnet.WANV6, tunV6[1]},
	} {
		for _, dst := range to {
			before := b.gw.API.Status().Drops
			in.send(packetTo(from, dst, protoUDP, n))
			in.send(packetTo(from, dst, protoTCP, n))
			n++
			testnet.Until(t, udpPatience, "both packets to "+dst+" are counted", func() bool { return sum(drops(b.gw, before)) >= 2 })
		}
	}
	if left := out.Packets(); left != 0 {
		t.Errorf("%d packets left", left)
	}
	select {
	case e := <-opened:
		t.Errorf("a flow was opened: %s %s", e.Type, e.Data)
	default:
	}
}

// packetTo is a datagram or a SYN to port 5351; a mapped destination stays IPv6.
func packetTo(from, dst string, proto, n int) []byte {
	placeholder := dst
	if from == testnet.ClientV6 {
		placeholder = testnet.FarV6
	}
	make := func(to string) []byte {
		if proto == protoTCP {
			return synPacket(from, 4000+n, to, 5351)
		}
		return udpPacket(from, 4000+n, to, 5351, "x")
	}
	if placeholder == dst {
		return make(dst)
	}
	p := make(placeholder)
	copy(p[24:40], net.ParseIP(dst).To16())
	at := 40 + map[int]int{protoTCP: 16, protoUDP: 6}[proto]
	p[at], p[at+1] = 0, 0
	pseudo := append([]byte{}, p[8:40]...)
	pseudo = append(pseudo, 0, 0, 0, byte(len(p)-40), 0, 0, 0, byte(proto))
	sum := internetSum(append(pseudo, p[40:]...))
	p[at], p[at+1] = byte(sum>>8), byte(sum)
	return p
}

func TestB29_AnAddressIsTheGatewaysFromTheMomentItIsAdded(t *testing.T) {
	const movable = "192.0.2.77"
	b := newTCPBed(t, "")
	in := injectInto(t, b.GW, tcpDevice)
	var accepted atomic.Int64
	b.GW.Serve("0.0.0.0:7", func(c *net.TCPConn) { accepted.Add(1); c.Close() })
	b.Srv.Run("ip", "addr", "add", movable+"/32", "dev", "lo")
	b.Srv.Echo(movable + ":7")
	b.GW.Run("ip", "route", "add", movable, "via", testnet.ServerV4)
	echo := b.Srv.UDPEcho(movable + ":8")
	b.GW.UDPEcho("0.0.0.0:8")

	c := b.connect(t, movable+":7")
	exchange(t, c, "it is the server's")
	peer := addrPort(movable, 8)
	s := openUDP(t, b.Cli, testnet.ClientV4)
	s.sendTo(peer, "before")
	s.want(peer, "before")
	datagrams, _ := echo.Received()

	for i := range 20 {
		before := b.gw.API.Status().Drops
		b.GW.Run("ip", "addr", "add", movable+"/32", "dev", "lo")
		in.send(synPacket(testnet.ClientV4, 5000+i, movable, 7))
		in.send(udpPacket(testnet.ClientV4, s.port(), movable, 8, "after")) // of the sub-link that there is
		testnet.Until(t, udpPatience, "both are counted", func() bool { return drops(b.gw, before)["self"] >= 2 })
		b.GW.Run("ip", "addr", "del", movable+"/32", "dev", "lo")
		testnet.Until(t, time.Second+prompt, "the address is the server's again", func() bool {
			return b.try(t, movable+":7", prompt) == nil
		})
	}
	if n := accepted.Load(); n != 0 {
		t.Errorf("%d connections reached the gateway's own listener", n)
	}
	if n, _ := echo.Received(); n != datagrams {
		t.Errorf("%d datagrams to the gateway's address reached the server", n-datagrams)
	}
	s.wantNothing(100 * time.Millisecond)
	testnet.Until(t, 2*time.Second, "datagrams reach the server again", func() bool {
		s.sendTo(peer, "again")
		got, _, err := s.next(100 * time.Millisecond)
		return err == nil && got == "again"
	})
}

func TestB29_ARuleThatAllowsTheHostReachesIt(t *testing.T) {
	b := newTCPBed(t, `route:
  rules:
    - {name: own-dns, ip: ["`+testnet.WANV4+`", "`+testnet.WANV6+`"], port: 53, outbound: direct, allow_host: true}
`)
	// Whose packets the kernel would take itself go into the device first.
	for _, family := range []string{"-4", "-6"} {
		b.GW.Run("ip", family, "rule", "add", "pref", "32000", "lookup", "local")
		b.GW.Run("ip", family, "rule", "del", "pref", "0")
	}
	b.GW.Run("sysctl", "-qw", "net.ipv4.conf."+tcpDevice+".accept_local=1")
	for _, own := range []string{testnet.WANV4, testnet.WANV6} {
		b.GW.Echo(hostPort(own, 53))
		b.GW.Echo(hostPort(own, 54))
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		c, err := b.Cli.Dial(ctx, "tcp", hostPort(own, 53))
		cancel()
		if err != nil {
			t.Errorf("%s, allowed: %v", own, err)
			continue
		}
		exchange(t, c, "hello")
		c.Close()
		if err := b.try(t, hostPort(own, 54), 3*time.Second); !isProhibited(err) {
			t.Errorf("%s, another port: %v, want prohibited", own, err)
		}
	}
}
