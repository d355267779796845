package track

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
)

// Kind is what happened to a flow.
type Kind uint8

// The kinds of events.
const (
	Opened  Kind = iota + 1 // it is registered
	Closed                  // it is not registered any more; its counters are final
	Blocked                 // a rule refused it; it never was registered
)

// String is the event's name, "opened", "closed" or "blocked".
func (k Kind) String() string {
	switch k {
	case Opened:
		return "opened"
	case Closed:
		return "closed"
	case Blocked:
		return "blocked"
	}
	return "kind(" + strconv.Itoa(int(k)) + ")"
}

// Event tells of one flow. For each flow opened comes before closed.
type Event struct {
	Kind   Kind
	Record Record
}

// events is one ring for all subscribers, each of whom has a position in it. Who
// publishes overwrites the oldest event and waits for nobody. The ring exists only
// while somebody is subscribed.
type events struct {
	limit       int
	subscribers atomic.Int32 // changed under mu

	mu    sync.Mutex
	ring  []Event // guarded by mu; nil without subscribers
	head  uint64  // guarded by mu; number of the next event
	fresh signal  // guarded by mu
}

// wanted is whether anybody is subscribed.
func (e *events) wanted() bool { return e.subscribers.Load() > 0 }

func (e *events) publish(k Kind, r *Record) {
	if !e.wanted() {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ring == nil {
		return
	}
	ev := &e.ring[e.head%uint64(e.limit)]
	ev.Kind, ev.Record = k, *r
	e.head++
	e.fresh.fire()
}

// Subscription is one reader of events, which Close ends.
type Subscription struct {
	events *events
	done   chan struct{}
	next   uint64 // guarded by events.mu; number of the event to read next
	closed bool   // guarded by events.mu
}

var errUnsubscribed = errors.New("the subscription is closed")

// Subscribe starts a subscription to every event that is sent from now on.
func (t *Tracker) Subscribe() *Subscription {
	e := &t.events
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ring == nil {
		e.ring = make([]Event, e.limit)
	}
	e.subscribers.Add(1)
	return &Subscription{events: e, done: make(chan struct{}), next: e.head}
}

// Next blocks until there is an event, ctx ends (its error), or the subscription is
// closed (an error). missed is how many events were overwritten before this reader
// came to them; ev is then the oldest that was kept.
func (s *Subscription) Next(ctx context.Context) (ev Event, missed uint64, err error) {
	for {
		if err := ctx.Err(); err != nil {
			return Event{}, 0, err
		}
		ev, missed, wait, err := s.take()
		if wait == nil {
			return ev, missed, err
		}
		select {
		case <-wait:
		case <-s.done:
		case <-ctx.Done():
		}
	}
}

// take returns the next event, or what to wait for.
func (s *Subscription) take() (ev Event, missed uint64, wait <-chan struct{}, err error) {
	e := s.events
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.closed {
		return Event{}, 0, nil, errUnsubscribed
	}
	if kept := uint64(e.limit); e.head-s.next > kept {
		missed = e.head - s.next - kept
		s.next += missed
	}
	if s.next == e.head {
		return Event{}, 0, e.fresh.wait(), nil
	}
	ev = e.ring[s.next%uint64(e.limit)]
	s.next++
	return ev, missed, nil, nil
}

// Close ends the subscription and a Next that waits. It may be called again.
func (s *Subscription) Close() {
	e := s.events
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	close(s.done)
	if e.subscribers.Add(-1) == 0 {
		e.ring = nil
	}
}

// signal wakes everyone who waits for something to change. It costs nothing while
// nobody waits. The lock of what changes guards it.
type signal struct{ ch chan struct{} }

// wait returns what the next fire closes.
func (s *signal) wait() <-chan struct{} {
	if s.ch == nil {
		s.ch = make(chan struct{})
	}
	return s.ch
}

func (s *signal) fire() {
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}
