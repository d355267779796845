package tun

import (
	"bytes"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"gatewayd/internal/exitcode"
	"gatewayd/internal/hostnet"
	"gatewayd/internal/hostnet/hostnettest"
)

// opened opens a device and checks after the test that nothing of it is left.
func opened(t *testing.T, cfg Config) *Device {
	t.Helper()
	hostnettest.Need(t)
	nothingLeft(t)
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// nothingLeft checks after the test that links, descriptors and goroutines are
// what they are now.
func nothingLeft(t *testing.T) {
	t.Helper()
	links, fds := state(t)
	t.Cleanup(func() {
		goleak.VerifyNone(t)
		if l, f := state(t); !slices.Equal(l, links) || f != fds {
			t.Errorf("links %v and %d TUN descriptors are left, %v and %d were there before", l, f, links, fds)
		}
	})
}

func state(t *testing.T) (links []string, fds int) {
	t.Helper()
	found, err := hostnet.Links()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range found {
		links = append(links, l.Name)
	}
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range open {
		if target, _ := os.Readlink(fd); target == devicePath {
			fds++
		}
	}
	slices.Sort(links)
	return links, fds
}

// sysctl sets a value for the time of the test.
func sysctl(t *testing.T, path, value string) {
	t.Helper()
	path = "/proc/sys/net/" + path
	old := readFile(t, path)
	write := func(v string) {
		if err := os.WriteFile(path, []byte(v), 0); err != nil {
			t.Error(err)
		}
	}
	write(value)
	t.Cleanup(func() { write(old) })
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// addressesOn lists the addresses of a link, in the order of their text.
func addressesOn(t *testing.T, link string) (got []string) {
	t.Helper()
	all, err := hostnet.Addresses()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if a.Link == link {
			got = append(got, netip.PrefixFrom(a.Addr, a.Net.Bits()).String())
		}
	}
	slices.Sort(got)
	return got
}

func TestAnOpenDeviceIsUpWithItsAddressesAndGoneAfterClose(t *testing.T) {
	d := opened(t, Config{Name: "gw0", MTU: 1400, Addresses: prefixes("10.99.0.1/24", "fd99::1/64")})
	l, ok, err := hostnet.LinkByName("gw0")
	if want := (hostnet.Link{Index: d.Index(), Name: "gw0", Kind: "tun", MTU: 1400, Up: true}); err != nil || !ok || l != want {
		t.Fatalf("link %+v, %v: want %+v", l, err, want)
	}
	if got := addressesOn(t, "gw0"); !slices.Equal(got, []string{"10.99.0.1/24", "fd99::1/64"}) {
		t.Errorf("addresses %v, want those configured and no link-local one", got)
	}
	if d.MTU() != 1400 || d.Name() != "gw0" || !slices.Equal(d.Addresses(), prefixes("10.99.0.1/24", "fd99::1/64")) {
		t.Errorf("it tells MTU %d, name %s, addresses %v", d.MTU(), d.Name(), d.Addresses())
	}
	for path, want := range map[string]string{"ipv6/conf/gw0/accept_ra": "0", "ipv4/conf/gw0/rp_filter": "0"} {
		if got := readFile(t, "/proc/sys/net/"+path); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok, err := hostnet.LinkByName("gw0"); ok || err != nil {
		t.Fatalf("after Close: found %v, %v", ok, err)
	}
}

func TestAgainstAStrictReversePathFilterTheDeviceIsLoose(t *testing.T) {
	hostnettest.Need(t)
	sysctl(t, "ipv4/conf/all/rp_filter", "1")
	opened(t, Config{Name: "gw0"})
	if got := readFile(t, "/proc/sys/net/ipv4/conf/gw0/rp_filter"); got != "2" {
		t.Errorf("rp_filter is %s, want 2", got)
	}
}

func TestANameIsFreeAsSoonAsCloseReturns(t *testing.T) {
	hostnettest.Need(t)
	nothingLeft(t)
	for i := range 10 {
		d, err := Open(Config{Name: "gw0", Queues: 1 + i%2})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDevicesWithoutAddressesGetPairsOfTheirOwn(t *testing.T) {
	a := opened(t, Config{Name: "gw0"})
	hostnettest.IP(t, "route add 172.31.255.248/30 dev gw0")
	b := opened(t, Config{Name: "gw1"})
	if want := prefixes("172.31.255.253/30", "fd86:6761:7465::1/126"); !slices.Equal(a.Addresses(), want) {
		t.Errorf("the first has %v, want %v", a.Addresses(), want)
	}
	if want := prefixes("172.31.255.245/30", "fd86:6761:7465::9/126"); !slices.Equal(b.Addresses(), want) {
		t.Errorf("the second has %v, want %v: beside the first and the route", b.Addresses(), want)
	}
}

func TestADefaultRouteLeavesAutomaticAddressesFree(t *testing.T) {
	a := opened(t, Config{Name: "gw0", Addresses: prefixes("10.99.0.1/24")})
	for _, r := range []string{"default", "0.0.0.0/1", "128.0.0.0/1"} {
		hostnettest.IP(t, "route add "+r+" dev "+a.Name())
	}
	b := opened(t, Config{Name: "gw1"})
	if got := b.Addresses()[0]; got != prefixes("172.31.255.253/30")[0] {
		t.Errorf("address %v", got)
	}
}

func TestAnAddressThatIsTakenIsACollisionThatNamesTheLink(t *testing.T) {
	opened(t, Config{Name: "gw0", Addresses: prefixes("10.99.0.1/24", "fd99::1/64")})
	for _, want := range []string{"10.99.0.1/24", "10.99.0.77/32", "10.0.0.1/8", "fd99::2/64"} {
		_, err := Open(Config{Name: "gw1", Addresses: prefixes(want)})
		refused(t, err, exitcode.Collision, "device gw1", want, "on gw0", "choose")
	}
	hostnettest.IP(t, "addr add 10.60.0.1 peer 10.61.0.1 dev gw0")
	for _, want := range []string{"10.60.0.2/24", "10.61.0.2/24"} { // around either end
		_, err := Open(Config{Name: "gw1", Addresses: prefixes(want)})
		refused(t, err, exitcode.Collision, "device gw1", want, "10.60.0.1", "on gw0")
	}
	if _, err := Open(Config{Name: "gw1", Addresses: prefixes("127.0.0.1/8")}); exitcode.Of(err) != exitcode.Config {
		t.Errorf("loopback: %v", err)
	}
}

func TestANameInUseIsACollisionThatNamesTheOccupant(t *testing.T) {
	t.Run("process", func(t *testing.T) {
		opened(t, Config{Name: "gw0"})
		for _, queues := range []int{1, 2} {
			_, err := Open(Config{Name: "gw0", Queues: queues})
			refused(t, err, exitcode.Collision, "device gw0", "process "+strconv.Itoa(os.Getpid()), "choose another name")
		}
	})
	t.Run("several queues", func(t *testing.T) {
		opened(t, Config{Name: "gw0", Queues: 2})
		_, err := Open(Config{Name: "gw0", Queues: 2})
		refused(t, err, exitcode.Collision, "device gw0")
	})
	t.Run("persistent", func(t *testing.T) {
		hostnettest.Need(t)
		nothingLeft(t)
		hostnettest.IP(t, "tuntap add dev gw0 mode tun")
		defer hostnettest.IP(t, "link del gw0")
		_, err := Open(Config{Name: "gw0"})
		refused(t, err, exitcode.Collision, "no process", "ip link del gw0")
	})
	t.Run("another kind", func(t *testing.T) {
		hostnettest.Need(t)
		nothingLeft(t)
		hostnettest.IP(t, "link add gw0 type veth peer name gw0p")
		defer hostnettest.IP(t, "link del gw0")
		_, err := Open(Config{Name: "gw0"})
		refused(t, err, exitcode.Collision, "a veth link", "ip link del gw0")
	})
}

func TestIPv6SwitchedOffLeavesADeviceWithIPv4AndOneWarning(t *testing.T) {
	hostnettest.Need(t)
	sysctl(t, "ipv6/conf/default/disable_ipv6", "1")
	var log bytes.Buffer
	d := opened(t, Config{Name: "gw0", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if want := prefixes("172.31.255.253/30"); !slices.Equal(d.Addresses(), want) {
		t.Errorf("addresses %v, want %v", d.Addresses(), want)
	}
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "disable_ipv6=0") || !strings.Contains(got, "device=gw0") {
		t.Errorf("log %q, want one line with the device and the sysctl", got)
	}
}

func TestIPv6SwitchedOffFailsWhereThereIsNothingElse(t *testing.T) {
	hostnettest.Need(t)
	sysctl(t, "ipv6/conf/all/disable_ipv6", "1")
	nothingLeft(t)
	_, err := Open(Config{Name: "gw0", Addresses: prefixes("fd99::1/64")})
	refused(t, err, exitcode.Missing, "device gw0", "IPv6 is required", "net.ipv6.conf.default.disable_ipv6=0")
}

func TestAnMTUTooSmallForIPv6LeavesIPv4(t *testing.T) {
	d := opened(t, Config{Name: "gw0", MTU: 576, Addresses: prefixes("10.99.0.1/24", "fd99::1/64")})
	if !slices.Equal(d.Addresses(), prefixes("10.99.0.1/24")) {
		t.Errorf("addresses %v", d.Addresses())
	}
}

func TestWithoutTheCapabilityTheFixIsNamed(t *testing.T) {
	hostnettest.Need(t)
	nothingLeft(t)
	errs := make(chan error, 2)
	go func() {
		runtime.LockOSThread() // and not unlocked: the thread ends with the goroutine
		errs <- dropNetAdmin()
		_, err := Open(Config{Name: "gw0"})
		errs <- err
	}()
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	refused(t, <-errs, exitcode.Missing, "device gw0", "CAP_NET_ADMIN")
}

// dropNetAdmin takes the capability from the calling thread.
func dropNetAdmin() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	data[0].Permitted &^= 1 << unix.CAP_NET_ADMIN
	return unix.Capset(&header, &data[0])
}

func TestOffloadsAreWhatWasAskedFor(t *testing.T) {
	on := opened(t, Config{Name: "gw0", Offload: OffloadOn})
	off := opened(t, Config{Name: "gw1", Offload: OffloadOff})
	if !on.CanGSO() || off.CanGSO() || off.CanUSO() {
		t.Errorf("on: GSO %v; off: GSO %v, USO %v", on.CanGSO(), off.CanGSO(), off.CanUSO())
	}
}

func TestTheKernelKeepsPacketsForALateReader(t *testing.T) {
	opened(t, config())
	out, err := exec.Command("ip", "-o", "link", "show", "gw0").Output()
	if err != nil || !strings.Contains(string(out), "qlen 2000") {
		t.Fatalf("%s, %v", out, err)
	}
}
