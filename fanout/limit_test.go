package fanout

import (
	"fmt"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

func TestAssociationsAreCappedPerSourceByIdleness(t *testing.T) {
	bubble(t, func(c *Config) { c.PerSource = 3 }, func(t *testing.T, w *world) {
		for _, port := range []int{1, 2, 3} {
			w.say(fmt.Sprintf("10.0.0.2:%d", port), "192.0.1.1:7", "x")
			wait(time.Second)
		}
		w.link(0).answer("192.0.1.1:7", "x") // the second one is the idlest now
		w.say(bob, "192.0.1.1:7", "x")
		w.say("10.0.0.2:4", "192.0.1.1:7", "x")
		if err := w.closedWith(t, w.link(1)); err != error(flow.ErrEvicted) {
			t.Errorf("closed with %v", err)
		}
		if n := w.drops[flow.DropFlowLimit].Load(); n != 1 || w.Associations() != 4 {
			t.Errorf("%d counted, %d associations", n, w.Associations())
		}
	})
}

func TestAnOldAssociationInUseIsNotTheOneThatMakesRoom(t *testing.T) {
	const share = 8
	bubble(t, func(c *Config) { c.PerSource = share }, func(t *testing.T, w *world) {
		say := func(port int) {
			wait(time.Millisecond)
			w.say(fmt.Sprintf("10.0.0.2:%d", port), "192.0.1.1:7", "x")
		}
		for port := range 10 * share {
			say(1 + port)
			say(1)
			say(2)
		}
		if w.link(0).isClosed() || w.link(1).isClosed() {
			t.Error("one that was used all the time made room")
		}
		if n := w.Associations(); n != share {
			t.Errorf("%d associations, want %d", n, share)
		}
	})
}

func TestRoomForManyAssociationsIsGivenBack(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.route = func(f flow.Flow) Target {
			return Target{Outbound: 1, Name: "out1@v1", Blocked: f.Source.Port() != 1000}
		}
		w.say(alice, "192.0.1.1:7", "x")
		f, ts := udp(alice, "192.0.1.1:7"), []flow.Train{payload("x")}
		for i := range 32 * 256 {
			f.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 1)
			w.Handle(f, ts)
		}
		var grown [shards][2]uintptr
		rooms := func(sh *shard) [2]uintptr {
			sh.mu.Lock()
			defer sh.mu.Unlock()
			return [2]uintptr{reflect.ValueOf(sh.byKey).Pointer(), reflect.ValueOf(sh.sources).Pointer()}
		}
		for i := range w.shards {
			grown[i] = rooms(&w.shards[i])
		}
		wait(emptyIdle + 2*time.Second)
		if n := w.Associations(); n != 1 {
			t.Fatalf("%d associations are left, want alice's", n)
		}
		for i := range w.shards {
			if now := rooms(&w.shards[i]); now[0] == grown[i][0] || now[1] == grown[i][1] {
				t.Errorf("shard %d keeps its room", i)
			}
		}
		w.say(alice, "192.0.1.1:7", "y")
		if w.opened() != 1 {
			t.Error("alice's association is lost")
		}
	})
}

func TestAssociationsNeverExceedTheLimitInAll(t *testing.T) {
	bubble(t, func(c *Config) { c.Associations = 20 }, func(t *testing.T, w *world) {
		for i := range 500 {
			w.say(fmt.Sprintf("10.0.%d.%d:1", i/200, 1+i%200), "192.0.1.1:7", "x")
			if n := w.Associations(); n > 20 {
				t.Fatalf("%d associations", n)
			}
		}
		if n := w.drops[flow.DropFlowLimit].Load(); n != 480 || w.live() != 20 {
			t.Errorf("%d evictions, %d live sub-links", n, w.live())
		}
	})
}

func TestEndAllEndsOpenAndOpeningSubLinksWithTheCause(t *testing.T) {
	retired := &flow.Cause{Reason: flow.Retired, Text: "the device was removed"}
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.hold = make(chan struct{})
		w.say(alice, "192.0.2.1:7", "b")
		w.EndAll(retired)
		synctest.Wait()
		if err := w.closedWith(t, w.link(0)); err != error(retired) {
			t.Errorf("closed with %v", err)
		}
		if w.opened() != 1 || w.Table.live.Load() != 0 || w.Associations() != 0 {
			t.Error("the opening goes on")
		}
		close(w.hold)
		w.say(alice, "192.0.1.1:7", "again")
		if w.opened() != 2 {
			t.Error("nothing opens after EndAll")
		}
	})
}

