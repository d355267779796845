package route

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// versions makes a version for each tag and the look-up that Compile wants.
func versions(tags ...string) func(string) (*Version, bool) {
	m := make(map[string]*Version)
	for _, tag := range tags {
		m[tag] = &Version{tag: tag, n: 1}
	}
	return func(tag string) (*Version, bool) { v, ok := m[tag]; return v, ok }
}

func compile(tb testing.TB, s Spec) *Plane {
	tb.Helper()
	p, err := Compile(s, 7, versions("direct", "reject", "vpn"))
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func span(from, to uint16) []PortRange { return []PortRange{{From: from, To: to}} }

func query(network flow.Network, source, destination string) *Query {
	return &Query{Flow: flow.Flow{
		Inbound: "lan", Network: network,
		Source: netip.MustParseAddrPort(source),
		Dest:   flow.Destination{Addr: netip.MustParseAddrPort(destination)},
	}}
}

// The model: the conditions as the documentation words them, over netip alone.

func modelMatch(m *Match, q *Query) bool {
	f, w := &q.Flow, &q.Who
	listed := func(n int, has bool) bool { return n == 0 || has }
	ok := listed(len(m.Inbound), slices.Contains(m.Inbound, f.Inbound)) &&
		listed(len(m.Network), slices.Contains(m.Network, f.Network)) &&
		listed(len(m.Source), modelPrefix(m.Source, f.Source.Addr())) &&
		listed(len(m.IP), modelPrefix(m.IP, f.Dest.Addr.Addr())) &&
		listed(len(m.SourcePort), f.Network != flow.ICMP && modelPort(m.SourcePort, f.Source.Port())) &&
		listed(len(m.Port), f.Network != flow.ICMP && modelPort(m.Port, f.Dest.Addr.Port())) &&
		listed(len(m.User), w.User != "" && slices.Contains(m.User, w.User)) &&
		listed(len(m.UserGroup), w.Group != "" && slices.Contains(m.UserGroup, w.Group)) &&
		listed(len(m.UserState), slices.Contains(m.UserState, w.State) || w.User == "" && slices.Contains(m.UserState, "anonymous")) &&
		listed(len(m.Device), slices.ContainsFunc(m.Device, func(s flow.DeviceSet) bool { return modelDevice(s, q) })) &&
		(m.Not == nil || !modelMatch(m.Not, q))
	for i := range m.All {
		ok = ok && modelMatch(&m.All[i], q)
	}
	some := len(m.Any) == 0
	for i := range m.Any {
		some = some || modelMatch(&m.Any[i], q)
	}
	return ok && some
}

func modelDevice(s flow.DeviceSet, q *Query) bool {
	return s.MAC != "" && s.MAC == q.Who.Device.MAC || s.Host != "" && s.Host == q.Who.Device.Host ||
		s.Prefix.IsValid() && modelPrefix([]netip.Prefix{s.Prefix}, q.Flow.Source.Addr())
}

func modelPrefix(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Addr().Is4In6() {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		if p.Contains(a.Unmap()) {
			return true
		}
	}
	return false
}

func modelPort(list []PortRange, port uint16) bool {
	for _, r := range list {
		if r.From <= port && port <= r.To {
			return true
		}
	}
	return false
}

func modelRoute(s *Spec, q *Query) (rule int, outbound string, recorder int) {
	recorder = DefaultRule
	for i, r := range s.Rules {
		if !modelMatch(&r.Match, q) {
			continue
		}
		if r.Record && recorder == DefaultRule {
			recorder = i
		}
		if r.Outbound != "" {
			return i, r.Outbound, recorder
		}
	}
	return DefaultRule, s.Default, recorder
}

// Generators draw from a small world, so that rules overlap and queries hit them.

var (
	genInbound = rapid.SampledFrom([]string{"lan", "road", "guest"})
	genNetwork = rapid.SampledFrom([]flow.Network{flow.TCP, flow.UDP, flow.ICMP})
	genTag     = rapid.SampledFrom([]string{"direct", "reject", "vpn"})
	genPort    = rapid.Uint16Range(1, 9)
	genAddr    = rapid.Custom(func(t *rapid.T) netip.Addr {
		b := func(n int) byte { return byte(rapid.IntRange(0, n).Draw(t, "byte")) }
		v4 := netip.AddrFrom4([4]byte{10 + b(1), b(1), b(1), b(3)})
		switch b(3) {
		case 0:
			return netip.AddrFrom16(v4.As16()) // mapped
		case 1:
			return netip.AddrFrom16([16]byte{0: 0xfd, 1: b(1), 14: b(1), 15: b(3)})
		}
		return v4
	})
	genPrefix = rapid.Custom(func(t *rapid.T) netip.Prefix {
		a := genAddr.Draw(t, "addr")
		back := rapid.SampledFrom([]int{0, 1, 2, 8, 9, 16, 24, 31, 32, 40}).Draw(t, "host bits")
		return netip.PrefixFrom(a, max(a.BitLen()-back, 0)).Masked()
	})
	genRange = rapid.Custom(func(t *rapid.T) PortRange {
		a, b := genPort.Draw(t, "a"), genPort.Draw(t, "b")
		return PortRange{From: min(a, b), To: max(a, b)}
	})
)

// some draws a list that is absent more often than not.
func some[T any](t *rapid.T, g *rapid.Generator[T]) []T {
	return rapid.SliceOfN(g, 0, rapid.SampledFrom([]int{0, 0, 0, 3}).Draw(t, "limit")).Draw(t, "list")
}

func genMatch(depth int) *rapid.Generator[Match] {
	return rapid.Custom(func(t *rapid.T) Match {
		m := Match{
			Inbound: some(t, genInbound), Network: some(t, genNetwork),
			Source: some(t, genPrefix), SourcePort: some(t, genRange),
			IP: some(t, genPrefix), Port: some(t, genRange),
			User: some(t, genUser), UserGroup: some(t, genGroup), UserState: some(t, genState), Device: some(t, genDevices),
		}
		if depth > 0 {
			inner := genMatch(depth - 1)
			if rapid.IntRange(0, 3).Draw(t, "not") == 0 {
				n := inner.Draw(t, "not")
				m.Not = &n
			}
			m.Any, m.All = some(t, inner), some(t, inner)
		}
		return m
	})
}

var genRule = rapid.Custom(func(t *rapid.T) Rule {
	r := Rule{
		Name: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "name"), Match: genMatch(2).Draw(t, "match"),
		Outbound: genTag.Draw(t, "outbound"), Pin: rapid.Bool().Draw(t, "pin"),
		Record: rapid.Bool().Draw(t, "record"), AllowHost: rapid.Bool().Draw(t, "allow_host"),
	}
	if r.Record && rapid.Bool().Draw(t, "records only") {
		r.Outbound = ""
	}
	return r
})

