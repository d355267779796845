package device

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gatewayd/internal/hostnet"
)

const macA, macB = "3c:22:fb:aa:bb:0a", "3c:22:fb:aa:bb:0b"

var sameAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func TestAMACHasAllItsAddresses(t *testing.T) {
	inBubble(t, func(b *bench) {
		addrs := []string{"192.168.1.20", "2001:db8::20", "2001:db8::a1b2", "fd00::20"}
		for _, a := range addrs {
			b.hear(a, macA)
			b.want(a, "mac:"+macA, "")
		}
		b.hearOn(3, "192.168.2.30", macB)
		b.hear("fe80::20", macA)
		b.want("fe80::20", "fe80::20", "") // which link is not said
		all := b.All()
		if len(all) != 2 || !slices.Equal(texts(all[0].Addrs), append(addrs, "fe80::20")) || all[0].Link != "br-lan" || all[1].Link != "br-guest" {
			t.Errorf("devices %+v", all)
		}
	})
}

func texts(addrs []netip.Addr) (s []string) {
	for _, a := range addrs {
		s = append(s, a.String())
	}
	return s
}

func TestTheSameLinkLocalAddressOnTwoLinksIsTwoDevices(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.hearOn(2, "fe80::1", macA)
		b.hearOn(3, "fe80::1", macB)
		if all := b.All(); len(all) != 2 {
			t.Errorf("devices %+v", all)
		}
	})
}

func TestAnotherFormOfAnAddressIsTheSame(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.hear("192.168.1.20", macA)
		b.hear("fd00::20", macB)
		for form, name := range map[string]string{"::ffff:192.168.1.20": "mac:" + macA, "fd00::20%eth0": "mac:" + macB} {
			if d := b.Lookup(netip.MustParseAddr(form)); d.Name != name || d.Addr.Is4In6() || d.Addr.Zone() != "" {
				t.Errorf("%s: %+v", form, d)
			}
		}
		if d := b.Lookup(netip.Addr{}); d.Name != "" {
			t.Errorf("no address at all: %+v", d)
		}
	})
}

func TestChangesAreTold(t *testing.T) {
	inBubble(t, func(b *bench) {
		const a = "192.168.1.20"
		expect := func(what string, want ...Change) {
			t.Helper()
			if diff := cmp.Diff(want, b.changes(), sameAddr); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		}
		b.hear(a, macA)
		expect("an address appears", Change{device(a, "", ""), device(a, macA, "")})
		b.hear(a, macA)
		expect("it is confirmed")
		b.hear(a, macB)
		expect("another MAC has it", Change{device(a, macA, ""), device(a, macB, "")})
		b.lease("0 " + macB + " " + a + " tablet *\n")
		expect("it gets a name", Change{device(a, macB, ""), device(a, macB, "tablet")})
		b.lease("")
		expect("it loses the name", Change{device(a, macB, "tablet"), device(a, macB, "")})
		b.hear(a, "")
		expect("the kernel forgets it")
		b.pass(idleKept + sweepsEvery*time.Second)
		expect("it leaves", Change{device(a, macB, ""), device(a, "", "")})
	})
}

func TestAnUnknownAddressIsItselfAndAskedForOnce(t *testing.T) {
	inBubble(t, func(b *bench) {
		const routed, late = "10.44.0.9", "192.168.1.20"
		b.f.table[netip.MustParseAddr(late)] = neighbour(2, late, macA)
		for range 5 {
			b.want(routed, routed, "")
			b.pass(time.Second)
		}
		if n := len(b.f.asked); n != 1 {
			t.Errorf("the kernel was asked %d times about one address", n)
		}
		if all := b.All(); len(all) != 1 || all[0].Name != routed || all[0].Used.IsZero() {
			t.Errorf("devices %+v", all)
		}
		b.want(late, late, "") // its news are still under way
		b.pass(0)
		b.want(late, "mac:"+macA, "")
		if told := b.changes(); len(told) != 1 {
			t.Errorf("told %+v", told)
		}
		for _, a := range []string{"fe80::1", "127.0.0.1", "224.0.0.1", "::"} {
			b.want(a, a, "")
		}
		b.pass(time.Second)
		if n := len(b.f.asked); n != 2 {
			t.Errorf("asked about what is no source: %v", b.f.asked[2:])
		}
	})
}

func TestUnknownSourcesAreAskedAboutWithinARate(t *testing.T) {
	inBubble(t, func(b *bench) {
		for second := 1; second <= 3; second++ {
			for i := range 10 * lookups {
				b.Lookup(netip.AddrFrom4([4]byte{10, byte(second), byte(i >> 8), byte(i)}))
			}
			b.pass(time.Second)
			if n := len(b.f.asked); n > second*lookups || n < second*lookups/2 {
				t.Fatalf("asked %d times within %d s", n, second)
			}
		}
	})
}

