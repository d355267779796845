package user

import (
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"

	"pgregory.net/rapid"
)

var ledgerStart = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func openLedger(t testing.TB, dir string) (*Ledger, *store.Store) {
	t.Helper()
	s, _, err := store.Open(dir, ledgerStart)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(ledgerStart) })
	l, err := NewLedger(LedgerOptions{Store: s, Zone: time.UTC})
	if err != nil {
		t.Fatal(err)
	}
	return l, s
}

func mustFlush(t testing.TB, l *Ledger, now time.Time) {
	t.Helper()
	if err := l.Flush(now); err != nil {
		t.Fatal(err)
	}
}

func observe(l *Ledger, key flow.UserKey, u Usage, now time.Time) {
	l.Observe(func(yield func(flow.UserKey, Usage) bool) { yield(key, u) }, now)
}

func allPayers(Payer) (string, bool) { return "all", true }

// seriesTotal is what a series says of all users.
func seriesTotal(t testing.TB, l *Ledger, step time.Duration, now time.Time) (sum Volume) {
	t.Helper()
	got, err := l.Series(Query{To: now.Add(1000 * aDay), Step: step, Label: func(p Payer) (string, bool) { return "users", p.Kind == ForUser }}, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range got["users"] {
		sum.add(p.Volume)
	}
	return sum
}

func TestUsageIsThereAfterARestart(t *testing.T) {
	dir := t.TempDir()
	l, s := openLedger(t, dir)
	want := Usage{
		Up: 1, Down: 2, ChargedUp: 3, ChargedDown: 4, CarryUp: 5, CarryDown: 6, WireRx: 7, WireTx: 8, Extra: 9, Extended: 10,
		FirstUse: ledgerStart, LastSeen: ledgerStart.Add(time.Second), PeriodStart: ledgerStart.Add(-aDay), Generation: 11,
		Earlier: Moved{12, 13, 14, 15, 16, 17},
	}
	observe(l, 1, want, ledgerStart)
	observe(l, 2, Usage{Up: 1 << 63}, ledgerStart)
	mustFlush(t, l, ledgerStart)
	s.Close(ledgerStart)
	l, _ = openLedger(t, dir)
	if got, _ := l.Usage(1); got != want {
		t.Errorf("usage %+v, want %+v", got, want)
	}
	if got, _ := l.Usage(2); got.Up != 1<<63 {
		t.Errorf("usage %+v", got)
	}
	if got, _ := l.Usage(3); got != (Usage{}) {
		t.Error("usage of nobody")
	}
}

func TestTrafficIsInTheHourAndTheDayInWhichItMoved(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	l, _ := openLedger(t, t.TempDir())
	l.opt.Zone = berlin
	at := time.Date(2026, 3, 28, 22, 30, 0, 0, berlin) // the day after has 23 hours
	var u Usage
	for i := range 30 {
		u.Up++
		u.ChargedUp += 2
		observe(l, 1, u, at)
		l.Add(ForOutbound, "direct", 1, 0, at)
		if i%3 == 0 {
			mustFlush(t, l, at)
		}
		at = at.Add(time.Hour)
	}
	label := func(p Payer) (string, bool) { return string(p.Kind) + p.Name, true }
	got, err := l.Series(Query{From: at.Add(-3 * aDay), To: at, Step: aDay, Label: label}, at)
	if err != nil {
		t.Fatal(err)
	}
	want := []Point{
		{time.Date(2026, 3, 28, 0, 0, 0, 0, berlin), Volume{Up: 2, ChargedUp: 4}},
		{time.Date(2026, 3, 29, 0, 0, 0, 0, berlin), Volume{Up: 23, ChargedUp: 46}},
		{time.Date(2026, 3, 30, 0, 0, 0, 0, berlin), Volume{Up: 5, ChargedUp: 10}},
	}
	if !slices.EqualFunc(got["u"], want, samePoint) {
		t.Errorf("days %v, want %v", got["u"], want)
	}
	for i := range want {
		want[i].ChargedUp = 0
	}
	if !slices.EqualFunc(got["odirect"], want, samePoint) {
		t.Errorf("days of the outbound %v, want %v", got["odirect"], want)
	}
	got, err = l.Series(Query{From: at.Add(-12*time.Hour - 30*time.Minute), To: at, Step: 6 * time.Hour, Label: allPayers}, at)
	if err != nil || len(got["all"]) != 2 || got["all"][0].Up != 12 || !got["all"][1].Start.Equal(at.Add(-6*time.Hour-30*time.Minute)) {
		t.Errorf("steps of six hours: %v, %v", got, err)
	}
	for _, step := range []time.Duration{0, time.Minute, 90 * time.Minute, 30 * time.Hour, -time.Hour} {
		if _, err := l.Series(Query{From: at, To: at, Step: step, Label: allPayers}, at); err == nil {
			t.Errorf("step %v is taken", step)
		}
	}
}

func samePoint(a, b Point) bool { return a.Start.Equal(b.Start) && a.Volume == b.Volume }

func TestAUserThatIsForgottenBeginsAnew(t *testing.T) {
	dir := t.TempDir()
	l, s := openLedger(t, dir)
	observe(l, 1, Usage{Up: 5}, ledgerStart)
	if _, err := l.Take(ledgerStart, 1); err != nil {
		t.Fatal(err)
	}
	l.Forget(1)
	mustFlush(t, l, ledgerStart)
	if got := seriesTotal(t, l, time.Hour, ledgerStart); got.Up != 5 {
		t.Errorf("the series lost what moved: %v", got)
	}
	s.Close(ledgerStart)
	l, _ = openLedger(t, dir)
	if got, _ := l.Usage(1); got != (Usage{}) {
		t.Error("usage is still there")
	}
	observe(l, 1, Usage{Up: 2}, ledgerStart)
	if got, err := l.Take(ledgerStart, 1); err != nil || len(got) != 1 || got[0].Up != 2 || got[0].Sequence != 1 {
		t.Errorf("take %v, %v", got, err)
	}
}

func TestDevicesAreBoundedAndTheLongestUnseenGoes(t *testing.T) {
	l, s := openLedger(t, t.TempDir())
	for i := range maxNamed + 10 {
		l.Add(ForDevice, string(rune('a'+i)), 1, 0, ledgerStart.Add(time.Duration(i)))
	}
	mustFlush(t, l, ledgerStart)
	n := 0
	s.Each(store.Usage, func(string, []byte) { n++ })
	if n != maxNamed || len(l.named) != maxNamed || l.named[Payer{Kind: ForDevice, Name: "a"}] != nil {
		t.Errorf("%d records, %d in memory", n, len(l.named))
	}
}

func TestWhatIsOldIsDeleted(t *testing.T) {
	l, s := openLedger(t, t.TempDir())
	l.opt.Hourly, l.opt.Daily = 2*aDay, 40*aDay
	var u Usage
	at := ledgerStart
	for range 100 {
		u.Down += 7
		observe(l, 1, u, at)
		l.Add(ForDevice, "old", 1, 1, ledgerStart)
		mustFlush(t, l, at)
		at = at.Add(aDay)
	}
	mustFlush(t, l, at)
	count := func(series store.Series) (n int) {
		if err := s.Rows(series, 0, 1<<40, func(_ int64, key, _ []byte) {
			if key[0] == byte(ForUser) {
				n++
			}
		}); err != nil {
			t.Error(err)
		}
		return n
	}
	if h, d := count(store.Hourly), count(store.Daily); h > 4 || h < 1 || d > 40+32 || d < 39 {
		t.Errorf("%d hours and %d days are left", h, d)
	}
	if len(l.named) != 0 {
		t.Errorf("%d devices", len(l.named))
	}
	if got := seriesTotal(t, l, aDay, at); got.Down != 39*7 {
		t.Errorf("the series has %v, want 39 days", got)
	}
}

// The model is a sum. Traffic, resets, commits, clocks that jump, crashes that lose
// what was not committed, takes whose answers get lost: what the ledger says of a user
// is what the model says, each byte in one hour, one day and one acknowledged take.
func TestEveryByteIsCountedOnceOverAnyCrash(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir := t.TempDir()
		l, s := openLedger(t, dir)
		now := ledgerStart
		var usage, kept Usage // now, and as it was committed last
		var billed Moved      // acknowledged
		var last Taken        // given out last
		bill := make(map[uint64]Moved)
		l.opt.Hourly, l.opt.Daily = 1000*aDay, 10000*aDay
		crash := func() {
			copied := t.TempDir()
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				rt.Fatal(err)
			}
			s.Close(now)
			dir = copied
			l, s = openLedger(t, dir)
			l.opt.Hourly, l.opt.Daily = 1000*aDay, 10000*aDay
			usage = kept
		}
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			switch rapid.IntRange(0, 8).Draw(rt, "what") {
			case 0:
				crash()
			case 1:
				now = now.Add(time.Duration(rapid.Int64Range(-30, 60).Draw(rt, "hours")) * time.Hour)
			case 2: // a reset
				usage = Usage{Generation: usage.Generation + 1, Earlier: usage.Lifetime()}
			case 3, 4:
				mustFlush(t, l, now)
				kept, _ = l.Usage(1)
			case 5:
				got, err := l.Take(now, 1)
				if err != nil {
					rt.Fatal(err)
				}
				kept, _ = l.Usage(1)
				if len(got) == 0 || got[0].Sequence == 0 {
					break
				}
				if before, again := bill[got[0].Sequence]; again && (before != got[0].Moved || got[0] != last) {
					rt.Fatalf("take %+v, before it was %+v", got[0], last)
				}
				last = got[0]
				bill[last.Sequence] = last.Moved
			case 6:
				if last.Sequence == 0 {
					break
				}
				for range rapid.IntRange(1, 2).Draw(rt, "acks") {
					if err := l.Ack(1, last.Sequence, now); err != nil {
						rt.Fatal(err)
					}
				}
				billed = Moved{}
				for _, m := range bill {
					billed = billed.plus(m)
				}
			default:
				n := rapid.Uint64Range(1, 1000).Draw(rt, "bytes")
				usage.Up += n
				usage.Down += 2 * n
				usage.ChargedDown += 3 * n
				usage.WireRx += n
				observe(l, 1, usage, now)
			}
		}
		observe(l, 1, usage, now)
		all := usage.Lifetime()
		for _, step := range []time.Duration{time.Hour, aDay} {
			got, err := l.Series(Query{From: now.Add(-1000 * aDay), To: now.Add(1000 * aDay), Step: step, Label: allPayers}, now)
			if err != nil {
				rt.Fatal(err)
			}
			var sum Volume
			for _, p := range got["all"] {
				sum.add(p.Volume)
			}
			if sum != all.volume() {
				rt.Fatalf("steps of %v have %+v, want %+v", step, sum, all.volume())
			}
		}
		if last.Sequence != 0 {
			if err := l.Ack(1, last.Sequence, now); err != nil {
				rt.Fatal(err)
			}
		}
		rest, err := l.Take(now, 1)
		if err != nil {
			rt.Fatal(err)
		}
		billed = Moved{}
		for _, m := range bill {
			billed = billed.plus(m)
		}
		if len(rest) == 1 {
			billed = billed.plus(rest[0].Moved)
		}
		if billed != all {
			rt.Fatalf("billed %+v, moved %+v", billed, all)
		}
	})
}

