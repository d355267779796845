package user

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"
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
	l, s := openLedger(t, dir)
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

func TestAKilledProcessLosesOneIntervalAtMost(t *testing.T) {
	dir := t.TempDir()
	var before, billed uint64
	lost := 0
	for range 50 {
		may, kept := kill(t, dir, time.Duration(rand.Int64N(int64(30*time.Millisecond))))
		l, s := openLedger(t, dir)
		now := s.LastCommit().Add(time.Hour)
		total := lifetimes(l)
		if total < max(kept, before) || total > may {
			t.Fatalf("after a kill %d bytes: %d were committed, %d before the start, %d counted", total, kept, before, may)
		}
		if total < may {
			lost++
		}
		for _, step := range []time.Duration{time.Hour, aDay} {
			if got := seriesOfAll(t, l, step, now); got.Up != total {
				t.Fatalf("steps of %v have %d bytes, %d were counted", step, got.Up, total)
			}
		}
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
}

// seriesOfAll is what a series says of all users, since ever.
func seriesOfAll(t *testing.T, l *Ledger, step time.Duration, now time.Time) (sum Volume) {
	t.Helper()
	l.opt.Hourly, l.opt.Daily = 100_000*time.Hour, 10_000*aDay
	return seriesTotal(t, l, step, now)
}
