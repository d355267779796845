package suite

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// refusals are ways in which a server does not take a connection: what its
// packet filter does with port 81, and how the gateway's rules treat it.
var refusals = []struct {
	name    string
	verdict string // of the server's filter; "": the port is closed
}{
	{"closed port", ""},
	{"silence", "drop"},
	{"reset", "meta l4proto tcp reject with tcp reset"},
	{"host unreachable", "reject with icmpx type host-unreachable"},
	{"no route", "reject with icmpx type no-route"},
	{"port unreachable", "reject with icmpx type port-unreachable"},
	{"prohibited", "reject with icmpx type admin-prohibited"},
}

const synACK = "tcp flags & (syn | ack) == syn | ack"

// try dials and returns what the client's kernel says: an errno, or ETIMEDOUT
// after a while of nothing.
func (b *tcpBed) try(t *testing.T, address string, limit time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := b.Cli.Dial(ctx, "tcp", address)
	var errno syscall.Errno
	switch {
	case err == nil:
		c.Close()
		return nil
	case errors.As(err, &errno):
		return errno
	case os.IsTimeout(err):
		return syscall.ETIMEDOUT
	}
	return err
}

func TestB01_ARefusalLooksAsOnADirectPathAndIsNoFlow(t *testing.T) {
	const silence = 1500 * time.Millisecond // longer than the dial's limit: giving up is silent too
	b := b01Bed(t)
	j := b.follow(t)
	accepted := b.Cli.Filter("input", synACK, "")
	for _, f := range tcpFamilies() {
		for _, r := range refusals {
			t.Run(f.name+"/"+r.name, func(t *testing.T) {
				port := b.Srv.Filter("input", "tcp dport 81", r.verdict)
				t.Cleanup(b.Srv.Unfilter)
				b.Undivert()
				direct := b.try(t, f.addr(81), silence)
				if (direct == syscall.ETIMEDOUT) != (r.verdict == "drop") {
					t.Fatalf("on the direct path the client got %q", direct)
				}
				b.Divert(tcpDevice)
				before := port.Packets()
				if got := b.try(t, f.addr(81), silence); got != direct || got == nil {
					t.Errorf("the client got %q through the gateway and %q without", got, direct)
				}
				if port.Packets() == before {
					t.Error("the gateway did not dial")
				}
			})
		}
	}
	if n := accepted.Packets(); n != 0 {
		t.Errorf("clients got %d SYN-ACKs", n)
	}
	b.sawNothing(t, j)
}

// b01Bed has a server that is some time away: an ICMP error that comes back
// while the kernel is still inside connect would not be told to the caller.
func b01Bed(t *testing.T) *tcpBed {
	t.Helper()
	b := newTCPBedWith(t, "timeouts: {dial: 1s}\n", testnet.Options{Shim: testnet.WANDevice})
	b.Shim.SetBoth(testnet.Link{Delay: 3 * time.Millisecond})
	b.Srv.Run("sysctl", "-qw", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
	return b
}

func TestB01_RulesRefuseWithoutAFlow(t *testing.T) {
	b := newTCPBed(t, `route:
  rules:
    - {name: no-telnet, network: tcp, port: 23, outbound: reject}
    - {name: no-smtp, network: tcp, port: 25, outbound: drop}
`)
	j := b.follow(t)
	accepted := b.Cli.Filter("input", synACK, "")
	for _, f := range tcpFamilies() {
		for _, port := range []int{23, 25} {
			b.Srv.Discard(f.addr(port))
		}
		if err := b.try(t, f.addr(23), prompt); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: rule to reject: %v", f.name, err)
		}
		if err := b.try(t, f.addr(25), prompt); !errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("%s: rule to drop: %v", f.name, err)
		}
	}
	if n := accepted.Packets(); n != 0 {
		t.Errorf("clients got %d SYN-ACKs", n)
	}
	if n := b.gw.API.Status().Drops["blocked"]; n < 4 {
		t.Errorf("%d drops counted as blocked, want one for each attempt", n)
	}
	b.sawNothing(t, j)
}

