package user

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// sink is the outbound's link of a flow, its client and its owner: it keeps what passes.
type sink struct {
	mu     sync.Mutex
	got    [][]byte    // datagrams
	at     []time.Time // when they passed
	refuse func(tr *flow.Train) error
	during func()
	failed int // datagrams
	over   bool
	held   int
}

func (s *sink) take(tr *flow.Train) error {
	s.mu.Lock()
	during := s.during
	s.mu.Unlock()
	if during != nil {
		during()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse != nil {
		if err := s.refuse(tr); err != nil {
			return err
		}
	}
	for p, i := tr.Payload, 0; i < tr.Count(); i++ {
		n := len(p)
		if tr.Count() > 1 {
			n = min(n, tr.Segment)
		}
		s.got, p = append(s.got, append([]byte{}, p[:n]...)), p[n:]
		s.at = append(s.at, time.Now())
	}
	return nil
}

func (s *sink) Send(ts []flow.Train) (taken, moved int, err error) {
	for i := range ts {
		if err := s.take(&ts[i]); err != nil {
			return i, moved, err
		}
		moved += len(ts[i].Payload)
	}
	return len(ts), moved, nil
}

func (s *sink) Receive(ts []flow.Train) (moved int) {
	for i := range ts {
		if s.take(&ts[i]) == nil {
			moved += len(ts[i].Payload)
		}
	}
	return moved
}

func (s *sink) Close() error                  { return nil }
func (s *sink) LocalAddr() netip.AddrPort     { return netip.AddrPort{} }
func (s *sink) Unreachable(flow.ICMPError)    {}
func (s *sink) Closed(error)                  {}
func (s *sink) Failed(tr flow.Train, _ error) { s.failed += tr.Count() }

func (s *sink) Hold() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return false
	}
	s.held++
	return true
}

func (s *sink) Release() {
	s.mu.Lock()
	s.held--
	s.mu.Unlock()
}

func (s *sink) change(f func(s *sink)) {
	s.mu.Lock()
	f(s)
	s.mu.Unlock()
}

func (s *sink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.got)
}

// bytes is what passed in all.
func (s *sink) bytes() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.got {
		n += len(p)
	}
	return n
}

// datagramFlow is a lease with both ends.
type datagramFlow struct {
	*Lease
	up, down sink
	link     flow.Link
	receiver flow.Receiver
}

func newDatagramFlow(t testing.TB, a *account) *datagramFlow {
	f := &datagramFlow{Lease: mustAdmit(t, a)}
	f.link, f.receiver = f.Link(&f.up, &f.up), f.Lease.Receiver(&f.down, &f.down)
	return f
}

// send sends datagrams of sizes each way, and fails if the link does.
func (f *datagramFlow) send(t testing.TB, d flow.Dir, ts ...flow.Train) {
	t.Helper()
	if d == flow.Down {
		f.receiver.Receive(ts)
		return
	}
	if n, _, err := f.link.Send(ts); n != len(ts) || err != nil {
		t.Fatalf("took %d of %d, %v", n, len(ts), err)
	}
}

func datagram(n int) flow.Train { return flow.Train{Payload: make([]byte, n)} }

func train(count, segment int) flow.Train {
	return flow.Train{Payload: make([]byte, count*segment), Segment: segment}
}

// bandwidthUp limits what is sent.
func bandwidthUp(rate uint64) *policy {
	return limited(func(p *policy) { p.bandwidth[flow.Up] = rate })
}

// The figures of the debt bucket: whole, late by what the one before cost.
func TestADatagramLargerThanTheBurstLeavesWholeAndIsPaidAfterwards(t *testing.T) {
	for _, c := range []struct {
		rate uint64
		size int
	}{{1, 65_507}, {100, 65_507}, {1000, 65_507}, {10 * mega, 65_507}, {10_000, 30_000}} {
		synctest.Test(t, func(t *testing.T) {
			a := newTestAccount(limited(func(p *policy) { p.speed = c.rate }))
			f := newDatagramFlow(t, a)
			start := time.Now()
			if c.rate > uint64(c.size) { // use the burst up
				for range c.rate/uint64(c.size) + 1 {
					f.send(t, flow.Up, datagram(c.size))
				}
			} else {
				f.send(t, flow.Up, datagram(c.size))
			}
			n := f.up.count()
			f.send(t, flow.Up, datagram(c.size), datagram(1))
			debt := uint64(n*c.size) - c.rate
			want := time.Duration(float64(debt) / float64(c.rate) * 1e9)
			time.Sleep(want + 2*time.Second + time.Duration(float64(c.size)/float64(c.rate)*1e9))
			synctest.Wait()
			if f.up.count() != n+2 || len(f.up.got[n]) != c.size {
				t.Fatalf("%d B/s: %d datagrams left", c.rate, f.up.count()-n)
			}
			if late := f.up.at[n].Sub(start) - want; late < -time.Microsecond || late > shortestPause {
				t.Errorf("%d B/s: left after %v, paid after %v", c.rate, f.up.at[n].Sub(start), want)
			}
		})
	}
}

