package suite

import (
	"os"
	"slices"
	"strings"
	"testing"

	"gatewayd/internal/testnet"
)

func TestAConfigurationIsPostedOnlyByWhoSawTheRunningOne(t *testing.T) {
	open := reloadConfig("", "{port: 9, outbound: reject}")
	lab, g := reloadBed(t, open, 8)
	onDisk, err := os.ReadFile(g.Config)
	if err != nil {
		t.Fatal(err)
	}
	running := call(t, g, "GET", "/v1/config", "")
	etag := running.header.Get("ETag")
	if running.status != 200 || running.body != string(onDisk) || len(etag) < 3 || etag[0] != '"' {
		t.Fatalf("status %d, etag %s, text %q", running.status, etag, running.body)
	}
	closed := strings.Replace(running.body, "port: 9", "port: 8", 1)

	for _, tt := range []struct {
		name   string
		body   string
		match  []string
		status int
		detail string
	}{
		{"without If-Match", closed, nil, 428, "If-Match is needed"},
		{"of another time", closed, []string{"If-Match", `"stale"`}, 412, "read it again"},
		{"with a weak tag", closed, []string{"If-Match", "W/" + etag}, 412, "read it again"},
		{"with a mistake", strings.Replace(closed, "reject", "nowhere", 1), []string{"If-Match", etag}, 422, `no outbound "nowhere"`},
		{"with another device", strings.Replace(closed, "gw0", "gw7", 1), []string{"If-Match", etag}, 422, "tun: "},
		{"that is nothing", "", []string{"If-Match", etag}, 422, "version"},
	} {
		a := call(t, g, "POST", "/v1/config", tt.body, tt.match...)
		if p := a.problem(t); a.status != tt.status || !strings.Contains(p.Detail, tt.detail) {
			t.Errorf("%s: status %d, %s; want %d, %q", tt.name, a.status, a.body, tt.status, tt.detail)
		}
	}
	if s := g.API.Status(); s.Epoch != 1 || !connects(t, lab.Cli, hostPort(testnet.FarV4, 8)) {
		t.Errorf("epoch %d after refusals, or port 8 is closed", s.Epoch)
	}

	a := call(t, g, "POST", "/v1/config", closed, "If-Match", etag)
	next := a.header.Get("ETag")
	if a.status != 200 || next == etag || !strings.Contains(a.body, `"epoch":2`) {
		t.Fatalf("status %d, etag %s: %s", a.status, next, a.body)
	}
	if connects(t, lab.Cli, hostPort(testnet.FarV4, 8)) || connects(t, lab.Cli, hostPort(testnet.FarV6, 8)) {
		t.Error("the posted rules do not hold")
	}
	if now := call(t, g, "GET", "/v1/config", ""); now.body != closed || now.header.Get("ETag") != next {
		t.Errorf("running is %s %q", now.header.Get("ETag"), now.body)
	}
	if a := call(t, g, "POST", "/v1/config", running.body, "If-Match", etag); a.status != 412 {
		t.Errorf("the etag from before: status %d, want 412", a.status)
	}
	// The file was not written, and the next reload reads it.
	if now, err := os.ReadFile(g.Config); err != nil || string(now) != string(onDisk) {
		t.Errorf("the file became %q, %v", now, err)
	}
	reload(t, g, open, true)
	if now := call(t, g, "GET", "/v1/config", ""); now.body != running.body || now.header.Get("ETag") != etag {
		t.Errorf("after a reload %s is running: %q", now.header.Get("ETag"), now.body)
	}
	if !connects(t, lab.Cli, hostPort(testnet.FarV4, 8)) {
		t.Error("the file's rules do not hold")
	}
}

func TestCheckingAConfigurationTouchesNothing(t *testing.T) {
	good := reloadConfig("", "")
	_, g := reloadBed(t, good)
	text := call(t, g, "GET", "/v1/config", "").body
	if a := call(t, g, "POST", "/v1/config/check", strings.Replace(text, "rules: []", "rules: [{port: 8, outbound: drop}]", 1)); a.status != 204 {
		t.Errorf("a good one: status %d: %s", a.status, a.body)
	}
	for _, bad := range []string{strings.Replace(text, "gw0", "gw1", 1), text + "colour: red\n"} {
		if a := call(t, g, "POST", "/v1/config/check", bad); a.status != 422 {
			t.Errorf("a bad one: status %d: %s", a.status, a.body)
		}
	}
	if now := call(t, g, "GET", "/v1/config", ""); now.body != text || g.API.Status().Epoch != 1 {
		t.Errorf("running is %q", now.body)
	}
}

func TestASubscriberHearsOfEveryFlowThatTheShutdownEnds(t *testing.T) {
	lab, g := reloadBed(t, reloadConfig("", ""), 7)
	events := g.API.Events(t.Context(), "/v1/connections/events")
	c := newChatter(t)
	for range 5 {
		for _, host := range []string{testnet.FarV4, testnet.FarV6} {
			c.talk(lab.Cli, "udp", hostPort(host, 7))
		}
	}
	c.end()
	flows := g.API.Flows("")
	if code := g.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	closed := map[uint64]testnet.FlowRecord{}
	for e := range events { // ends with the gateway
		if f, err := e.Flow(); err == nil && e.Type == "closed" {
			closed[f.ID] = f
		}
	}
	if len(flows) != 10 {
		t.Errorf("%d flows, want 10", len(flows))
	}
	for _, f := range flows {
		if end := closed[f.ID]; end.Reason != "shutdown" || end.Up != f.Up || end.Down != f.Down || end.Up == 0 || end.Up != end.Down {
			t.Errorf("flow#%d, %d up, %d down, closed as %q with %d, %d", f.ID, f.Up, f.Down, end.Reason, end.Up, end.Down)
		}
	}
}

func TestTwoGatewaysShareAHost(t *testing.T) {
	lab, first := reloadBed(t, reloadConfig("", ""), 7)
	second := lab.Start(testnet.GatewayOptions{Config: strings.Replace(reloadConfig("", ""), "gw0", "gw1", 1)})
	addresses := func(g *testnet.Gateway) []string {
		var s struct {
			Inbounds []struct{ Addresses []string }
		}
		g.API.Get("/v1/status", &s)
		return s.Inbounds[0].Addresses
	}
	a, b := addresses(first), addresses(second)
	if len(a) != 2 || len(b) != 2 || a[0] == b[0] || a[1] == b[1] {
		t.Errorf("addresses %v and %v", a, b)
	}
	carries := func(g *testnet.Gateway) {
		t.Helper()
		c, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(testnet.FarV6, 7))
		if err == nil {
			defer c.Close()
			err = exchangeWord(c, "hello")
		}
		if err != nil || !slices.ContainsFunc(g.API.Flows(""), func(f testnet.FlowRecord) bool { return f.Source == c.LocalAddr().String() }) {
			t.Errorf("%v; flows %+v", err, g.API.Flows(""))
		}
	}
	carries(first)
	lab.Undivert()
	lab.Divert("gw1")
	carries(second)
	if code := first.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	carries(second)
}
