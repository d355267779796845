package netstack

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/internal/admit"
)

func TestDialsAreLimitedPerSourceWithTheCauseCounted(t *testing.T) {
	tab := newTable(20, 2)
	first := attempt(source1, 1, 0)
	wantSYN(t, outcome(tab, first, epoch), synNew)
	wantSYN(t, outcome(tab, attempt(source1, 2, 0), epoch), synNew)
	if got, cause := ask(tab, attempt(source1, 3, 0), epoch); got != synRefused || cause != flow.DropSYNLimit {
		t.Fatalf("the third SYN is %d with cause %s", got, cause)
	}
	wantSYN(t, outcome(tab, attempt(source2, 1, 0), epoch), synNew)
	tab.remove(first)
	wantSYN(t, outcome(tab, attempt(source1, 3, 0), epoch), synNew)
}

// fillTable adds attempts of n sources, each in a network of its own, until the table is full.
func fillTable(tab *pendingTable, per int) (ps []*Pending) {
	for i := 0; tab.admission.shares.Len() < tab.admission.shares.Max; i++ {
		p := attempt(netip.AddrFrom4([4]byte{11, byte(i / per >> 8), byte(i / per), 1}), uint16(i), 0)
		if outcome(tab, p, epoch) == synNew {
			ps = append(ps, p)
		}
	}
	return ps
}

func TestInAFullTableTheNewcomerTakesThePlaceOfWhoHasMore(t *testing.T) {
	tab := newTable(64, 4)
	ps := fillTable(tab, 2)
	newcomer := attempt(source1, 1, 0)
	wantSYN(t, outcome(tab, newcomer, epoch), synNew)
	displaced := 0
	for _, p := range ps {
		if p.ctx.Err() != nil {
			displaced++
			if context.Cause(p.ctx) != errDisplaced || flow.VerdictOf(context.Cause(p.ctx)) != flow.VerdictSilent {
				t.Fatalf("it ended as %v", context.Cause(p.ctx))
			}
		}
	}
	if displaced != 1 || tab.admission.drops[flow.DropSYNLimit].Load() != 1 {
		t.Fatalf("%d attempts made room, %d counted, want 1", displaced, tab.admission.drops[flow.DropSYNLimit].Load())
	}
	// A second one of the same source has one already: it takes the place of those with two only.
	wantSYN(t, outcome(tab, attempt(source1, 2, 0), epoch), synNew)
	wantSYN(t, outcome(tab, attempt(source1, 3, 0), epoch), synRefused)
}

func TestAttemptsOfTrustedSourcesAreNotDisplaced(t *testing.T) {
	tab := newTable(32, 4)
	for i := range 32 {
		src := netip.AddrFrom4([4]byte{12, 0, byte(i), 1})
		tab.admission.rates.Prove(src, epoch)
		wantSYN(t, outcome(tab, attempt(src, 1, 0), epoch), synNew)
	}
	wantSYN(t, outcome(tab, attempt(source1, 1, 0), epoch), synRefused)
}

// Dials that are ending still hold their goroutine and socket.
func TestDialsThatAreEndingAreBoundedToo(t *testing.T) {
	tab := newTable(64, 4)
	ps := fillTable(tab, 1)
	admitted := 0
	for i := range 100 {
		p := attempt(netip.AddrFrom4([4]byte{13, 0, byte(i), 1}), 1, 0)
		if outcome(tab, p, epoch) == synNew {
			admitted++
			ps = append(ps, p)
		}
	}
	if admitted != 64/maxDisplaced {
		t.Fatalf("%d newcomers displaced others before any ended, want %d", admitted, 64/maxDisplaced)
	}
	for _, p := range ps {
		if p.displaced {
			tab.remove(p)
		}
	}
	if tab.admission.displaced != 0 || tab.admission.shares.Len() != 64 || tab.len() != 64 {
		t.Fatalf("%d displaced, %d shares, %d attempts after they ended", tab.admission.displaced, tab.admission.shares.Len(), tab.len())
	}
}

func TestARateIsMetWithItsOwnCauseAndHandshakesPayItBack(t *testing.T) {
	tab := newTable(0, 0)
	tab.admission.rates.Address = admit.Rate{PerSecond: 10, Burst: 5}
	for i := range 5 {
		p := attempt(source1, uint16(i), 0)
		wantSYN(t, outcome(tab, p, epoch), synNew)
		tab.proved(p, epoch)
		tab.remove(p)
	}
	for i := range 5 {
		wantSYN(t, outcome(tab, attempt(source1, uint16(10+i), 0), epoch), synNew)
	}
	if got, cause := ask(tab, attempt(source1, 20, 0), epoch); got != synRefused || cause != flow.DropSYNRate {
		t.Fatalf("the SYN is %d with cause %s", got, cause)
	}
	wantSYN(t, outcome(tab, attempt(source2, 1, 0), epoch), synNew)
	wantSYN(t, outcome(tab, attempt(source1, 20, 0), epoch.Add(100*time.Millisecond)), synNew)
}

