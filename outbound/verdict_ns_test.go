package outbound

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

// The kernel's own refusals and those of a packet filter, whose ICMP messages come
// back while the kernel is still inside connect.
func TestADialThatARouterRefusesHasItsVerdict(t *testing.T) {
	ns := namespace(t)
	d, _ := direct(t, nil)
	for _, c := range []struct {
		name, nft string
		port      uint16
		want      flow.Verdict
	}{
		{"prohibited", "reject with icmpx type admin-prohibited", 81, flow.VerdictProhibited},
		{"IPv4 host prohibited", "ip protocol tcp reject with icmp type host-prohibited", 82, flow.VerdictProhibited},
		{"host unreachable", "reject with icmpx type host-unreachable", 83, flow.VerdictHostUnreachable},
		{"no route", "reject with icmpx type no-route", 84, flow.VerdictNetUnreachable},
		{"port unreachable", "reject with icmpx type port-unreachable", 85, flow.VerdictReset},
		{"IPv4 protocol unreachable", "ip protocol tcp reject with icmp type prot-unreachable", 86, flow.VerdictProtocol},
	} {
		ns.filter(t, c.port, c.nft)
		ns.do(func() {
			for _, addr := range []string{"192.0.2.99", "2001:db8::99"} {
				a := netip.MustParseAddr(addr)
				if strings.HasPrefix(c.name, "IPv4") && a.Is6() {
					continue
				}
				begun := time.Now()
				_, err := d.DialStream(t.Context(), toward(flow.TCP, netip.AddrPortFrom(a, c.port)))
				if got := flow.VerdictOf(err); got != c.want {
					t.Errorf("%s, %s: %v has verdict %d, want %d", c.name, addr, err, got, c.want)
				}
				if took := time.Since(begun); took > 900*time.Millisecond { // the SYN is sent again after 1 s
					t.Errorf("%s, %s: told after %v, want at once", c.name, addr, took)
				}
			}
		})
	}
}

func (ns *netns) filter(t *testing.T, port uint16, verdict string) {
	t.Helper()
	script := fmt.Sprintf("add table inet t; add chain inet t o { type filter hook output priority 0; }; add rule inet t o tcp dport %d %s", port, verdict)
	if out, err := exec.Command("ip", "netns", "exec", ns.name, "nft", script).CombinedOutput(); err != nil {
		needs(t, "nft: "+err.Error()+" "+string(out))
	}
}

// An ICMP message may end a dial; it must not end a connection.
func TestAConnectedStreamHearsNoICMPMessages(t *testing.T) {
	for _, network := range []string{"tcp4", "tcp6"} {
		l, err := net.Listen(network, map[string]string{"tcp4": "127.0.0.1:0", "tcp6": "[::1]:0"}[network])
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		d, _ := direct(t, nil)
		f := toward(flow.TCP, l.Addr().(*net.TCPAddr).AddrPort())
		f.AllowHost = true
		s, err := d.DialStream(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		level, option := unix.IPPROTO_IP, unix.IP_RECVERR
		if network == "tcp6" {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
		}
		if on, err := unix.GetsockoptInt(s.(*stream).fd, level, option); err != nil || on != 0 {
			t.Errorf("%s: hears of them: %d, %v", network, on, err)
		}
	}
}
