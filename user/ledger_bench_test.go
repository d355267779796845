package user

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"
)

const benchUsers = 50_000

// busyUsers gives usages that all moved since the last call.
func busyUsers(us []Usage) func(yield func(flow.UserKey, Usage) bool) {
	return func(yield func(flow.UserKey, Usage) bool) {
		for i := range us {
			us[i].Up += 1000
			us[i].ChargedUp += 1000
			if !yield(flow.UserKey(i+1), us[i]) {
				return
			}
		}
	}
}

// What the ledger itself takes of 50,000 users, all of whom moved something.
func BenchmarkObserve50000(b *testing.B) {
	l, _ := openLedger(b, "")
	us := make([]Usage, benchUsers)
	l.Observe(busyUsers(us), ledgerStart)
	for b.Loop() {
		l.Observe(busyUsers(us), ledgerStart)
		b.StopTimer()
		l.mu.Lock()
		l.changes()
		l.mu.Unlock()
		b.StartTimer()
	}
}

// The same with the records that are committed, in memory.
func BenchmarkChanges50000(b *testing.B) {
	l, _ := openLedger(b, "")
	us := make([]Usage, benchUsers)
	for b.Loop() {
		b.StopTimer()
		l.Observe(busyUsers(us), ledgerStart)
		b.StartTimer()
		l.mu.Lock()
		l.changes()
		l.mu.Unlock()
	}
}

// With the disk.
func BenchmarkCommit50000(b *testing.B) {
	l, _ := openLedger(b, b.TempDir())
	us := make([]Usage, benchUsers)
	for b.Loop() {
		if err := l.Commit(ledgerStart, busyUsers(us)); err != nil {
			b.Fatal(err)
		}
	}
}

// Everybody's takes. With TMPDIR in memory it is what is computed, without the disk.
func BenchmarkTake50000(b *testing.B) {
	benchTakes(b, func(*Ledger, []Usage) {})
}

// The same when everybody moved something since the last commit, so that it commits that too.
func BenchmarkTakeUncommitted50000(b *testing.B) {
	benchTakes(b, func(l *Ledger, us []Usage) { l.Observe(busyUsers(us), ledgerStart) })
}

func benchTakes(b *testing.B, before func(*Ledger, []Usage)) {
	l, _ := openLedger(b, b.TempDir())
	us := make([]Usage, benchUsers)
	keys := make([]flow.UserKey, benchUsers)
	for i := range keys {
		keys[i] = flow.UserKey(i + 1)
	}
	for b.Loop() {
		b.StopTimer()
		if err := l.Commit(ledgerStart, busyUsers(us)); err != nil {
			b.Fatal(err)
		}
		before(l, us)
		b.StartTimer()
		taken, err := l.Take(ledgerStart, keys...)
		if err != nil || len(taken) != benchUsers {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := l.AckAll(taken, ledgerStart); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// A day of commits: MB/day is what the process gave to write calls, pages/day the 4 KiB
// pages of files that it made dirty, which is what a file system without compression
// writes, beside its own book-keeping.
func BenchmarkDay(b *testing.B) {
	for _, c := range []struct {
		name  string
		users int
		every time.Duration
	}{
		{"10users30s", 10, 30 * time.Second},
		{"10users60s", 10, time.Minute},
		{"1000users30s", 1000, 30 * time.Second},
		{"1000users60s", 1000, time.Minute},
	} {
		b.Run(c.name, func(b *testing.B) {
			l, _ := openLedger(b, b.TempDir())
			us := make([]Usage, c.users)
			for i := range us {
				us[i] = Usage{
					Up: 1 << 33, Down: 1 << 36, ChargedUp: 1 << 33, ChargedDown: 1 << 36,
					FirstUse: ledgerStart, LastSeen: ledgerStart, PeriodStart: ledgerStart, Generation: 5,
					Earlier: Moved{1 << 36, 1 << 39, 1 << 36, 1 << 39, 0, 0},
				}
			}
			now, days := ledgerStart, 0
			if err := l.Commit(now, busyUsers(us)); err != nil {
				b.Fatal(err)
			}
			before, pages := written(b, "wchar"), written(b, "write_bytes")
			for b.Loop() {
				for end := now.Add(aDay); now.Before(end); {
					now = now.Add(c.every)
					for i := range us {
						us[i].Down += 1 << 20
						us[i].LastSeen = now
					}
					if err := l.Commit(now, busyUsers(us)); err != nil {
						b.Fatal(err)
					}
				}
				days++
			}
			b.ReportMetric(float64(written(b, "wchar")-before)/float64(days)/1e6, "MB/day")
			b.ReportMetric(float64(written(b, "write_bytes")-pages)/float64(days)/4096, "pages/day")
		})
	}
}

// written is a count of /proc/self/io.
func written(b *testing.B, of string) (n uint64) {
	text, err := os.ReadFile("/proc/self/io")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, of+": %d", &n); err == nil {
			return n
		}
	}
	b.Fatalf("no %s in /proc/self/io", of)
	return 0
}