func TestTheLongRunRateIsTheLimitForDatagrams(t *testing.T) {
	for _, c := range []struct {
		rate    uint64
		size    int
		seconds int
	}{{1, 65_507, 200_000}, {100, 65_507, 20_000}, {1000, 65_507, 3000}, {1000, 1200, 300}, {10 * mega, 65_507, 5}, {10 * mega, 1200, 5}} {
		synctest.Test(t, func(t *testing.T) {
			a := newTestAccount(bandwidthUp(c.rate))
			f := newDatagramFlow(t, a)
			gap := time.Duration(float64(c.size) / float64(c.rate) * 1e9 / 3)
			sent := 0
			for start := time.Now(); time.Since(start) < time.Duration(c.seconds)*time.Second; time.Sleep(gap) {
				f.send(t, flow.Up, datagram(c.size))
				sent++
			}
			synctest.Wait()
			if got, want := f.up.bytes(), int(c.rate)*c.seconds; got < want-want/20 || got > want+want/20+c.size {
				t.Errorf("%d B/s in datagrams of %d: %d bytes in %d s", c.rate, c.size, got, c.seconds)
			}
			if n := f.up.count() + a.backlog.datagrams + int(a.drops[flow.DropPaced].Load()); n != sent {
				t.Errorf("%d datagrams passed, wait or were dropped, of %d", n, sent)
			}
			if u := a.usage(); int(u.Up) != f.up.bytes() || u.ChargedUp != u.Up {
				t.Errorf("counted %d, charged %d, moved %d", u.Up, u.ChargedUp, f.up.bytes())
			}
			f.Release()
		})
	}
}

// The order of a flow's datagrams is kept whatever waits, and none is split, doubled or
// lost but by a full queue; trains may be cut.
func TestDatagramsKeepTheirOrderAndBounds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			rate := rapid.Uint64Range(500, 100_000).Draw(rt, "rate")
			a := newTestAccount(limited(func(p *policy) { p.speed, p.bandwidth[flow.Down] = rate, 2*rate }))
			f := newDatagramFlow(t, a)
			var sent [2]int
			next := func(d flow.Dir, count, segment int) flow.Train {
				tr := train(count, segment)
				for i := range count {
					if segment >= 8 {
						binary.BigEndian.PutUint64(tr.Payload[i*segment:], uint64(sent[d]))
					}
					sent[d]++
				}
				return tr
			}
			limits := []*policy{a.policy, unlimited(), bandwidthUp(rate / 2), a.policy}
			for range rapid.IntRange(1, 60).Draw(rt, "steps") {
				d := flow.Dir(rapid.IntRange(0, 1).Draw(rt, "dir"))
				var ts []flow.Train
				for range rapid.IntRange(1, 3).Draw(rt, "trains") {
					segment := rapid.SampledFrom([]int{0, 8, 100, 1200}).Draw(rt, "segment")
					count := rapid.IntRange(1, 8).Draw(rt, "count")
					if segment == 0 {
						count = 1
					}
					ts = append(ts, next(d, count, segment))
				}
				f.send(t, d, ts...)
				for i := range ts {
					clear(ts[i].Payload) // the caller's again
				}
				time.Sleep(time.Duration(rapid.IntRange(0, 100).Draw(rt, "ms")) * time.Millisecond)
				if rapid.IntRange(0, 9).Draw(rt, "change") == 0 {
					a.setPolicy(rapid.SampledFrom(limits).Draw(rt, "to"))
				}
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			lost := int(a.drops[flow.DropPaced].Load())
			for d, s := range []*sink{&f.up, &f.down} {
				last := -1
				for _, p := range s.got {
					if len(p) < 8 {
						continue
					}
					if n := int(binary.BigEndian.Uint64(p)); n <= last {
						rt.Fatalf("%v: %d after %d", flow.Dir(d), n, last)
					} else {
						last = n
					}
				}
				lost -= sent[d] - len(s.got)
			}
			if lost != 0 {
				rt.Fatalf("%d more drops counted than datagrams lost", lost)
			}
			if a.backlog != (backlog{}) || a.queued.bytes.Load() != 0 || a.queued.datagrams.Load() != 0 {
				rt.Fatalf("what waits: %+v", a.backlog)
			}
			if u := a.usage(); int(u.Up) != f.up.bytes() || int(u.Down) != f.down.bytes() {
				rt.Fatalf("counted %d and %d", u.Up, u.Down)
			}
			f.Release()
			if len(a.associations) != 0 {
				rt.Fatal("the association is still known")
			}
		})
	})
}

