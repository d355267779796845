package user

import (
	"math"
	"math/bits"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

const mega = 1_000_000

// A worker is a stream that always has bytes, in pieces of a size that size tells.
type worker struct {
	t     testing.TB
	l     *Lease
	dir   flow.Dir
	size  func() int
	wake  chan struct{}
	moved atomic.Uint64
	pause int // times that it was paused
}

func newWorker(t testing.TB, l *Lease, d flow.Dir, size func() int) *worker {
	return &worker{t: t, l: l, dir: d, size: size, wake: make(chan struct{}, 1)}
}

// transfer waits for its turn and moves one piece; false: stopped, or ended.
func (w *worker) transfer(stop <-chan struct{}) bool {
	for {
		limit, err := w.l.Ready(w.dir, func() { w.wake <- struct{}{} })
		switch err {
		case nil:
			n := min(w.size(), limit)
			w.l.Took(w.dir, n)
			w.l.Moved(w.dir, n)
			w.moved.Add(uint64(n))
			return true
		case flow.ErrPaused:
			w.pause++
			select {
			case <-w.wake:
			case <-stop:
				w.l.Leave(w.dir)
				return false
			}
		default:
			return false
		}
	}
}

func (w *worker) run(stop <-chan struct{}) {
	for w.transfer(stop) {
		select {
		case <-stop:
			return
		default:
		}
	}
}

func fixed(n int) func() int { return func() int { return n } }

// within reports that got is want, but for 5 %.
func within(got, want uint64) bool {
	return got >= want-want/20 && got <= want+want/20
}

func TestABucketIsPaidWholeAndRepaidExactly(t *testing.T) {
	sec := int64(time.Second)
	var b bucket
	b.change(10_000, speedBurst(10_000), 0)
	b.spend(30_000)
	if b.debt != 20_000 || b.wait() != time.Second {
		t.Errorf("a full bucket after 30,000 bytes: %+v, wait %v", b, b.wait())
	}
	if b.earn(2*sec - 1); b.debt != 1 || b.wait() != 1 {
		t.Errorf("just before 2 s: %+v, wait %v", b, b.wait())
	}
	if b.earn(2 * sec); b.debt != 0 {
		t.Errorf("at 2 s: %+v", b)
	}
	if b.spend(1); b.wait() != 100*time.Microsecond {
		t.Errorf("one byte is repaid in %v", b.wait())
	}
	if b.earn(62 * sec); b.credit != 10_000 {
		t.Errorf("60 idle seconds bank %d", b.credit)
	}
	if b.spend(25_000); b.debt != 15_000 {
		t.Errorf("%+v", b)
	}
	if b.earn(62*sec + sec/2); b.wait() != time.Second || b.debt != 10_000 {
		t.Errorf("half a second later: %+v, wait %v", b, b.wait())
	}
}

// What is beyond a full bucket is nobody's, fractions included, and debt has an end.
func TestABucketBanksNoFractionsAndSaturates(t *testing.T) {
	var b bucket
	b.change(3, 3, 0)
	b.spend(4)
	b.earn(10 * int64(time.Second) / 3) // 9 bytes and a fraction
	if b.spend(4); b.debt != 1 || b.wait() != time.Second/3+1 {
		t.Errorf("%+v waits %v", b, b.wait())
	}
	b.spend(math.MaxUint64)
	if b.spend(5); b.debt != math.MaxUint64 || b.wait() != time.Second {
		t.Errorf("%+v waits %v", b, b.wait())
	}
}

func TestAPauseIsBetweenAMillisecondAndASecond(t *testing.T) {
	for debt, want := range map[uint64]time.Duration{1: time.Millisecond, 20_000: 20 * time.Millisecond, 1 << 40: time.Second} {
		a := newTestAccount(bandwidthUp(mega))
		l := mustAdmit(t, a)
		a.bandwidth[flow.Up].spend(a.bandwidth[flow.Up].credit + debt)
		a.joinLocked(&l.ways[flow.Up])
		if pause, ok := a.pauseLocked(); pause != want || !ok {
			t.Errorf("in debt of %d: %v, %v", debt, pause, ok)
		}
	}
}

func TestTheBurstsAreATenthAndOneSecond(t *testing.T) {
	for rate, want := range map[uint64]uint64{1: 1, 9: 1, 10: 1, 11: 2, 1000: 100, 10 * mega: mega, math.MaxUint64: math.MaxUint64/10 + 1} {
		if got := bandwidthBurst(rate); got != want {
			t.Errorf("rate %d: %d, want %d", rate, got, want)
		}
	}
	for _, rate := range []uint64{1, 100, math.MaxUint64} {
		var b bucket
		if b.change(rate, speedBurst(rate), 0); b.credit != rate {
			t.Errorf("a new limit of %d begins with %d", rate, b.credit)
		}
	}
}

func TestAChangedRateKeepsDebtCapsCreditAndForgivesWithTheLimit(t *testing.T) {
	sec := int64(time.Second)
	for _, c := range []struct {
		name         string
		from, to     uint64
		spend        uint64
		credit, debt uint64 // a second after the spending, when the rate changes
	}{
		{"less, in debt", 1000, 10, 5000, 0, 3000},
		{"more, in debt", 1000, 50_000, 5000, 0, 3000},
		{"less, with credit", 1000, 10, 0, 10, 0},
		{"more, with credit", 1000, 50_000, 1500, 500, 0},
		{"to unlimited", 1000, 0, 5000, 0, 0},
		{"from unlimited", 0, 700, 5000, 700, 0},
		{"the same, in debt", 1000, 1000, 5000, 0, 3000},
		{"the same, with credit", 1000, 1000, 1500, 500, 0},
	} {
		var b bucket
		b.change(c.from, speedBurst(c.from), 0)
		b.spend(c.spend)
		b.earn(sec)
		// What was not earned yet is settled at the old rate.
		if c.credit == 0 && c.debt > 0 {
			b.spend(500)
			b.earn(sec)
			b.change(c.to, speedBurst(c.to), 3*sec/2)
			b.earn(3 * sec / 2)
		} else {
			b.change(c.to, speedBurst(c.to), sec)
		}
		if b.credit != c.credit || b.debt != c.debt {
			t.Errorf("%s: %+v", c.name, b)
		}
	}
}

// A bucket earns what big numbers say, to the billionth, whatever the steps, and
// saturates.
func TestABucketEarnsTheSameInAnySteps(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rate := rapid.OneOf(rapid.Just(uint64(1)), rapid.Uint64Range(1, 1000), rapid.Uint64Min(1)).Draw(rt, "rate")
		var b bucket
		b.change(rate, rate, 0)
		b.spend(none) // as deep as it goes
		before := b.debt
		now := int64(0)
		for _, step := range rapid.SliceOfN(rapid.Int64Range(0, 3e9), 1, 20).Draw(rt, "steps") {
			now += step
			b.earn(now)
			if b.wait() < 0 || b.wait() > longestPause {
				rt.Fatalf("waits %v", b.wait())
			}
		}
		hi, lo := bits.Mul64(rate, uint64(now))
		if hi >= uint64(time.Second) { // more than fits
			if b.debt != 0 {
				rt.Fatalf("%+v", b)
			}
			return
		}
		want, part := bits.Div64(hi, lo, uint64(time.Second))
		if got := before - b.debt; got != min(want, before) || want < before && b.part != part {
			rt.Fatalf("earned %d and %d, want %d and %d", got, b.part, want, part)
		}
	})
}

