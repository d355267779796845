package track

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"gatewayd/flow"
)

func TestAThousandSubscribersAreEachToldExactlyWhatTheyMissed(t *testing.T) {
	const flows, subscribers = 1500, 1000
	tr := newTracker(t, Options{})
	var stalled []*Subscription
	var readers sync.WaitGroup
	problems := make(chan error, subscribers)
	for i := range subscribers {
		sub := tr.Subscribe()
		t.Cleanup(sub.Close)
		if i%2 == 0 {
			stalled = append(stalled, sub)
		} else {
			ctx := soon(t)
			readers.Go(func() { problems <- follow(ctx, sub, 2*flows) })
		}
	}
	for range flows {
		tr.Open(over("lan", "direct", 0), nil).Close(nil)
	}
	readers.Wait()
	close(problems)
	for err := range problems {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, sub := range stalled {
		first, missed, err := sub.Next(soon(t))
		if want := uint64(2*flows - DefaultEvents); err != nil || missed != want || first.Record.ID != flow.ID(want/2+1) || first.Kind != Opened {
			t.Fatalf("a stalled one got %v of %v, missed %d, %v; want %d missed", first.Kind, first.Record.ID, missed, err, want)
		}
		if err := follow(soon(t), sub, DefaultEvents-1); err != nil {
			t.Fatal(err)
		}
	}
}

// follow expects n events, read or missed, of flows that open and close one by one.
func follow(ctx context.Context, sub *Subscription, n uint64) error {
	var last flow.ID
	kind := Closed
	for all := uint64(0); all < n; {
		ev, missed, err := sub.Next(ctx)
		if err != nil {
			return fmt.Errorf("after %d events of %d: %w", all, n, err)
		}
		id := ev.Record.ID
		if follows := kind == Opened && ev.Kind == Closed && id == last || kind == Closed && ev.Kind == Opened && id == last+1; all > 0 && missed == 0 && !follows {
			return fmt.Errorf("%v of %v follows %v of %v", ev.Kind, id, kind, last)
		}
		last, kind = id, ev.Kind
		if all += 1 + missed; all > n {
			return fmt.Errorf("%d events, want %d", all, n)
		}
	}
	return nil
}

func TestEventsComeInOrderForEachFlow(t *testing.T) {
	const openers, each = 8, 500
	tr := newTracker(t, Options{Events: 2 * openers * each})
	sub := tr.Subscribe()
	defer sub.Close()
	var flows sync.WaitGroup
	for range openers {
		flows.Go(func() {
			for range each {
				tr.Open(over("lan", "direct", 0), nil).Close(nil)
			}
		})
	}
	state := make(map[flow.ID]Kind)
	for range 2 * openers * each {
		ev, missed, err := sub.Next(soon(t))
		if err != nil || missed > 0 {
			t.Fatalf("missed %d, %v", missed, err)
		}
		if before := state[ev.Record.ID]; ev.Kind != before+1 {
			t.Fatalf("%v of %v after %v", ev.Kind, ev.Record.ID, before)
		}
		state[ev.Record.ID] = ev.Kind
	}
	flows.Wait()
	if len(state) != openers*each {
		t.Errorf("%d flows, want %d", len(state), openers*each)
	}
}

func TestAFlowWaitsForNoReader(t *testing.T) {
	tr := newTracker(t, Options{})
	sub := tr.Subscribe()
	defer sub.Close()
	tr.events.fresh.mu.Lock() // a reader that stopped while it goes to sleep
	tr.sampler.mu.Lock()      // a tick that takes long
	done := make(chan struct{})
	go func() {
		f := tr.Open(over("lan", "direct", 0), nil)
		f.Moved(flow.Up, 5)
		f.Change(Principal{User: 1})
		tr.Kill(f.ID())
		f.Close(nil)
		close(done)
	}()
	select {
	case <-done:
	case <-soon(t).Done():
		t.Error("a flow waits")
	}
	tr.sampler.mu.Unlock()
	tr.events.fresh.mu.Unlock()
	<-done
}

func TestNoLockIsHeldWhileACallerLooks(t *testing.T) {
	tr := newTracker(t, Options{})
	for range 3 * shardCount {
		tr.Open(over("lan", "direct", 0), nil)
	}
	free := func() error {
		for i := range tr.shards {
			if !tr.shards[i].mu.TryLock() {
				return fmt.Errorf("shard %d is locked", i)
			}
			tr.shards[i].mu.Unlock()
		}
		if !tr.events.mu.TryLock() || !tr.closed.mu.TryLock() {
			return errors.New("the events or the closed records are locked")
		}
		tr.events.mu.Unlock()
		tr.closed.mu.Unlock()
		return nil
	}
	tr.Each(func(*Record) bool {
		if err := free(); err != nil {
			t.Fatal(err)
		}
		return true
	})
	f := tr.Open(over("lan", "direct", 0), func(error) {
		if err := free(); err != nil {
			t.Error(err)
		}
	})
	tr.KillWhere(func(r *Record) bool {
		if err := free(); err != nil {
			t.Fatal(err)
		}
		return r.ID == f.ID()
	})
}

func TestAScanHoldsALockForOneChunkAndComesBackAfterAllOthers(t *testing.T) {
	tr := newTracker(t, Options{})
	for range shardCount * 2 * scanChunk {
		tr.Open(over("lan", "direct", 0), nil)
	}
	visited := make(map[*shard]int) // when
	turn := 0
	tr.chunks(scanChunk, func(sh *shard, from int) bool {
		seen, more := sh.look(nil, from)
		if len(seen) > scanChunk {
			t.Errorf("%d flows in a chunk of %d", len(seen), scanChunk)
		}
		turn++
		if last := visited[sh]; last > 0 && turn-last < shardCount {
			t.Errorf("a shard was locked again after %d others", turn-last-1)
		}
		visited[sh] = turn
		return more
	})
	if len(visited) != shardCount || turn != 2*shardCount {
		t.Errorf("%d chunks of %d shards", turn, len(visited))
	}
}
