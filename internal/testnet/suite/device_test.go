package suite

import (
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// deviceBack is how long a device may be away (B40).
const deviceBack = 5 * time.Second

// exchange writes to an echo server and wants it back.
func exchange(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		t.Fatalf("write: %v", err)
	}
	got := make([]byte, len(text))
	for n := 0; n < len(got); {
		m, err := c.Read(got[n:])
		if err != nil {
			t.Fatalf("read: %v", err)
		}
		n += m
	}
	if string(got) != text {
		t.Fatalf("%q came back as %q", text, got)
	}
}

// reroute makes the routes into the device again, which went with the link.
func (b *tcpBed) reroute(t *testing.T) {
	t.Helper()
	for _, family := range []string{"-4", "-6"} {
		b.GW.Run("ip", family, "route", "replace", "default", "dev", tcpDevice, "table", "100")
	}
}

// hasDevice reports whether a link of that name is in the namespace.
func hasDevice(n *testnet.Netns, name string) (there bool) {
	n.Do(func() error { //nolint:errcheck // false then
		_, err := net.InterfaceByName(name)
		there = err == nil
		return nil
	})
	return there
}

// quiet checks that the gateway's CPU time grows by less than a twentieth of a while.
func quiet(t *testing.T, g *testnet.Gateway, while time.Duration) {
	t.Helper()
	before := g.Process().CPU
	time.Sleep(while)
	if used := g.Process().CPU - before; used > while/20 {
		t.Errorf("%v of CPU time in %v", used, while)
	}
}

func TestB40_ARemovedDeviceIsCreatedAgainAndFlowsLiveOn(t *testing.T) {
	for _, c := range []struct{ name, command string }{
		{"removed", "link del gw0"},
		{"moved to another namespace", "link set gw0 netns "},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTCPBed(t, "")
			leaked := b.Srv.Filter("prerouting", `ip saddr 10.10.0.0/24`, "")
			var flows []*net.TCPConn
			for _, f := range tcpFamilies() {
				b.Srv.Echo(f.addr(7))
				c := b.connect(t, f.addr(7))
				exchange(t, c, "before")
				flows = append(flows, c)
			}
			lines, fds := strings.Count(b.gw.Log(), "\n"), b.gw.Process().FDs
			command := c.command
			if strings.HasSuffix(command, " ") {
				command += b.Srv.Name
			}
			b.GW.Run("ip", strings.Fields(command)...)
			begin := time.Now()
			b.gw.WaitLog(deviceBack, "created again")
			if !hasDevice(b.GW, tcpDevice) || hasDevice(b.Srv, tcpDevice) {
				t.Error("the device is not where it was")
			}
			if took := time.Since(begin); took > deviceBack {
				t.Errorf("back after %v", took)
			}
			quiet(t, b.gw, time.Second)
			if err := b.try(t, tcpFamilies()[0].addr(7), prompt); err == nil {
				t.Error("a connection without a route into the device went out another way")
			}
			b.reroute(t)
			for i, f := range tcpFamilies() {
				exchange(t, flows[i], "after")
				exchange(t, b.connect(t, f.addr(7)), "a new one")
			}
			if n := leaked.Packets(); n != 0 {
				t.Errorf("%d packets of clients reached the WAN", n)
			}
			if n := strings.Count(b.gw.Log(), "\n") - lines; n != 1 {
				t.Errorf("%d lines were logged, want one:\n%s", n, b.gw.Log())
			}
			testnet.Until(t, patience, "descriptors are as before", func() bool { return b.gw.Process().FDs <= fds+2 }) // the new flows'
			if code := b.gw.Stop(); code != 0 || hasDevice(b.GW, tcpDevice) {
				t.Errorf("exit code %d; the device is left: %v", code, hasDevice(b.GW, tcpDevice))
			}
		})
	}
}