func TestShutdownClosesEverythingAndDropsWhatComesLater(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.stop()
		if err := w.closedWith(t, w.link(0)); err != error(flow.ErrShutdown) {
			t.Errorf("closed with %v", err)
		}
		w.say(alice, "192.0.1.1:7", "late")
		if w.opened() != 1 || w.Associations() != 0 {
			t.Error("it opens after the shutdown")
		}
	})
}

func TestOpeningsAreBounded(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.hold = make(chan struct{})
		for i := range maxOpeners + maxOpenings + 10 {
			w.hand(udp(fmt.Sprintf("10.%d.%d.1:1", i/200, 1+i%200), "192.0.1.1:7"), payload("x"))
		}
		synctest.Wait()
		if n := w.drops[flow.DropFlowLimit].Load(); n != 10 {
			t.Errorf("%d dropped, want 10", n)
		}
		close(w.hold)
		synctest.Wait()
		if n := w.opened(); n != maxOpeners+maxOpenings {
			t.Errorf("%d opened", n)
		}
	})
}

func TestTheQueuesOfAllOpeningsAreBoundedInBytes(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.hold = make(chan struct{})
		big := make([]byte, 60000)
		for i := range maxQueue/60000 + 5 {
			w.hand(udp(fmt.Sprintf("10.0.0.1:%d", 1+i), "192.0.1.1:7"), flow.Train{Payload: big})
		}
		if n := w.drops[flow.DropQueueFull].Load(); n != 5 {
			t.Errorf("%d dropped, want 5", n)
		}
		close(w.hold)
		synctest.Wait()
	})
}

func TestEchoStreamsAndDatagramsOfOnePortAreTwoAssociations(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		echo := udp(alice, "192.0.1.1:0")
		echo.Network = flow.ICMP
		w.hand(echo, payload("b"))
		synctest.Wait()
		if w.Associations() != 2 {
			t.Errorf("%d associations, want 2", w.Associations())
		}
		wait(11 * time.Second)
		if err := w.closedWith(t, w.link(1)); err != error(flow.ErrIdle) {
			t.Errorf("the echo stream closed with %v", err)
		}
	})
}

func TestHandleAllocatesNothingInSteadyState(t *testing.T) {
	w := newWorld(t, nil)
	defer w.stop()
	f, tr := udp(alice, "192.0.1.1:7"), payload("x")
	w.hand(f, tr)
	w.waitForLink(t)
	l := w.link(0)
	l.mu.Lock()
	l.quiet = true
	l.mu.Unlock()
	g := udp(alice, "192.0.1.2:7")
	w.hand(g, tr)
	ts := []flow.Train{tr, tr, tr}
	ts[0].Peer, ts[1].Peer, ts[2].Peer = f.Dest, f.Dest, g.Dest
	if n := testing.AllocsPerRun(1000, func() { w.Handle(f, ts) }); n != 0 {
		t.Errorf("%v allocations for three datagrams", n)
	}
}

func TestReadersKillersAndSweepsRaceSafely(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Sweep = time.Millisecond
		c.Associations, c.PerSource = 30, 4
		c.Timeouts = Timeouts{OneWay: 2 * time.Millisecond, Answered: 3 * time.Millisecond, Ports: map[uint16]time.Duration{}}
		c.Log = nil
	})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 3000 {
				w.hand(udp(fmt.Sprintf("10.0.0.%d:%d", 1+i%13, 1+i%7), fmt.Sprintf("192.0.%d.1:7", i%90)), payload("x"))
				w.mu.Lock()
				var l *fakeLink
				if n := len(w.links); n > 0 {
					l = w.links[(i*7+g)%n]
				}
				w.mu.Unlock()
				if l == nil {
					continue
				}
				switch i % 5 {
				case 0:
					l.sub.End(errTest)
				case 1:
					l.sub.Closed(errTest)
				case 2:
					l.sub.Receive([]flow.Train{payload("y")})
				}
				if i%1000 == 999 {
					w.EndAll(flow.ErrPolicy)
				}
			}
		})
	}
	wg.Wait()
	w.stop()
	for _, l := range w.links {
		w.closedWith(t, l)
		if !l.closed || l.overlaps > 0 {
			t.Fatalf("flow %d: closed %v, %d sends after its close", l.id, l.closed, l.overlaps)
		}
	}
}