// The wait is when the debt is paid, and not a nanosecond more.
func TestAWaitEndsWhenTheDebtIsPaid(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rate := rapid.OneOf(rapid.Uint64Range(1, 1e6), rapid.Uint64Min(1)).Draw(rt, "rate")
		var b bucket
		b.change(rate, 1, 0)
		b.spend(rapid.Uint64Range(1, max(1, rate)).Draw(rt, "bytes"))
		b.earn(rapid.Int64Range(0, 1e6).Draw(rt, "at"))
		if b.debt == 0 {
			return
		}
		early, late := b, b
		early.earn(b.last + int64(b.wait()) - 1)
		late.earn(b.last + int64(b.wait()))
		if early.debt == 0 || late.debt != 0 {
			rt.Fatalf("%+v waits %v, then %+v and %+v", b, b.wait(), early, late)
		}
	})
}

func setBandwidth(p *policy, rate uint64) { p.bandwidth = [2]uint64{rate, rate} }
func setSpeed(p *policy, rate uint64)     { p.speed = rate }
func setThrottle(p *policy, rate uint64)  { p.throttle = rate }

// B48: the long-run rate does not depend on how much is written at once.
func TestTheLongRunRateIsTheLimitForStreams(t *testing.T) {
	for i, c := range []struct {
		rate    uint64
		seconds int
		kind    func(p *policy, rate uint64)
	}{
		{1, 50_000, setBandwidth},
		{100, 2000, setSpeed},
		{1000, 300, setThrottle},
		{1000, 300, setBandwidth},
		{10 * mega, 20, setSpeed},
		{10 * mega, 20, setBandwidth},
		{10 * mega, 20, setThrottle},
	} {
		for _, size := range []int{1500, 64 << 10} {
			synctest.Test(t, func(t *testing.T) {
				a := newTestAccount(limited(func(p *policy) { c.kind(p, c.rate) }))
				stop := make(chan struct{})
				w := newWorker(t, mustAdmit(t, a), flow.Down, fixed(size))
				go w.run(stop)
				time.Sleep(time.Duration(c.seconds) * time.Second)
				close(stop)
				synctest.Wait()
				// The last transfer is not paid yet.
				if want := c.rate * uint64(c.seconds); w.moved.Load() < want-want/20 || w.moved.Load() > want+want/20+uint64(a.turn[flow.Down]) {
					t.Errorf("%d: %d B/s in pieces of %d: %d bytes in %d s", i, c.rate, size, w.moved.Load(), c.seconds)
				}
				if limit := w.moved.Load()/uint64(min(size, a.turn[flow.Down])) + uint64(c.seconds) + 10; uint64(w.pause) > limit {
					t.Errorf("%d B/s in pieces of %d: paused %d times for %d bytes", c.rate, size, w.pause, w.moved.Load())
				}
			})
		}
	}
}

