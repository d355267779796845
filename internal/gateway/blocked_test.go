package gateway

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
	"gatewayd/route"
	"gatewayd/track"
)

// next is the next event, or none within a moment.
func next(t *testing.T, sub *track.Subscription, patience time.Duration) (track.Event, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ev, missed, err := sub.Next(ctx)
	if missed > 0 {
		t.Fatalf("%d events missed", missed)
	}
	return ev, err == nil
}

var toPort80 = route.Match{Port: []route.PortRange{{From: 80, To: 80}}}

func TestARefusalIsAnnouncedOnlyIfARuleMarkedTheFlow(t *testing.T) {
	recordOnly := route.Rule{Name: "audit", Record: true, Match: toPort80}
	for name, c := range map[string]struct {
		rules []route.Rule
		told  bool
		rule  int
	}{
		"rejects and records": {[]route.Rule{{Name: "no", Outbound: "reject", Record: true, Match: toPort80}}, true, 0},
		"drops and records":   {[]route.Rule{{Name: "no", Outbound: "drop", Record: true, Match: toPort80}}, true, 0},
		"a rule before":       {[]route.Rule{recordOnly, {Name: "no", Outbound: "reject"}}, true, 1},
		"only a rule behind":  {[]route.Rule{{Name: "no", Outbound: "reject"}, recordOnly}, false, 0},
		"nothing records":     {[]route.Rule{{Name: "no", Outbound: "reject"}}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.rules...)
			r.gw.blocked.rates = blockedRates
			sub := r.gw.tracker.Subscribe()
			defer sub.Close()
			r.syn(0)
			r.balanced()
			patience := 10 * time.Second
			if !c.told {
				patience = 50 * time.Millisecond
			}
			ev, ok := next(t, sub, patience)
			if ok != c.told {
				t.Fatalf("told: %v, %+v", ok, ev)
			}
			if m := ev.Record; ok && (ev.Kind != track.Blocked || m.ID != 0 || m.Source != client || m.Dest.Addr != server || m.Rule != c.rule || m.RuleName != "no" || !m.Recorded || m.Egress.IsValid()) {
				t.Errorf("told %+v", ev)
			}
			if n := len(r.gw.tracker.Closed()); n != 0 {
				t.Errorf("%d closed records", n)
			}
		})
	}
}

func TestARecordedFlowThatIsNotRefusedIsMarkedAndMatchingGoesOn(t *testing.T) {
	r := newRig(t, route.Rule{Name: "audit", Record: true, Match: toPort80}, route.Rule{Name: "out", Outbound: "out"})
	accepted := r.dialLoopback()
	r.syn(0)
	r.wantFlags(wire.SYN | wire.ACK)
	defer within(t, accepted).Close()
	f := r.gw.tracker.Flows()
	if len(f) != 1 || !f[0].Recorded || f[0].Rule != 1 || f[0].RuleName != "out" {
		t.Fatalf("%+v", f)
	}
}

// Datagrams and echo requests are refused by their association's decision: one event
// for each decision, and nothing of them is charged or registered.
func TestRefusedDatagramsAreAnnouncedWithTheirDecision(t *testing.T) {
	r := newRig(t, route.Rule{Name: "no", Outbound: "reject", Record: true, Match: route.Match{Network: []flow.Network{flow.UDP, flow.ICMP}}})
	sub := r.gw.tracker.Subscribe()
	defer sub.Close()
	for _, network := range []flow.Network{flow.UDP, flow.ICMP} {
		f := flow.Flow{Inbound: "lan", Network: network, Source: client, Dest: flow.Destination{Addr: server}}
		if target := r.gw.inbounds[0].resolve(f); !target.Blocked {
			t.Fatalf("%v: %+v", network, target)
		}
		if ev, ok := next(t, sub, 10*time.Second); !ok || ev.Kind != track.Blocked || ev.Record.Network != network || ev.Record.ID != 0 {
			t.Errorf("%v: told %v, %+v", network, ok, ev)
		}
	}
	r.gw.tracker.Final()
	if s := r.gw.tracker.Snapshot(); s.Total != (track.Stats{}) || len(s.Outbounds) != 0 {
		t.Errorf("charged: %+v", s)
	}
}

func TestANoisyClientDoesNotDrownTheRefusalsOfOthers(t *testing.T) {
	b := blockedEvents{rates: blockedRates}
	now := time.Now()
	noisy, quiet := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	told := 0
	for range 10_000 {
		if b.allow(noisy, now) {
			told++
		}
	}
	if told != blockedRates.Address.Burst || b.suppressed.Load() != uint64(10_000-told) {
		t.Errorf("%d told, %d suppressed", told, b.suppressed.Load())
	}
	if !b.allow(quiet, now) {
		t.Error("another client's refusal is suppressed")
	}
	if now = now.Add(time.Second); !b.allow(noisy, now) {
		t.Error("nothing is told a second later")
	}
}
