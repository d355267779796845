package fanout

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOneSubLinkPerOutboundVersionWhateverTheDestination(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.say(alice, "192.0.1.2:8", "b")
		w.say(alice, "192.0.2.1:7", "c")
		w.say(bob, "192.0.1.1:7", "d")
		if n := w.opened(); n != 3 {
			t.Fatalf("%d sub-links, want 3", n)
		}
		if got := w.link(0).all(); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("first sub-link sent %q", got)
		}
		if n := w.Associations(); n != 2 {
			t.Errorf("%d associations, want 2", n)
		}
	})
}

func TestRepliesGoToTheClientAndAreMetered(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "ping")
		w.link(0).answer("198.51.100.9:99", "pong")
		if want := []string{alice + "<198.51.100.9:99 pong"}; !slices.Equal(w.replies, want) {
			t.Errorf("replies %q, want %q", w.replies, want)
		}
		if n := w.link(0).counted; n != 4 {
			t.Errorf("metered %d bytes, want 4", n)
		}
	})
}

func TestEmptyDatagramsPass(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "")
		w.say(alice, "192.0.1.1:7", "x")
		w.say(alice, "192.0.1.1:7", "")
		if got := w.link(0).all(); !slices.Equal(got, []string{"", "x", ""}) {
			t.Errorf("sent %q", got)
		}
		w.link(0).answer("192.0.1.1:7", "")
		if len(w.replies) != 1 {
			t.Errorf("replies %q, want an empty one", w.replies)
		}
	})
}

func TestOpeningQueuesSixteenDatagramsAndDropsTheNewest(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.hold = make(chan struct{})
		buf := []byte("  ")
		for i := range 20 {
			copy(buf, fmt.Sprintf("%02d", i)) // the payload is valid during the call only
			w.hand(udp(alice, "192.0.1.1:7"), flow.Train{Payload: buf})
		}
		copy(buf, "!!")
		synctest.Wait()
		if w.opened() != 0 {
			t.Fatal("it is open already")
		}
		close(w.hold)
		synctest.Wait()
		w.say(alice, "192.0.1.1:7", "later")
		got := w.link(0).all()
		if len(got) != 17 || got[0] != "00" || got[15] != "15" || got[16] != "later" {
			t.Errorf("sent %q", got)
		}
		if n := w.drops[flow.DropQueueFull].Load(); n != 4 {
			t.Errorf("%d dropped, want 4", n)
		}
	})
}

func TestATrainCountsAsItsDatagramsInTheQueue(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.hold = make(chan struct{})
		w.hand(udp(alice, "192.0.1.1:7"), flow.Train{Payload: make([]byte, 40), Segment: 2})
		w.hand(udp(alice, "192.0.1.1:7"), payload("x"))
		close(w.hold)
		synctest.Wait()
		if got := w.link(0).all(); len(got) != 1 || len(got[0]) != 32 {
			t.Errorf("sent %q, want the first 16 datagrams", got)
		}
		if n := w.drops[flow.DropQueueFull].Load(); n != 5 {
			t.Errorf("%d dropped, want 5", n)
		}
	})
}

func TestASubLinkThatFailsToOpenIsLoggedAndNothingIsRegistered(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.openErr = errTest
		w.say(alice, "192.0.1.1:7", "a")
		if w.opened() != 0 || len(w.closes) != 0 {
			t.Error("something was registered")
		}
		if !w.log.has("opening out1@v1 failed: test failure") {
			t.Errorf("log: %s", w.log.b.String())
		}
		if n := w.drops[flow.DropOpenFailed].Load(); n != 1 {
			t.Errorf("%d dropped, want 1", n)
		}
		w.wantRefused(t, refused{netip.MustParseAddrPort(alice), netip.MustParseAddrPort("192.0.1.1:7"), "a", errTest})
		w.openErr = nil
		w.say(alice, "192.0.1.1:7", "b")
		if w.opened() != 1 {
			t.Error("a later datagram did not open a sub-link")
		}
	})
}

