package suite

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"gatewayd/internal/exitcode"
	"gatewayd/internal/testnet"
)

const startConfig = "version: 1\napi: {listen: \"$API\"}\ntun: [{tag: lan, device: gw0}]\n"

func TestAMissingTUNDriverIsNamedWithItsFix(t *testing.T) {
	a := newAttempt(t)
	a.configure(startConfig)
	// `ip netns exec` made a mount namespace; what is hidden in it is hidden from gatewayd alone.
	hide := []string{"sh", "-c", `mount -t tmpfs none /dev/net && exec "$@"`, "sh"}
	a.refused(exitcode.Missing, hide, "gatewayd: ", "/dev/net/tun is missing", "modprobe tun", "kmod-tun")
	dead := []string{"sh", "-c", `mount -t tmpfs none /dev/net && mknod /dev/net/tun c 240 77 && exec "$@"`, "sh"}
	a.refused(exitcode.Missing, dead, "/dev/net/tun", "modprobe tun")
}

func TestAMissingCapabilityIsNamedWithItsFix(t *testing.T) {
	testnet.Require(t, "setpriv")
	a := newAttempt(t)
	a.configure(startConfig)
	without := []string{"setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"}
	a.refused(exitcode.Missing, without, "device gw0", "CAP_NET_ADMIN is missing", "run as root", "AmbientCapabilities")

	// One who is not root at all may not even open the driver.
	if err := errors.Join(os.Chmod(a.dir, 0o777), os.Chmod(a.file, 0o644)); err != nil {
		t.Fatal(err)
	}
	nobody := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"}
	a.refused(exitcode.Missing, nobody, "run as root")
}

func TestADeviceNameThatIsTakenIsRefusedNamingWhoHasIt(t *testing.T) {
	a := newAttempt(t)
	a.configure(startConfig)
	t.Run("by another gatewayd", func(t *testing.T) {
		first := a.lab.Start(testnet.GatewayOptions{Config: startConfig})
		a.refused(exitcode.Collision, nil, "device gw0", "process "+strconv.Itoa(first.PID()), "gatewayd", "stop that, or choose another name")
		if code := first.Stop(); code != 0 {
			t.Errorf("the first one ended with %d", code)
		}
	})
	t.Run("by a TUN that nobody has open", func(t *testing.T) {
		a.lab.GW.Run("ip", "tuntap", "add", "gw0", "mode", "tun")
		a.refused(exitcode.Collision, nil, "device gw0", "ip link del gw0")
		a.lab.GW.Run("ip", "link", "del", "gw0")
	})
	t.Run("by a link of another kind", func(t *testing.T) {
		a.configure(strings.Replace(startConfig, "gw0", testnet.LANDevice, 1))
		a.refused(exitcode.Collision, nil, "device "+testnet.LANDevice, "veth", "choose another name")
	})
}

func TestAnAddressClashIsRefusedNamingTheOtherLink(t *testing.T) {
	a := newAttempt(t)
	for _, tt := range []struct{ address, other string }{
		{"10.10.0.77/24", testnet.LANV4}, {"10.0.0.1/8", testnet.LANV4}, {testnet.WANV4 + "/24", testnet.WANV4}, {"2001:db8:1::77/64", testnet.WANV6},
	} {
		t.Run(tt.address, func(t *testing.T) {
			a.configure("version: 1\napi: {listen: \"$API\"}\ntun: [{tag: lan, device: gw0, address: \"" + tt.address + "\"}]\n")
			a.refused(exitcode.Collision, nil, "device gw0", "address "+tt.address+" overlaps "+tt.other, "choose another address")
		})
	}
	t.Run("every automatic address", func(t *testing.T) {
		for _, n := range []string{"172.31.255.240/28", "10.255.255.248/29", "192.168.255.248/29"} {
			a.lab.GW.Run("ip", "route", "add", n, "dev", testnet.WANDevice)
		}
		a.configure(startConfig)
		a.refused(exitcode.Collision, nil, "device gw0", "set the device's addresses")
	})
}

func TestASecondDeviceThatFailsTakesTheFirstOneWithIt(t *testing.T) {
	a := newAttempt(t)
	a.configure("version: 1\napi: {listen: \"$API\"}\ntun: [{tag: a, device: gw0}, {tag: b, device: " + testnet.WANDevice + "}]\n")
	a.refused(exitcode.Collision, nil, "device "+testnet.WANDevice)
}

