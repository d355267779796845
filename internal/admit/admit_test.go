package admit

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var epoch = time.Unix(1_000_000, 0)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestANetworkIsA24OrA64(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"10.0.0.1", "10.0.0.254", true},
		{"10.0.0.1", "10.0.1.1", false},
		{"10.0.0.1", "::ffff:10.0.0.9", true},
		{"fd00::1", "fd00::ffff:0:0:1", true},
		{"fd00::1", "fd00:0:0:1::1", false},
		{"::1", "0.0.0.1", false},
	} {
		if got := SameNetwork(addr(c.a), addr(c.b)); got != c.same {
			t.Errorf("%s and %s: %v", c.a, c.b, got)
		}
	}
}

func TestAnAddressAndANetworkHoldTheirShares(t *testing.T) {
	s := Shares{Max: 40, Per: 10, Network: 20}
	for range 10 {
		want(t, &s, "10.0.0.1", Admitted)
	}
	want(t, &s, "10.0.0.1", ByAddress)
	for i := range 10 {
		want(t, &s, netip.AddrFrom4([4]byte{10, 0, 0, byte(10 + i)}).String(), Admitted)
	}
	want(t, &s, "10.0.0.99", ByNetwork)
	want(t, &s, "10.0.1.1", Admitted)
}

func want(t *testing.T, s *Shares, a string, r Refusal) {
	t.Helper()
	if got := s.Take(addr(a)); got != r {
		t.Fatalf("%s is met with %d holding %d, %d in all; want %d", a, got, s.Held(addr(a)), s.Len(), r)
	}
}

func TestSharesShrinkWhenMoreThanHalfIsHeldAndRoomIsLeftForThoseWithLittle(t *testing.T) {
	s := Shares{Max: 1000, Per: 100}
	held := 0
	for i := 0; s.Take(netip.AddrFrom4([4]byte{10, byte(i), 0, 1})) == Admitted; {
		if s.Held(netip.AddrFrom4([4]byte{10, byte(i), 0, 1})) >= s.share() {
			i++
		}
		if held++; held == 900 {
			break
		}
	}
	if got := s.share(); got != 20 {
		t.Fatalf("a share is %d with %d of 1000 held, want 20", got, held)
	}
	want(t, &s, "10.0.0.1", ByAddress) // holds 100
	for range 4 {
		want(t, &s, "11.0.0.1", Admitted)
	}
}

// Whatever comes and goes, the counts are a plain list's, and nothing is left.
func TestSharesEqualAPlainList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Shares{Max: rapid.IntRange(0, 20).Draw(t, "max"), Per: rapid.IntRange(0, 5).Draw(t, "per"), Network: rapid.IntRange(0, 8).Draw(t, "network")}
		var list []netip.Addr
		count := func(same func(netip.Addr) bool) (n int) {
			for _, a := range list {
				if same(a) {
					n++
				}
			}
			return n
		}
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				a := netip.AddrFrom4([4]byte{10, 0, rapid.Byte().Draw(t, "net") % 3, rapid.Byte().Draw(t, "host") % 4})
				host := count(func(b netip.Addr) bool { return a == b })
				network := count(func(b netip.Addr) bool { return SameNetwork(a, b) })
				expect := Admitted
				switch {
				case s.Per > 0 && host >= s.share():
					expect = ByAddress
				case s.Network > 0 && network >= s.Network:
					expect = ByNetwork
				case s.Max > 0 && len(list) >= s.Max:
					expect = ByAll
				}
				if got := s.Take(a); got != expect {
					t.Fatalf("%d, want %d with %d, %d and %d held", got, expect, host, network, len(list))
				}
				if expect == Admitted {
					list = append(list, a)
				}
			},
			"give": func(t *rapid.T) {
				if len(list) == 0 {
					t.Skip("nothing held")
				}
				i := rapid.IntRange(0, len(list)-1).Draw(t, "which")
				s.Give(list[i])
				list = append(list[:i], list[i+1:]...)
			},
			"": func(t *rapid.T) {
				if s.Len() != len(list) || s.Per > 0 && s.share() < min(s.Per, minShare) {
					t.Fatalf("%d held, want %d; a share is %d", s.Len(), len(list), s.share())
				}
			},
		})
		for _, a := range list {
			s.Give(a)
		}
		if s.Len() != 0 || len(s.held) != 0 {
			t.Fatalf("left over: %v", s.held)
		}
	})
}

func TestRoomForManySourcesIsGivenBack(t *testing.T) {
	var s Shares
	var as []netip.Addr
	for i := range 4096 {
		as = append(as, netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1}))
		s.Take(as[i])
	}
	honest := addr("10.255.0.1")
	s.Take(honest)
	grown := reflect.ValueOf(s.held).Pointer()
	for _, a := range as {
		s.Give(a)
	}
	if reflect.ValueOf(s.held).Pointer() == grown || s.Held(honest) != 1 {
		t.Fatalf("there is room for %d sources, the one that is left holds %d", len(as), s.Held(honest))
	}
}