// sawNothing fails the test if the gateway knows of a flow or a byte, or still dials.
func (b *tcpBed) sawNothing(t *testing.T, j *journal) {
	t.Helper()
	j.sound(t)
	if opened, _ := j.counts(); opened != 0 {
		t.Errorf("%d events of flows that never were", opened)
	}
	if live, closed := len(b.gw.API.Flows("")), len(b.gw.API.Closed()); live+closed != 0 {
		t.Errorf("%d live and %d closed flows", live, closed)
	}
	tick := b.gw.API.Traffic().Tick
	testnet.Until(t, patience, "a tick", func() bool { return b.gw.API.Traffic().Tick > tick })
	if total := b.gw.API.Traffic().Total; total != (testnet.Counters{}) {
		t.Errorf("counted %+v", total)
	}
}

func TestB01_AClientWithSeveralAddressesReachesTheGoodOne(t *testing.T) {
	testnet.Require(t, "curl")
	b := b01Bed(t)
	for _, f := range tcpFamilies() {
		for _, verdict := range []string{"", "reject with icmpx type host-unreachable", "reject with icmpx type admin-prohibited"} {
			b.Srv.Filter("input", fmt.Sprintf("%s daddr %s tcp dport 80", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.name], f.server), verdict)
			s := b.Srv.Source(f.addr(80), 5)
			out := b.Cli.Run("curl", "--http0.9", "--no-progress-meter", "--max-time", "10", "--connect-timeout", "2", "--resolve",
				fmt.Sprintf("name.test:80:[%s],[%s]", f.server, f.far), "-w", " %{remote_ip}", "-o", "/dev/null", "http://name.test/")
			if out != " "+f.far {
				t.Errorf("%s, first address %q: curl printed %q", f.name, verdict, out)
			}
			b.Srv.Unfilter()
			s.Close()
		}
	}
}

func TestADialEndsWithItsClientsPatience(t *testing.T) {
	b := newTCPBed(t, "")
	for _, f := range tcpFamilies() {
		port := b.Srv.Filter("input", "tcp dport 81", "drop")
		base := b.gw.Process().FDs
		if err := b.try(t, f.addr(81), 300*time.Millisecond); !errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("%s: %v", f.name, err)
		}
		if port.Packets() == 0 {
			t.Errorf("%s: the gateway did not dial", f.name)
		}
		// The client sends no reset; 2 × its gap of 1 s + 1 s after its last SYN it gave up.
		testnet.Until(t, 5*time.Second, "the dial's socket is closed", func() bool { return b.gw.Process().FDs <= base })
		b.Srv.Unfilter()
	}
}

func TestB04_ASYNWithECNBitsIsAnswered(t *testing.T) {
	b := newTCPBed(t, "")
	b.Cli.Run("sysctl", "-qw", "net.ipv4.tcp_ecn=1")
	asked := b.Cli.Filter("output", "tcp flags & (syn | ack | ecn | cwr) == syn | ecn | cwr", "")
	for i, f := range tcpFamilies() {
		b.Srv.Echo(f.addr(7))
		c := b.connect(t, f.addr(7))
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 5)); n != 5 || err != nil {
			t.Errorf("%s: read %d bytes, %v", f.name, n, err)
		}
		if n := asked.Packets(); n != uint64(i+1) {
			t.Errorf("%s: %d SYNs had ECN bits", f.name, n)
		}
	}
}

func TestB04_AHandMadeSYNWithECNBitsIsAnswered(t *testing.T) {
	b := newTCPBed(t, "")
	for _, f := range tcpFamilies() {
		b.Srv.Discard(f.addr(9))
		for _, flags := range []byte{tcpSYN, tcpSYN | tcpECE | tcpCWR, tcpSYN | tcpECE, tcpSYN | tcpCWR} {
			port := uint16(30000) + uint16(flags)
			var got byte
			err := b.Cli.Do(func() (err error) {
				got, err = answerTo(net.ParseIP(f.client), net.ParseIP(f.far), port, 9, flags)
				return err
			})
			if err != nil {
				t.Fatalf("%s: %v", f.name, err)
			}
			if got&(tcpSYN|tcpACK|tcpRST) != tcpSYN|tcpACK {
				t.Errorf("%s: a SYN with flags %#x was answered with flags %#x", f.name, flags, got)
			}
		}
	}
}
