package suite

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// Addresses that answer no ping: the server gets what is for them and is silent.
const (
	deadV4, deadV6       = "203.0.113.99", "2001:db8:cb::99"
	rejectV4, rejectV6   = "203.0.113.20", "2001:db8:cb::20"
	droppedV4, droppedV6 = "203.0.113.30", "2001:db8:cb::30"
)

// echoRules block some of them.
const echoRules = `route:
  rules:
    - {name: rejected, network: icmp, ip: ["` + rejectV4 + `", "` + rejectV6 + `"], outbound: reject}
    - {name: dropped, network: icmp, ip: ["` + droppedV4 + `", "` + droppedV6 + `"], outbound: drop}
`

// echoBed is a lab with a gateway, whose processes may have ping sockets or not
// even as root.
func echoBed(t *testing.T, o testnet.Options, pingSockets bool) (*testnet.Lab, *testnet.Gateway) {
	t.Helper()
	testnet.Require(t, "ping")
	lab := testnet.New(t, o)
	if !pingSockets {
		lab.GW.Run("sysctl", "-qw", "net.ipv4.ping_group_range=1 0")
	}
	lab.GW.Filter("output", `oifname "gw0" ip6 daddr ff00::/8`, "drop")
	return lab, lab.Start(testnet.GatewayOptions{Config: udpBase + echoRules, Device: "gw0"})
}

// eachEchoBed runs a test over ping sockets and over raw ones.
func eachEchoBed(t *testing.T, o testnet.Options, test func(t *testing.T, lab *testnet.Lab, g *testnet.Gateway)) {
	t.Helper()
	for _, pingSockets := range []bool{true, false} {
		name := "raw socket"
		if pingSockets {
			name = "ping socket"
		}
		t.Run(name, func(t *testing.T) {
			lab, g := echoBed(t, o, pingSockets)
			test(t, lab, g)
		})
	}
}

// pinged is what iputils' ping says.
type pinged struct {
	sent, received, errors int
	min, max               time.Duration // of round trips
	text                   string
}

var (
	pingSummary = regexp.MustCompile(`(\d+) packets transmitted, (\d+) received,(?: \+(\d+) errors,)?`)
	pingTimes   = regexp.MustCompile(`rtt min/avg/max/mdev = ([0-9.]+)/[0-9.]+/([0-9.]+)/`)
	pingTrouble = regexp.MustCompile(`DUP!|wrong data byte|truncated|BAD CHECKSUM`)
)

// ping runs ping in the client's namespace, at most 15 s. One that is damaged or
// doubled fails the test.
func ping(t *testing.T, lab *testnet.Lab, dest string, args ...string) (p pinged) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	cmd := lab.Cli.Command(ctx, "ping", append(append([]string{"-n", "-i", "0.2", "-W", "1"}, args...), dest)...)
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if p.text = string(out); err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) { // 1: no answer
		t.Fatalf("ping %s: %v: %s", dest, err, out)
	}
	m := pingSummary.FindStringSubmatch(p.text)
	if m == nil || pingTrouble.MatchString(p.text) {
		t.Fatalf("ping %s: %s", dest, out)
	}
	for i, n := range []*int{&p.sent, &p.received, &p.errors} {
		*n, _ = strconv.Atoi(m[i+1])
	}
	if m = pingTimes.FindStringSubmatch(p.text); m != nil {
		for i, d := range []*time.Duration{&p.min, &p.max} {
			ms, _ := strconv.ParseFloat(m[i+1], 64)
			*d = time.Duration(ms * float64(time.Millisecond))
		}
	}
	return p
}

// echoClient is a raw ICMP socket of the client, which chooses ids itself.
type echoClient struct {
	t  *testing.T
	fd int
	v4 bool
}

func openEcho(t *testing.T, lab *testnet.Lab, host string) echoClient {
	t.Helper()
	c := echoClient{t: t, v4: netip.MustParseAddr(host).Is4()}
	domain, proto := unix.AF_INET6, unix.IPPROTO_ICMPV6
	if c.v4 {
		domain, proto = unix.AF_INET, unix.IPPROTO_ICMP
	}
	err := lab.Cli.Do(func() (err error) {
		c.fd, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
		return err
	})
	if err != nil {
		t.Fatalf("raw socket: %v", err)
	}
	t.Cleanup(func() { unix.Close(c.fd) })
	return c
}

func (c echoClient) send(dest string, id, seq uint16, payload string) {
	c.t.Helper()
	b := []byte{128, 0, 0, 0}
	if c.v4 {
		b[0] = 8
	}
	b = binary.BigEndian.AppendUint16(b, id)
	b = binary.BigEndian.AppendUint16(b, seq)
	b = append(b, payload...)
	var to unix.Sockaddr
	if a := netip.MustParseAddr(dest); c.v4 {
		binary.BigEndian.PutUint16(b[2:], internetSum(b))
		to = &unix.SockaddrInet4{Addr: a.As4()}
	} else {
		to = &unix.SockaddrInet6{Addr: a.As16()} // the kernel sets the checksum
	}
	if err := unix.Sendto(c.fd, b, 0, to); err != nil {
		c.t.Fatalf("send to %s: %v", dest, err)
	}
}

// next is the next echo reply with the id.
func (c echoClient) next(id uint16, limit time.Duration) (from string, seq uint16, payload string, ok bool) {
	c.t.Helper()
	kind := byte(129)
	if c.v4 {
		kind = 0
	}
	buf := make([]byte, 1<<16)
	for deadline := time.Now().Add(limit); ; {
		left := unix.NsecToTimeval(max(time.Until(deadline), time.Microsecond).Nanoseconds())
		if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &left); err != nil {
			c.t.Fatal(err)
		}
		n, sa, err := unix.Recvfrom(c.fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			return "", 0, "", false
		}
		if err != nil {
			c.t.Fatal(err)
		}
		b := buf[:n]
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			from, b = netip.AddrFrom4(sa.Addr).String(), b[int(b[0]&15)*4:]
		case *unix.SockaddrInet6:
			from = netip.AddrFrom16(sa.Addr).String()
		}
		if len(b) >= 8 && b[0] == kind && binary.BigEndian.Uint16(b[4:]) == id {
			return from, binary.BigEndian.Uint16(b[6:]), string(b[8:]), true
		}
	}
}

// want expects one echo reply.
func (c echoClient) want(dest string, id, seq uint16, payload string) {
	c.t.Helper()
	from, gotSeq, got, ok := c.next(id, udpPatience)
	if !ok || from != dest || gotSeq != seq || got != payload {
		c.t.Fatalf("answered %v by %s, number %d, %d bytes %.40q; want %s, %d, %d bytes %.40q", ok, from, gotSeq, len(got), got, dest, seq, len(payload), payload)
	}
}

// settled waits until live flows have moved so many bytes: a packet may arrive
// before it is counted.
func settled(t *testing.T, g *testnet.Gateway, up, down uint64) {
	t.Helper()
	testnet.Until(t, udpPatience, fmt.Sprintf("%d bytes up and %d down are counted", up, down), func() bool {
		var gotUp, gotDown uint64
		for _, f := range g.API.Flows("") {
			gotUp += f.Up
			gotDown += f.Down
		}
		return gotUp >= up && gotDown >= down
	})
}

// wave is n bytes that tell their place.
func wave(n int) string {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%d,", i)
	}
	return b.String()[:n]
}