// Once the limit is gone, what waits goes at once, before what comes then.
func TestWhatWaitsGoesFirstWhenTheLimitIsGone(t *testing.T) {
	for _, gap := range []time.Duration{0, shortestPause} {
		testLimitGone(t, gap)
	}
}

// testLimitGone sends one more datagram after a gap.
func testLimitGone(t *testing.T, gap time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(bandwidthUp(1))
		f := newDatagramFlow(t, a)
		w := newWorker(t, mustAdmit(t, a), flow.Up, fixed(100))
		for size := range 200 {
			f.send(t, flow.Up, datagram(1+size))
		}
		go w.transfer(nil)
		synctest.Wait()
		a.setPolicy(unlimited())
		time.Sleep(gap)
		synctest.Wait()
		if gap > 0 && f.up.count() != 200 {
			t.Fatalf("%d left", f.up.count())
		}
		f.send(t, flow.Up, datagram(201))
		time.Sleep(shortestPause)
		synctest.Wait()
		if f.up.count() != 201 || w.moved.Load() != 100 {
			t.Fatalf("%d left, the stream moved %d", f.up.count(), w.moved.Load())
		}
		for i, p := range f.up.got {
			if len(p) != 1+i {
				t.Fatalf("datagram %d left in place %d", len(p)-1, i)
			}
		}
		if f.state.Load() != open {
			t.Error("the account is still asked")
		}
	})
}

// A turn that somebody else's reservation took away comes back with it.
func TestDatagramsThatWereCalledTooLateAreCalledAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.total, p.block = 1000, true }))
		f, other := newDatagramFlow(t, a), mustAdmit(t, a)
		reserve := func() {
			if _, err := other.Ready(flow.Down, nil); err != nil {
				t.Fatal(err)
			}
		}
		reserve()
		f.send(t, flow.Up, datagram(10))
		other.Took(flow.Down, 0) // calls
		reserve()
		time.Sleep(shortestPause)
		synctest.Wait()
		if f.up.count() != 0 {
			t.Fatal("passed beside a transfer that may cross the limit")
		}
		other.Took(flow.Down, 0)
		time.Sleep(shortestPause)
		synctest.Wait()
		if f.up.count() != 1 {
			t.Error("was not called again")
		}
	})
}

// An empty datagram keeps its place and costs nothing.
func TestAnEmptyDatagramKeepsItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(bandwidthUp(1000))
		f := newDatagramFlow(t, a)
		f.send(t, flow.Up, datagram(1100), datagram(500), datagram(0), datagram(0), datagram(7))
		time.Sleep(999 * time.Millisecond)
		if f.up.count() != 1 {
			t.Fatalf("%d datagrams left", f.up.count())
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		if f.up.count() != 5 || len(f.up.got[2]) != 0 || f.up.at[4].Sub(f.up.at[1]) != 500*time.Millisecond {
			t.Errorf("left at %v", f.up.at)
		}
		if u := a.usage(); u.Up != 1607 {
			t.Errorf("%d bytes counted", u.Up)
		}
		f.Release()
	})
}

func TestADatagramOver65535BytesIsRefused(t *testing.T) {
	a := newTestAccount(bandwidthUp(10 * mega))
	f := newDatagramFlow(t, a)
	f.send(t, flow.Up, datagram(65_536), datagram(65_535), datagram(65_536), datagram(10))
	if f.up.count() != 2 || a.drops[flow.DropTooBig].Load() != 2 {
		t.Errorf("%d left, %d dropped", f.up.count(), a.drops[flow.DropTooBig].Load())
	}
	f.Release()
}

