package fanout

import (
	"context"
	"sync"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/shrink"
)

// emptyIdle is how long an association without sub-links stays, since nothing
// but its decisions would be lost.
const emptyIdle = 10 * time.Second

// endedList holds the sub-links that are over and not closed yet.
type endedList struct {
	wake  chan struct{}
	mu    sync.Mutex
	first *Sub
}

func (l *endedList) push(s *Sub) {
	s.a.t.dying.Add(1)
	l.mu.Lock()
	s.nextEnded, l.first = l.first, s
	l.mu.Unlock()
	l.rouse()
}

func (l *endedList) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *endedList) take() *Sub {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := l.first
	l.first = nil
	return first
}

// Run closes what ended and what is idle until ctx ends. Then it ends all with
// flow.ErrShutdown, waits until every sub-link is closed, and returns nil.
// Datagrams that come later are dropped.
func (t *Table) Run(ctx context.Context) error {
	tick := time.NewTicker(t.cfg.Sweep)
	defer tick.Stop()
	for {
		select {
		case <-t.ended.wake:
			t.closeEnded()
		case <-tick.C:
			t.sweep(t.now())
		case <-ctx.Done():
			t.shutdown()
			return nil
		}
	}
}

func (t *Table) shutdown() {
	t.closed.Store(true) // no association is added from here on
	t.EndAll(flow.ErrShutdown)
	for t.live.Load() > 0 {
		<-t.ended.wake
		t.closeEnded()
	}
	t.openers.wg.Wait()
}

// closeEnded closes the sub-links that are over; one with an opening or a call
// under way is closed by that.
func (t *Table) closeEnded() {
	for s := t.ended.take(); s != nil; {
		next := s.nextEnded
		s.nextEnded = nil
		s.cancelOpening()
		s.a.detach(s)
		s.Release()
		s = next
	}
}

func (s *Sub) cancelOpening() {
	s.a.mu.Lock()
	op := s.opening
	s.a.mu.Unlock()
	if op != nil {
		op.cancel(*s.cause.Load())
	}
}

// sweep ends idle sub-links and forgets associations that have none.
func (t *Table) sweep(now int64) {
	for i := range t.shards {
		sh := &t.shards[i]
		sh.mu.Lock()
		for _, a := range sh.byKey {
			if a.sweep(now) {
				sh.removeLocked(a)
				t.total.Add(-1)
			}
		}
		sh.byKey = shrink.Map(sh.byKey, &sh.peaks.byKey)
		sh.sources = shrink.Map(sh.sources, &sh.peaks.sources)
		sh.mu.Unlock()
	}
	t.opens.forget(t.timeOf(now))
}

// sweep ends idle sub-links, and reports whether the association is dead now. It
// waits for no lock: an association that is busy is not idle.
func (a *association) sweep(now int64) (dead bool) {
	if !a.mu.TryLock() {
		return false
	}
	defer a.mu.Unlock()
	for i := len(a.mu.subs) - 1; i >= 0; i-- {
		if s := a.mu.subs[i]; s.over() || s.idleLocked(now) {
			a.detachLocked(s)
			s.End(flow.ErrIdle)
		}
	}
	empty := min(emptyIdle, a.t.cfg.Timeouts.OneWay)
	a.mu.dead = len(a.mu.subs) == 0 && now-a.seen.Load() >= int64(empty)
	return a.mu.dead
}