func TestAnAcknowledgementOfAnotherTakeIsRefused(t *testing.T) {
	l, _ := openLedger(t, t.TempDir())
	observe(l, 1, Usage{Up: 5}, ledgerStart)
	got, err := l.Take(ledgerStart, 1, 2)
	if err != nil || len(got) != 1 || got[0].Sequence != 1 || got[0].Up != 5 {
		t.Fatal(got, err)
	}
	for _, seq := range []uint64{0, 2} {
		if err := l.Ack(1, seq, ledgerStart); err == nil {
			t.Errorf("take %d is acknowledged", seq)
		}
	}
	if err := l.Ack(1, 1, ledgerStart.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if got, err = l.Take(ledgerStart.Add(2*time.Hour), 1); err != nil || got[0].Sequence != 0 || got[0].Moved != (Moved{}) || !got[0].From.Equal(ledgerStart) {
		t.Errorf("take of nothing: %+v, %v", got, err)
	}
}

func TestWithoutADiskNothingIsBilled(t *testing.T) {
	l, _ := openLedger(t, "")
	observe(l, 1, Usage{Up: 5}, ledgerStart)
	if got, err := l.Take(ledgerStart, 1); err == nil {
		t.Errorf("took %v", got)
	}
	if err := l.Flush(ledgerStart); err == nil {
		t.Error("a commit without a disk succeeds")
	}
	if got := seriesTotal(t, l, time.Hour, ledgerStart); got.Up != 5 {
		t.Errorf("series %v", got)
	}
}

func TestAResetThatForgetsWhatWasEarlierMakesNothingFall(t *testing.T) {
	dir := t.TempDir()
	l, s := openLedger(t, dir)
	observe(l, 1, Usage{Up: 100}, ledgerStart)
	observe(l, 1, Usage{Up: 0, Generation: 1}, ledgerStart)
	observe(l, 1, Usage{Up: 5, Generation: 1}, ledgerStart)
	mustFlush(t, l, ledgerStart)
	s.Close(ledgerStart)
	l, _ = openLedger(t, dir)
	if got := seriesTotal(t, l, aDay, ledgerStart); got.Up != 105 {
		t.Errorf("series %v", got)
	}
	if got, err := l.Take(ledgerStart, 1); err != nil || got[0].Up != 105 {
		t.Errorf("take %v %v", got, err)
	}
}

// What is collected while a commit hangs is not waited for; it is in the next one.
func TestADiskThatHangsStopsNobodyWhoCounts(t *testing.T) {
	l, _ := openLedger(t, t.TempDir())
	l.saving.Lock() // as a commit does
	observe(l, 1, Usage{Up: 1}, ledgerStart)
	l.Add(ForOutbound, "direct", 1, 1, ledgerStart)
	if u, err := l.Usage(1); err != nil || u.Up != 1 {
		t.Errorf("usage %+v, %v", u, err)
	}
	l.saving.Unlock()
	mustFlush(t, l, ledgerStart)
}

func TestCountersAddUpWhileEverybodyCounts(t *testing.T) {
	dir := t.TempDir()
	l, s := openLedger(t, dir)
	const steps = 200
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			var u Usage
			for i := range steps {
				at := ledgerStart.Add(time.Duration(i) * time.Hour)
				u.Up++
				observe(l, flow.UserKey(g+1), u, at)
				l.Add(ForOutbound, "direct", 1, 0, at)
			}
		})
	}
	billed := uint64(0)
	all.Go(func() {
		for i := range 20 {
			at := ledgerStart.Add(time.Duration(i) * time.Hour)
			if err := l.Flush(at); err != nil {
				t.Error(err)
			}
			taken, err := l.Take(at, 1, 2, 3, 4)
			if err != nil {
				t.Error(err)
			}
			for _, k := range taken {
				billed += k.Up
				if k.Sequence > 0 {
					if err := l.Ack(k.User, k.Sequence, at); err != nil {
						t.Error(err)
					}
				}
			}
			seriesTotal(t, l, time.Hour, at)
		}
	})
	all.Wait()
	mustFlush(t, l, ledgerStart)
	s.Close(ledgerStart)
	l, _ = openLedger(t, dir)
	rest, err := l.Take(ledgerStart, 1, 2, 3, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range rest {
		billed += k.Up
	}
	if got := seriesTotal(t, l, time.Hour, ledgerStart); got.Up != 4*steps || billed != 4*steps {
		t.Errorf("hours have %d, takes %d, want %d", got.Up, billed, 4*steps)
	}
	got, err := l.Series(Query{To: ledgerStart.Add(1000 * aDay), Step: aDay, Label: func(p Payer) (string, bool) { return p.Name, p.Kind == ForOutbound }}, ledgerStart)
	sum := Volume{}
	for _, p := range got["direct"] {
		sum.add(p.Volume)
	}
	if err != nil || sum.Up != 4*steps {
		t.Errorf("the outbound has %d, want %d: %v", sum.Up, 4*steps, err)
	}
}
