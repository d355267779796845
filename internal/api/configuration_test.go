package api_test

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/track"
)

// post sends a configuration with an If-Match header ("" sends none).
func (f *fixture) post(path, text, match string) (*http.Response, string) {
	return f.ask("admin", "POST", path, func(r *http.Request) {
		r.Body = io.NopCloser(strings.NewReader(text))
		r.Header.Set("Content-Type", "text/yaml")
		if match != "" {
			r.Header.Set("If-Match", match)
		}
	})
}

func TestAnApplyNeedsTheRunningConfigurationsTag(t *testing.T) {
	f := start(t, nil)
	text, etag, err := f.unix.Config(f.within())
	if err != nil || text != "version: 1\n" || etag != `"ex"` {
		t.Fatalf("config %q, etag %s, %v", text, etag, err)
	}
	resp, body := f.post("/v1/config", "version: 1 # new\n", "")
	f.wantProblem(resp, body, 428, "If-Match is needed")
	for _, tag := range []string{`"old"`, `W/"ex"`, "ex", `"other", "old"`} {
		resp, body = f.post("/v1/config", "version: 1 # new\n", tag)
		f.wantProblem(resp, body, 412, "changed meanwhile")
	}
	applied, err := f.unix.Apply(f.within(), "version: 1 # new\n", etag)
	if err != nil || applied.Epoch != 2 || applied.ETag != "exx" {
		t.Fatalf("applied %+v, %v", applied, err)
	}
	if _, err = f.unix.Apply(f.within(), "version: 1 # newer\n", etag); statusOf(err) != 412 {
		t.Errorf("the old tag again: %v", err)
	}
	if text, etag, _ = f.unix.Config(f.within()); text != "version: 1 # new\n" || etag != `"exx"` {
		t.Errorf("config %q, etag %s", text, etag)
	}
	for _, tag := range []string{"*", `"old", "exxx"`} {
		if resp, body = f.post("/v1/config", "version: 1\n", tag); resp.StatusCode != 200 || resp.Header.Get("ETag") == "" {
			t.Errorf("If-Match %s: %d %s", tag, resp.StatusCode, body)
		}
	}
}

func TestABadConfigurationIsRefusedWithEachMistake(t *testing.T) {
	f := start(t, nil)
	for _, path := range []string{"/v1/config", "/v1/config/check"} {
		resp, body := f.post(path, "bad", "*")
		f.wantProblem(resp, body, 422, "gw.yaml:3:5: route.rules[0].outbound")
		var p api.Problem
		if err := json.Unmarshal([]byte(body), &p); err != nil || len(p.Errors) != 2 || !strings.HasPrefix(p.Errors[1], "gw.yaml:9:1") {
			t.Errorf("%s: %s", path, body)
		}
		resp, body = f.post(path, "clash", "*")
		f.wantProblem(resp, body, 409, "device gw0 is in use")
	}
	if text, _ := f.gateway.Config(); text != "version: 1\n" {
		t.Errorf("a refused text runs: %q", text)
	}
}

func TestACheckChangesNothing(t *testing.T) {
	f := start(t, nil)
	if err := f.unix.Check(f.within(), "version: 1 # new\n"); err != nil {
		t.Fatal(err)
	}
	if text, etag := f.gateway.Config(); text != "version: 1\n" || etag != "ex" {
		t.Errorf("config %q, etag %s", text, etag)
	}
}

func TestAReloadReadsTheFileAgain(t *testing.T) {
	f := start(t, nil)
	if _, err := f.unix.Reload(f.within()); err != nil || f.gateway.reloads != 1 {
		t.Errorf("%d reloads, %v", f.gateway.reloads, err)
	}
}

func TestStatusAndListsHaveTheFieldsOfTheContract(t *testing.T) {
	f := start(t, nil)
	f.open(nil)
	f.drops.Add(0, 5)
	for path, fields := range map[string][]string{
		"/v1/status": {
			`"version":"1.2.3"`, `"uptime_s":`, `"epoch":1`, `"inbounds":[{"tag":"lan","type":"tun","device":"gw0","mtu":1500,"addresses":[]}]`,
			`"flows":1`, `"associations":3`, `"memory":{"rss":`, `"drops":{`, `"malformed":5`, `"warnings":[]`, `"outbounds":[{`,
		},
		"/v1/outbounds": {
			`{"outbounds":[{"tag":"direct","version":2,"type":"direct","healthy":null,"flows":1,"latency_ms":null,"last_error":"dial direct 203.0.113.5:443: network is unreachable","draining":[{"version":1,"flows":4}]}`,
			`"tag":"reject"`, `"draining":[]`,
		},
		"/v1/rules": {`{"rules":[{"rule":0,"name":"web","when":"{port: 443}","outbound":"direct","hits":7},{"rule":null,"outbound":"direct","hits":1}]}`},
		"/healthz":  {"ok\n"},
	} {
		resp, body := f.ask("read", "GET", path, nil)
		for _, field := range fields {
			if !strings.Contains(body, field) {
				t.Errorf("%s: %d %s lacks %s", path, resp.StatusCode, body, field)
			}
		}
	}
}

func TestMetricsNameTheDNSServiceAndEachCauseOfDrops(t *testing.T) {
	f := start(t, nil)
	f.open(nil).Moved(flow.Up, 10)
	f.open(func(m *track.Meta) { m.Outbound = "" }).Moved(flow.Down, 20)
	f.drops.Add(flow.DropTTL, 3)
	f.tracker.Final()
	resp, body := f.ask("read", "GET", "/metrics", nil)
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain; version=0.0.4") {
		t.Errorf("content type %q", resp.Header.Get("Content-Type"))
	}
	lines := strings.Split(strings.TrimSpace(body), "\n")
	for _, want := range []string{
		`gatewayd_bytes_total{direction="up"} 10`, `gatewayd_bytes_total{direction="down"} 20`, "gatewayd_flows 2", "gatewayd_epoch 1",
		`gatewayd_outbound_bytes_total{outbound="dns",direction="down"} 20`, `gatewayd_outbound_flows{outbound="direct"} 1`,
		`gatewayd_inbound_flows{inbound="lan"} 2`, `gatewayd_drops_total{cause="ttl"} 3`, `gatewayd_drops_total{cause="malformed"} 0`,
		"gatewayd_associations 3", "# TYPE gatewayd_drops_total counter",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %s", want)
		}
	}
	checkExposition(t, lines)
}

// checkExposition holds the text to what scrapers demand: each family is declared
// once, directly before its samples, and has our prefix.
func checkExposition(t *testing.T, lines []string) {
	t.Helper()
	declared := map[string]bool{}
	family := ""
	for _, line := range lines {
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			family, _, _ = strings.Cut(rest, " ")
			if declared[family] || !strings.HasPrefix(family, "gatewayd_") {
				t.Errorf("family %s", family)
			}
			declared[family] = true
		} else if !strings.HasPrefix(line, "# HELP ") {
			if name := line[:strings.IndexAny(line, "{ ")]; name != family {
				t.Errorf("%s among the samples of %s", line, family)
			}
		}
	}
}

func TestLabelsAreEscaped(t *testing.T) {
	if got, want := api.Labelled("m", "a", "x\"y\\z\n"), `m{a="x\"y\\z\n"}`; got != want {
		t.Errorf("%s: want %s", got, want)
	}
}
