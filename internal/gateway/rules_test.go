package gateway

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/internal/config"
	"gatewayd/route"
)

func parse(t interface {
	Helper()
	Fatalf(string, ...any)
}, text string,
) *config.Config {
	t.Helper()
	c, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return c
}

// withRule is a configuration whose only rule has these conditions.
func withRule(conditions string) string {
	if conditions != "" {
		conditions += ", "
	}
	return `version: 1
tun: [{tag: lan, device: gw0}, {tag: guest, device: gw1}]
route:
  rules: [{` + conditions + `outbound: reject}]
  default: direct
`
}

var (
	genPrefix = rapid.SampledFrom([]netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.7/32"),
		netip.MustParsePrefix("::/0"), netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("2001:db8::1/128"),
	})
	// Names that YAML would take for something else are names, too.
	genName = rapid.SampledFrom([]string{
		"ann", "true", "Null", "~", "1.5", "0x1f", "1e3", "a, b", "[a", "a: b", "#c", "- a", "NaN", `it's "a\"`, "ü ß", "2030-01-31", "*a", "!a", "\u202ea",
	})
	genDevices = rapid.Custom(func(t *rapid.T) flow.DeviceSet {
		p := genPrefix.Draw(t, "prefix")
		return rapid.SampledFrom([]flow.DeviceSet{{MAC: "3c:22:fb:aa:bb:cc"}, {Host: "kids-tablet"}, {Host: "7"}, {Prefix: p}}).Draw(t, "device")
	})
	genPorts = rapid.SampledFrom([]config.PortRange{{From: 1, To: 1}, {From: 53, To: 53}, {From: 8000, To: 9000}, {From: 1, To: 65535}})
)

func some[T any](g *rapid.Generator[T]) *rapid.Generator[[]T] {
	return rapid.Custom(func(t *rapid.T) []T {
		if n := rapid.IntRange(0, 3).Draw(t, "n"); n > 0 {
			return rapid.SliceOfN(g, n, n).Draw(t, "list")
		}
		return nil
	})
}

func genMatch(depth int) *rapid.Generator[config.Match] {
	return rapid.Custom(func(t *rapid.T) config.Match {
		m := config.Match{
			Inbound:    some(rapid.SampledFrom([]string{"lan", "guest"})).Draw(t, "inbound"),
			Network:    some(rapid.SampledFrom([]flow.Network{flow.TCP, flow.UDP, flow.ICMP})).Draw(t, "network"),
			Source:     some(genPrefix).Draw(t, "source"),
			IP:         some(genPrefix).Draw(t, "ip"),
			SourcePort: some(genPorts).Draw(t, "source port"),
			Port:       some(genPorts).Draw(t, "port"),
			User:       some(genName).Draw(t, "user"),
			UserGroup:  some(genName).Draw(t, "group"),
			UserState:  some(rapid.SampledFrom([]string{"anonymous", "active", "unused"})).Draw(t, "state"),
			Device:     some(genDevices).Draw(t, "device"),
		}
		if reflect.DeepEqual(m, config.Match{}) { // a rule inside a rule has to say something
			m.Network = []flow.Network{flow.TCP}
		}
		if len(m.Network) > 0 && len(m.Port)+len(m.SourcePort) > 0 { // ICMP alone has no ports
			m.Network = append(m.Network, flow.UDP)
		}
		if depth > 0 {
			if rapid.Bool().Draw(t, "not") {
				not := genMatch(depth-1).Draw(t, "negated")
				m.Not = &not
			}
			m.Any = some(genMatch(depth-1)).Draw(t, "any")
			m.All = some(genMatch(depth-1)).Draw(t, "all")
		}
		return m
	})
}

// What the API shows of a rule's conditions is what the file may say: read again,
// it is the same rule.
func TestTheLineThatShowsConditionsReadsBackAsThem(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := genMatch(2).Draw(t, "match")
		shown := matchOf(want)
		got := parse(t, withRule(when(&shown))).Route.Rules[0].Match
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%s\nreads back as %+v,\nwant          %+v", when(&shown), got, want)
		}
	})
}

func TestARuleWithoutConditionsShowsNone(t *testing.T) {
	if s := when(&route.Match{}); s != "" {
		t.Fatalf("shows %q", s)
	}
	rule := parse(t, withRule("")).Route.Rules[0]
	if !reflect.DeepEqual(matchOf(rule.Match), route.Match{}) {
		t.Fatalf("%+v", rule.Match)
	}
}

func TestConditionsAreShownInTheOrderOfTheDocumentation(t *testing.T) {
	m := matchOf(parse(t, withRule(`port: [53, 8000-9000], network: udp, not: {ip: 10.0.0.0/8}, any: [{inbound: lan}, {source: "fd00::/8"}]`)).Route.Rules[0].Match)
	want := `network: [udp], port: [53, 8000-9000], not: {ip: [10.0.0.0/8]}, any: [{inbound: [lan]}, {source: ["fd00::/8"]}]`
	if got := when(&m); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// Each field of a rule and of its conditions has to reach the plane: a new one
// that conversion forgets fails here.
func TestEveryFieldOfARuleReachesThePlane(t *testing.T) {
	rule := config.Rule{
		Name: "name", Outbound: "out", Pin: true, Record: true, AllowHost: true,
		Match: config.Match{
			Inbound: []string{"lan"}, Network: []flow.Network{flow.TCP},
			Source: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, IP: []netip.Prefix{netip.MustParsePrefix("fd00::/8")},
			SourcePort: []config.PortRange{{From: 1, To: 2}}, Port: []config.PortRange{{From: 3, To: 4}},
			User: []string{"user"}, UserGroup: []string{"group"}, UserState: []string{"active"},
			Device: []flow.DeviceSet{{MAC: "3c:22:fb:aa:bb:cc"}},
			Not:    &config.Match{Inbound: []string{"not"}},
			Any:    []config.Match{{Inbound: []string{"any"}}}, All: []config.Match{{Inbound: []string{"all"}}},
		},
	}
	if name := unset(reflect.ValueOf(rule)); name != "" {
		t.Fatalf("this test does not know %s", name)
	}
	spec := specOf(config.Route{Rules: []config.Rule{rule}, Default: "direct"})
	if spec.Default != "direct" || len(spec.Rules) != 1 {
		t.Fatalf("%+v", spec)
	}
	got := spec.Rules[0]
	if name := unset(reflect.ValueOf(got)); name != "" {
		t.Fatalf("%s was lost", name)
	}
	if got.Match.Port[0] != (route.PortRange{From: 3, To: 4}) || got.Match.SourcePort[0] != (route.PortRange{From: 1, To: 2}) ||
		got.Match.Not.Inbound[0] != "not" || got.Match.Any[0].Inbound[0] != "any" || got.Match.All[0].Inbound[0] != "all" ||
		got.Match.Source[0] != rule.Match.Source[0] || got.Match.IP[0] != rule.Match.IP[0] {
		t.Fatalf("%+v", got)
	}
}

// unset names the first field of a struct, or of the Match in it, that is zero.
func unset(v reflect.Value) string {
	for i := range v.NumField() {
		f, name := v.Field(i), v.Type().Field(i).Name
		if f.IsZero() {
			return fmt.Sprintf("%s.%s", v.Type(), name)
		}
		if name == "Match" {
			if inner := unset(f); inner != "" {
				return inner
			}
		}
	}
	return ""
}
