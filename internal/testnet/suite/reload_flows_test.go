package suite

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestFiftyReloadsUnderFiftyFlowsCutNothingAndLeakNothing(t *testing.T) {
	const (
		reloads = 50
		pause   = 200 * time.Millisecond
		steady  = "{tag: steady, type: direct}"
	)
	// Odd configurations refuse port 8 and mark what leaves through `changing`
	// differently; flows to port 7 are on an outbound that never changes.
	config := func(i int) string {
		rules := "{port: 7, outbound: steady}, {port: 9, outbound: changing}"
		if i%2 == 1 {
			rules = "{name: no, port: 8, outbound: reject}, " + rules
		}
		return reloadConfig(fmt.Sprintf("%s, {tag: changing, type: direct, mark: %d}", steady, 1+i), rules)
	}
	lab, g := reloadBed(t, config(0), 7, 8, 9)
	c := newChatter(t)
	for i := range 50 {
		network, host, port := "tcp", testnet.FarV4, 7
		if i%2 == 1 {
			network = "udp"
		}
		if i%4 >= 2 {
			host = testnet.FarV6
		}
		if network == "tcp" && i%10 == 0 {
			port = 9 // on the outbound that changes: its versions drain by `keep`
		}
		c.talk(lab.Cli, network, hostPort(host, port))
	}
	ids := func() (all []uint64) {
		for _, f := range g.API.Flows("") {
			if !strings.HasSuffix(f.Destination, ":8") {
				all = append(all, f.ID)
			}
		}
		return all
	}
	before, most := ids(), 0
	if len(before) != 50 {
		t.Fatalf("%d flows, want 50", len(before))
	}
	baseline, descriptors := goroutines(t, g), g.Process().FDs

	tick := time.NewTicker(pause)
	defer tick.Stop()
	for i := range reloads {
		reload(t, g, config(i+1), i%5 == 0)
		if open := connects(t, lab.Cli, hostPort(testnet.FarV4, 8)); open != (i%2 == 1) {
			t.Fatalf("reload %d: a connection to port 8 succeeds: %v", i, open)
		}
		most = max(most, goroutines(t, g))
		<-tick.C
	}
	if after := ids(); !slices.Equal(after, before) {
		t.Errorf("flows %v became %v", before, after)
	}
	for _, f := range g.API.Closed() {
		if slices.Contains(before, f.ID) {
			t.Errorf("flow %+v was cut", f)
		}
	}
	// What asks, and a connection that is just closing, may add a few for a moment.
	if most > baseline+12 {
		t.Errorf("up to %d goroutines, %d before", most, baseline)
	}
	testnet.Until(t, udpPatience, "descriptors are where they were", func() bool { return g.Process().FDs <= descriptors+1 })
	testnet.Until(t, udpPatience, "goroutines are where they were", func() bool { return goroutines(t, g) <= baseline+2 })
	if o := outboundOf(t, g, "steady"); o.Version != 1 || o.Flows != 45 || len(o.Draining) != 0 {
		t.Errorf("the outbound that never changed: %+v", o)
	}
	if o := outboundOf(t, g, "changing"); o.Version != reloads+1 || len(o.Draining) != 1 || o.Draining[0].Version != 1 || o.Draining[0].Flows != 5 {
		t.Errorf("the outbound that changed: %+v", o)
	}
	if c.turns.Load() < 50*reloads {
		t.Errorf("only %d words were exchanged meanwhile", c.turns.Load())
	}
	c.end()
	testnet.Until(t, udpPatience, "the old version is gone with its flows", func() bool { return len(outboundOf(t, g, "changing").Draining) == 0 })
}

func TestABrokenFileKeepsTheOldPlaneAndSaysWhy(t *testing.T) {
	good := reloadConfig("{tag: wan, type: direct}", "{name: no, port: 8, outbound: reject}, {port: 7, outbound: wan}")
	lab, g := reloadBed(t, good, 7, 8)
	c := newChatter(t)
	c.talk(lab.Cli, "tcp", hostPort(testnet.FarV4, 7))
	c.talk(lab.Cli, "udp", hostPort(testnet.FarV6, 7))
	before := g.API.Flows("")
	// All that comes before the mistake is new and good: none of it may be taken.
	broken := reloadConfig("{tag: wan, type: direct, mark: 9}, {tag: more, type: direct}", "{port: 7, outbound: reject}, {port: 9, outbound: nowhere}")
	const place, why = "gatewayd.yaml:7:66: route.rules[1].outbound", `no outbound \"nowhere\"`

	g.WriteConfig(broken)
	g.Signal(syscall.SIGHUP)
	if line := g.WaitLog(udpPatience, "configuration refused"); !strings.Contains(line, place) || !strings.Contains(line, why) || !strings.Contains(line, "level=ERROR") {
		t.Errorf("it logged %q", line)
	}
	answer := call(t, g, "POST", "/v1/config/reload", "")
	if p := answer.problem(t); answer.status != 422 || len(p.Errors) != 1 || !strings.Contains(p.Errors[0], place) {
		t.Errorf("status %d: %s", answer.status, answer.body)
	}
	out, err := g.CLI("reload")
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(out, place) {
		t.Errorf("the command says %q, %v", out, err)
	}
	if s := g.API.Status(); s.Epoch != 1 {
		t.Errorf("epoch %d", s.Epoch)
	}
	if o := outboundOf(t, g, "wan"); o.Version != 1 || outboundOf(t, g, "more").Tag != "" {
		t.Errorf("outbounds %+v", o)
	}
	if connects(t, lab.Cli, hostPort(testnet.FarV4, 8)) || !connects(t, lab.Cli, hostPort(testnet.FarV4, 7)) {
		t.Error("the old rules do not hold")
	}
	for _, f := range before {
		if !slices.ContainsFunc(g.API.Flows(""), func(now testnet.FlowRecord) bool { return now.ID == f.ID }) {
			t.Errorf("flow#%d is gone", f.ID)
		}
	}
	reload(t, g, good, true) // unchanged, and the mistake is forgotten
	if o := outboundOf(t, g, "wan"); o.Version != 1 {
		t.Errorf("an unchanged outbound became version %d", o.Version)
	}
}