func TestASendThatFailsIsLoggedAndTheSubLinkLivesOn(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.link(0).err = errTest
		w.say(alice, "192.0.1.1:7", "b")
		w.link(0).err = nil
		w.say(alice, "192.0.1.1:7", "c")
		if got := w.link(0).all(); !slices.Equal(got, []string{"a", "c"}) {
			t.Errorf("sent %q", got)
		}
		if !w.log.has("sending on out1@v1 failed: test failure") {
			t.Errorf("log: %s", w.log.b.String())
		}
		if n := w.drops[flow.DropSendFailed].Load(); n != 1 {
			t.Errorf("%d dropped, want 1", n)
		}
		w.wantRefused(t, refused{netip.MustParseAddrPort(alice), netip.MustParseAddrPort("192.0.1.1:7"), "b", errTest})
	})
}

func (w *world) wantRefused(t *testing.T, want ...refused) {
	t.Helper()
	if !slices.Equal(w.refused, want) {
		t.Errorf("told clients %v, want %v", w.refused, want)
	}
}

func TestClientsAreToldOfEachDatagramThatIsRefusedAndOfNoOther(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		target := Target{Blocked: true, Cause: flow.DropBlocked, Refusal: errTest}
		w.route = func(flow.Flow) Target { return target }
		w.say(alice, "192.0.1.1:7", "a")
		w.say(alice, "192.0.1.1:7", "b")
		target.Refusal = nil
		w.say(alice, "192.0.1.2:7", "silence")
		a, to := netip.MustParseAddrPort(alice), netip.MustParseAddrPort("192.0.1.1:7")
		w.wantRefused(t, refused{a, to, "a", errTest}, refused{a, to, "b", errTest})
	})
}

func TestNobodyIsToldOfAnOpeningThatWasEnded(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.hold, w.openErr = make(chan struct{}), errTest
		w.hand(udp(alice, "192.0.1.1:7"), payload("a"))
		w.EndAll(flow.ErrShutdown)
		close(w.hold)
		synctest.Wait()
		w.wantRefused(t)
	})
}

func TestTheAssociationAndItsOtherSubLinksSurviveTheLossOfOne(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.say(alice, "192.0.2.1:7", "b")
		w.link(0).sub.Closed(errTest)
		synctest.Wait()
		if !w.log.has("sub-link out1@v1 ended: test failure") {
			t.Errorf("log: %s", w.log.b.String())
		}
		if err := w.closedWith(t, w.link(0)); !errors.Is(err, errTest) {
			t.Errorf("closed with %v", err)
		}
		w.say(alice, "192.0.2.1:7", "c")
		w.say(alice, "192.0.1.1:7", "d")
		if w.opened() != 3 || w.Associations() != 1 {
			t.Fatalf("%d sub-links opened, %d associations", w.opened(), w.Associations())
		}
		if got := w.link(1).all(); !slices.Equal(got, []string{"b", "c"}) {
			t.Errorf("the other one sent %q", got)
		}
		if got := w.link(2).all(); !slices.Equal(got, []string{"d"}) {
			t.Errorf("the new one sent %q", got)
		}
	})
}

func TestAKillFromWithinASendEndsTheSubLinkOnce(t *testing.T) {
	killed := &flow.Cause{Reason: flow.Killed, Text: "the flow was killed"}
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		l := w.link(0)
		l.onSend = func() { l.sub.End(killed); l.sub.End(errTest); l.err = killed }
		w.say(alice, "192.0.1.1:7", "b")
		if err := w.closedWith(t, l); err != error(killed) {
			t.Errorf("closed with %v, want the first cause", err)
		}
		if !l.closed {
			t.Error("the link is open")
		}
		l.answer("192.0.1.1:7", "late")
		if len(w.replies) != 0 {
			t.Errorf("a reply came after the end: %q", w.replies)
		}
	})
}

func TestAFlowClosesAfterTheBytesOfTheCallUnderWayWereCounted(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		l := w.link(0)
		inside, goOn := make(chan struct{}), make(chan struct{})
		w.cfg.Reply = func(_ Client, ts []flow.Train) (moved int) {
			close(inside)
			<-goOn
			return len(ts[0].Payload)
		}
		go l.sub.Receive([]flow.Train{payload("12345")})
		<-inside
		l.sub.End(errTest)
		synctest.Wait()
		if len(w.closes) != 0 {
			t.Error("closed during the call")
		}
		close(goOn)
		synctest.Wait()
		w.closedWith(t, l)
		if l.counted != 5 {
			t.Errorf("counted %d bytes at the close, want 5", l.counted)
		}
	})
}

