package hostnet_test

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/internal/hostnet"
	"gatewayd/internal/hostnet/hostnettest"
)

const deadline = 10 * time.Second

func TestMain(m *testing.M) { hostnettest.Main(m) }

// link makes a link that is up, and removes it after the test.
func link(t *testing.T, name string) hostnet.Link {
	t.Helper()
	hostnettest.Need(t)
	hostnettest.IP(t, "link add "+name+" type veth peer name "+name+"p")
	l := find(t, name)
	t.Cleanup(func() {
		if err := hostnet.Delete(l.Index); err != nil {
			t.Error(err)
		}
	})
	for _, index := range [...]int{l.Index, find(t, name+"p").Index} {
		if err := hostnet.SetUp(index); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func find(t *testing.T, name string) hostnet.Link {
	t.Helper()
	l, ok, err := hostnet.LinkByName(name)
	if err != nil || !ok {
		t.Fatalf("link %s: found %v, %v", name, ok, err)
	}
	return l
}

func TestALinkIsDescribedAndChanged(t *testing.T) {
	l := link(t, "d0")
	if err := hostnet.SetMTU(l.Index, 1400); err != nil {
		t.Fatal(err)
	}
	want := hostnet.Link{Index: l.Index, Name: "d0", Kind: "veth", MTU: 1400, Up: true}
	if got := find(t, "d0"); got != want {
		t.Fatalf("link %+v, want %+v", got, want)
	}
	links, err := hostnet.Links()
	if err != nil || !slices.Contains(links, want) {
		t.Fatalf("links %+v, %v: want %+v among them", links, err, want)
	}
}

func TestAMissingLinkIsNoError(t *testing.T) {
	if _, ok, err := hostnet.LinkByName("nosuch0"); ok || err != nil {
		t.Fatalf("found %v, %v", ok, err)
	}
}

func TestAddressesOfBothFamiliesAreListedWithTheirLink(t *testing.T) {
	l := link(t, "d0")
	for _, p := range []string{"10.1.2.3/24", "fd00:1::3/64"} {
		if err := hostnet.AddAddress(l.Index, netip.MustParsePrefix(p)); err != nil {
			t.Fatal(err)
		}
	}
	hostnettest.IP(t, "addr add 10.9.0.1 peer 10.9.1.0/24 dev d0")
	got, err := hostnet.Addresses()
	if err != nil {
		t.Fatal(err)
	}
	for addr, reach := range map[string]string{
		"10.1.2.3": "10.1.2.0/24", "fd00:1::3": "fd00:1::/64", "10.9.0.1": "10.9.1.0/24", "127.0.0.1": "127.0.0.0/8",
	} {
		want := hostnet.Address{Addr: netip.MustParseAddr(addr), Net: netip.MustParsePrefix(reach), Index: l.Index, Link: "d0"}
		if addr == "127.0.0.1" {
			want.Index, want.Link = 1, "lo"
		}
		if !slices.Contains(got, want) {
			t.Errorf("addresses %+v: want %+v among them", got, want)
		}
	}
}

func TestUnicastRoutesAreSeenAndDeadOnesNot(t *testing.T) {
	l := link(t, "d0")
	hostnettest.IP(t, "addr add 10.1.2.3/24 dev d0")
	hostnettest.IP(t, "route add default via 10.1.2.1")
	hostnettest.IP(t, "route add 10.44.0.0/16 via 10.1.2.1")
	hostnettest.IP(t, "route add blackhole 10.55.0.0/16")
	t.Cleanup(func() { hostnettest.IP(t, "route del blackhole 10.55.0.0/16") })
	hostnettest.IP(t, "-6 route add fd44::/32 dev d0")
	var got []hostnet.Route
	if err := hostnet.EachRoute(func(r hostnet.Route) bool { got = append(got, r); return true }); err != nil {
		t.Fatal(err)
	}
	for _, dst := range []string{"0.0.0.0/0", "10.44.0.0/16", "10.1.2.0/24", "fd44::/32"} {
		if want := (hostnet.Route{Dst: netip.MustParsePrefix(dst), Index: l.Index}); !slices.Contains(got, want) {
			t.Errorf("routes %+v: want %+v among them", got, want)
		}
	}
	dead := func(r hostnet.Route) bool { return r.Dst == netip.MustParsePrefix("10.55.0.0/16") }
	if slices.ContainsFunc(got, dead) {
		t.Errorf("routes %+v: a blackhole among them", got)
	}
	calls := 0
	if err := hostnet.EachRoute(func(hostnet.Route) bool { calls++; return false }); err != nil || calls != 1 {
		t.Errorf("%d calls after a false, %v", calls, err)
	}
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(deadline); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", deadline, what)
		}
	}
}

