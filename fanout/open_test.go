package fanout

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"

	"gatewayd/flow"
)

// The plane is swapped, and the old version's drain period over, between the
// decision of a datagram and the opening of its sub-link; or right after it.
func TestWhatWaitedForADrainedVersionGoesThroughTheNewOne(t *testing.T) {
	drained := &flow.Cause{Reason: flow.Drained, Text: "drained"}
	for _, after := range []bool{false, true} {
		bubble(t, nil, func(t *testing.T, w *world) {
			hold := make(chan struct{})
			w.hold = hold
			if !after {
				w.openErr = drained
			} else {
				open := w.cfg.Open
				w.cfg.Open = func(ctx context.Context, f flow.Flow, t Target, s *Sub) (Opened, error) {
					o, err := open(ctx, f, t, s)
					if t.Name == "out1@v1" {
						s.End(drained)
					}
					return o, err
				}
			}
			w.hand(udp(alice, "192.0.1.1:7"), payload("a"))
			w.hand(udp(alice, "192.0.1.2:7"), payload("b"))
			synctest.Wait()
			w.mu.Lock()
			w.gen++
			w.hold, w.openErr = nil, nil
			w.route = func(flow.Flow) Target { return Target{Outbound: "new", Name: "out1@v2"} }
			w.mu.Unlock()
			close(hold)
			synctest.Wait()
			last := w.link(w.opened() - 1)
			if got := last.all(); last.name != "out1@v2" || !slices.Equal(got, []string{"a", "b"}) {
				t.Errorf("after %v: %s sent %q", after, last.name, got)
			}
			if n := w.drops[flow.DropOpenFailed].Load(); n != 0 || len(w.refused) != 0 {
				t.Errorf("after %v: %d dropped, %d told", after, n, len(w.refused))
			}
		})
	}
}

func TestWhatCanNotBeOpenedForALackIsCountedAsThat(t *testing.T) {
	for err, cause := range map[error]flow.Drop{
		fmt.Errorf("socket: %w", syscall.EMFILE): flow.DropResources,
		flow.ErrLimit:                            flow.DropFlowLimit,
		syscall.EHOSTUNREACH:                     flow.DropOpenFailed,
	} {
		bubble(t, nil, func(t *testing.T, w *world) {
			w.openErr = err
			w.say(alice, "192.0.1.1:7", "a")
			if n := w.drops[cause].Load(); n != 1 {
				t.Errorf("%v: %d dropped as %v", err, n, cause)
			}
			w.openErr = nil
			w.say(alice, "192.0.1.1:7", "b")
			before := w.drops[cause].Load()
			w.link(0).err = err
			w.say(alice, "192.0.1.1:7", "c")
			if n := w.drops[cause].Load() - before; cause == flow.DropResources && n != 1 {
				t.Errorf("%v: %d dropped of a send", err, n)
			}
		})
	}
}

// Without a new decision there is no other way.
func TestWhatWaitedForADrainedVersionIsDroppedWhereNothingElseIsDecided(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world) {
		w.openErr = &flow.Cause{Reason: flow.Drained, Text: "drained"}
		w.say(alice, "192.0.1.1:7", "a")
		if n := w.drops[flow.DropOpenFailed].Load(); n != 1 || w.asked != 1 {
			t.Errorf("%d dropped, %d decisions", n, w.asked)
		}
	})
}