// Whatever comes and goes in whatever order: limits hold, who is below all of
// them gets in, who is displaced is told, and nothing is left in the end.
func TestThePendingTableHoldsItsLimitsAndBalances(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		maxAll, maxPer := rapid.IntRange(0, 12).Draw(t, "max"), rapid.IntRange(0, 4).Draw(t, "per source")
		tab := newTable(maxAll, maxPer)
		tab.admission.shares.Network = rapid.IntRange(0, 8).Draw(t, "per network")
		var known []*Pending // in the table
		held := func(src netip.Addr) (n, network, all int) {
			for _, p := range known {
				if !p.displaced {
					all++
					if p.tuple.client.Addr() == src {
						n++
					}
					if src.IsValid() && admit.SameNetwork(p.tuple.client.Addr(), src) {
						network++
					}
				}
			}
			return n, network, all
		}
		t.Repeat(map[string]func(*rapid.T){
			"syn": func(t *rapid.T) {
				src := netip.AddrFrom4([4]byte{10, 0, rapid.Byte().Draw(t, "network") % 3, rapid.Byte().Draw(t, "host") % 3})
				p := attempt(src, rapid.Uint16Range(1, 4).Draw(t, "port"), 1)
				n, network, all := held(src)
				repeated := tab.get(p.tuple) != nil
				got := outcome(tab, p, epoch)
				free := (maxPer == 0 || n < min(maxPer, minShareForTests)) && (maxAll == 0 || all < maxAll/2) &&
					(tab.admission.shares.Network == 0 || network < tab.admission.shares.Network)
				switch {
				case repeated != (got == synRepeated):
					t.Fatalf("the SYN is %d, known already: %v", got, repeated)
				case maxPer > 0 && n >= maxPer && got == synNew:
					t.Fatalf("admitted with %d of its source", n)
				case free && got == synRefused:
					t.Fatalf("refused with %d of its source and %d of %d in all", n, all, maxAll)
				}
				if got == synNew {
					known = append(known, p)
				}
			},
			"remove": func(t *rapid.T) {
				if len(known) == 0 {
					t.Skip("nothing to remove")
				}
				i := rapid.IntRange(0, len(known)-1).Draw(t, "which")
				tab.remove(known[i])
				tab.remove(known[i]) // nothing, the second time
				known = append(known[:i], known[i+1:]...)
			},
			"": func(t *rapid.T) {
				displaced := 0
				for _, p := range known {
					if p.displaced {
						displaced++
					}
					if p.displaced != (p.ctx.Err() != nil) {
						t.Fatal("an attempt is displaced and was not told, or the other way")
					}
				}
				_, _, all := held(netip.Addr{})
				if tab.len() != len(known) || tab.admission.displaced != displaced || tab.admission.shares.Len() != all {
					t.Fatalf("%d attempts, %d displaced, %d shares; want %d, %d, %d", tab.len(), tab.admission.displaced, tab.admission.shares.Len(), len(known), displaced, all)
				}
				if maxAll > 0 && all > maxAll {
					t.Fatalf("%d of %d", all, maxAll)
				}
			},
		})
		for _, p := range known {
			tab.remove(p)
		}
		if tab.len() != 0 || tab.admission.displaced != 0 || tab.admission.shares.Len() != 0 {
			t.Fatalf("left over: %v", tab.admission)
		}
	})
}

// minShareForTests is what one source may hold whatever the others do.
const minShareForTests = 4

func TestARefusedSYNAllocatesNothingInTheTable(t *testing.T) {
	tab := newTable(64, 4)
	tab.admission.rates = admit.Rates{Address: admit.Rate{PerSecond: 1, Burst: 1000}, Network: admit.Rate{PerSecond: 1, Burst: 1000}}
	for i := range 4 {
		ask(tab, attempt(source1, uint16(i), 0), epoch)
	}
	p := attempt(source1, 9, 0)
	if n := testing.AllocsPerRun(100, func() { ask(tab, p, epoch) }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func TestAClientIsTrustedOnceItCompletedAHandshake(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		h.syn(0)
		waitFor(t, func() bool { return len(b.dev.out) > 0 }) // the SYN-ACK
		if b.stack.Trusted(client.Addr()) {
			t.Fatal("trusted for a SYN")
		}
		h.answered()
		c := recv(t, b.conns)
		if !b.stack.Trusted(client.Addr()) || b.stack.Trusted(dst.Addr()) {
			t.Fatal("want trust in the client, and in nobody else")
		}
		c.Abort()
		c.ep.Close()
	})
}
