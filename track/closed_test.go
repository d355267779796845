package track

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// Whoever follows the ends of flows reads each once, in order, and what it does not
// read is missed: the two add up, whatever the ring had to overwrite meanwhile.
func TestAFollowerReadsOrMissesEveryClosedFlowOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := closedRing{}
		c.init(rapid.IntRange(1, 5).Draw(rt, "limit"))
		size := c.limit
		reader := &ClosedReader{ring: &c}
		var last, seen, closed uint64
		rt.Repeat(map[string]func(*rapid.T){
			"close": func(rt *rapid.T) {
				for range rapid.IntRange(1, 12).Draw(rt, "flows") {
					closed++
					c.add(&Record{ID: flow.ID(closed)})
				}
			},
			"grow": func(*rapid.T) {
				c.follow()
				size = followed
			},
			"read": func(rt *rapid.T) {
				got, missed := c.since(nil, reader.next)
				if (len(got) == 0) != (seen == closed) {
					rt.Fatalf("%d records, with %d of %d seen", len(got), seen, closed)
				}
				for _, r := range got {
					if uint64(r.ID) != last+missed+1 {
						rt.Fatalf("record %d after %d and %d missed", r.ID, last, missed)
					}
					last, missed, seen = uint64(r.ID), 0, uint64(r.ID)
				}
				reader.next = seen
			},
			"": func(rt *rapid.T) {
				list := c.list()
				if len(list) > c.limit || len(c.records) > size {
					rt.Fatalf("%d listed, %d kept", len(list), len(c.records))
				}
				for i, r := range list {
					if want := closed - uint64(len(list)-1-i); uint64(r.ID) != want {
						rt.Fatalf("listed %d in place %d, want %d", r.ID, i, want)
					}
				}
			},
		})
	})
}

func TestAFollowerThatFallsBehindIsToldExactlyHowManyItMissed(t *testing.T) {
	tr := newTracker(t, Options{})
	r := tr.FollowClosed()
	const flows = followed + 100
	for range flows {
		tr.Open(over("lan", "direct", 0), nil).Close(nil)
	}
	read, missed, err := r.Next(soon(t), nil)
	if err != nil || missed != 100 || len(read) != closedRead || read[0].ID != 101 {
		t.Fatalf("%d records, %d missed, %v", len(read), missed, err)
	}
	for uint64(len(read))+missed < flows {
		var more uint64
		if read, more, err = r.Next(soon(t), read); err != nil || more != 0 {
			t.Fatalf("%d missed, %v", more, err)
		}
	}
	if n := len(tr.Closed()); n != DefaultClosed {
		t.Errorf("%d records are listed", n)
	}
	if opened, closed := tr.Counts(); opened != flows || closed != flows {
		t.Errorf("%d opened, %d closed", opened, closed)
	}
}

func TestAFollowerWaitsForTheNextEndOrItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		r := tr.FollowClosed()
		f := tr.Open(over("lan", "direct", 0), nil)
		told := make(chan int, 1)
		go func() {
			got, _, _ := r.Next(t.Context(), nil)
			told <- len(got)
		}()
		synctest.Wait()
		f.Close(nil)
		if n := <-told; n != 1 {
			t.Errorf("%d records", n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, _, err := r.Next(ctx, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
	})
}

func TestARefusedFlowIsAnnouncedAndNeverRegistered(t *testing.T) {
	tr := newTracker(t, Options{})
	tr.Block(over("lan", "reject", 0)) // nobody listens
	sub := tr.Subscribe()
	defer sub.Close()
	tr.Block(over("lan", "reject", 0))
	if sub.Behind() != 1 {
		t.Errorf("%d events wait", sub.Behind())
	}
	ev, missed, err := sub.Next(soon(t))
	if err != nil || missed != 0 || ev.Kind != Blocked || ev.Record.ID != 0 || ev.Record.Outbound != "reject" || ev.Record.Started.IsZero() {
		t.Errorf("%+v, %d, %v", ev, missed, err)
	}
	tr.Final()
	if s := tr.Snapshot(); tr.Live() != 0 || len(tr.Closed()) != 0 || len(s.Outbounds) != 0 || sub.Behind() != 0 {
		t.Errorf("left traces: %d live, %d closed, %+v", tr.Live(), len(tr.Closed()), s)
	}
}
