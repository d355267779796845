package gateway

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/config"
	"gatewayd/internal/epoll"
	"gatewayd/internal/exitcode"
	"gatewayd/route"
)

const base = `version: 1
tun: [{tag: lan, device: gw0}]
outbounds: [{tag: lte, type: direct, interface: wwan0, drain: keep}]
route: {default: lte}
`

func TestWhatNeedsARestartIsNamed(t *testing.T) {
	for _, c := range []struct{ name, old, next, want string }{
		{"nothing", "", "", ""},
		{"a rule", "default: lte", "default: lte, rules: [{port: 25, outbound: reject}]", ""},
		{"an outbound", "wwan0", "wwan1", ""},
		{"the log's level", "version: 1", "version: 1\nlog: {level: debug}", ""},
		{"the flow log", "version: 1", "version: 1\nevents: {flow_log: {file: /x}}", ""},
		{"the log's form", "version: 1", "version: 1\nlog: {format: json}", "log.format"},
		{"a device", "gw0", "gw1", "tun"},
		{"a device's MTU", "device: gw0", "device: gw0, mtu: 1400", "tun"},
		{"a listener", "version: 1", "version: 1\napi: {listen: []}", "api"},
		{"a timeout", "version: 1", "version: 1\ntimeouts: {udp: {ports: {99: 1s}}}", "timeouts"},
		{"a limit", "version: 1", "version: 1\nlimits: {per_source: {dials: 3}}", "limits"},
		{"privacy", "version: 1", "version: 1\nprivacy: none", "privacy"},
		{"profile", "version: 1", "version: 1\nprofile: tiny", "profile"},
		{"sample", "version: 1", "version: 1\nsample: 2s", "sample"},
		{"sweep", "version: 1", "version: 1\nsweep: 2s", "sweep"},
		{"state_dir", "version: 1", "version: 1\nstate_dir: /tmp/x", "state_dir"},
		{"two at once", "version: 1\ntun: [{tag: lan, device: gw0}]", "version: 1\nsweep: 2s\ntun: [{tag: lan, device: gw7}]", "tun, sweep"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := needsRestart(parse(t, base), parse(t, strings.Replace(base, c.old, c.next, 1)))
			if c.want == "" {
				if err != nil {
					t.Fatalf("refused: %v", err)
				}
				return
			}
			if err == nil || !strings.HasPrefix(err.Error(), c.want+": ") {
				t.Fatalf("says %v, want %s", err, c.want)
			}
			if code := exitcode.Of(err); code != exitcode.Config {
				t.Fatalf("exit code %d", code)
			}
		})
	}
}

// A version is what its flows dial with. How it drains is not: whoever only edits
// that must not end what lives on it.
func TestOnlyWhatADefinitionDialsWithMakesANewVersion(t *testing.T) {
	for _, c := range []struct {
		name, old, next string
		changed         bool
	}{
		{"nothing", "", "", false},
		{"drain", "drain: keep", "drain: 10m", false},
		{"drain now", "drain: keep", "drain: now", false},
		{"the default route", "default: lte", "default: direct", false},
		{"UDP timeouts", "version: 1", "version: 1\ntimeouts: {udp: {one_way: 7s}}", false},
		{"interface", "wwan0", "wwan1", true},
		{"source", "drain: keep", "drain: keep, source: 192.0.2.1", true},
		{"source v6", "drain: keep", `drain: keep, source: "2001:db8::1"`, true},
		{"mark", "drain: keep", "drain: keep, mark: 7", true},
		{"family", "drain: keep", "drain: keep, family: ipv4", true},
		{"filtering", "drain: keep", "drain: keep, filtering: address-dependent", true},
		{"dial timeout", "version: 1", "version: 1\ntimeouts: {dial: 3s}", true},
		{"keepalive", "version: 1", "version: 1\ntimeouts: {tcp: {keepalive: {idle: 30s}}}", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newDefiner(t)
			before := g.apply1(t, parse(t, base))
			after := g.apply1(t, parse(t, strings.Replace(base, c.old, c.next, 1)))
			if changed := before["lte"] != after["lte"]; changed != c.changed {
				t.Fatalf("%s became %s", before["lte"], after["lte"])
			}
			for _, tag := range []string{"reject", "drop"} {
				if before[tag] != after[tag] {
					t.Errorf("%s became %s", before[tag], after[tag])
				}
			}
		})
	}
}

// definer is as much of a Gateway as definitions need.
type definer struct{ Gateway }

func newDefiner(t *testing.T) *definer {
	t.Helper()
	g := &definer{Gateway{log: slog.New(slog.DiscardHandler)}}
	var err error
	if g.poller, err = epoll.New(); err != nil {
		t.Fatal(err)
	}
	g.outbounds = route.NewOutbounds(func(*route.Version) {})
	t.Cleanup(func() {
		if err := errors.Join(g.outbounds.Close()); err != nil {
			t.Error(err)
		}
		g.poller.Close()
	})
	return g
}

// apply1 applies the outbounds of c and gives the current versions by tag.
func (g *definer) apply1(t *testing.T, c *config.Config) map[string]*route.Version {
	t.Helper()
	change, err := g.outbounds.Prepare(g.definitions(c))
	if err != nil {
		t.Fatal(err)
	}
	change.Commit()
	current := map[string]*route.Version{}
	for _, v := range g.outbounds.Current() {
		current[v.Tag()] = v
	}
	return current
}

func TestDrainsMeanWhatTheFileSays(t *testing.T) {
	g := newDefiner(t)
	for text, want := range map[string]route.Drain{
		"keep": {Keep: true},
		"now":  {},
		"10m":  {After: 10 * time.Minute},
	} {
		c := parse(t, strings.Replace(base, "drain: keep", "drain: "+text, 1))
		for _, d := range g.definitions(c) {
			if d.Tag == "lte" && d.Drain != want {
				t.Errorf("%s: %+v, want %+v", text, d.Drain, want)
			}
		}
	}
}

// Each choice of the configuration has to mean something to the outbound and the
// device: a value that is missing from a map would silently be the zero value.
func TestEveryChoiceOfTheConfigurationIsKnown(t *testing.T) {
	for _, family := range []string{"auto", "ipv4", "ipv6"} {
		parse(t, strings.Replace(base, "drain: keep", "family: "+family, 1))
		if _, ok := families[family]; !ok {
			t.Errorf("family %s", family)
		}
	}
	for _, filtering := range []string{"endpoint-independent", "address-dependent", "address-and-port-dependent"} {
		parse(t, strings.Replace(base, "drain: keep", "filtering: "+filtering, 1))
		if _, ok := filterings[filtering]; !ok {
			t.Errorf("filtering %s", filtering)
		}
	}
	for _, offload := range []string{"auto", "on", "off"} {
		parse(t, strings.Replace(base, "device: gw0", "device: gw0, offload: "+offload, 1))
		if _, ok := offloads[offload]; !ok {
			t.Errorf("offload %s", offload)
		}
	}
}