func TestAnAPISocketInUseIsRefusedAndAStaleOneReplaced(t *testing.T) {
	a := newAttempt(t)
	a.configure(startConfig)
	listen := func(t *testing.T) *net.UnixListener {
		t.Helper()
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: a.socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		return l
	}
	t.Run("in use", func(t *testing.T) {
		l := listen(t)
		a.refused(exitcode.Collision, nil, "api socket "+a.socket, "in use", "change api.listen")
		if _, err := os.Stat(a.socket); err != nil {
			t.Errorf("the owner's socket: %v", err)
		}
		l.Close()
	})
	t.Run("stale, and then in use by gatewayd", func(t *testing.T) {
		// The last owner was killed: the file is there, nobody listens.
		if _, err := os.Lstat(a.socket); err != nil {
			t.Fatal(err)
		}
		first := a.lab.Start(testnet.GatewayOptions{Config: strings.ReplaceAll(startConfig, "$API", "unix:"+a.socket)})
		a.configure("version: 1\napi: {listen: \"$API\"}\ntun: [{tag: lan, device: gw1}]\n") // the socket is all that they share
		a.refused(exitcode.Collision, nil, "api socket "+a.socket, "another gatewayd", "stop that one")
		if code := first.Stop(); code != 0 {
			t.Errorf("the first one ended with %d", code)
		}
		if _, err := os.Lstat(a.socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket after the end: %v", err)
		}
	})
	t.Run("no socket at all", func(t *testing.T) {
		if err := os.WriteFile(a.socket, []byte("precious"), 0o600); err != nil {
			t.Fatal(err)
		}
		a.refused(exitcode.Collision, nil, "api socket "+a.socket, "no socket", "move it away")
		if b, err := os.ReadFile(a.socket); string(b) != "precious" {
			t.Errorf("the file: %q, %v", b, err)
		}
	})
	t.Run("a TCP port in use", func(t *testing.T) {
		l, err := a.lab.GW.Listen(t.Context(), "tcp", "127.0.0.1:8690")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := os.WriteFile(a.dir+"/token", []byte("0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		a.configure("version: 1\napi: {listen: \"tcp:127.0.0.1:8690\", tokens: [{name: ops, role: admin, file: \"$DIR/token\"}]}\ntun: [{tag: lan, device: gw0}]\n")
		a.refused(exitcode.Collision, nil, "127.0.0.1:8690", "in use by another program")
	})
}

func TestWithoutIPv6AGatewayStartsWithIPv4UnlessItNeedsIPv6(t *testing.T) {
	for _, scope := range []string{"all", "default"} {
		t.Run(scope, func(t *testing.T) {
			a := newAttempt(t)
			a.lab.GW.Run("sysctl", "-qw", "net.ipv6.conf."+scope+".disable_ipv6=1")
			a.configure("version: 1\napi: {listen: \"$API\"}\ntun: [{tag: lan, device: gw0, address: \"fd77::1/64\"}]\n")
			a.refused(exitcode.Missing, nil, "device gw0", "IPv6 is required", "switched off", "net.ipv6.conf.default.disable_ipv6=0")

			g := a.lab.Start(testnet.GatewayOptions{Config: startConfig})
			a.divertIPv4("gw0")
			if warning := g.WaitLog(udpPatience, "the device has IPv4 only"); !strings.Contains(warning, "level=WARN") || !strings.Contains(warning, "disable_ipv6=0") {
				t.Errorf("it warned %q", warning)
			}
			a.carries(t, g)
		})
	}
}

func TestIPv6SwitchedOffOnTheDeviceAloneLeavesIPv4(t *testing.T) {
	a := newAttempt(t)
	g := a.lab.Start(testnet.GatewayOptions{Config: startConfig, Device: "gw0"})
	a.lab.GW.Run("sysctl", "-qw", "net.ipv6.conf.gw0.disable_ipv6=1")
	a.carries(t, g)
	if code := g.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// divertIPv4 is the lab's Divert where IPv6 is off.
func (a *attempt) divertIPv4(device string) {
	a.lab.GW.Run("ip", "route", "add", "default", "dev", device, "table", "100")
	a.lab.GW.Run("ip", "rule", "add", "iif", testnet.LANDevice, "priority", "99", "lookup", "main", "suppress_prefixlength", "0")
	a.lab.GW.Run("ip", "rule", "add", "iif", testnet.LANDevice, "priority", "100", "lookup", "100")
}

// carries expects that IPv4 datagrams and streams pass.
func (a *attempt) carries(t *testing.T, g *testnet.Gateway) {
	t.Helper()
	a.lab.Srv.UDPEcho(hostPort(testnet.FarV4, 7))
	a.lab.Srv.Echo(hostPort(testnet.FarV4, 7))
	c := openUDP(t, a.lab.Cli, testnet.ClientV4)
	c.sendTo(addrPort(testnet.FarV4, 7), "over IPv4")
	c.want(addrPort(testnet.FarV4, 7), "over IPv4")
	s, err := a.lab.Cli.Dial(t.Context(), "tcp", hostPort(testnet.FarV4, 7))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if n := len(g.API.Flows("")); n != 2 {
		t.Errorf("%d flows, want 2", n)
	}
}

func TestStoppingLeavesNothing(t *testing.T) {
	a := newAttempt(t)
	before := a.traces()
	g := a.lab.Start(testnet.GatewayOptions{Config: strings.ReplaceAll(startConfig, "$API", "unix:"+a.socket)})
	if now := a.traces(); now == before || !strings.Contains(now, "gw0") || !strings.Contains(now, "api.sock S") {
		t.Errorf("a running gateway leaves no traces:\n%s", now)
	}
	if code := g.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if after := a.traces(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

func TestWrongCommandLinesAreUsage(t *testing.T) {
	a := newAttempt(t)
	a.configure(startConfig)
	before := a.traces()
	for _, args := range [][]string{
		{"run", "--no-such-flag"},
		{"run", "surplus"},
		{"no-such-command"},
		{"kill"},
		{"check", "-c"},
		{"run", "-c", a.file, a.file},
		{"status", "--api", "gopher:somewhere"},
	} {
		o := a.gatewayd(nil, args...)
		if o.code != exitcode.Usage || !strings.HasPrefix(o.stderr, "gatewayd: ") || !strings.Contains(o.stderr, "gatewayd help") {
			t.Errorf("%v: exit code %d, it said %q", args, o.code, o.stderr)
		}
	}
	if after := a.traces(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// The whole table of bad files is a unit test of internal/config; here a dozen
// shows that the command and the daemon tell the same, and touch nothing.
func TestCheckAndRunRefuseTheSameFilesInTheSameWords(t *testing.T) {
	a := newAttempt(t)
	huge := "version: 1\n# " + strings.Repeat("x", 20<<20) + "\n"
	const head = "version: 1\napi: {listen: \"$API\"}\n"
	for _, bad := range []struct{ name, text, at string }{
		{"unknown key", head + "tun: [{tag: lan, device: gw0, colour: red}]\n", ":3:31: "},
		{"duplicate tag", head + "tun: [{tag: lan, device: gw0}, {tag: lan, device: gw1}]\n", ":3:38: "},
		{"missing outbound", head + "route: {rules: [{port: 25, outbound: nowhere}]}\n", ":3:38: "},
		{"missing default", head + "route: {default: nowhere}\n", ":3:18: "},
		{"missing inbound", head + "route: {rules: [{inbound: wan, outbound: direct}]}\n", ":3:27: "},
		{"host bits", head + "route: {rules: [{ip: 10.0.0.1/8, outbound: direct}]}\n", ":3:22: "},
		{"/33", head + "route: {rules: [{ip: 10.0.0.0/33, outbound: direct}]}\n", ":3:22: "},
		{"port 0", head + "route: {rules: [{port: 0, outbound: direct}]}\n", ":3:24: "},
		{"port 70000", head + "route: {rules: [{port: 70000, outbound: direct}]}\n", ":3:24: "},
		{"device name of 16 bytes", head + "tun: [{tag: lan, device: abcdefghijklmnop}]\n", ":3:26: "},
		{"overlapping devices", head + "tun: [{tag: a, device: gw0, address: 10.1.0.1/16}, {tag: b, device: gw1, address: 10.1.2.1/24}]\n", ":3:83: "},
		{"duplicate JSON key", `{"version":1,"sample":"1s","sample":"2s"}`, ":1:28: "},
		{"byte order mark and a tab", "\ufeffversion: 1\nlog:\n\tlevel: info\n", ":3:1: "},
		{"balancer cycle", head + "outbounds: [{tag: a, type: balancer, members: [b]}, {tag: b, type: balancer, members: [a]}]\n", ":3:"},
		{"not yet available", head + "dns: {hijack: true}\n", ":3:"},
		{"no YAML", "{{{{", ":1:"},
		{"huge file", huge, ""},
	} {
		t.Run(bad.name, func(t *testing.T) {
			a.configure(bad.text)
			before := a.traces()
			check, run := a.gatewayd(nil, "check", "-c", a.file), a.run()
			if check.code != exitcode.Config || run.code != exitcode.Config {
				t.Errorf("check exits with %d, run with %d, want %d", check.code, run.code, exitcode.Config)
			}
			if check.stderr != run.stderr || !strings.HasPrefix(run.stderr, a.file+bad.at) {
				t.Errorf("want both to say %s%s…; check says\n%srun says\n%s", a.file, bad.at, check.stderr, run.stderr)
			}
			if after := a.traces(); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
	t.Run("missing file", func(t *testing.T) {
		if err := os.Remove(a.file); err != nil {
			t.Fatal(err)
		}
		check, run := a.gatewayd(nil, "check", "-c", a.file), a.run()
		if check.code != exitcode.Config || check != run || !strings.Contains(run.stderr, a.file) {
			t.Errorf("check: %+v; run: %+v", check, run)
		}
	})
	t.Run("a good file", func(t *testing.T) {
		a.configure(startConfig)
		if o := a.gatewayd(nil, "check", "-c", a.file); o.code != 0 || o.stdout != fmt.Sprintf("%s: ok\n", a.file) {
			t.Errorf("check: %+v", o)
		}
	})
}