func TestTheLargestRateNeverPauses(t *testing.T) {
	a := newTestAccount(limited(func(p *policy) {
		p.speed, p.throttle, p.bandwidth = math.MaxUint64, math.MaxUint64, [2]uint64{math.MaxUint64, math.MaxUint64}
	}))
	l := mustAdmit(t, a)
	for range 1000 {
		if n := move(t, l, flow.Up, maxTransfer, nil); n != maxTransfer {
			t.Fatalf("moved %d", n)
		}
	}
}

func TestATurnIsABurstButNoLessThan4KiBAndNoMoreThan64KiB(t *testing.T) {
	for rate, want := range map[uint64]int{1: 4096, 40_960: 4096, 100_000: 10_000, 655_360: 65_536, math.MaxUint64: 65_536} {
		if got := limited(func(p *policy) { p.bandwidth[flow.Up] = rate }).turn(flow.Up); got != want {
			t.Errorf("%d B/s: %d", rate, got)
		}
	}
	both := limited(func(p *policy) { p.bandwidth[flow.Up], p.speed = 100_000, 50_000 })
	if both.turn(flow.Up) != 5000 || both.turn(flow.Down) != 5000 {
		t.Errorf("turns of %d and %d", both.turn(flow.Up), both.turn(flow.Down))
	}
}

// In no time can more move than the rate, one burst, and the transfer that was begun.
func TestNoWindowOfTimeHoldsMoreThanRateAndBurst(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			rate := rapid.Uint64Range(1000, 2*mega).Draw(rt, "rate")
			shared := rapid.Bool().Draw(rt, "speed")
			p := limited(func(p *policy) {
				if shared {
					p.speed = rate
				} else {
					p.bandwidth = [2]uint64{rate, rate}
				}
			})
			a := newTestAccount(p)
			start := time.Now()
			type event struct {
				at  time.Duration
				dir flow.Dir
				n   int
			}
			var events []event
			stop := make(chan struct{})
			sizes := rapid.SliceOfN(rapid.IntRange(300, 100_000), 4, 4).Draw(rt, "sizes")
			idle := rapid.SliceOfN(rapid.IntRange(0, 3000), 4, 4).Draw(rt, "idle")
			lock := make(chan struct{}, 1)
			for i := range rapid.IntRange(1, 4).Draw(rt, "flows") {
				d := flow.Dir(i % 2)
				w := newWorker(t, mustAdmit(t, a), d, fixed(sizes[i]))
				go func() {
					for before := w.moved.Load(); w.transfer(stop); before = w.moved.Load() {
						lock <- struct{}{}
						events = append(events, event{time.Since(start), d, int(w.moved.Load() - before)})
						rest := idle[i] * (len(events) % 3)
						<-lock
						time.Sleep(time.Duration(rest) * time.Millisecond)
						select {
						case <-stop:
							return
						default:
						}
					}
				}()
			}
			time.Sleep(20 * time.Second)
			close(stop)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			burst, dirs := bandwidthBurst(rate), []flow.Dir{flow.Up, flow.Down}
			if shared {
				burst, dirs = speedBurst(rate), dirs[:1]
			}
			for _, d := range dirs { // a leaky bucket that would overflow
				level, last := 0.0, time.Duration(0)
				for _, e := range events {
					if !shared && e.dir != d {
						continue
					}
					level = max(0, level-(e.at-last).Seconds()*float64(rate)) + float64(e.n)
					if last = e.at; level > float64(burst)+float64(p.turn(d))+1 {
						rt.Fatalf("%.0f bytes over the rate at %v", level, e.at)
					}
				}
			}
			var up, down uint64
			for _, e := range events {
				if e.dir == flow.Up {
					up += uint64(e.n)
				} else {
					down += uint64(e.n)
				}
			}
			if u := a.usage(); u.Up != up || u.Down != down {
				rt.Fatalf("counted %d and %d, moved %d and %d", u.Up, u.Down, up, down)
			}
		})
	})
}

func TestSpeedAndBandwidthHoldAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.speed, p.bandwidth = 100_000, [2]uint64{30_000, 90_000} }))
		stop := make(chan struct{})
		up := newWorker(t, mustAdmit(t, a), flow.Up, fixed(64<<10))
		down := newWorker(t, mustAdmit(t, a), flow.Down, fixed(64<<10))
		go up.run(stop)
		go down.run(stop)
		time.Sleep(100 * time.Second)
		close(stop)
		synctest.Wait()
		if !within(up.moved.Load(), 3*mega) || !within(down.moved.Load(), 7*mega) {
			t.Errorf("up %d, down %d", up.moved.Load(), down.moved.Load())
		}
	})
}

// Directions that share a rate share it by turns.
func TestNeitherDirectionStarvesTheOtherOfASharedSpeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.speed = 100_000 }))
		l := mustAdmit(t, a)
		stop := make(chan struct{})
		up, down := newWorker(t, l, flow.Up, fixed(64<<10)), newWorker(t, l, flow.Down, fixed(64<<10))
		go up.run(stop)
		go down.run(stop)
		time.Sleep(60 * time.Second)
		close(stop)
		synctest.Wait()
		if !within(up.moved.Load(), 3*mega) || !within(down.moved.Load(), 3*mega) {
			t.Errorf("up %d, down %d", up.moved.Load(), down.moved.Load())
		}
	})
}

func TestALiveChangeIsFeltAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rate := func(r uint64) *policy { return limited(func(p *policy) { p.bandwidth[flow.Down] = r }) }
		a := newTestAccount(rate(100_000))
		stop := make(chan struct{})
		w := newWorker(t, mustAdmit(t, a), flow.Down, fixed(1000))
		go w.run(stop)
		measure := func(want uint64) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			before := w.moved.Load()
			time.Sleep(20 * time.Second)
			synctest.Wait()
			if got := w.moved.Load() - before; !within(got, 20*want) {
				t.Errorf("%d B/s after the rate was set to %d", got/20, want)
			}
		}
		measure(100_000)
		a.setPolicy(rate(10_000))
		measure(10_000)
		a.setPolicy(rate(1))
		time.Sleep(time.Hour) // deep in line
		a.setPolicy(rate(mega))
		measure(mega)
		a.setPolicy(rate(1))
		time.Sleep(time.Hour)
		before := w.moved.Load()
		w.size = func() int { // unlimited: it moves at once, and would for ever
			if w.moved.Load() > before+10*mega {
				time.Sleep(time.Hour)
			}
			return 64 << 10
		}
		a.setPolicy(unlimited())
		synctest.Wait()
		if w.moved.Load() < before+10*mega {
			t.Errorf("%d bytes once the limit was gone", w.moved.Load()-before)
		}
		close(stop)
		time.Sleep(2 * time.Hour)
	})
}

// What is set again as it was makes nobody's debt less.
func TestAnUnchangedLimitLeavesDebtAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := limited(func(p *policy) { p.speed = 1000 })
		a := newTestAccount(p)
		w := newWorker(t, mustAdmit(t, a), flow.Up, fixed(4096))
		stop := make(chan struct{})
		go w.run(stop)
		for range 1000 {
			time.Sleep(100 * time.Millisecond)
			again := *p
			a.setPolicy(&again)
		}
		close(stop)
		synctest.Wait()
		if !within(w.moved.Load(), 100_000) {
			t.Errorf("%d bytes in 100 s", w.moved.Load())
		}
	})
}
