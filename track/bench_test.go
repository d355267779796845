package track

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"gatewayd/flow"
)

// populated is a tracker with benchFlows live flows of so many users, 0 for none.
func populated(b *testing.B, users int) (*Tracker, []*Flow) {
	t := newTracker(b, Options{})
	flows := make([]*Flow, benchFlows)
	for i := range flows {
		m := over("lan", "direct", 0)
		if users > 0 {
			m.User = flow.UserKey(1 + i%users)
		}
		flows[i] = t.Open(m, nil)
	}
	t.Final()
	return t, flows
}

// BenchmarkOpenClose is a whole life of a flow, with its record among the closed ones,
// while benchFlows are live, and beside ticks without a pause.
func BenchmarkOpenClose(b *testing.B) {
	for _, beside := range []string{"idle", "scans"} {
		b.Run(beside, func(b *testing.B) {
			t, _ := populated(b, 0)
			stop := scanning(b, beside == "scans", t.Final)
			m := over("lan", "direct", 0)
			b.ReportAllocs()
			for b.Loop() {
				t.Open(m, nil).Close(nil)
			}
			stop()
		})
	}
}

// BenchmarkScan is one tick over benchFlows: while nothing moves, and after every flow
// moved bytes both ways; and a look at every record.
func BenchmarkScan(b *testing.B) {
	for _, users := range []int{0, 1000} {
		t, flows := populated(b, users)
		b.Run(fmt.Sprintf("still/users=%d", users), func(b *testing.B) {
			for b.Loop() {
				t.Final()
			}
		})
		b.Run(fmt.Sprintf("moving/users=%d", users), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				for _, f := range flows {
					f.Moved(flow.Up, 1500)
					f.Moved(flow.Down, 1500)
				}
				b.StartTimer()
				t.Final()
			}
		})
		b.Run(fmt.Sprintf("records/users=%d", users), func(b *testing.B) {
			for b.Loop() {
				t.Each(func(*Record) bool { return true })
			}
		})
	}
}

// BenchmarkPage is a list of benchFlows: all of it, a page of 100 at its begin and in its
// middle, and the 50 flows that a predicate picks.
func BenchmarkPage(b *testing.B) {
	t, _ := populated(b, 0)
	few := func(r *Record) bool { return r.ID%10_000 == 0 }
	for _, page := range []struct {
		name  string
		after flow.ID
		limit int
		pred  func(*Record) bool
	}{
		{"all", 0, 0, nil}, {"first", 0, 100, nil}, {"middle", benchFlows / 2, 100, nil}, {"picked", 0, 0, few},
	} {
		b.Run(page.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				t.Page(page.after, page.limit, page.pred)
			}
		})
	}
}

// BenchmarkKillWhere asks a predicate about benchFlows, which picks 500 each time.
func BenchmarkKillWhere(b *testing.B) {
	t, _ := populated(b, 0)
	round, killed := flow.ID(0), 0
	for b.Loop() {
		killed += t.KillWhere(func(r *Record) bool { return r.Outbound == "direct" && r.ID%1000 == round })
		round++
	}
	b.ReportMetric(float64(killed)/float64(round), "killed/op")
}

// BenchmarkKill finds a flow by its id and ends it, which it was before.
func BenchmarkKill(b *testing.B) {
	t, _ := populated(b, 0)
	n := uint64(0)
	for b.Loop() {
		if !t.Kill(flow.ID(1 + n*7919%benchFlows)) {
			b.Fatal("a live flow was not found")
		}
		n++
	}
}

// BenchmarkFanOut is what opening and closing a flow takes while subscribers read its
// events, or have stalled.
func BenchmarkFanOut(b *testing.B) {
	for _, subscribers := range []int{0, 1, 100, 1000} {
		for _, what := range []string{"reading", "stalled"} {
			b.Run(fmt.Sprintf("subscribers=%d/%s", subscribers, what), func(b *testing.B) {
				t := newTracker(b, Options{})
				ctx, cancel := context.WithCancel(b.Context())
				var read atomic.Uint64
				var readers sync.WaitGroup
				for range subscribers {
					sub := t.Subscribe()
					defer sub.Close()
					if what == "stalled" {
						continue
					}
					readers.Go(func() {
						n := uint64(0)
						for ; ; n++ {
							if _, _, err := sub.Next(ctx); err != nil {
								break
							}
						}
						read.Add(n)
					})
				}
				m, n := over("lan", "direct", 0), 0
				b.ReportAllocs()
				for b.Loop() {
					t.Open(m, nil).Close(nil)
					n++
				}
				cancel()
				readers.Wait()
				b.ReportMetric(float64(read.Load())/float64(n), "read/op")
			})
		}
	}
}

// BenchmarkMeter is what the meter takes of each transfer.
func BenchmarkMeter(b *testing.B) {
	f := newTracker(b, Options{}).Open(over("lan", "direct", 0), nil)
	for b.Loop() {
		if _, err := f.Ready(flow.Up, nil); err != nil {
			b.Fatal(err)
		}
		f.Took(flow.Up, 16<<10)
		f.Moved(flow.Up, 16<<10)
	}
}

const (
	relayBytes = 256 << 20
	relayRead  = 16 << 10
)

// BenchmarkRelay reads 256 MiB in pieces of 16 KiB from a socket and writes them to
// another: bare, with the meter as the gateway's relay asks it, and through a Stream.
func BenchmarkRelay(b *testing.B) {
	for _, how := range []string{"bare", "metered", "stream"} {
		b.Run(how, func(b *testing.B) {
			feed, in := socketPair(b)
			out, drain := socketPair(b)
			t := newTracker(b, Options{})
			f := t.Open(over("lan", "direct", 0), nil)
			var write io.Writer = out
			if how == "stream" {
				write = t.Stream(over("lan", "direct", 0), out)
			}
			piece, p := make([]byte, relayRead), make([]byte, relayRead)
			b.SetBytes(relayBytes)
			for b.Loop() {
				for range relayBytes / relayRead {
					must(b)(feed.Write(piece))
					must(b)(io.ReadFull(in, p))
					if how == "metered" {
						must(b)(f.Ready(flow.Up, nil))
						f.Took(flow.Up, relayRead)
						f.Moved(flow.Up, relayRead)
					}
					must(b)(write.Write(p))
					must(b)(io.ReadFull(drain, piece))
				}
			}
		})
	}
}

// socketPair is a pair of connected sockets, which have room for a piece.
func socketPair(b *testing.B) (flow.Stream, flow.Stream) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		b.Fatal(err)
	}
	var ends [2]flow.Stream
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(file)
		if err != nil {
			b.Fatal(err)
		}
		file.Close()
		b.Cleanup(func() { c.Close() })
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// must makes an error of a transfer the benchmark's end.
func must(b *testing.B) func(int, error) {
	return func(_ int, err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
}
