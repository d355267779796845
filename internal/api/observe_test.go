package api_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/track"
)

func refused(m *track.Meta) {
	m.Outbound, m.Recorded, m.RuleName, m.Egress = "reject", true, "no-smtp", m.Source
	m.Dest.Domain, m.Dest.From = "mail.example", flow.FromSNI
}

func TestABlockedFlowIsToldWithoutIdAndCounters(t *testing.T) {
	f := start(t, nil)
	events := f.follow("/v1/connections/events", nil, "")
	all := f.follow("/v1/events", url.Values{"types": {"flow"}}, "")
	f.block(refused)
	ev := f.next(events)
	var got map[string]any
	if err := json.Unmarshal(ev.Data, &got); err != nil || ev.Name != "blocked" {
		t.Fatalf("%s %s: %v", ev.Name, ev.Data, err)
	}
	for _, field := range []string{"id", "up", "down", "killed", "ended", "reason"} {
		if v, there := got[field]; there {
			t.Errorf("%s is %v", field, v)
		}
	}
	for field, want := range map[string]any{
		"inbound": "lan", "network": "tcp", "source": "10.0.0.2:51234", "destination": "203.0.113.5:443", "domain": "mail.example",
		"outbound": "reject", "rule": 0.0, "rule_name": "no-smtp", "recorded": true,
	} {
		if got[field] != want {
			t.Errorf("%s is %v, want %v", field, got[field], want)
		}
	}
	if ev := f.next(all); ev.Name != "flow.blocked" || decode[api.Flow](t, ev.Data).ID != 0 || ev.ID == "" {
		t.Errorf("in the common stream: %s %s", ev.Name, ev.Data)
	}
}

// block announces a refused flow.
func (f *fixture) block(change func(*track.Meta)) {
	m := sample()
	change(&m)
	f.tracker.Block(m)
}

func TestStreamsHideWhatPrivacyHidesFromThoseBelowAdmin(t *testing.T) {
	f := start(t, func(o *api.Options) { o.Privacy = "none" })
	conn, lines := f.raw("/v1/events") // with the role read
	defer conn.Close()
	admin := f.follow("/v1/events", nil, "")
	f.events.Publish("user.near", map[string]string{"user": "alice"})
	f.block(func(m *track.Meta) { refused(m); m.Session = 3 })
	f.events.Publish("warning", "the end")
	if ev := f.next(admin); ev.Name != "user.near" {
		t.Errorf("administrators see %s", ev.Name)
	}
	shown := ""
	for !strings.Contains(shown, "the end") || !strings.Contains(shown, `"rule_name":"no-smtp"`) {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		shown += line
	}
	for _, secret := range []string{"alice", "user.near", "mail.example", "10.0.0.2", "203.0.113.5", `"session"`} {
		if strings.Contains(shown, secret) {
			t.Errorf("%s is shown in %s", secret, shown)
		}
	}
}

func TestClosedLinesAreTheClosedRingsRecords(t *testing.T) {
	for _, level := range []string{"full", "addresses", "none"} {
		f := start(t, func(o *api.Options) { o.Privacy = level })
		f.open(func(m *track.Meta) {
			m.User, m.UserName, m.Dest.Domain, m.Dest.From = 1, "alice", "example.org", flow.FromSNI
		}).Close(nil)
		line, err := api.ClosedLine(level)
		if err != nil {
			t.Fatal(err)
		}
		got, err := line(&f.tracker.Closed()[0])
		if err != nil || !strings.HasSuffix(string(got), "}\n") || strings.Count(string(got), "\n") != 1 {
			t.Fatalf("line %q, %v", got, err)
		}
		_, body := f.ask("admin", "GET", "/v1/connections/closed", nil)
		if want := `{"flows":[` + strings.TrimSpace(string(got)) + "]}\n"; body != want {
			t.Errorf("%s: the ring has %sthe line is %s", level, body, got)
		}
		f.stop()
	}
	if _, err := api.ClosedLine("some"); err == nil {
		t.Error("a level that does not exist is taken")
	}
}

// Whoever does not read costs the socket's buffers and one event, however much happens.
func TestReadersThatDoNotReadNeverGrowMemory(t *testing.T) {
	f := start(t, nil)
	f.server.SetTiming(time.Minute, time.Minute)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for range 20 {
		c, _ := f.raw("/v1/connections/events")
		defer c.Close()
	}
	churn := func(flows int) {
		for range flows {
			f.open(func(m *track.Meta) { m.RuleName = strings.Repeat("x", 1024) }).Close(nil)
		}
	}
	churn(5000) // the rings are full
	before := heap()
	churn(100_000)
	if grown := int64(heap()) - int64(before); grown > 4<<20 {
		t.Errorf("%d bytes more after 200,000 events that nobody read", grown)
	}
	f.await("the lag is in the metrics", func() bool {
		_, body := f.ask("read", "GET", "/metrics", nil)
		return !strings.Contains(body, "\ngatewayd_events_lag 0\n")
	})
}

func TestWhatAReaderMissedIsInTheMetrics(t *testing.T) {
	f := start(t, nil)
	c, lines := f.raw("/v1/connections/events")
	for range 30_000 {
		f.open(func(m *track.Meta) { m.RuleName = strings.Repeat("x", 1024) }).Close(nil)
	}
	untilLagged(t, c, lines)
	f.await("missed events are counted", func() bool {
		_, body := f.ask("read", "GET", "/metrics", nil)
		return strings.Contains(body, "gatewayd_events_missed_total") && !strings.Contains(body, "gatewayd_events_missed_total 0\n")
	})
}

// untilLagged reads a stream until it says that something was missed, then leaves it.
func untilLagged(t *testing.T, c net.Conn, lines *bufio.Reader) {
	t.Helper()
	defer c.Close()
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			if err != io.EOF {
				t.Fatal(err)
			}
			return
		}
		if line == "event: lagged\n" {
			return
		}
	}
}

func TestTheMetricsNameTheTickTheEventsAndTheFlowLog(t *testing.T) {
	f := start(t, nil)
	f.gateway.log = &api.FlowLog{File: "/x", Written: 3, Dropped: 4}
	f.open(nil).Close(nil)
	f.open(nil)
	f.tracker.Final()
	_, body := f.ask("read", "GET", "/metrics", nil)
	for _, want := range []string{
		"gatewayd_flows_opened_total 2", "gatewayd_flows_closed_total 1", "gatewayd_flows 1", "gatewayd_ticks_total 1",
		"gatewayd_tick_interval_seconds 0.", "gatewayd_tick_duration_seconds ", "gatewayd_events_lag 0", "gatewayd_events_missed_total 0",
		"gatewayd_blocked_events_suppressed_total 5", "gatewayd_flow_log_written_total 3", "gatewayd_flow_log_dropped_total 4",
	} {
		if !strings.Contains(body, "\n"+want) {
			t.Errorf("no %s in\n%s", want, body)
		}
	}
}