var genFlow = rapid.Custom(func(t *rapid.T) flow.Flow {
	return flow.Flow{
		Inbound: genInbound.Draw(t, "inbound"), Network: genNetwork.Draw(t, "network"),
		Source: netip.AddrPortFrom(genAddr.Draw(t, "source"), genPort.Draw(t, "source port")),
		Dest:   flow.Destination{Addr: netip.AddrPortFrom(genAddr.Draw(t, "destination"), genPort.Draw(t, "port"))},
	}
})

func TestRouteEqualsTheObviousLinearScan(t *testing.T) {
	var byRule, byDefault, recorded int
	rapid.Check(t, func(t *rapid.T) {
		s := Spec{Rules: rapid.SliceOfN(genRule, 0, 8).Draw(t, "rules"), Default: genTag.Draw(t, "default")}
		p, err := Compile(s, 7, versions("direct", "reject", "vpn"))
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			q := &Query{Flow: genFlow.Draw(t, "flow"), Who: genWho.Draw(t, "who")}
			rule, outbound, recorder := modelRoute(&s, q)
			d := p.Route(q)
			if d.Rule != rule || d.Outbound.Tag() != outbound || d.Recorder != recorder || d.Record != (recorder != DefaultRule) {
				t.Fatalf("%+v: decided by %d to %v, marked by %d; want %d to %s, %d",
					q, d.Rule, d.Outbound, d.Recorder, rule, outbound, recorder)
			}
			checkOptions(t, &s, d)
			checkSteps(t, &s, q, p.Explain(q), rule)
			if rule == DefaultRule {
				byDefault++
			} else {
				byRule++
			}
			if d.Record {
				recorded++
			}
		}
	})
	if byRule == 0 || byDefault == 0 || recorded == 0 {
		t.Errorf("decided by a rule %d, by the default %d, recorded %d: the test saw too little", byRule, byDefault, recorded)
	}
}