// waitForLink waits until the first sub-link is open, outside of bubbles.
func (w *world) waitForLink(t testing.TB) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); <-tick.C {
		w.mu.Lock()
		ready := len(w.links) == 1 && w.links[0].sub.ready.Load()
		w.mu.Unlock()
		if ready {
			return
		}
	}
	t.Fatal("not open within 10 s")
}

func BenchmarkHandle(b *testing.B) {
	w := newWorld(b, nil)
	defer w.stop()
	f, tr := udp(alice, "192.0.1.1:7"), payload("x")
	w.hand(f, tr)
	w.waitForLink(b)
	l := w.link(0)
	l.mu.Lock()
	l.quiet = true
	l.mu.Unlock()
	tr.Peer = f.Dest
	for _, n := range []int{1, 32} {
		ts := slices.Repeat([]flow.Train{tr}, n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				w.Handle(f, ts)
			}
		})
	}
}

// Each datagram comes from a port of its own and makes room for itself among the
// many of its source, some of which are in use.
func BenchmarkAnAssociationMoreOfASourceThatHasItsShare(b *testing.B) {
	for _, share := range []int{512, 8192} {
		b.Run(fmt.Sprint(share), func(b *testing.B) {
			w := newWorld(b, func(c *Config) { c.PerSource = share })
			defer w.stop()
			w.route = func(flow.Flow) Target { return Target{Blocked: true} }
			f, ts := udp(alice, "192.0.1.1:7"), []flow.Train{payload("x")}
			from := func(port int) {
				f.Source = netip.AddrPortFrom(f.Source.Addr(), uint16(port))
				w.Handle(f, ts)
			}
			for i := range share {
				from(i)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				from(share + i%(60_000-share))
				from(i % 64) // in use
			}
		})
	}
}

// Whether clients wait for each other: with two processors it should do twice as
// many as with one.
func BenchmarkHandleOfManyClients(b *testing.B) {
	w := newWorld(b, func(c *Config) { c.Gen = func() uint64 { return 1 } })
	defer w.stop()
	var clients []flow.Flow
	for i := range 64 {
		f := udp(fmt.Sprintf("10.0.0.%d:1000", 1+i), "192.0.1.1:7")
		w.hand(f, payload("x"))
		clients = append(clients, f)
	}
	for w.opened() < len(clients) {
		runtime.Gosched()
	}
	for i := range clients {
		l := w.link(i)
		l.mu.Lock()
		l.quiet = true
		l.mu.Unlock()
	}
	var started atomic.Uint32
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		f := clients[started.Add(1)%64]
		tr := payload("x")
		tr.Peer = f.Dest
		ts := []flow.Train{tr}
		for pb.Next() {
			w.Handle(f, ts)
		}
	})
}

func TestWhileMemoryIsShortNewAssociationsAndSubLinksAreDroppedAndOldOnesCarry(t *testing.T) {
	full := false
	bubble(t, func(c *Config) { c.Full = func() bool { return full } }, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		full = true
		w.say(bob, "192.0.1.1:7", "b")
		w.say(alice, "192.0.2.1:7", "c") // another outbound
		w.say(alice, "192.0.1.1:7", "d")
		if n := w.drops[flow.DropMemory].Load(); n != 2 || w.Associations() != 1 || w.opened() != 1 {
			t.Fatalf("%d dropped; %d associations, %d sub-links", n, w.Associations(), w.opened())
		}
		full = false
		w.say(bob, "192.0.1.1:7", "e")
		w.say(alice, "192.0.2.1:7", "f")
		if w.Associations() != 2 || w.opened() != 3 || w.drops[flow.DropMemory].Load() != 2 {
			t.Errorf("%d associations, %d sub-links after it", w.Associations(), w.opened())
		}
	})
}
