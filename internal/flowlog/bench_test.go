package flowlog

import (
	"context"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/internal/api"
	"gatewayd/track"
)

// What an open and a close cost, alone, with a flow log that keeps to its rate, and
// with one that writes every line.
func BenchmarkOpenAndClose(b *testing.B) {
	for _, c := range []struct {
		name string
		log  bool
		rate admit.Rate
	}{{"alone", false, lineRate}, {"logged", true, lineRate}, {"every line", true, admit.Rate{}}} {
		b.Run(c.name, func(b *testing.B) {
			tr, err := track.New(track.Options{Interval: time.Second})
			if err != nil {
				b.Fatal(err)
			}
			line, err := api.ClosedLine("full")
			if err != nil {
				b.Fatal(err)
			}
			l := New(Options{Tracker: tr, Line: line, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
			if c.log {
				l.Use(Target{filepath.Join(b.TempDir(), "f"), 64 << 20, 1})
			}
			ctx, cancel := context.WithCancel(context.Background())
			var running sync.WaitGroup
			running.Go(func() { _ = l.run(ctx, c.rate) })
			m := track.Meta{
				Inbound: "lan", Network: flow.TCP, Source: netip.MustParseAddrPort("10.0.0.2:51234"), Outbound: "direct", Version: 1,
				Dest: flow.Destination{Addr: netip.MustParseAddrPort("203.0.113.5:443")}, Egress: netip.MustParseAddrPort("192.0.2.2:40112"),
			}
			b.ReportAllocs()
			for b.Loop() {
				tr.Open(m, nil).Close(nil)
			}
			b.StopTimer()
			cancel()
			running.Wait()
			s := l.State()
			if n := s.Written + s.Dropped; c.log && n > 0 {
				b.ReportMetric(float64(s.Written)/float64(n), "written")
			}
		})
	}
}