// The limits of what waits, each reached alone: the newest are dropped.
func TestWhatWaitsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &common{drops: new(flow.Drops)}
		newFlow := func(a *account, client int) *datagramFlow {
			s := from("10.0.0.2")
			s.Client = netip.AddrPortFrom(s.Source, uint16(client))
			l, err := a.admit(s)
			if err != nil {
				t.Fatal(err)
			}
			f := &datagramFlow{Lease: l}
			f.link, f.receiver = f.Link(&f.up, &f.up), f.Lease.Receiver(&f.down, &f.down)
			return f
		}
		p := limited(func(p *policy) { p.bandwidth = [2]uint64{1, 1} })
		account := func() *account { return newAccount(c, 1, "ann", Usage{}, p) }
		check := func(what string, bytes, datagrams int64) {
			t.Helper()
			if b, n := c.queued.bytes.Load(), c.queued.datagrams.Load(); b != bytes || n != datagrams {
				t.Errorf("%s: %d bytes and %d datagrams wait, want %d and %d", what, b, n, bytes, datagrams)
			}
		}
		indebt := func(f *datagramFlow) {
			f.send(t, flow.Up, datagram(60_000))
			f.send(t, flow.Down, datagram(60_000))
		}

		a := account()
		one, same, other := newFlow(a, 1), newFlow(a, 1), newFlow(a, 2)
		indebt(one)
		for range 100 { // both directions and both sub-links share the association's bound
			one.send(t, flow.Up, train(3, 100))
			same.send(t, flow.Down, train(2, 1))
		}
		check("an association's datagrams", 51*300+51*2+100, 256)
		for range 10 {
			other.send(t, flow.Up, train(6, 20_000))
		}
		check("an association's bytes", 51*300+51*2+100+52*20_000, 256+52)
		one.Release()
		same.Release()
		other.Release()
		check("after the flows ended", 0, 0)

		a = account()
		indebt(newFlow(a, 1))
		for i := range 8 {
			f := newFlow(a, 2+i)
			for range 300 {
				f.send(t, flow.Up, datagram(1))
			}
		}
		check("a user's datagrams", 1024, 1024)
		a = account() // another user has room of its own
		indebt(newFlow(a, 1))
		for i := range 8 {
			f := newFlow(a, 2+i)
			for range 17 {
				f.send(t, flow.Up, datagram(60_000))
			}
		}
		check("a user's bytes", 1024+69*60_000, 1024+69)
		for range 20 {
			a = account()
			indebt(newFlow(a, 1))
			for i := range 4 {
				f := newFlow(a, 2+i)
				for range 300 {
					f.send(t, flow.Up, datagram(0))
				}
			}
		}
		check("all datagrams", 1024+69*60_000, 16384)
	})
}

// What waits of a train that is nearly gone is copied, so that it does not keep the whole.
func TestWhatWaitsHoldsNoMoreThanTwiceItsBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(bandwidthUp(10_000))
		f := newDatagramFlow(t, a)
		f.send(t, flow.Up, datagram(5000), train(60, 1000))
		for f.up.bytes() < 65_000 {
			time.Sleep(20 * time.Millisecond)
			synctest.Wait()
			a.mu.Lock()
			held, waits := 0, 0
			for _, tr := range f.ways[flow.Up].queue {
				held, waits = held+cap(tr.Payload), waits+len(tr.Payload)
			}
			if held > 2*waits || waits != a.backlog.bytes {
				t.Fatalf("%d bytes are held for %d, of which %d are counted", held, waits, a.backlog.bytes)
			}
			a.mu.Unlock()
		}
		f.Release()
	})
}

func TestARefusalOfTheLinkReachesWhoSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(bandwidthUp(1000))
		f := newDatagramFlow(t, a)
		f.up.refuse = func(tr *flow.Train) error {
			if len(tr.Payload) == 13 {
				return syscall.EMSGSIZE
			}
			return nil
		}
		n, moved, err := f.link.Send([]flow.Train{datagram(50), datagram(13), datagram(7)})
		if n != 1 || moved != 50 || err != syscall.EMSGSIZE {
			t.Errorf("%d, %d, %v", n, moved, err)
		}
		f.send(t, flow.Up, datagram(1000), datagram(5), datagram(13), datagram(6))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if f.up.failed != 1 || f.up.count() != 4 || f.up.held != 0 {
			t.Errorf("%d failed, %d left, %d held", f.up.failed, f.up.count(), f.up.held)
		}
		if u := a.usage(); u.Up != 1061 || a.pending != [2]int{} {
			t.Errorf("%d bytes counted, pending %v", u.Up, a.pending)
		}
		f.Release()
	})
}

