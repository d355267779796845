package track

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// soon is a context that bounds a wait.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestASubscriberSeesWhatCameAfterItSubscribed(t *testing.T) {
	tr := newTracker(t, Options{})
	old := tr.Open(over("lan", "direct", 0), nil)
	sub := tr.Subscribe()
	defer sub.Close()
	f := tr.Open(over("lan", "vpn", 0), nil)
	f.Moved(flow.Down, 9)
	tr.Kill(f.ID())
	f.Close(nil)
	old.Close(nil)
	for _, want := range []Event{
		{Opened, Record{ID: 2}},
		{Closed, Record{ID: 2, Down: 9, Reason: flow.Killed, Killed: true}},
		{Closed, Record{ID: 1, Reason: flow.EOF}},
	} {
		ev, missed, err := sub.Next(soon(t))
		r, w := ev.Record, want.Record
		if err != nil || missed != 0 || ev.Kind != want.Kind || r.ID != w.ID || r.Down != w.Down || r.Killed != w.Killed || r.Reason != w.Reason {
			t.Errorf("got %+v, %d, %v; want %+v", ev, missed, err, want)
		}
		if r.Ended.IsZero() != (ev.Kind == Opened) {
			t.Errorf("%v ended %v", ev.Kind, r.Ended)
		}
	}
}

func TestAnEventFollowsWhatItTells(t *testing.T) {
	tr := newTracker(t, Options{})
	sub := tr.Subscribe()
	defer sub.Close()
	var f *Flow
	for _, c := range []struct {
		kind Kind
		lock *sync.Mutex // of what has to be done before the event is sent
		do   func()
	}{
		{Opened, &tr.shardOf(1).mu, func() { f = tr.Open(over("lan", "direct", 0), nil) }},
		{Closed, &tr.shardOf(1).mu, func() { f.Close(nil) }},
		{Opened, &tr.shardOf(2).mu, func() { f = tr.Open(over("lan", "direct", 0), nil) }},
		{Closed, &tr.closed.mu, func() { f.Close(nil) }},
	} {
		var doing sync.WaitGroup
		c.lock.Lock()
		doing.Go(c.do)
		early, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if ev, _, err := sub.Next(early); err == nil {
			t.Errorf("%v was sent too early", ev.Kind)
		}
		cancel()
		c.lock.Unlock()
		if ev, _, err := sub.Next(soon(t)); err != nil || ev.Kind != c.kind {
			t.Errorf("%v, %v; want %v", ev.Kind, err, c.kind)
		}
		doing.Wait()
	}
}

func TestAStalledSubscriberIsToldExactlyWhatItMissed(t *testing.T) {
	tr := newTracker(t, Options{Events: 8})
	stalled, quick := tr.Subscribe(), tr.Subscribe()
	defer stalled.Close()
	defer quick.Close()
	id := flow.ID(0)
	send := func(n int) {
		for range n {
			tr.Open(over("lan", "direct", 0), nil)
			id++
			ev, missed, err := quick.Next(soon(t))
			if err != nil || missed != 0 || ev.Record.ID != id {
				t.Fatalf("the quick one got %v, %d, %v; want %v", ev.Record.ID, missed, err, id)
			}
		}
	}
	expect := func(want flow.ID, lost uint64) {
		t.Helper()
		ev, missed, err := stalled.Next(soon(t))
		if err != nil || missed != lost || ev.Record.ID != want {
			t.Errorf("got %v, missed %d, %v; want %v, missed %d", ev.Record.ID, missed, err, want, lost)
		}
	}
	send(8)
	expect(1, 0) // exactly full: nothing is lost yet
	send(2)
	expect(3, 1)
	send(100)
	expect(103, 99)
	for next := range 7 {
		expect(104+flow.ID(next), 0)
	}
	late := tr.Subscribe()
	defer late.Close()
	send(9)
	expect(112, 1)
	if ev, missed, err := late.Next(soon(t)); err != nil || missed != 1 || ev.Record.ID != 112 {
		t.Errorf("the late one got %v, %d, %v", ev.Record.ID, missed, err)
	}
}

func TestAnEventThatIsOverwrittenWhileItIsReadIsMissed(t *testing.T) {
	tr := newTracker(t, Options{Events: 4})
	sub := tr.Subscribe()
	defer sub.Close()
	tr.Open(over("lan", "direct", 0), nil)
	sub.ring[0].Store(&sent{n: 4}) // stored, before the head tells of it
	if ev := sub.take(); ev != nil {
		t.Errorf("it read %+v", ev)
	}
	tr.Open(over("lan", "direct", 0), nil)
	if ev, missed, err := sub.Next(soon(t)); err != nil || missed != 1 || ev.Record.ID != 2 {
		t.Errorf("then %v, %d missed, %v; want flow 2 and 1 missed", ev.Record.ID, missed, err)
	}
}

func TestNextEndsWithItsContextAndWithItsSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		sub := tr.Subscribe()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, _, err := sub.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after its deadline: %v", err)
		}
		tr.Open(over("lan", "direct", 0), nil)
		if ev, _, err := sub.Next(ctx); err != nil || ev.Kind != Opened {
			t.Errorf("what is there after the deadline: %v, %v", ev.Kind, err)
		}
		go func() {
			time.Sleep(time.Minute)
			sub.Close()
			sub.Close()
		}()
		if _, _, err := sub.Next(t.Context()); err == nil {
			t.Error("a closed subscription gave an event")
		}
		if _, _, err := sub.Next(t.Context()); err == nil {
			t.Error("a closed subscription gave an event")
		}
		synctest.Wait()
	})
}

func TestWithoutSubscribersNothingIsKept(t *testing.T) {
	tr := newTracker(t, Options{Events: 4})
	first := tr.Subscribe()
	tr.Open(over("lan", "direct", 0), nil)
	first.Close()
	tr.Open(over("lan", "direct", 0), nil)
	if tr.events.ring != nil || tr.events.wanted() {
		t.Error("the ring outlived its last reader")
	}
	second := tr.Subscribe()
	defer second.Close()
	tr.Open(over("lan", "direct", 0), nil)
	if ev, missed, err := second.Next(soon(t)); err != nil || missed != 0 || ev.Record.ID != 3 {
		t.Errorf("got %v, %d, %v; want flow 3", ev.Record.ID, missed, err)
	}
}

func TestSubscribersMayComeAndGoBesideEvents(t *testing.T) {
	tr := newTracker(t, Options{Events: 16})
	ctx := soon(t)
	stop := make(chan struct{})
	var churn, readers sync.WaitGroup
	for range 4 {
		churn.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					tr.Open(over("lan", "direct", 0), nil).Close(nil)
				}
			}
		})
	}
	for range 4 {
		readers.Go(func() {
			for range 50 {
				sub := tr.Subscribe()
				opened := make(map[flow.ID]bool)
				for range 20 {
					ev, missed, err := sub.Next(ctx)
					if err != nil {
						t.Errorf("Next: %v", err)
					}
					if missed > 0 {
						clear(opened)
					}
					if ev.Kind == Opened && opened[ev.Record.ID] {
						t.Errorf("%v opened twice", ev.Record.ID)
					}
					opened[ev.Record.ID] = true
				}
				sub.Close()
			}
		})
	}
	readers.Wait()
	close(stop)
	churn.Wait()
}