func TestWhatTheKernelForgetsIsKnownForAWhile(t *testing.T) {
	inBubble(t, func(b *bench) {
		const idle, busy, present = "192.168.1.20", "192.168.1.21", "192.168.1.22"
		for _, a := range []string{idle, busy, present} {
			b.hear(a, macA)
		}
		b.hear(idle, "")
		b.hear(busy, "")
		b.pass(idleKept - 5*time.Second)
		b.want(busy, "mac:"+macA, "")
		if n := len(b.All()[0].Addrs); n != 3 {
			t.Fatalf("%d addresses before the time is up", n)
		}
		b.pass(sweepsEvery*time.Second + 5*time.Second)
		if all := b.All(); !slices.Equal(texts(all[0].Addrs), []string{busy, present}) {
			t.Errorf("devices %+v", all)
		}
	})
}

func TestALeaseTellsMACAndHostOfAllAddresses(t *testing.T) {
	inBubble(t, func(b *bench) {
		soon := time.Now().Add(time.Hour).Unix()
		b.lease(fmt.Sprintf("# lan %s ipv4 Kids-Tablet %d 0 32 192.168.1.20/32\n# lan 0001 77 v6-only %d 0 128 fd00::6f9/128\n# lan 0002 78 other %d 0 128 fd00::700/128\n",
			strings.ReplaceAll(macA, ":", ""), soon, soon, soon))
		b.want("192.168.1.20", "mac:"+macA, "kids-tablet")
		b.hear("2001:db8::a1b2", macA) // a privacy address, of which no lease knows
		b.want("2001:db8::a1b2", "mac:"+macA, "kids-tablet")
		b.hear("fd00::6f9", macB)
		b.want("fd00::6f9", "mac:"+macB, "v6-only")
		b.want("fd00::700", "fd00::700", "")
		b.pass(0)
		b.want("fd00::700", "fd00::700", "other")
		b.hear("2001:db8::a1b2", "")
		b.pass(2 * idleKept)
		b.want("192.168.1.20", "mac:"+macA, "kids-tablet") // while the lease lives
		b.pass(time.Hour)
		if all := b.All(); len(all) != 1 || all[0].Name != "mac:"+macB || all[0].Host != "" {
			t.Errorf("after the leases ended: %+v", all)
		}
	})
}

func TestOfTwoLeasesTheOneThatEndsLastNamesTheDevice(t *testing.T) {
	inBubble(t, func(b *bench) {
		mac, now := strings.ReplaceAll(macA, ":", ""), time.Now().Unix()
		b.hear("fd00::20", macA)
		b.lease(fmt.Sprintf("# lan %s ipv4 new %d 0 32 192.168.1.20/32\n# lan %s ipv4 old %d 0 32 192.168.2.20/32\n", mac, now+7200, mac, now+3600))
		b.want("192.168.2.20", "mac:"+macA, "old")
		b.want("fd00::20", "mac:"+macA, "new")
		b.lease(fmt.Sprintf("# lan %s ipv4 new %d 0 32 192.168.1.20/32\n# lan %s ipv4 forever -1 0 32 192.168.2.20/32\n", mac, now+7200, mac))
		b.want("fd00::20", "mac:"+macA, "forever")
	})
}

func TestANeighbourIsBelievedBeforeALease(t *testing.T) {
	inBubble(t, func(b *bench) {
		const a = "192.168.1.20"
		b.hear(a, macB)
		b.lease("0 " + macA + " " + a + " lender *\n")
		b.want(a, "mac:"+macB, "") // the lease is another one's, and so is its name
		b.hear(a, "")
		b.want(a, "mac:"+macA, "lender")
		b.hear(a, macB)
		b.want(a, "mac:"+macB, "")
	})
}

func TestOfTwoLinksTheOneOfTheRouteIsBelieved(t *testing.T) {
	inBubble(t, func(b *bench) {
		const a = "192.168.1.20"
		b.f.link[netip.MustParseAddr(a)] = 2
		b.hearOn(2, a, macA)
		b.hearOn(3, a, macB)
		b.want(a, "mac:"+macA, "")
		b.hearOn(3, a, "")
		b.hearOn(2, a, "")
		b.hearOn(3, a, macB) // alone now
		b.want(a, "mac:"+macB, "")
		b.hearOn(2, a, macA)
		b.want(a, "mac:"+macA, "")
		b.hearOn(3, a, macA) // the same device moved
		if all := b.All(); len(all) != 1 || all[0].Link != "br-guest" {
			t.Errorf("devices %+v", all)
		}
	})
}