// What waits goes with its flow, and an owner that is over gets nothing any more.
func TestTheEndOfAFlowDropsWhatWaits(t *testing.T) {
	for name, end := range map[string]func(a *account, f *datagramFlow){
		"released":      func(_ *account, f *datagramFlow) { f.Release() },
		"disabled":      func(a *account, f *datagramFlow) { a.end(ErrDisabled); f.Release() },
		"owner is over": func(_ *account, f *datagramFlow) { f.up.change(func(s *sink) { s.over = true }) },
		"ended in a send": func(a *account, f *datagramFlow) {
			f.up.change(func(s *sink) { s.during = func() { a.end(ErrRetired) } })
		},
		"closed in a send": func(_ *account, f *datagramFlow) { f.up.change(func(s *sink) { s.during = f.Release }) },
	} {
		synctest.Test(t, func(t *testing.T) {
			a := newTestAccount(bandwidthUp(1000))
			f, other := newDatagramFlow(t, a), newDatagramFlow(t, a)
			f.send(t, flow.Up, datagram(2000), datagram(1000), datagram(1000), datagram(1000))
			end(a, f)
			time.Sleep(time.Minute)
			f.Release()
			if n := f.up.count(); n > 2 || a.queued.bytes.Load() != 0 || a.backlog.datagrams != 0 || a.pending != [2]int{} {
				t.Errorf("%s: %d left, %d bytes wait, pending %v", name, n, a.queued.bytes.Load(), a.pending)
			}
			if lost := a.drops[flow.DropPaced].Load(); int(lost) != 4-f.up.count() {
				t.Errorf("%s: %d drops, %d left", name, lost, f.up.count())
			}
			if a.lines != [2]line{} {
				t.Errorf("%s: somebody is in line", name)
			}
			if name != "disabled" && name != "ended in a send" { // the others go on
				other.send(t, flow.Up, datagram(10))
				if other.up.count() != 1 {
					t.Errorf("%s: nothing passes any more", name)
				}
			}
			other.Release()
		})
	}
}

func TestAnEndedFlowsDatagramsAreRefusedWithTheCause(t *testing.T) {
	a := newTestAccount(unlimited())
	f := newDatagramFlow(t, a)
	a.end(ErrExpired)
	if n, _, err := f.link.Send([]flow.Train{datagram(1)}); n != 0 || err != ErrExpired {
		t.Errorf("%d, %v", n, err)
	}
	if f.receiver.Receive([]flow.Train{datagram(1)}) != 0 || f.down.count() != 0 {
		t.Error("received after the end")
	}
}

// A datagram may be what crosses the limit: it passes, and is the last.
func TestADatagramThatCrossesTheLimitIsTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.up, p.block = 2500, true }))
		f := newDatagramFlow(t, a)
		var cause error
		f.Attach(func(err error) { cause = err })
		ts := []flow.Train{datagram(1000), datagram(1000)}
		f.send(t, flow.Up, ts...)
		f.send(t, flow.Up, datagram(1000))
		if cause != ErrQuota || a.usage().Up != 3000 {
			t.Errorf("ended with %v after %d bytes", cause, a.usage().Up)
		}
		if _, _, err := f.link.Send(ts); err != ErrQuota {
			t.Errorf("sent after the end: %v", err)
		}
	})
}

// One batch is many transfers to the limit: at most 64 KiB go beyond it.
func TestABatchOfDatagramsGoesBeyondTheLimitByOneTransferAtMost(t *testing.T) {
	a := newTestAccount(limited(func(p *policy) { p.up, p.block = 10_000, true }))
	f := newDatagramFlow(t, a)
	var ts []flow.Train
	for range 64 {
		ts = append(ts, train(60, 1000))
	}
	n, moved, err := f.link.Send(ts)
	if n != 1 || moved != 60_000 || err != ErrQuota {
		t.Errorf("took %d, moved %d, %v", n, moved, err)
	}
}
