package api

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"gatewayd/track"
)

// exposition writes metrics in the Prometheus text format, a family at a time.
type exposition struct {
	bytes.Buffer
}

// family begins a metric; its samples follow.
func (e *exposition) family(name, kind, help string) {
	fmt.Fprintf(e, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

// gauge is a family with one sample.
func (e *exposition) gauge(name, help string, v float64) {
	e.family(name, "gauge", help)
	metrics.WriteGaugeFloat64(e, name, v)
}

// counter is a family with one sample that only grows.
func (e *exposition) counter(name, help string, v uint64) {
	e.family(name, "counter", help)
	metrics.WriteCounterUint64(e, name, v)
}

var labelEscape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// series is a name with labels, given as name, value, name, value, …
func series(name string, labels ...string) string {
	var b strings.Builder
	b.WriteString(name)
	for i := 0; i+1 < len(labels); i += 2 {
		sep := byte(',')
		if i == 0 {
			sep = '{'
		}
		b.WriteByte(sep)
		b.WriteString(labels[i] + `="` + labelEscape.Replace(labels[i+1]) + `"`)
	}
	b.WriteByte('}')
	return b.String()
}

// metrics answers what Prometheus scrapes. The counters of bytes are those of the
// last tick, so that they agree with the rates beside them.
func (s *Server) metrics(w http.ResponseWriter, r *http.Request) error {
	var e exposition
	st := s.opt.Gateway.Status()
	s.processMetrics(&e, &st)
	snap := s.opt.Tracker.Snapshot()
	trafficMetrics(&e, snap)
	tagMetrics(&e, "inbound", snap.Inbounds)
	tagMetrics(&e, "outbound", snap.Outbounds)
	s.dropMetrics(&e)
	s.eventMetrics(&e, &st)
	s.userMetrics(&e, r, &st)
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write(e.Bytes()) // whoever asked is gone
	return nil
}

func (s *Server) processMetrics(e *exposition, st *Status) {
	e.family("gatewayd_build_info", "gauge", "The running program; always 1.")
	metrics.WriteGaugeUint64(e, series("gatewayd_build_info", "version", s.opt.Version, "go", runtime.Version(), "arch", runtime.GOARCH), 1)
	e.gauge("gatewayd_uptime_seconds", "Seconds since the start.", time.Since(s.started).Seconds())
	m := st.Memory
	readMemory(&m)
	e.family("gatewayd_memory_bytes", "gauge", "Memory of the process by kind.")
	for _, kind := range []struct {
		name  string
		bytes uint64
	}{{"rss", m.RSS}, {"heap", m.Heap}, {"stacks", m.Stacks}, {"runtime", m.Runtime}, {"budget", m.Budget}, {"used", m.Used}} {
		metrics.WriteGaugeUint64(e, series("gatewayd_memory_bytes", "kind", kind.name), kind.bytes)
	}
	e.family("gatewayd_memory_level", "gauge", "How short memory is: 1 for the level that holds, 0 for the others.")
	for _, level := range MemoryLevels {
		holds := uint64(0)
		if level == m.Level {
			holds = 1
		}
		metrics.WriteGaugeUint64(e, series("gatewayd_memory_level", "level", level), holds)
	}
	e.gauge("gatewayd_goroutines", "Goroutines of the process.", float64(m.Goroutines))
	e.gauge("gatewayd_api_streams", "Open event streams of the API.", float64(len(s.streams)))
	e.gauge("gatewayd_epoch", "Epoch of the routing plane; it grows by one per apply.", float64(st.Epoch))
	e.gauge("gatewayd_associations", "Live UDP associations.", float64(st.Associations))
	e.gauge("gatewayd_warnings", "Warnings that the status shows.", float64(len(st.Warnings)))
	e.gauge("gatewayd_flows", "Live flows, now.", float64(s.opt.Tracker.Live()))
	opened, closed := s.opt.Tracker.Counts()
	e.counter("gatewayd_flows_opened_total", "Flows that opened.", opened)
	e.counter("gatewayd_flows_closed_total", "Flows that closed.", closed)
}

func trafficMetrics(e *exposition, snap *track.Snapshot) {
	e.counter("gatewayd_ticks_total", "Ticks of the sampler.", snap.Tick)
	e.gauge("gatewayd_tick_interval_seconds", "Seconds between the last two ticks; what is over the configured interval is lag.", snap.Interval.Seconds())
	e.gauge("gatewayd_tick_duration_seconds", "Seconds that the last tick took.", snap.Took.Seconds())
	e.family("gatewayd_bytes_total", "counter", "Payload bytes of all flows; up is what their openers sent.")
	metrics.WriteCounterUint64(e, series("gatewayd_bytes_total", "direction", "up"), snap.Total.Up)
	metrics.WriteCounterUint64(e, series("gatewayd_bytes_total", "direction", "down"), snap.Total.Down)
	e.family("gatewayd_bytes_per_second", "gauge", "Payload bytes per second over the last tick.")
	metrics.WriteGaugeUint64(e, series("gatewayd_bytes_per_second", "direction", "up"), snap.Total.UpRate)
	metrics.WriteGaugeUint64(e, series("gatewayd_bytes_per_second", "direction", "down"), snap.Total.DownRate)
}

// tagMetrics are the families by inbound or by outbound.
func tagMetrics(e *exposition, kind string, byTag map[string]track.Stats) {
	tags := slices.Sorted(maps.Keys(byTag))
	total, rate, flows := "gatewayd_"+kind+"_bytes_total", "gatewayd_"+kind+"_bytes_per_second", "gatewayd_"+kind+"_flows"
	e.family(total, "counter", "Payload bytes by "+kind+".")
	for _, tag := range tags {
		metrics.WriteCounterUint64(e, series(total, kind, shownTag(tag), "direction", "up"), byTag[tag].Up)
		metrics.WriteCounterUint64(e, series(total, kind, shownTag(tag), "direction", "down"), byTag[tag].Down)
	}
	e.family(rate, "gauge", "Payload bytes per second over the last tick by "+kind+".")
	for _, tag := range tags {
		metrics.WriteGaugeUint64(e, series(rate, kind, shownTag(tag), "direction", "up"), byTag[tag].UpRate)
		metrics.WriteGaugeUint64(e, series(rate, kind, shownTag(tag), "direction", "down"), byTag[tag].DownRate)
	}
	e.family(flows, "gauge", "Live flows at the last tick by "+kind+".")
	for _, tag := range tags {
		metrics.WriteGaugeUint64(e, series(flows, kind, shownTag(tag)), uint64(byTag[tag].Flows))
	}
}

// shownTag names the DNS service, whose tag is empty.
func shownTag(tag string) string {
	if tag == "" {
		return "dns"
	}
	return tag
}

func (s *Server) dropMetrics(e *exposition) {
	e.family("gatewayd_drops_total", "counter", "Packets, datagrams and connection attempts that were dropped, by cause.")
	drops := s.opt.Drops.Map()
	for _, cause := range slices.Sorted(maps.Keys(drops)) {
		metrics.WriteCounterUint64(e, series("gatewayd_drops_total", "cause", cause), drops[cause])
	}
}

// eventMetrics tell how well whoever watches keeps up.
func (s *Server) eventMetrics(e *exposition, st *Status) {
	e.counter("gatewayd_events_missed_total", "Events that readers of streams missed, and were told so.", s.watching.missed.Load())
	e.gauge("gatewayd_events_lag", "Events that wait for the slowest reader of a stream.", float64(s.watching.behind()))
	e.counter("gatewayd_blocked_events_suppressed_total", "Events about refused flows that were over their rate.", st.BlockedSuppressed)
	if l := st.FlowLog; l != nil {
		e.counter("gatewayd_flow_log_written_total", "Closed flows that were written to the flow log.", l.Written)
		e.counter("gatewayd_flow_log_dropped_total", "Closed flows that are missing in the flow log.", l.Dropped)
	}
}