func checkOptions(t *rapid.T, s *Spec, d Decision) {
	var want Rule
	if d.Rule != DefaultRule {
		want = s.Rules[d.Rule]
	}
	if d.RuleName != want.Name || d.Pin != want.Pin || d.AllowHost != want.AllowHost {
		t.Fatalf("options of rule %d: %+v, want %+v", d.Rule, d, want)
	}
}

func checkSteps(t *rapid.T, s *Spec, q *Query, steps []Step, decided int) {
	last := steps[len(steps)-1]
	if last.Rule != decided || !last.Matched {
		t.Fatalf("the last step is %+v, rule %d decided", last, decided)
	}
	for i, step := range steps[:len(steps)-1] {
		if step.Rule != i || step.Why == "" || step.Matched != modelMatch(&s.Rules[i].Match, q) {
			t.Fatalf("step %d is wrong: %+v", i, step)
		}
	}
}

func TestTheFirstRuleThatMatchesWins(t *testing.T) {
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		{Name: "web", Match: Match{Network: []flow.Network{flow.TCP}, Port: slices.Concat(span(80, 80), span(443, 443))}, Outbound: "vpn", Pin: true},
		{Name: "all", Outbound: "reject", AllowHost: true},
	}})
	d := p.Route(query(flow.TCP, "10.0.0.2:999", "203.0.113.5:443"))
	if d.Outbound.Tag() != "vpn" || d.Rule != 0 || d.RuleName != "web" || !d.Pin || d.AllowHost || d.Epoch != 7 || d.Gen != p.Gen() {
		t.Errorf("web: %+v", d)
	}
	d = p.Route(query(flow.UDP, "10.0.0.2:999", "203.0.113.5:443"))
	if d.Outbound.Tag() != "reject" || d.Rule != 1 || d.Pin || !d.AllowHost {
		t.Errorf("all: %+v", d)
	}
}

func TestTheDefaultAnswersWhatNoRuleDecides(t *testing.T) {
	for _, rules := range [][]Rule{nil, {{Match: Match{Inbound: []string{"road"}}, Outbound: "vpn"}}} {
		d := compile(t, Spec{Default: "direct", Rules: rules}).Route(query(flow.TCP, "10.0.0.2:1", "203.0.113.5:1"))
		if d.Outbound.Tag() != "direct" || d.Rule != DefaultRule || d.RuleName != "" || d.Record {
			t.Errorf("%+v", d)
		}
	}
}

func TestARuleThatOnlyRecordsDoesNotEndMatching(t *testing.T) {
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		{Name: "audit", Match: Match{Network: []flow.Network{flow.TCP}}, Record: true, AllowHost: true, Pin: true},
		{Name: "web", Match: Match{Port: span(80, 80)}, Outbound: "vpn"},
		{Name: "mail", Match: Match{Port: span(25, 25)}, Outbound: "reject", Record: true},
	}})
	for _, c := range []struct {
		port           int
		outbound       string
		rule, recorder int
	}{{80, "vpn", 1, 0}, {25, "reject", 2, 0}, {22, "direct", DefaultRule, 0}} {
		d := p.Route(query(flow.TCP, "10.0.0.2:1", fmt.Sprintf("203.0.113.5:%d", c.port)))
		if d.Outbound.Tag() != c.outbound || d.Rule != c.rule || !d.Record || d.Recorder != c.recorder || d.AllowHost || d.Pin {
			t.Errorf("port %d: %+v", c.port, d)
		}
	}
	if d := p.Route(query(flow.UDP, "10.0.0.2:1", "203.0.113.5:25")); !d.Record || d.Recorder != 2 || d.Rule != 2 {
		t.Errorf("a rule that records and decides: %+v", d)
	}
}

