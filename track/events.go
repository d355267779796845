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
// publishes overwrites the oldest event, takes no lock that a reader takes, and wakes
// one reader at most. The ring exists only while somebody is subscribed.
type events struct {
	limit       int
	subscribers atomic.Int32  // changed under mu
	head        atomic.Uint64 // number of the next event; written under mu
	fresh       bell

	mu   sync.Mutex // of those who publish, subscribe and unsubscribe
	ring ring       // guarded by mu; nil without subscribers
}

// ring holds event n at n modulo its length. A place is written before head passes it.
type ring []atomic.Pointer[sent]

// sent is an event with its number. It never changes.
type sent struct {
	n  uint64
	ev Event
}

// wanted is whether anybody is subscribed.
func (e *events) wanted() bool { return e.subscribers.Load() > 0 }

func (e *events) publish(k Kind, r *Record) {
	if !e.wanted() {
		return
	}
	s := &sent{ev: Event{k, *r}}
	e.mu.Lock()
	if e.ring != nil {
		s.n = e.head.Load()
		e.ring[s.n%uint64(e.limit)].Store(s)
		e.head.Store(s.n + 1)
	}
	e.mu.Unlock()
	e.fresh.strike()
}

// Subscription is one reader of events, which Close ends.
type Subscription struct {
	events *events
	ring   ring
	done   chan struct{}
	once   sync.Once
	next   atomic.Uint64 // number of the event to read next; its reader writes it
	missed uint64        // not told yet
}

var errUnsubscribed = errors.New("the subscription is closed")

// Subscribe starts a subscription to every event that is sent from now on.
func (t *Tracker) Subscribe() *Subscription {
	e := &t.events
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ring == nil {
		e.ring = make(ring, e.limit)
	}
	e.subscribers.Add(1)
	s := &Subscription{events: e, ring: e.ring, done: make(chan struct{})}
	s.next.Store(e.head.Load())
	return s
}

// Next blocks until there is an event, ctx ends (its error), or the subscription is
// closed (an error). What is there already comes also after ctx ended. missed is how many events were overwritten before this reader
// came to them; ev is then the oldest that was kept. One goroutine at a time may call it.
func (s *Subscription) Next(ctx context.Context) (ev Event, missed uint64, err error) {
	for {
		select {
		case <-s.done:
			return Event{}, 0, errUnsubscribed
		default:
		}
		if kept := s.take(); kept != nil {
			missed, s.missed = s.missed, 0
			return kept.ev, missed, nil
		}
		if err := ctx.Err(); err != nil {
			return Event{}, 0, err
		}
		s.events.fresh.wait(ctx.Done(), s.done, func() bool { return s.events.head.Load() != s.next.Load() })
	}
}

// take returns the oldest event kept that this reader has not read, or nil.
func (s *Subscription) take() *sent {
	kept := uint64(len(s.ring))
	for {
		next, head := s.next.Load(), s.events.head.Load()
		if head == next {
			return nil
		}
		if behind := head - next; behind > kept {
			s.skip(behind - kept)
			next += behind - kept
		}
		if ev := s.ring[next%kept].Load(); ev.n == next {
			s.next.Store(next + 1)
			return ev
		}
		s.skip(1) // it was overwritten just now
	}
}

func (s *Subscription) skip(n uint64) {
	s.next.Add(n)
	s.missed += n
}

// Behind is how many events wait to be read, those included that were overwritten
// and will be told as missed.
func (s *Subscription) Behind() uint64 {
	next := s.next.Load() // first: it never passes a head that was read later
	return s.events.head.Load() - next
}

// Close ends the subscription and a Next that waits. It may be called again.
func (s *Subscription) Close() {
	s.once.Do(func() {
		close(s.done)
		e := s.events
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.subscribers.Add(-1) == 0 {
			e.ring = nil
		}
	})
}