func TestWhatComesBackBeforeTheFlowIsRegisteredIsDeliveredAndCounted(t *testing.T) {
	bubble(t, func(c *Config) {
		open := c.Open
		c.Open = func(ctx context.Context, f flow.Flow, tg Target, s *Sub) (Opened, error) {
			early := []byte("early")
			s.Receive([]flow.Train{{Payload: early}})
			copy(early, "XXXXX")
			return open(ctx, f, tg, s)
		}
	}, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		if len(w.replies) != 1 || w.link(0).counted != 5 {
			t.Errorf("replies %q, counted %d", w.replies, w.link(0).counted)
		}
	})
}

func TestBlockedDatagramsOpenNothing(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.route = func(flow.Flow) Target { return Target{Blocked: true, Cause: flow.DropSelf} }
		for range 3 {
			w.say(alice, "192.0.1.1:7", "a")
		}
		if w.opened() != 0 || w.asked != 1 {
			t.Errorf("opened %d, asked %d times", w.opened(), w.asked)
		}
		if n := w.drops[flow.DropSelf].Load(); n != 3 {
			t.Errorf("%d dropped, want 3", n)
		}
	})
}

func TestDecisionsAreRememberedUntilTheGenerationMovesOrTheirTimeEnds(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		version := "a"
		until := time.Time{}
		w.route = func(flow.Flow) Target { return Target{Outbound: version, Name: version, Until: until} }
		w.say(alice, "192.0.1.1:7", "1")
		version = "b"
		w.say(alice, "192.0.1.1:7", "2")
		if w.asked != 1 || w.opened() != 1 {
			t.Fatalf("asked %d times, want once", w.asked)
		}
		until = time.Now().Add(5 * time.Second)
		w.gen++
		w.say(alice, "192.0.1.1:7", "3")
		if w.asked != 2 || w.opened() != 2 {
			t.Fatalf("asked %d times after the generation moved", w.asked)
		}
		version = "c"
		wait(4 * time.Second)
		w.say(alice, "192.0.1.1:7", "4")
		wait(time.Second)
		w.say(alice, "192.0.1.1:7", "5")
		if w.asked != 3 || w.opened() != 3 {
			t.Fatalf("asked %d times, opened %d", w.asked, w.opened())
		}
		if got := w.link(1).all(); !slices.Equal(got, []string{"3", "4"}) {
			t.Errorf("b sent %q", got)
		}
	})
}

func TestAPinnedAssociationSendsEverythingThroughItsFirstSubLink(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.route = func(f flow.Flow) Target {
			n := f.Dest.Addr.Addr().As4()[2]
			return Target{Outbound: n, Name: fmt.Sprint(n), Pin: n == 3, Blocked: n == 4}
		}
		w.say(alice, "192.0.1.1:7", "a")
		w.say(alice, "192.0.2.1:7", "b")
		w.say(alice, "192.0.3.1:7", "pin")
		w.say(alice, "192.0.2.1:7", "c")
		w.say(alice, "192.0.5.1:7", "d")
		w.say(alice, "192.0.4.1:7", "blocked")
		if w.opened() != 2 {
			t.Fatalf("%d sub-links, want 2", w.opened())
		}
		if got := w.link(0).all(); !slices.Equal(got, []string{"a", "pin", "c", "d"}) {
			t.Errorf("the first one sent %q", got)
		}
	})
}

func TestWhatMayReachThisHostSharesNoSubLinkWithWhatMayNot(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.route = func(f flow.Flow) Target {
			return Target{Outbound: 1, Name: "x", Pin: true, AllowHost: f.Dest.Addr.Port() == 1}
		}
		w.say(alice, "192.0.1.1:1", "a")
		w.say(alice, "192.0.1.1:2", "b")
		if w.opened() != 2 || !w.link(0).f.AllowHost || w.link(1).f.AllowHost {
			t.Errorf("%d sub-links", w.opened())
		}
	})
}