func TestATableToldAnewShowsWhatWent(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.hear("192.168.1.20", macA)
		b.hear("192.168.1.21", macB)
		b.news(hostnet.NeighbourNews{Kind: hostnet.TableBegins})
		b.hear("192.168.1.21", macB)
		b.news(hostnet.NeighbourNews{Kind: hostnet.TableEnds})
		b.want("192.168.1.20", "mac:"+macA, "")
		b.pass(2 * idleKept)
		b.want("192.168.1.20", "192.168.1.20", "")
		b.want("192.168.1.21", "mac:"+macB, "")
	})
}

func mac(i int) string {
	return fmt.Sprintf("02:00:%02x:%02x:%02x:%02x", i>>24, i>>16&255, i>>8&255, i&255)
}

func TestAFloodOfNeighboursIsBoundedAndSparesTheBusy(t *testing.T) {
	inBubble(t, func(b *bench) {
		const busy = "192.168.1.20"
		b.hear(busy, macA)
		for i := range 3 * maxAddresses {
			b.f.news <- hostnet.NeighbourNews{Neighbour: neighbour(2, fmt.Sprintf("2001:db8::%x:%x", i>>16, i&0xffff), mac(i))}
			if i%1024 == 0 {
				b.pass(time.Second)
				b.want(busy, "mac:"+macA, "")
				checkBook(t, b.Table)
			}
		}
		if n := len(b.All()); n < maxAddresses/2 {
			t.Errorf("%d devices left", n)
		}
	})
}

func TestOneMACCannotFillTheTable(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.hear("192.168.1.20", macB)
		b.pass(time.Second)
		for i := range 3000 {
			b.f.news <- hostnet.NeighbourNews{Neighbour: neighbour(2, fmt.Sprintf("2001:db8::%x", i), macA)}
		}
		b.pass(0)
		all := b.All()
		if len(all) != 2 || len(all[0].Addrs) > maxPerMAC || len(all[1].Addrs) != 1 {
			t.Errorf("%d devices, %d and %d addresses", len(all), len(all[0].Addrs), len(all[1].Addrs))
		}
	})
}

func TestSourcesWithoutMACCannotFillTheTable(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.hear("192.168.1.20", macB)
		for i := range 2 * maxNameless {
			b.Lookup(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
			if i%lookups == lookups-1 {
				b.pass(time.Second)
			}
		}
		checkBook(t, b.Table)
		if n := len(b.All()); n > maxNameless+1 || n < maxNameless/2 {
			t.Errorf("%d devices", n)
		}
		b.want("192.168.1.20", "mac:"+macB, "")
	})
}

// Whatever is told in whatever order, what is kept twice agrees, and what was told of
// the changes leads from nothing to the present answers.
func TestTheBookAgreesWithItself(t *testing.T) {
	macs := []string{"", macA, macB, mac(1)}
	rapid.Check(t, func(rt *rapid.T) {
		told := map[netip.Addr]string{}
		tab := newTable(Options{Changed: func(Change) {}}, &fake{link: map[netip.Addr]int{}})
		now := tab.start
		addr := func() string { return fmt.Sprintf("192.168.1.%d", rapid.IntRange(1, 6).Draw(rt, "addr")) }
		step := func() {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0, 1:
				n := neighbour(rapid.IntRange(2, 3).Draw(rt, "link"), addr(), rapid.SampledFrom(macs).Draw(rt, "mac"))
				tab.hearLocked(n, now, func(netip.Addr) int { return 2 })
			case 2:
				tab.lookedLocked(netip.MustParseAddr(addr()), hostnet.Neighbour{}, false, now)
			case 3:
				var leases []hostnet.Lease
				for range rapid.IntRange(0, 4).Draw(rt, "leases") {
					n := neighbour(0, addr(), rapid.SampledFrom(macs).Draw(rt, "mac"))
					l := hostnet.Lease{Addr: n.Addr, MAC: n.MAC, Host: rapid.SampledFrom([]string{"", "a", "b"}).Draw(rt, "host")}
					if m := rapid.IntRange(0, 30).Draw(rt, "minutes"); m > 0 {
						l.Expires = now.Add(time.Duration(m) * time.Minute)
					}
					leases = append(leases, l)
				}
				tab.leasesLocked(leases, now)
			case 4:
				now = now.Add(time.Duration(rapid.IntRange(0, 15).Draw(rt, "minutes")) * time.Minute)
				tab.sweepLocked(now)
			case 5:
				tab.beginTableLocked()
				tab.endTableLocked(now)
			}
		}
		for range 40 {
			step()
			for _, c := range tab.changes {
				if a := c.Before.Addr; a != c.After.Addr || told[a] != c.Before.MAC+c.Before.Host {
					rt.Fatalf("told %+v after %q", c, told[a])
				}
				told[c.After.Addr] = c.After.MAC + c.After.Host
			}
			tab.changes = nil
			checkBook(t, tab)
			for k, r := range tab.records {
				if told[r.addr] != r.said.dev.MAC+r.said.dev.Host {
					rt.Fatalf("%s: said %+v, told %q", r.addr, r.said.dev, told[r.addr])
				}
				want := r.neighbour
				if l := tab.leases[k]; !r.live && l.MAC != (hostnet.MAC{}) {
					want = l.MAC
				}
				if got := r.said.dev.MAC; got != "" && got != want.String() || got == "" && want != (hostnet.MAC{}) {
					rt.Fatalf("%s: said %q, want %s", r.addr, got, want)
				}
			}
		}
	})
}

