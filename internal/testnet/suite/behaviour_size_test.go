package suite

import (
	"context"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// Ports of the server behind links that take 1,300 bytes and tell nobody.
const (
	portHoleDown = 118 // toward the client
	portHoleUp   = 119 // toward the server
)

// holes are the silent links, and what makes the sizes on them those of the wire.
func holes(t *testing.T, lab *testnet.Lab) {
	t.Helper()
	for _, device := range []string{testnet.LANDevice, testnet.WANDevice} {
		lab.GW.Run("ethtool", "-K", device, "gso", "off", "tso", "off")
	}
	lab.Cli.Filter("prerouting", fmt.Sprintf("tcp sport %d meta length > 1300", portHoleDown), "drop")
	lab.Srv.Filter("prerouting", fmt.Sprintf("tcp dport %d meta length > 1300", portHoleUp), "drop")
	for _, n := range []*testnet.Netns{lab.Cli, lab.GW} {
		n.Run("sysctl", "-qw", "net.ipv4.tcp_mtu_probing=1")
	}
}

// serveSizes starts the servers behind the holes.
func (w *world) serveSizes() {
	w.lab.Srv.Source(hostPort(w.f.far, portHoleDown), mebibyte)
	w.lab.Srv.Serve(hostPort(w.f.far, portHoleUp), func(c *net.TCPConn) {
		n, err := testnet.ReadPattern(c)
		fmt.Fprintf(c, "the server read %d bytes, %s", n, ending(err))
	})
}

// announcing connects with a segment size of its own, reads all and tells whether
// anything larger came.
func announcing(mss int) func(*world) (string, error) {
	return func(w *world) (string, error) {
		headers := map[string]int{"IPv4": 20, "IPv6": 40}[w.f.name] + 20 // and options instead of payload
		family := map[string]string{"IPv4": "ipv4", "IPv6": "ipv6"}[w.f.name]
		larger := w.lab.Cli.Filter("input", fmt.Sprintf("meta nfproto %s tcp sport %d meta length > %d", family, portSource, mss+headers), "")
		counted := w.lab.Cli.Filter("input", fmt.Sprintf("meta nfproto %s tcp sport %d meta length > %d", family, portSource, mss/2), "")
		small := func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, mss) }) //nolint:errcheck // seen by what comes
		}
		var got string
		err := w.lab.Cli.Do(func() error {
			d := net.Dialer{Control: small}
			d.SetMultipathTCP(false)
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			c, err := d.DialContext(ctx, "tcp", hostPort(w.f.far, portSource))
			if err != nil {
				return err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(5 * time.Second))
			n, err := testnet.ReadPattern(c)
			got = fmt.Sprintf("%d bytes, %s", n, ending(err))
			return nil
		})
		return fmt.Sprintf("%s; segments: %v, larger ones: %v", got, counted.Packets() > 0, larger.Packets() > 0), err
	}
}

// patiently is for what is found out by time-outs.
func patiently(talk func(*world, *net.TCPConn) (string, error)) func(*world, *net.TCPConn) (string, error) {
	return func(w *world, c *net.TCPConn) (string, error) {
		c.SetDeadline(time.Now().Add(3 * 5 * time.Second))
		return talk(w, c)
	}
}

// tcpSizes are what becomes of segments that are too large for somebody.
func tcpSizes() []behaviour {
	const g = "TCP"
	return []behaviour{
		{group: g, name: "1 MiB down to a client that announced 536 bytes", probe: announcing(536)},
		{group: g, name: "1 MiB down to a client that announced 1,220 bytes", probe: announcing(1220)},
		{group: g, name: "1 MiB up where the far side drops large packets silently", probe: talking(portHoleUp, patiently(counting(mebibyte, mebibyte)))},
		{group: g, name: "1 MiB down where the client's side drops large packets silently", probe: talking(portHoleDown, func(w *world, c *net.TCPConn) (string, error) {
			n, err := testnet.ReadPattern(c)
			return fmt.Sprintf("%d bytes, %s", n, ending(err)), nil
		})},
	}
}