func TestAChangedOutboundDrainsAsItIsTold(t *testing.T) {
	const period = 1500 * time.Millisecond
	for _, tt := range []struct {
		drain    string
		atLeast  time.Duration
		outlives bool
	}{
		{"keep", 0, true},
		{"now", 0, false},
		{period.String(), period, false},
	} {
		t.Run(tt.drain, func(t *testing.T) {
			config := func(mark int) string {
				return reloadConfig(fmt.Sprintf("{tag: wan, type: direct, mark: %d, drain: %s}", mark, tt.drain), "{outbound: wan}")
			}
			lab, g := reloadBed(t, config(1), 7)
			tcp, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(testnet.FarV4, 7))
			if err != nil {
				t.Fatal(err)
			}
			defer tcp.Close()
			udp, err := lab.Cli.Dial(t.Context(), "udp", hostPort(testnet.FarV6, 7))
			if err != nil {
				t.Fatal(err)
			}
			defer udp.Close()
			if err := errors.Join(exchangeWord(tcp, "before"), exchangeWord(udp, "before")); err != nil {
				t.Fatal(err)
			}
			old := g.API.Flows("outbound=wan")
			begin := time.Now()
			reload(t, g, config(2), false)
			if tt.outlives || tt.atLeast > 0 {
				if err := exchangeWord(tcp, "while it drains"); err != nil {
					t.Error(err)
				}
				if o := outboundOf(t, g, "wan"); o.Version != 2 || len(o.Draining) != 1 || o.Draining[0].Version != 1 || o.Draining[0].Flows != 2 {
					t.Errorf("while it drains: %+v", o)
				}
			}
			// New flows are on the new version; so is UDP of an old socket.
			if err := exchangeWord(udp, "after"); err != nil {
				t.Error(err)
			}
			if o := outboundOf(t, g, "wan"); o.Version != 2 || o.Flows != 1 {
				t.Errorf("after the reload: %+v", o)
			}
			if tt.outlives {
				time.Sleep(300 * time.Millisecond)
				if err := exchangeWord(tcp, "still there"); err != nil {
					t.Error(err)
				}
				return
			}
			if _, err := io.ReadAll(tcp); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the drained connection ended with %v, want a reset", err)
			}
			if lived := time.Since(begin); lived < tt.atLeast || lived > tt.atLeast+2*time.Second {
				t.Errorf("it lived for %v, want %v", lived, tt.atLeast)
			}
			for _, f := range old {
				if closed := closedFlow(t, g, f.ID); closed.Reason != "drained" || closed.OutboundVersion != 1 {
					t.Errorf("flow#%d of wan@v%d closed as %s", f.ID, closed.OutboundVersion, closed.Reason)
				}
			}
			testnet.Until(t, udpPatience, "the old version is gone", func() bool { return len(outboundOf(t, g, "wan").Draining) == 0 })
		})
	}
}

func TestWhatARunningGatewayDoesNotChangeIsRefusedByName(t *testing.T) {
	base := reloadConfig("", "")
	lab, g := reloadBed(t, base, 7)
	c := newChatter(t)
	c.talk(lab.Cli, "tcp", hostPort(testnet.FarV4, 7))
	for _, tt := range []struct{ from, to, name string }{
		{"device: gw0", "device: gw0, mtu: 1400", "tun"},
		{"device: gw0}", "device: gw0}, {tag: more, device: gw1}", "tun"},
		{"sample: 100ms", "sample: 200ms", "sample"},
		{"{listen: \"$API\"}", "{listen: \"$API\", hosts: [gw.example.net]}", "api"},
		{"sweep: 50ms", "sweep: 50ms\ntimeouts: {dial: 3s}", "timeouts"},
	} {
		g.WriteConfig(strings.Replace(base, tt.from, tt.to, 1))
		a := call(t, g, "POST", "/v1/config/reload", "")
		if p := a.problem(t); a.status != 422 || !strings.HasPrefix(p.Detail, tt.name+": ") || !strings.Contains(p.Detail, "restart gatewayd") {
			t.Errorf("%s: status %d: %s", tt.to, a.status, a.body)
		}
	}
	if s := g.API.Status(); s.Epoch != 1 {
		t.Errorf("epoch %d", s.Epoch)
	}
	reload(t, g, base, true)
}