func TestLookupAllocatesNothing(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.hear("192.168.1.20", macA)
		known, routed := netip.MustParseAddr("192.168.1.20"), netip.MustParseAddr("10.44.0.9")
		b.Lookup(routed)
		b.pass(time.Second)
		for _, a := range []netip.Addr{known, routed} {
			if n := testing.AllocsPerRun(100, func() { b.Lookup(a) }); n != 0 {
				t.Errorf("%s: %v allocations", a, n)
			}
		}
	})
}

func full(b *testing.B) (*Table, []netip.Addr) {
	b.Helper()
	tab := newTable(Options{}, &fake{})
	var addrs []netip.Addr
	for i := range maxAddresses {
		n := neighbour(2, fmt.Sprintf("2001:db8::%x", i), mac(i/4))
		tab.hearLocked(n, tab.start, nil)
		addrs = append(addrs, n.Addr)
	}
	return tab, addrs
}

func BenchmarkLookup(b *testing.B) {
	tab, addrs := full(b)
	i := 0
	for b.Loop() {
		tab.Lookup(addrs[i&63])
		i++
	}
}

// As under a flood of neighbours: each takes another's place.
func BenchmarkNeighbourInAFullTable(b *testing.B) {
	tab, _ := full(b)
	i := 0
	for b.Loop() {
		i++
		n := neighbour(2, "2001:db8:1::", mac(i))
		raw := n.Addr.As16()
		raw[13], raw[14], raw[15] = byte(i>>16), byte(i>>8), byte(i)
		n.Addr = netip.AddrFrom16(raw)
		tab.hearLocked(n, tab.start, nil)
	}
}

func TestWhoBeginsAFlowFromANewAddressIsAskedForItsMAC(t *testing.T) {
	inBubble(t, func(b *bench) {
		fresh, mute, routed := netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("192.168.7.7")
		b.f.mu.Lock()
		b.f.link[fresh], b.f.link[mute] = 2, 2
		b.f.answers = map[netip.Addr]hostnet.Neighbour{fresh: neighbour(2, "fd00::1", "3c:22:fb:aa:bb:cc")}
		b.f.mu.Unlock()
		b.Lookup(fresh) // which alone finds out nothing, and must not be taken for an answer
		b.pass(time.Second)
		for _, c := range []struct {
			addr netip.Addr
			mac  string
			took time.Duration
		}{{fresh, "3c:22:fb:aa:bb:cc", meetPause}, {mute, "", meetTime}, {routed, "", 0}} {
			for range 2 { // the second time it is known
				start := time.Now()
				d, sure := b.Meet(context.Background(), c.addr)
				if took := time.Since(start); d.MAC != c.mac || !sure || took > c.took {
					t.Errorf("%v: %+v, sure %v, after %v", c.addr, d, sure, took)
				}
				c.took = 0
			}
		}
		b.f.mu.Lock()
		if len(b.f.solicited) != 2 {
			t.Errorf("asked %v", b.f.solicited)
		}
		b.f.mu.Unlock()
		if told := b.changes(); len(told) == 0 || told[len(told)-1].After.MAC != "3c:22:fb:aa:bb:cc" {
			t.Errorf("told %+v", told)
		}
		for i := range lookups {
			b.Meet(context.Background(), netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
		}
		if _, sure := b.Meet(context.Background(), netip.MustParseAddr("10.2.0.1")); sure {
			t.Error("more were asked for than the rate allows")
		}
	})
}
