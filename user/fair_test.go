package user

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// Who waits first goes first, and who comes later never overtakes.
func TestTurnsAreGivenInTheOrderOfAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.bandwidth[flow.Down] = 1000 }))
		move(t, mustAdmit(t, a), flow.Down, 4096, nil) // in debt
		const flows = 50
		var order []int
		leases := make([]*Lease, flows)
		for i := range leases {
			leases[i] = mustAdmit(t, a)
			wake := func() {
				if i == 9 { // was released, and may go on under another lease
					return
				}
				order = append(order, i)
				if move(t, leases[i], flow.Down, 100, nil) != 100 {
					t.Errorf("flow %d was woken and may not move", i)
				}
			}
			if move(t, leases[i], flow.Down, 100, wake) != -1 {
				t.Fatalf("flow %d overtook", i)
			}
		}
		leases[7].Leave(flow.Down)
		leases[9].Release()
		for i := range leases { // asking again is no reason to go to the end
			if i != 7 && i != 9 && i%2 == 1 {
				l := leases[i]
				wake := l.ways[flow.Down].wake
				move(t, l, flow.Down, 100, wake)
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		want := 0
		for _, i := range order {
			if want == 7 || want == 9 {
				want++
			}
			if i != want {
				t.Fatalf("the order is %v", order)
			}
			want++
		}
		if want != flows || len(order) != flows-2 {
			t.Errorf("the order is %v", order)
		}
	})
}

// A flow that was called and can't use its turn gives it to the next at once.
func TestWhoLeavesGivesItsTurnToTheNext(t *testing.T) {
	for name, leave := range map[string]func(*Lease){
		"leaves":   func(l *Lease) { l.Leave(flow.Up) },
		"releases": func(l *Lease) { l.Release() },
		"takes nothing": func(l *Lease) {
			if n, err := l.Ready(flow.Up, nil); n == 0 || err != nil {
				panic(err)
			}
			l.Took(flow.Up, 0)
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := newTestAccount(bandwidthUp(1000))
			move(t, mustAdmit(t, a), flow.Up, 4096, nil)
			first, second := mustAdmit(t, a), mustAdmit(t, a)
			var called []time.Duration
			start := time.Now()
			note := func() { called = append(called, time.Since(start)) }
			move(t, first, flow.Up, 100, note)
			move(t, second, flow.Up, 100, note)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if len(called) != 1 {
				t.Fatalf("%s: called %d flows for one turn", name, len(called))
			}
			leave(first)
			if len(called) != 2 || move(t, second, flow.Up, 100, nil) != 100 {
				t.Errorf("%s: the next was not called, %v", name, called)
			}
		})
	}
}

// Small requests get their turn beside bulk transfers.
func TestSmallRequestsAreServedBesideABulkTransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.speed = mega }))
		stop := make(chan struct{})
		for range 4 {
			w := newWorker(t, mustAdmit(t, a), flow.Down, fixed(64<<10))
			go w.run(stop)
		}
		time.Sleep(5 * time.Second)
		var slowest time.Duration
		for range 200 {
			l := mustAdmit(t, a)
			begun := time.Now()
			for _, d := range []flow.Dir{flow.Up, flow.Down} {
				if w := newWorker(t, l, d, fixed(500)); !w.transfer(stop) || w.moved.Load() != 500 {
					t.Fatal("a request did not move")
				}
			}
			slowest = max(slowest, time.Since(begun))
			l.Release()
		}
		close(stop)
		synctest.Wait()
		if slowest > time.Second { // two turns behind four of 64 KiB each at 1 MB/s
			t.Errorf("a request took %v", slowest)
		}
	})
}

// A blast of datagrams does not starve streams, nor the reverse.
func TestStreamsAndDatagramsShareARateFairly(t *testing.T) {
	for _, d := range []flow.Dir{flow.Up, flow.Down} {
		synctest.Test(t, func(t *testing.T) {
			a := newTestAccount(limited(func(p *policy) { p.bandwidth = [2]uint64{mega, mega} }))
			stop := make(chan struct{})
			w := newWorker(t, mustAdmit(t, a), d, fixed(64<<10))
			f := newDatagramFlow(t, a)
			go w.run(stop)
			for range 20_000 { // 12 MB/s
				f.send(t, d, train(10, 1200))
				time.Sleep(time.Millisecond)
			}
			close(stop)
			synctest.Wait()
			udp := f.up.bytes() + f.down.bytes()
			if udp < 9*mega || udp > 11*mega || !within(w.moved.Load(), 10*mega) {
				t.Errorf("%v: the stream moved %d, the datagrams %d", d, w.moved.Load(), udp)
			}
			f.Release()
		})
	}
}

func TestUsersDoNotTouchEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := newTestAccount(limited(func(p *policy) { p.speed = 10_000 }))
		fast := newTestAccount(limited(func(p *policy) { p.speed = mega }))
		stop := make(chan struct{})
		var ws []*worker
		for _, a := range []*account{slow, slow, slow, fast} {
			w := newWorker(t, mustAdmit(t, a), flow.Down, fixed(64<<10))
			ws = append(ws, w)
			go w.run(stop)
		}
		time.Sleep(100 * time.Second)
		close(stop)
		synctest.Wait()
		if sum := ws[0].moved.Load() + ws[1].moved.Load() + ws[2].moved.Load(); !within(sum, mega) || !within(ws[3].moved.Load(), 100*mega) {
			t.Errorf("the slow user moved %d, the fast one %d", sum, ws[3].moved.Load())
		}
		for _, w := range ws[:3] {
			if !within(3*w.moved.Load(), mega) {
				t.Errorf("one of three flows moved %d", w.moved.Load())
			}
		}
	})
}

// Whatever flows do, a quota is passed by one transfer at most, everything is ended
// once, what is charged is what moved, and nothing is left.
func TestAQuotaIsPassedByOneTransferAtMost(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			limit := rapid.Uint64Range(1, 2*mega).Draw(rt, "limit")
			factor := rapid.SampledFrom([]uint64{one, one / 2, 3 * one / 2, 1}).Draw(rt, "multiplier")
			speed := rapid.SampledFrom([]uint64{0, 0, 500_000}).Draw(rt, "speed")
			crossed := 0
			c := &common{drops: new(flow.Drops), crossed: func(*account) { crossed++ }}
			a := newAccount(c, 1, "ann", Usage{}, limited(func(p *policy) {
				p.total, p.block, p.multiplier, p.speed = limit, true, factor, speed
			}))
			flows := rapid.IntRange(1, 5).Draw(rt, "flows")
			late := rapid.SliceOfN(rapid.IntRange(0, 30), flows, flows).Draw(rt, "late")
			loses := rapid.SliceOfN(rapid.IntRange(0, 3), flows, flows).Draw(rt, "loses")
			var moved [2]uint64
			var mu sync.Mutex
			ended := 0
			for i := range flows {
				l := mustAdmit(t, a)
				d := flow.Dir(i % 2)
				l.Attach(func(cause error) {
					if cause != ErrQuota {
						panic(cause)
					}
					ended++
				})
				go func() {
					defer l.Release()
					wake := make(chan struct{}, 1)
					for total := uint64(0); total < 4*mega; {
						n, err := l.Ready(d, func() { wake <- struct{}{} })
						if err == flow.ErrPaused {
							select {
							case <-wake:
							case <-time.After(10 * time.Second): // the end does not wake it
							}
							continue
						}
						if err != nil {
							return
						}
						n -= n * loses[i] / 10 // takes less
						l.Took(d, n)
						time.Sleep(time.Duration(late[i]) * time.Millisecond)
						lost := n * loses[i] / 20 // and of this some is lost
						for _, part := range []int{(n - lost) / 2, n - lost - (n-lost)/2} {
							mu.Lock()
							moved[d] += uint64(part)
							mu.Unlock()
							l.Moved(d, part)
						}
						if total += uint64(n); lost > 0 {
							return // with its flow
						}
					}
				}()
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			u := a.usage()
			if u.Up != moved[flow.Up] || u.Down != moved[flow.Down] {
				rt.Fatalf("counted %d and %d, moved %v", u.Up, u.Down, moved)
			}
			if u.ChargedUp != u.Up*factor/one || u.ChargedDown != u.Down*factor/one {
				rt.Fatalf("charged %d and %d of %v", u.ChargedUp, u.ChargedDown, moved)
			}
			charged := u.ChargedUp + u.ChargedDown
			if most := limit + maxTransfer*factor/one + 2; charged > most {
				rt.Fatalf("charged %d of %d", charged, limit)
			}
			if reached := charged >= limit; (crossed == 1) != reached || ended > 0 && !reached {
				rt.Fatalf("charged %d of %d, %d ended, told %d times", charged, limit, ended, crossed)
			}
			if n, ips := a.gauges(); n != 0 || len(ips) != 0 || a.pending != [2]int{} || a.lines != [2]line{} {
				rt.Fatalf("left are %d connections of %v, pending %v", n, ips, a.pending)
			}
		})
	})
}