func TestPortsOfAnEchoStreamMatchNothing(t *testing.T) {
	any80 := span(1, 65535)
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		{Match: Match{Port: any80}, Outbound: "reject"},
		{Match: Match{SourcePort: any80}, Outbound: "reject"},
		{Match: Match{Not: &Match{Port: any80}}, Outbound: "vpn"},
	}})
	if d := p.Route(query(flow.ICMP, "10.0.0.2:77", "203.0.113.5:0")); d.Rule != 2 {
		t.Errorf("decided by rule %d", d.Rule)
	}
}

func TestHitsAreCountedForRulesAndTheDefault(t *testing.T) {
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		{Match: Match{Inbound: []string{"lan"}}, Record: true},
		{Match: Match{Port: span(80, 80)}, Outbound: "vpn", Record: true},
	}})
	for _, f := range []struct{ inbound, port string }{{"lan", "80"}, {"lan", "80"}, {"lan", "443"}, {"road", "80"}} {
		q := query(flow.TCP, "10.0.0.2:1", "203.0.113.5:"+f.port)
		q.Flow.Inbound = f.inbound
		d := p.Route(q)
		p.Hit(&d)
	}
	if got, want := p.Hits(), []uint64{3, 3, 1}; !slices.Equal(got, want) {
		t.Errorf("hits %v, want %v", got, want)
	}
}