func TestATokenBucketLetsABurstThroughAndThenItsRate(t *testing.T) {
	r := Rates{Address: Rate{PerSecond: 100, Burst: 20}}
	a, now := addr("10.0.0.1"), epoch
	for _, c := range []struct {
		after time.Duration
		want  int
	}{{0, 20}, {0, 0}, {10 * time.Millisecond, 1}, {100 * time.Millisecond, 10}, {time.Hour, 20}} {
		now = now.Add(c.after)
		n := 0
		for r.Allow(a, now) {
			n++
		}
		if n != c.want {
			t.Fatalf("%d pass %v later, want %d", n, c.after, c.want)
		}
	}
	if !r.Allow(addr("10.0.0.2"), now) {
		t.Fatal("another address pays for the first one")
	}
}

func TestForgedSourcesUseUpTheirNetworkAndTrustedOnesPass(t *testing.T) {
	r := Rates{Address: Rate{10, 10}, Network: Rate{20, 20}, All: Rate{30, 30}}
	honest := addr("10.0.0.1")
	if !r.Allow(honest, epoch) {
		t.Fatal("refused at first")
	}
	r.Prove(honest, epoch)
	forged := func(network byte) (n int) {
		for i := range 200 {
			if r.Allow(netip.AddrFrom4([4]byte{10, 0, network, byte(2 + i)}), epoch) {
				n++
			}
		}
		return n
	}
	if n := forged(0); n != 20 {
		t.Errorf("%d of the honest client's network pass, want 20", n)
	}
	if n := forged(1); n != 10 {
		t.Errorf("%d of another network pass, want the 10 that are left to all", n)
	}
	for i := range 10 {
		if !r.Allow(honest, epoch) {
			t.Fatalf("the trusted client is refused after %d", i)
		}
	}
	if r.Allow(honest, epoch) {
		t.Error("the trusted client has no limit of its own")
	}
	later := epoch.Add(trustFor + time.Second)
	if r.Trusted(honest, later) {
		t.Error("trust lasts for ever")
	}
}

func TestWhatIsRememberedOfSourcesIsBoundedAndTrustOutlivesAFlood(t *testing.T) {
	r := Rates{Address: Rate{10, 10}, Network: Rate{1000, 1000}}
	honest := addr("10.0.0.1")
	r.Prove(honest, epoch)
	for range 20 * maxEntries {
		r.Allow(netip.AddrFrom4([4]byte{byte(11 + rand.IntN(200)), byte(rand.Uint32()), byte(rand.Uint32()), byte(rand.Uint32())}), epoch)
	}
	if len(r.addresses) > maxEntries || len(r.networks) > maxEntries {
		t.Fatalf("%d addresses and %d networks are remembered", len(r.addresses), len(r.networks))
	}
	if !r.Trusted(honest, epoch) {
		t.Fatal("the flood made it forget an honest client")
	}
}

func TestRatesForgetAFloodOnceItIsOverButNotTrustNorDebt(t *testing.T) {
	r := Rates{Address: Rate{1, 10}, Network: Rate{10, 10}, All: Rate{2 * fewEntries, 3 * fewEntries}}
	honest, greedy := addr("10.0.0.1"), addr("12.0.0.1")
	r.Prove(honest, epoch)
	for r.Allow(greedy, epoch) {
	}
	for i := range 2 * fewEntries {
		r.Allow(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 1}), epoch)
	}
	grown := [2]uintptr{reflect.ValueOf(r.addresses).Pointer(), reflect.ValueOf(r.networks).Pointer()}
	for _, c := range []struct {
		after time.Duration
		known bool
	}{{500 * time.Millisecond, true}, {2 * time.Second, false}} {
		now := epoch.Add(c.after)
		r.Forget(now)
		if n := min(len(r.addresses), len(r.networks)); (n > fewEntries) != c.known {
			t.Fatalf("%d addresses and %d networks are known %v later", len(r.addresses), len(r.networks), c.after)
		}
		if !r.Trusted(honest, now) || r.addresses[hostOf(greedy)].spent <= r.at(now) {
			t.Fatalf("what still says something is forgotten %v later", c.after)
		}
	}
	if reflect.ValueOf(r.addresses).Pointer() == grown[0] || reflect.ValueOf(r.networks).Pointer() == grown[1] {
		t.Fatal("the tables keep their room")
	}
}

func TestNothingIsAllocatedForKnownSources(t *testing.T) {
	s := Shares{Max: 10, Per: 5}
	r := Rates{Address: Rate{1000, 1000}, Network: Rate{1000, 1000}, All: Rate{1000, 1000}}
	a := addr("10.0.0.1")
	s.Take(a)
	r.Allow(a, epoch)
	if n := testing.AllocsPerRun(100, func() {
		r.Allow(a, epoch)
		if s.Take(a) == Admitted {
			s.Give(a)
		}
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}
