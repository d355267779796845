package gateway

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/internal/config"
)

// Whatever comes and goes: no limit is passed, nothing that is far below them is
// refused, and nothing is left in the end.
func TestLimitsHoldAndBalance(t *testing.T) {
	sources := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("fd00::2")}
	rapid.Check(t, func(t *rapid.T) {
		total, per := rapid.IntRange(0, 40).Draw(t, "total"), rapid.IntRange(0, 6).Draw(t, "per source")
		l := newLimits(config.Limits{Flows: total, PerSource: config.SourceLimits{Flows: per}}, 0)
		type held struct{ flows, links int }
		have := map[netip.Addr]held{}
		var all held
		ask := func(t *rapid.T, link bool) {
			src := rapid.SampledFrom(sources).Draw(t, "source")
			h := have[src]
			n, sum := h.flows+h.links, all.flows+all.links
			take := l.acquire
			if link {
				take = l.acquireLink
			}
			got := take(src)
			over := total > 0 && sum >= total || per > 0 && n >= per || link && total > fewFlows && all.links >= total*3/4
			under := (total == 0 || sum < total/2) && (per == 0 || n < per) && !over
			if over && got || under && !got {
				t.Fatalf("it says %v with %d of %d in all, %d of %d here, %d links", got, sum, total, n, per, all.links)
			}
			switch {
			case got && link:
				all.links++
				h.links++
			case got:
				all.flows++
				h.flows++
			}
			have[src] = h
		}
		give := func(src netip.Addr, link bool) bool {
			h := have[src]
			switch {
			case link && h.links > 0:
				h.links--
				all.links--
				l.releaseLink(src)
			case !link && h.flows > 0:
				h.flows--
				all.flows--
				l.release(src)
			default:
				return false
			}
			have[src] = h
			return true
		}
		t.Repeat(map[string]func(*rapid.T){
			"flow": func(t *rapid.T) { ask(t, false) },
			"link": func(t *rapid.T) { ask(t, true) },
			"release": func(t *rapid.T) {
				if !give(rapid.SampledFrom(sources).Draw(t, "source"), rapid.Bool().Draw(t, "link")) {
					t.Skip("nothing to release")
				}
			},
		})
		for src := range have {
			for give(src, true) || give(src, false) {
			}
		}
		if l.flows.Len() != 0 || l.links != 0 {
			t.Fatalf("left over: %d, %d", l.flows.Len(), l.links)
		}
	})
}

func TestDatagramsCanNotTakeEveryFlow(t *testing.T) {
	l := newLimits(config.Limits{Flows: 100}, 0)
	for i := range 200 {
		l.acquireLink(netip.AddrFrom4([4]byte{10, 0, byte(i), 1}))
	}
	if l.links != 75 || l.associations() != 50 {
		t.Fatalf("%d sub-links and %d associations of 100 flows", l.links, l.associations())
	}
	for i := range 25 {
		if !l.acquire(netip.AddrFrom4([4]byte{10, 1, byte(i), 1})) {
			t.Fatalf("flow %d is refused", i)
		}
	}
	if d := l.dials(256); d.Max != 50 || d.Network != 25 || d.Per != 256 {
		t.Fatalf("dials %+v", d)
	}
}