// run starts f and checks at the end of the test that it ends without an error.
func run(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(deadline):
			t.Errorf("it did not end within %v of its context", deadline)
		}
		goleak.VerifyNone(t)
	})
}

func TestAnAddressSetFollowsTheHost(t *testing.T) {
	l := link(t, "d0")
	s, err := hostnet.NewAddrSet()
	if err != nil {
		t.Fatal(err)
	}
	run(t, s.Run)
	a, other := netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("10.1.2.4")
	if s.Contains(a) || !s.Contains(netip.MustParseAddr("127.0.0.1")) {
		t.Fatal("want loopback alone at first")
	}
	if err := hostnet.AddAddress(l.Index, netip.PrefixFrom(a, 24)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new address is in the set", func() bool { return s.Contains(a) })
	if !s.Contains(netip.MustParseAddr("::ffff:10.1.2.3")) || s.Contains(other) {
		t.Fatal("want the mapped form too, and no neighbour")
	}
	if !s.Contains(netip.MustParseAddr("10.1.2.255")) || s.Contains(netip.MustParseAddr("10.1.2.0")) {
		t.Fatal("want the network's broadcast address too")
	}
	hostnettest.IP(t, "addr del 10.1.2.3/24 dev d0")
	eventually(t, "the removed address left the set", func() bool { return !s.Contains(a) })
}

// The pause between dumps must not be a time in which a new address is dialled.
func TestAnAddressIsKnownBeforeTheNextDump(t *testing.T) {
	l := link(t, "d0")
	s, err := hostnet.NewAddrSet()
	if err != nil {
		t.Fatal(err)
	}
	run(t, s.Run)
	eventually(t, "the watch begins", func() bool { return s.Gen() > 1 })
	late := 0
	const rounds = 40
	for i := range rounds {
		a := netip.AddrFrom4([4]byte{10, 9, 0, byte(i + 1)})
		if err := hostnet.AddAddress(l.Index, netip.PrefixFrom(a, 32)); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		eventually(t, "the new address is in the set", func() bool { return s.Contains(a) })
		if time.Since(begin) > 20*time.Millisecond { // of the 50 ms between dumps
			late++
		}
	}
	if late > rounds/4 {
		t.Fatalf("%d of %d addresses waited for a dump", late, rounds)
	}
}

func TestAZoneDoesNotHideAnAddress(t *testing.T) {
	link(t, "d0")
	hostnettest.IP(t, "addr add fe80::77/64 dev d0 nodad")
	s, err := hostnet.NewAddrSet()
	if err != nil {
		t.Fatal(err)
	}
	if !s.Contains(netip.MustParseAddr("fe80::77%d0")) {
		t.Fatal("the set misses an address because of its zone")
	}
}

func TestABurstOfChangesIsToldAFewTimes(t *testing.T) {
	l := link(t, "d0")
	const burst = 200
	calls, last := make(chan int, burst), 0
	run(t, func(ctx context.Context) error {
		n := 0
		return hostnet.Watch(ctx, func() { n++; calls <- n })
	})
	first := <-calls
	for i := range burst {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 7, 0, byte(i)}), 32)
		if err := hostnet.AddAddress(l.Index, p); err != nil {
			t.Fatal(err)
		}
	}
	quiet := time.NewTimer(time.Second)
	for waiting := true; waiting; {
		select {
		case last = <-calls:
		case <-quiet.C:
			waiting = false
		}
	}
	if n := last - first; n < 1 || n > burst/4 {
		t.Fatalf("%d changes were told %d times", burst, n)
	}
}

func TestAskingTheSetAllocatesNothing(t *testing.T) {
	s, err := hostnet.NewAddrSet()
	if err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr("fe80::1%eth0")
	if n := testing.AllocsPerRun(100, func() { s.Contains(a) }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func TestTheMTUTowardAnAddressIsThatOfItsRoute(t *testing.T) {
	l := link(t, "d0")
	if err := hostnet.SetMTU(l.Index, 1400); err != nil {
		t.Fatal(err)
	}
	hostnettest.IP(t, "-6 route add fd44::/32 dev d0")
	hostnettest.IP(t, "-6 route add fd45::/32 dev d0 mtu 1300")
	for addr, want := range map[string]int{"fd44::1": 1400, "fd45::1": 1300, "2001:db8::1": 0} {
		if got := hostnet.MTUToward(netip.MustParseAddr(addr)); got != want {
			t.Errorf("toward %s: %d, want %d", addr, got, want)
		}
	}
}
