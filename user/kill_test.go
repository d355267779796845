package user

import (
	"bufio"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"
)

// victimDir tells a test process that it is the one that gets killed.
const victimDir = "GATEWAYD_TEST_VICTIM"

// TestVictim counts traffic of some users, in a time of its own that runs fast, until
// it is killed. It says "may N" before a total of N bytes is observed and "kept N"
// once it is committed. It is no test but TestAKilledProcessLosesOneIntervalAtMost's child.
func TestVictim(t *testing.T) {
	dir := os.Getenv(victimDir)
	if dir == "" {
		return
	}
	l, s := openFastLedger(t, dir)
	now := s.LastCommit()
	if now.IsZero() {
		now = ledgerStart
	}
	total := lifetimes(l)
	for i := 0; ; i++ {
		for key := range flow.UserKey(5) {
			u, err := l.Usage(key + 1)
			if err != nil {
				t.Fatal(err)
			}
			total += uint64(key) + 1
			u.Up += uint64(key) + 1
			if i%7 == 0 {
				u = cleared(u, now, 0)
			}
			fmt.Println("may", total)
			observe(l, key+1, u, now)
		}
		now = now.Add(7 * time.Minute)
		if i%3 == 0 {
			mustFlush(t, l, now)
			fmt.Println("kept", total)
		}
	}
}

func lifetimes(l *Ledger) (sum uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.users {
		sum += t.usage.Lifetime().Up
	}
	return sum
}

// kill runs the victim on dir for about the given time and returns the last it said.
func kill(t *testing.T, dir string, after time.Duration) (may, kept uint64) {
	t.Helper()
	victim := exec.Command(os.Args[0], "-test.run=^TestVictim$")
	victim.Env = append(os.Environ(), victimDir+"="+dir)
	out, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	var timer *time.Timer
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if timer == nil { // from its first sign of life
			timer = time.AfterFunc(after, func() { victim.Process.Kill() })
		}
		var n uint64
		word, number, _ := strings.Cut(lines.Text(), " ")
		if _, err := fmt.Sscan(number, &n); err != nil {
			continue // a line that was cut off
		}
		switch word {
		case "may":
			may = n
		case "kept":
			kept = n
		}
	}
	if timer == nil {
		t.Fatal("the victim said nothing")
	}
	timer.Stop()
	_ = victim.Wait()
	return may, kept
}

// openFastLedger opens a ledger for a time that runs fast: no day is ever too old. Hours
// are, so that their files go while the process may be killed.
func openFastLedger(t *testing.T, dir string) (*Ledger, *store.Store) {
	t.Helper()
	l, s := openLedger(t, dir)
	l.opt.Daily = 10_000 * aDay
	return l, s
}

func TestAKilledProcessLosesOneIntervalAtMost(t *testing.T) {
	dir := t.TempDir()
	var before, billed uint64
	lost := 0
	for range 50 {
		may, kept := kill(t, dir, time.Duration(rand.Int64N(int64(30*time.Millisecond))))
		l, s := openFastLedger(t, dir)
		now := s.LastCommit().Add(aDay) // 50 of them are more than hours are kept for
		total := lifetimes(l)
		if total < max(kept, before) || total > may {
			t.Fatalf("after a kill %d bytes: %d were committed, %d before the start, %d counted", total, kept, before, may)
		}
		if total < may {
			lost++
		}
		if got := seriesTotal(t, l, aDay, now); got.Up != total {
			t.Fatalf("the days have %d bytes, %d were counted", got.Up, total)
		}
		sameByHourAndDay(t, l, s.LastCommit())
		taken, err := l.Take(now, 1, 2, 3, 4, 5)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range taken {
			billed += k.Up
			if k.Sequence > 0 {
				if err := l.Ack(k.User, k.Sequence, now); err != nil {
					t.Fatal(err)
				}
			}
		}
		if billed != total {
			t.Fatalf("billed %d bytes of %d", billed, total)
		}
		before = total
		s.Close(now)
	}
	if before == 0 || lost == 0 {
		t.Errorf("%d bytes, %d kills lost something: nothing was tried", before, lost)
	}
	if hours, err := filepath.Glob(filepath.Join(dir, "hourly-*")); err != nil || len(hours) > 15 {
		t.Errorf("files of %d days are left, hours are kept for 14: %v", len(hours), err)
	}
}

// sameByHourAndDay sees to it that the hours of each day that must still have all of them
// add up to the day.
func sameByHourAndDay(t *testing.T, l *Ledger, now time.Time) {
	t.Helper()
	from := now.Add(-l.opt.Hourly).Truncate(aDay).Add(aDay)
	sums := make(map[time.Duration]map[time.Time]uint64)
	for _, step := range []time.Duration{time.Hour, aDay} {
		got, err := l.Series(Query{From: from, To: now.Add(aDay), Step: step, Label: allPayers}, now)
		if err != nil {
			t.Fatal(err)
		}
		sums[step] = make(map[time.Time]uint64)
		for _, p := range got["all"] {
			sums[step][p.Start.Truncate(aDay)] += p.Up
		}
	}
	if !maps.Equal(sums[time.Hour], sums[aDay]) {
		t.Fatalf("hours of days have %v, the days %v", sums[time.Hour], sums[aDay])
	}
}