func TestTheLeastRecentlySentToSubLinkIsEvictedFirst(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		for i := range 64 {
			w.say(alice, fmt.Sprintf("192.0.%d.1:7", i), "x")
		}
		w.say(alice, "192.0.0.1:7", "again")
		w.say(alice, "192.0.100.1:7", "one more")
		if err := w.closedWith(t, w.link(1)); err != error(flow.ErrEvicted) {
			t.Errorf("closed with %v", err)
		}
		if w.live() != 64 {
			t.Errorf("%d live, want 64", w.live())
		}
		w.say(alice, "192.0.1.1:7", "back")
		if w.link(65).name != "out1@v1" {
			t.Errorf("a datagram to the evicted one opened %s", w.link(65).name)
		}
		w.closedWith(t, w.link(2))
	})
}

func TestFiveThousandDestinationsNeedOneSubLinkAndFewDecisions(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		for i := range 5000 {
			f := udp(alice, "192.0.1.1:7")
			f.Dest.Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 1, byte(i)}), uint16(1+i/256))
			w.hand(f, payload("x"))
			if i%100 == 0 { // kept active
				synctest.Wait()
				w.say(alice, "192.0.1.1:9999", "active")
			}
		}
		if w.opened() != 1 {
			t.Errorf("%d sub-links, want 1", w.opened())
		}
		for i := range w.shards {
			for _, a := range w.shards[i].byKey {
				if n := len(a.mu.decisions); n > maxDecisions {
					t.Errorf("%d decisions remembered", n)
				}
			}
		}
	})
}

func TestIdleLimits(t *testing.T) {
	const client, server = true, false
	type event struct {
		after time.Duration
		from  bool
	}
	tests := map[string]struct {
		ports  []int
		events []event
		idle   time.Duration
	}{
		"one way":                       {ports: []int{9}, idle: time.Minute},
		"refreshed by the client":       {ports: []int{9}, events: []event{{55 * time.Second, client}}, idle: time.Minute},
		"answered":                      {ports: []int{9}, events: []event{{1, server}}, idle: 5 * time.Minute},
		"refreshed by the server alone": {ports: []int{9}, events: []event{{1, server}, {4 * time.Minute, server}, {4 * time.Minute, server}}, idle: 5 * time.Minute},
		"dns":                           {ports: []int{53}, events: []event{{1, server}}, idle: 10 * time.Second},
		"ntp":                           {ports: []int{123}, idle: 10 * time.Second},
		"stun":                          {ports: []int{3478}, idle: 10 * time.Second},
		"quic":                          {ports: []int{443}, events: []event{{1, server}}, idle: 30 * time.Second},
		"the longest of the ports":      {ports: []int{443, 53}, idle: 30 * time.Second},
		"a general port is longer":      {ports: []int{443, 9}, idle: time.Minute},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(t *testing.T, w *world) {
				for _, port := range tt.ports {
					w.say(alice, fmt.Sprintf("192.0.1.1:%d", port), "x")
				}
				for _, e := range tt.events {
					wait(e.after)
					if e.from == client {
						w.say(alice, fmt.Sprintf("192.0.1.1:%d", tt.ports[0]), "x")
					} else {
						w.link(0).answer("192.0.1.1:9", "x")
					}
				}
				wait(tt.idle - time.Second)
				if w.live() != 1 {
					t.Fatal("closed before its time")
				}
				wait(2 * time.Second) // one sweep
				if err := w.closedWith(t, w.link(0)); err != error(flow.ErrIdle) {
					t.Errorf("closed with %v", err)
				}
				wait(emptyIdle)
				if w.Associations() != 0 {
					t.Error("the association stays without sub-links")
				}
			})
		})
	}
}

func TestAClientThatKeepsSendingDoesNotKeepADeadSubLinkAlive(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.say(alice, "192.0.1.1:7", "a")
		w.link(0).err = errTest
		for range 13 {
			wait(5 * time.Second)
			w.say(alice, "192.0.1.1:7", "b")
		}
		w.closedWith(t, w.link(0))
		if w.opened() != 2 {
			t.Errorf("%d sub-links opened, want a second one", w.opened())
		}
	})
}
