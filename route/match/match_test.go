package match

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func mustPrefixes(tb testing.TB, list ...string) *Prefixes {
	tb.Helper()
	var ps []netip.Prefix
	for _, s := range list {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	set, err := NewPrefixes(ps)
	if err != nil {
		tb.Fatal(err)
	}
	return set
}

func TestPrefixesContainWhatTheyCover(t *testing.T) {
	set := mustPrefixes(t, "10.0.0.0/8", "10.1.0.0/16", "192.0.2.1/32", "fd00::/8", "::ffff:198.51.100.0/120")
	for addr, want := range map[string]bool{
		"10.255.0.1": true, "10.1.2.3": true, "11.0.0.0": false, "192.0.2.1": true, "192.0.2.2": false,
		"::ffff:10.0.0.1": true, "::ffff:11.0.0.1": false, "198.51.100.7": true, "198.51.101.7": false,
		"fdff::1": true, "fe80::1": false, "fd00::1%eth0": true,
	} {
		if got := set.Contains(netip.MustParseAddr(addr)); got != want {
			t.Errorf("contains %s: %v, want %v", addr, got, want)
		}
	}
	if set.Contains(netip.Addr{}) {
		t.Error("contains the zero address")
	}
}

func TestTheWholeIPv6SpaceHoldsNoIPv4Address(t *testing.T) {
	set := mustPrefixes(t, "::/0")
	if set.Contains(netip.MustParseAddr("::ffff:10.0.0.1")) || !set.Contains(netip.MustParseAddr("2001:db8::1")) {
		t.Error("::/0 has to cover IPv6 and not IPv4")
	}
	all4 := mustPrefixes(t, "::ffff:0:0/96")
	if !all4.Contains(netip.MustParseAddr("10.0.0.1")) || all4.Contains(netip.MustParseAddr("2001:db8::1")) {
		t.Error("::ffff:0:0/96 has to cover IPv4 and not IPv6")
	}
}

func TestPrefixesThatMeanSomethingElseAreRefused(t *testing.T) {
	for want, p := range map[string]netip.Prefix{
		"host bits set, want 10.0.0.0/8": netip.MustParsePrefix("10.0.0.1/8"),
		"host bits set, want fd00::/8":   netip.MustParsePrefix("fd00::1/8"),
		"prefix at 0: invalid":           {},
	} {
		if _, err := NewPrefixes([]netip.Prefix{p}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", p, err, want)
		}
	}
}

func TestPortsEqualTheListOfRanges(t *testing.T) {
	edge := rapid.OneOf(rapid.Uint16Range(1, 12), rapid.Uint16Range(65530, 65535))
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) PortRange {
			a, b := edge.Draw(t, "a"), edge.Draw(t, "b")
			return PortRange{min(a, b), max(a, b)}
		}), 0, 6).Draw(t, "ranges")
		set, err := NewPorts(list)
		if err != nil {
			t.Fatal(err)
		}
		for port := range 1 << 16 {
			want := false
			for _, r := range list {
				want = want || int(r.From) <= port && port <= int(r.To)
			}
			if got := set.Contains(uint16(port)); got != want {
				t.Fatalf("port %d in %v: %v, want %v", port, list, got, want)
			}
		}
	})
}

func TestPortRangesAreRead(t *testing.T) {
	for s, want := range map[string]PortRange{"443": {443, 443}, "8000-9000": {8000, 9000}, "1-65535": {1, 65535}, "7-7": {7, 7}} {
		if got, err := ParsePortRange(s); err != nil || got != want {
			t.Errorf("%q: %v, %v, want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "-", "0", "0-5", "65536", "80-", "-80", "9000-8000", "+80", "80-+90", " 80", "80 - 90", "http", "1-2-3"} {
		if r, err := ParsePortRange(s); err == nil {
			t.Errorf("%q was read as %v", s, r)
		}
	}
	if _, err := NewPorts([]PortRange{{0, 5}}); err == nil {
		t.Error("a range with port 0 was taken")
	}
	if _, err := NewPorts([]PortRange{{9, 5}}); err == nil {
		t.Error("a reversed range was taken")
	}
}

func FuzzParsePortRange(f *testing.F) {
	for _, s := range []string{"443", "8000-9000", "0", "9-1", "65536", "1--2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParsePortRange(s)
		if err != nil {
			return
		}
		if r.From == 0 || r.From > r.To {
			t.Fatalf("%q was read as %v", s, r)
		}
		if again, err := ParsePortRange(r.String()); err != nil || again != r {
			t.Fatalf("%q: %v became %v, %v", s, r, again, err)
		}
	})
}

func TestLookUpsDoNotAllocate(t *testing.T) {
	prefixes := mustPrefixes(t, "10.0.0.0/8", "fd00::/8")
	ports, err := NewPorts([]PortRange{{80, 80}, {8000, 9000}})
	if err != nil {
		t.Fatal(err)
	}
	v4, v6 := netip.MustParseAddr("::ffff:10.0.0.1"), netip.MustParseAddr("fd00::1")
	if n := testing.AllocsPerRun(100, func() {
		if !prefixes.Contains(v4) || !prefixes.Contains(v6) || !ports.Contains(8500) || ports.Contains(81) {
			t.Error("wrong answer")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkPrefixesOf10000(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	var list []netip.Prefix
	for range 10_000 {
		a := netip.AddrFrom4([4]byte{byte(1 + r.IntN(223)), byte(r.IntN(256)), byte(r.IntN(256)), 0})
		list = append(list, netip.PrefixFrom(a, 12+r.IntN(13)).Masked())
	}
	set, err := NewPrefixes(list)
	if err != nil {
		b.Fatal(err)
	}
	addrs := make([]netip.Addr, 1024)
	for i := range addrs {
		addrs[i] = netip.AddrFrom4([4]byte{byte(1 + r.IntN(223)), byte(r.IntN(256)), byte(r.IntN(256)), byte(r.IntN(256))})
	}
	i := 0
	for b.Loop() {
		set.Contains(addrs[i%len(addrs)])
		i++
	}
}
