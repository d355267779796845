package route

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

var (
	genUser    = rapid.SampledFrom([]string{"ann", "bob", "eve"})
	genGroup   = rapid.SampledFrom([]string{"staff", "guests"})
	genState   = rapid.SampledFrom([]string{Anonymous, "active", "exhausted"})
	genMAC     = rapid.SampledFrom([]string{"3c:22:fb:aa:bb:cc", "3c:22:fb:aa:bb:cd"})
	genHost    = rapid.SampledFrom([]string{"tablet", "phone"})
	genDevices = rapid.Custom(func(t *rapid.T) flow.DeviceSet {
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			return flow.DeviceSet{MAC: genMAC.Draw(t, "mac")}
		case 1:
			return flow.DeviceSet{Host: genHost.Draw(t, "host")}
		}
		return flow.DeviceSet{Prefix: genPrefix.Draw(t, "prefix")}
	})
	genWho = rapid.Custom(func(t *rapid.T) (w Who) {
		known := rapid.SampledFrom([]bool{false, true, true})
		if known.Draw(t, "a user") {
			w.User, w.State = genUser.Draw(t, "user"), rapid.SampledFrom([]string{"active", "exhausted", "unused"}).Draw(t, "state")
			if known.Draw(t, "in a group") {
				w.Group = genGroup.Draw(t, "group")
			}
		}
		if known.Draw(t, "a device") {
			w.Device.MAC = genMAC.Draw(t, "mac")
		}
		if known.Draw(t, "a host") {
			w.Device.Host = genHost.Draw(t, "host")
		}
		return w
	})
)

func mac(s string) flow.DeviceSet { return flow.DeviceSet{MAC: s} }

func prefix(s string) flow.DeviceSet { return flow.DeviceSet{Prefix: netip.MustParsePrefix(s)} }

func TestAFlowOfNobodyIsAnonymousAndInNoList(t *testing.T) {
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		{Match: Match{User: []string{"ann", "bob"}}, Outbound: "reject"},
		{Match: Match{UserGroup: []string{"staff"}}, Outbound: "reject"},
		{Match: Match{UserState: []string{"active"}}, Outbound: "reject"},
		{Match: Match{Device: []flow.DeviceSet{mac("3c:22:fb:aa:bb:cc"), {Host: "tablet"}}}, Outbound: "reject"},
		{Match: Match{UserState: []string{"exhausted", Anonymous}}, Outbound: "vpn"},
	}})
	q := query(flow.TCP, "10.0.0.2:999", "203.0.113.5:443")
	if d := p.Route(q); d.Rule != 4 {
		t.Errorf("decided by rule %d", d.Rule)
	}
	q.Who = Who{User: "cid", State: "active"}
	if d := p.Route(q); d.Rule != 2 {
		t.Errorf("a user without a group: decided by rule %d", d.Rule)
	}
}

func TestExplainNamesWhoIsBehindAFlow(t *testing.T) {
	m := func(m Match) Rule { return Rule{Match: m, Outbound: "vpn"} }
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		m(Match{User: []string{"ann"}}),
		m(Match{UserGroup: []string{"staff"}}),
		m(Match{UserState: []string{"exhausted"}}),
		m(Match{Device: []flow.DeviceSet{mac("3c:22:fb:aa:bb:cc")}}),
		m(Match{All: []Match{{User: []string{"ann"}}}}),
	}})
	device := flow.Device{Name: "mac:3c:22:fb:aa:bb:cd", MAC: "3c:22:fb:aa:bb:cd", Host: "tablet"}
	for _, c := range []struct {
		who  Who
		want []string
	}{
		{Who{}, []string{"user: the flow is anonymous", "user_group: the flow is anonymous", "user_state is anonymous", "device is 10.0.0.2", "all[0]: user: the flow is anonymous"}},
		{Who{User: "bob", State: "active"}, []string{`user is "bob"`, "user_group: the user has none", "user_state is active", "device is 10.0.0.2", `all[0]: user is "bob"`}},
		{Who{User: "bob", Group: "guests", State: "unused", Device: device}, []string{`user is "bob"`, `user_group is "guests"`, "user_state is unused", "device is mac:3c:22:fb:aa:bb:cd, host tablet", `all[0]: user is "bob"`}},
	} {
		q := query(flow.TCP, "10.0.0.2:999", "203.0.113.5:443")
		q.Who = c.who
		for i, want := range c.want {
			if got := p.Explain(q)[i]; got.Why != want || got.Matched {
				t.Errorf("step %d: %+v, want %q", i, got, want)
			}
		}
	}
}

// ofUsers is a plane of 100 rules about users and devices that a query passes, and
// one of 1,000 users and devices that it meets.
func ofUsers(tb testing.TB) (*Plane, *Query) {
	tb.Helper()
	var rules []Rule
	for range 100 {
		rules = append(rules, Rule{Match: Match{User: []string{"kids", "guest"}, Device: []flow.DeviceSet{mac("3c:22:fb:aa:bb:cd")}}, Outbound: "reject"})
	}
	last := Match{UserGroup: []string{"staff"}, UserState: []string{"active", "unused"}}
	for i := range 1000 {
		host := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String()
		last.User = append(last.User, "user-"+host)
		last.Device = append(last.Device, flow.DeviceSet{Host: host}, prefix("10.2.0.0/16"))
	}
	rules = append(rules, Rule{Match: last, Outbound: "vpn"})
	q := query(flow.TCP, "10.0.0.2:999", "203.0.113.5:443")
	q.Who = Who{User: last.User[500], Group: "staff", State: "active", Device: flow.Device{Host: last.Device[600].Host}}
	return compile(tb, Spec{Rules: rules, Default: "direct"}), q
}

func TestRouteByUserDoesNotAllocate(t *testing.T) {
	p, q := ofUsers(t)
	if n := testing.AllocsPerRun(100, func() {
		if d := p.Route(q); d.Rule != 100 {
			t.Errorf("decided by rule %d", d.Rule)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkRouteByUserBehind100Rules(b *testing.B) {
	p, q := ofUsers(b)
	b.ReportAllocs()
	for b.Loop() {
		p.Route(q)
	}
}
