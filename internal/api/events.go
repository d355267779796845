package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"gatewayd/track"
)

// keptEvents is how many events a reader may fall behind, or miss while it is away.
const keptEvents = 1024

// eventTypes are the groups that /v1/events knows; an event's name is its type,
// or the type, a dot and more.
var eventTypes = []string{"flow", "session", "user", "device", "outbound", "config", "warning"}

// notice is one event on the ring. A track.Record as data is shown as each reader may see it.
type notice struct {
	seq  uint64
	name string
	data any
}

// Events is the ring behind /v1/events: what happened besides flows, and flows
// too once somebody asked. Publishing never waits for a reader.
type Events struct {
	run string // tells this process's ids from an earlier one's

	mu struct {
		sync.Mutex
		ring [keptEvents]notice
		seq  uint64        // of the newest event; the first one is 1
		more chan struct{} // closed when there is a newer one
	}
}

// NewEvents makes an empty ring.
func NewEvents() *Events {
	e := &Events{run: strconv.FormatInt(time.Now().UnixMilli(), 36)}
	e.mu.more = make(chan struct{})
	return e
}

// Publish puts an event on the ring. Its name begins with one of the types, as in
// "config.applied" or "warning"; data is shown as JSON. It never blocks.
func (e *Events) Publish(name string, data any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.seq++
	e.mu.ring[e.mu.seq%keptEvents] = notice{e.mu.seq, name, data}
	close(e.mu.more)
	e.mu.more = make(chan struct{})
}

// last is the newest sequence number.
func (e *Events) last() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.seq
}

// next is the oldest kept event after seq, and how many between were missed. It
// blocks until there is one or ctx ends.
func (e *Events) next(ctx context.Context, seq uint64) (notice, uint64, error) {
	for {
		n, missed, more := e.take(seq)
		if more == nil {
			return n, missed, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return notice{}, 0, ctx.Err()
		}
	}
}

// take is next without waiting: if there is nothing yet, it returns what to wait for.
func (e *Events) take(seq uint64) (notice, uint64, <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if seq >= e.mu.seq {
		return notice{}, 0, e.mu.more
	}
	oldest := max(e.mu.seq, keptEvents) - keptEvents + 1
	want := max(seq+1, oldest)
	return e.mu.ring[want%keptEvents], want - seq - 1, nil
}

// id is a notice's id in a stream.
func (e *Events) id(seq uint64) string { return e.run + "-" + strconv.FormatUint(seq, 10) }

// resume is the sequence number after which a reader with this Last-Event-ID goes
// on: the newest without one, the beginning for one of an earlier process.
func (e *Events) resume(lastID string) (uint64, error) {
	if lastID == "" {
		return e.last(), nil
	}
	run, number, _ := strings.Cut(lastID, "-")
	seq, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return 0, fail(http.StatusBadRequest, "Last-Event-ID %q: want one that this stream sent", lastID)
	}
	if run != e.run {
		return 0, nil
	}
	return min(seq, e.last()), nil
}

// allEvents streams events of the asked types, with ids to go on after a break.
func (s *Server) allEvents(w http.ResponseWriter, r *http.Request) error {
	wanted, err := parseTypes(r)
	if err != nil {
		return err
	}
	after, err := s.events.resume(r.Header.Get("Last-Event-ID"))
	if err != nil {
		return err
	}
	if wanted("flow.opened") {
		s.flowPump.Do(s.startPump)
	}
	st, err := s.openStream(w, r)
	if err != nil {
		return err
	}
	defer st.close()
	p := s.privacyFor(r)
	return st.follow(func(ctx context.Context) error {
		n, missed, err := s.events.next(ctx, after)
		if err != nil {
			return err
		}
		after = n.seq
		if err := s.lagged(st, missed); err != nil {
			return err
		}
		about := n.name
		if about == "lagged" { // behind the tracker: flows were missed
			about = "flow"
		}
		if !wanted(about) || !p.shows(about) {
			return nil
		}
		return st.event(s.events.id(n.seq), n.name, noticeShape(n, p))
	})
}

func noticeShape(n notice, p privacy) any {
	if ev, ok := n.data.(track.Event); ok {
		return eventShape(&ev, p)
	}
	return n.data
}

// parseTypes reads ?types=flow,config; without it every type is wanted.
func parseTypes(r *http.Request) (func(name string) bool, error) {
	q := r.URL.Query()
	if !q.Has("types") {
		return func(string) bool { return true }, nil
	}
	types := strings.Split(q.Get("types"), ",")
	for _, t := range types {
		if !slices.Contains(eventTypes, t) {
			return nil, fail(http.StatusBadRequest, "types: unknown type %q: known are %s", t, strings.Join(eventTypes, ", "))
		}
	}
	return func(name string) bool {
		kind, _, _ := strings.Cut(name, ".")
		return slices.Contains(types, kind)
	}, nil
}

// startPump copies flow events onto the ring until the server stops. It starts
// with the first reader that wants them: a gateway nobody watches pays nothing.
func (s *Server) startPump() {
	sub := s.watch()
	s.tasks.Go(func() {
		defer s.unwatch(sub)
		for {
			ev, missed, err := sub.Next(s.stopping)
			if err != nil {
				return
			}
			if missed > 0 {
				s.events.Publish("lagged", Lagged{missed})
			}
			s.events.Publish(fmt.Sprintf("flow.%s", ev.Kind), ev)
		}
	})
}