func TestB40_ADeviceWhoseNameIsTakenMeanwhileEndsTheGatewayInTime(t *testing.T) {
	b := newTCPBed(t, "")
	b.gw.Signal(unix.SIGSTOP) // or it takes the name first
	b.GW.Run("sh", "-c", "ip link del gw0 && ip link add gw0 type veth peer name gw0x")
	b.gw.Signal(unix.SIGCONT)
	if code := b.gw.Wait(2 * deviceBack); code == 0 {
		t.Error("exit code 0")
	}
	if log := b.gw.Log(); !strings.Contains(log, "can't be created again") {
		t.Errorf("it does not say why:\n%s", log)
	}
}

func TestB40_ADeviceThatIsSetDownGoesOnWhenItIsUp(t *testing.T) {
	b := newTCPBed(t, "")
	var flows []*net.TCPConn
	for _, f := range tcpFamilies() {
		b.Srv.Echo(f.addr(7))
		c := b.connect(t, f.addr(7))
		exchange(t, c, "before")
		flows = append(flows, c)
	}
	lines := strings.Count(b.gw.Log(), "\n")
	b.GW.Run("ip", "link", "set", tcpDevice, "down")
	quiet(t, b.gw, time.Second)
	b.GW.Run("ip", "link", "set", tcpDevice, "up")
	testnet.Until(t, deviceBack, "the device has its IPv6 address again", func() bool {
		return strings.Contains(b.GW.Run("ip", "-6", "addr", "show", "dev", tcpDevice), tunV6[1])
	})
	b.reroute(t)
	for i, f := range tcpFamilies() {
		exchange(t, flows[i], "after")
		exchange(t, b.connect(t, f.addr(7)), "a new one")
	}
	if n := strings.Count(b.gw.Log(), "\n") - lines; n != 0 {
		t.Errorf("%d lines were logged:\n%s", n, b.gw.Log())
	}
}

// sendMSS is the largest segment that a connection may send, in bytes.
func sendMSS(t *testing.T, c *net.TCPConn) (mss int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) { mss, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return mss
}

func TestB40_AnMTUThatIsChangedOutsideHoldsForNewFlows(t *testing.T) {
	b := newTCPBed(t, "")
	for _, n := range []*testnet.Netns{b.Cli, b.GW} { // a LAN that carries 9,000 bytes
		n.Run("sh", "-c", "ip link set eth0 mtu 9000 2>/dev/null || ip link set lan0 mtu 9000")
	}
	const v4Headers = 20 + 20
	f := tcpFamilies()[0]
	b.Srv.Echo(f.addr(7))
	old := b.connect(t, f.addr(7))
	exchange(t, old, "before")
	lines := strings.Count(b.gw.Log(), "\n")
	for _, mtu := range []int{576, 9000, 1500} {
		b.GW.Run("ip", "link", "set", tcpDevice, "mtu", map[int]string{576: "576", 9000: "9000", 1500: "1500"}[mtu])
		mss := 0
		t.Cleanup(func() { t.Logf("mtu %d: segments of %d bytes", mtu, mss) })
		testnet.Until(t, deviceBack, "a new connection has the device's segment size", func() bool {
			b.Cli.Run("ip", "route", "flush", "cache") // what the client learned of the path by itself
			c := b.connect(t, f.addr(7))
			mss = sendMSS(t, c)
			exchange(t, c, strings.Repeat("x", 20_000))
			// The kernel takes the options' room off what was announced.
			return mss <= mtu-v4Headers && mss >= mtu-v4Headers-20
		})
		exchange(t, old, "the old flow goes on")
	}
	testnet.Until(t, deviceBack, "the device has its IPv6 address again", func() bool {
		return strings.Contains(b.GW.Run("ip", "-6", "addr", "show", "dev", tcpDevice), tunV6[1])
	})
	b.reroute(t)
	v6 := tcpFamilies()[1]
	b.Srv.Echo(v6.addr(7))
	exchange(t, b.connect(t, v6.addr(7)), "IPv6 goes on")
	if n := strings.Count(b.gw.Log(), "\n") - lines; n != 0 {
		t.Errorf("%d lines were logged:\n%s", n, b.gw.Log())
	}
}