func TestCompileErrorsNameTheRuleAndTheCondition(t *testing.T) {
	host := []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}
	deep := Match{Network: []flow.Network{flow.TCP}}
	for range MaxDepth + 1 {
		deep = Match{All: []Match{deep}}
	}
	for want, r := range map[string]Rule{
		`rule 1 "x": outbound "vpm": not defined`:                                               {Outbound: "vpm"},
		`rule 1 "x": outbound: missing`:                                                         {},
		`rule 1 "x": inbound: tag is empty`:                                                     {Outbound: "vpn", Match: Match{Inbound: []string{""}}},
		`rule 1 "x": network: network(9): want tcp, udp or icmp`:                                {Outbound: "vpn", Match: Match{Network: []flow.Network{9}}},
		`rule 1 "x": port: port 9-8: range is reversed, want 8-9`:                               {Outbound: "vpn", Match: Match{Port: span(9, 8)}},
		`rule 1 "x": source_port: port 0: 0 is not a port`:                                      {Outbound: "vpn", Match: Match{SourcePort: span(0, 0)}},
		`rule 1 "x": ip: prefix 10.0.0.1/8: host bits set, want 10.0.0.0/8`:                     {Outbound: "vpn", Match: Match{IP: host}},
		`rule 1 "x": not.any[1].source: prefix 10.0.0.1/8: host bits set, want 10.0.0.0/8`:      {Outbound: "vpn", Match: Match{Not: &Match{Any: []Match{{}, {Source: host}}}}},
		`rule 1 "x": all[0].not.ip: prefix 10.0.0.1/8: host bits set, want 10.0.0.0/8`:          {Outbound: "vpn", Match: Match{All: []Match{{Not: &Match{IP: host}}}}},
		`rule 1 "x": user: name is empty`:                                                       {Outbound: "vpn", Match: Match{User: []string{"a", ""}}},
		`rule 1 "x": user_group: name is empty`:                                                 {Outbound: "vpn", Match: Match{UserGroup: []string{""}}},
		`rule 1 "x": not.user_state: name is empty`:                                             {Outbound: "vpn", Match: Match{Not: &Match{UserState: []string{""}}}},
		`rule 1 "x": device: names nothing`:                                                     {Outbound: "vpn", Match: Match{Device: []flow.DeviceSet{{}}}},
		`rule 1 "x": device: prefix 10.0.0.1/8: host bits set, want 10.0.0.0/8`:                 {Outbound: "vpn", Match: Match{Device: []flow.DeviceSet{{Prefix: host[0]}}}},
		`rule 1 "x": ` + strings.Repeat("all[0].", 32) + `not, any, all: nested deeper than 32`: {Outbound: "vpn", Match: deep},
	} {
		r.Name = "x"
		_, err := Compile(Spec{Rules: []Rule{{Outbound: "direct"}, r}, Default: "direct"}, 1, versions("direct", "vpn"))
		if err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	for want, s := range map[string]Spec{
		`default: outbound: missing`:           {},
		`default: outbound "vpm": not defined`: {Default: "vpm"},
		`rule 0: outbound "vpm": not defined`:  {Default: "direct", Rules: []Rule{{Outbound: "vpm"}}},
	} {
		if _, err := Compile(s, 1, versions("direct")); err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	if _, err := Compile(Spec{Default: "vpn", Rules: []Rule{{Outbound: "vpn", Match: deep.All[0]}}}, 1, versions("vpn")); err != nil {
		t.Errorf("a rule at the limit of depth: %v", err)
	}
}

func TestExplainNamesTheConditionThatFails(t *testing.T) {
	m := func(m Match) Rule { return Rule{Match: m, Outbound: "vpn"} }
	p10 := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	p := compile(t, Spec{Default: "direct", Rules: []Rule{
		m(Match{Network: []flow.Network{flow.UDP}}),
		m(Match{Inbound: []string{"road"}}),
		m(Match{Port: span(80, 80)}),
		m(Match{SourcePort: span(80, 80)}),
		m(Match{IP: p10}),
		m(Match{Source: p10}),
		m(Match{Not: &Match{Inbound: []string{"lan"}}}),
		m(Match{All: []Match{{}, {IP: p10}}}),
		m(Match{Any: []Match{{IP: p10}, {Source: p10}}}),
		{Name: "audit", Record: true},
	}})
	want := []string{
		"network is tcp", `inbound is "lan"`, "port is 443", "source_port is 999", "ip is 203.0.113.5", "source is 192.168.1.2",
		"not: every condition in it holds", "all[1]: ip is 203.0.113.5", "any: none of 2 holds",
		"every condition holds; records only, matching goes on", "no rule decided",
	}
	for i, s := range p.Explain(query(flow.TCP, "192.168.1.2:999", "203.0.113.5:443")) {
		if s.Why != want[i] || s.Matched != (i >= 9) {
			t.Errorf("step %d: %+v, want %q", i, s, want[i])
		}
	}
	icmp := p.Explain(query(flow.ICMP, "192.168.1.2:999", "203.0.113.5:0"))
	if icmp[2].Why != "port: icmp has no ports" {
		t.Errorf("icmp: %+v", icmp[2])
	}
}

// large is a plane as a big installation has: 100 small rules before one of
// 10,000 prefixes.
func large(tb testing.TB) (*Plane, *Query) {
	tb.Helper()
	r := rand.New(rand.NewPCG(3, 4))
	var list []netip.Prefix
	for range 10_000 {
		a := netip.AddrFrom4([4]byte{byte(1 + r.IntN(200)), byte(r.IntN(256)), byte(r.IntN(256)), 0})
		list = append(list, netip.PrefixFrom(a, 24))
	}
	var rules []Rule
	for i := range 100 {
		rules = append(rules, Rule{Match: Match{
			Network: []flow.Network{flow.UDP}, Inbound: []string{"road"}, Port: span(uint16(1+i), 9000),
			Not: &Match{IP: list[:3]},
		}, Outbound: "vpn"})
	}
	rules = append(rules, Rule{Match: Match{Network: []flow.Network{flow.TCP}, IP: list}, Outbound: "vpn"})
	q := query(flow.TCP, "10.0.0.2:999", "203.0.113.5:443")
	q.Flow.Dest.Addr = netip.AddrPortFrom(list[5000].Addr().Next(), 443)
	return compile(tb, Spec{Rules: rules, Default: "direct"}), q
}

func TestRouteDoesNotAllocate(t *testing.T) {
	p, q := large(t)
	if n := testing.AllocsPerRun(100, func() {
		d := p.Route(q)
		if d.Rule != 100 {
			t.Errorf("decided by rule %d", d.Rule)
		}
		p.Hit(&d)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkRoute10000PrefixesBehind100Rules(b *testing.B) {
	p, q := large(b)
	b.ReportAllocs()
	for b.Loop() {
		p.Route(q)
	}
}