// A flow that took the last of its user's traffic and moves none of it must not hold
// the others up for ever.
func TestWhoHoldsTheLastOfTheTrafficAndMovesNothingIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newTestAccount(limited(func(p *policy) { p.total, p.block = 50_000, true }))
		holder, other := mustAdmit(t, a), mustAdmit(t, a)
		var cause error
		var after time.Duration
		start := time.Now()
		holder.Attach(func(err error) { cause, after = err, time.Since(start); holder.Release() })
		if _, err := holder.Ready(flow.Down, nil); err != nil {
			t.Fatal(err)
		}
		holder.Took(flow.Down, 50_000)
		a.usage() // looks at everything
		time.Sleep(time.Hour)
		if cause != nil {
			t.Fatal("ended although nobody waits")
		}
		start = time.Now()
		w := newWorker(t, other, flow.Up, fixed(100))
		if !w.transfer(nil) || cause != ErrQuota || after < heldTime || after > heldTime+2*longestPause {
			t.Errorf("ended with %v after %v", cause, after)
		}
	})
}

// A limit that does not block is told, and nothing else.
func TestALimitThatDoesNotBlockIsToldAndPasses(t *testing.T) {
	told := 0
	c := &common{drops: new(flow.Drops), crossed: func(*account) { told++ }}
	p := limited(func(p *policy) { p.down = 1000 })
	a := newAccount(c, 1, "ann", Usage{}, p)
	l := mustAdmit(t, a)
	for range 10 {
		move(t, l, flow.Down, 600, nil)
	}
	if mustAdmit(t, a); told != 1 {
		t.Errorf("told %d times", told)
	}
	a.update(func(u *Usage) *policy { *u = Usage{Generation: 1}; return p })
	move(t, l, flow.Down, 600, nil)
	if told != 1 {
		t.Error("told in the new period")
	}
	if move(t, l, flow.Down, 600, nil); told != 2 || a.usage().ChargedDown != 1200 {
		t.Errorf("told %d times of %d bytes", told, a.usage().ChargedDown)
	}
}

// Many users and flows at once, limits that change and flows that end: nothing is left,
// nobody is forgotten.
func TestManyUsersWithManyFlows(t *testing.T) {
	const users, flows = 1000, 50
	synctest.Test(t, func(t *testing.T) {
		c := &common{drops: new(flow.Drops)}
		accounts := make([]*account, users)
		var workers sync.WaitGroup
		for i := range accounts {
			a := newAccount(c, flow.UserKey(i+1), "ann", Usage{}, limited(func(p *policy) { p.speed = uint64(10_000 + i*1000) }))
			accounts[i] = a
			for k := range flows {
				l := mustAdmit(t, a)
				workers.Go(func() {
					defer l.Release()
					if k%10 == 9 {
						var s sink
						link := l.Link(&s, &s)
						for range 8 {
							link.Send([]flow.Train{datagram(1000)})
							time.Sleep(10 * time.Millisecond)
						}
						return
					}
					w := newWorker(t, l, flow.Dir(k%2), fixed(1500))
					for range 8 {
						if !w.transfer(nil) {
							return
						}
					}
				})
			}
		}
		for i, a := range accounts {
			switch i % 4 {
			case 1:
				a.setPolicy(unlimited())
			case 2:
				a.setPolicy(bandwidthUp(50_000))
			}
		}
		workers.Wait()
		for _, a := range accounts {
			if n, ips := a.gauges(); n != 0 || len(ips) != 0 || a.pending != [2]int{} || a.lines != [2]line{} {
				t.Fatalf("left are %d connections of %v, pending %v", n, ips, a.pending)
			}
		}
		if c.queued.bytes.Load() != 0 || c.queued.datagrams.Load() != 0 {
			t.Errorf("%d bytes wait", c.queued.bytes.Load())
		}
	})
}
