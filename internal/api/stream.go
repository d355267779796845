package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/track"
)

// maxStreams is how many event streams may be open at once; the next one gets 503.
const maxStreams = 64

// leftover is how long a stream looks for one more event when the server stops.
const leftover = 50 * time.Millisecond

// errBegun ends a handler whose answer has begun, so that nothing can be added to it.
var errBegun = errors.New("the answer has begun")

// stream is one open answer of server-sent events. It buffers one event at a
// time: what its reader does not take stays in the rings, and is told as lagged.
type stream struct {
	w       http.ResponseWriter
	rc      *http.ResponseController
	timing  timing
	ctx     context.Context // ends with the request or the server
	request context.Context // ends with the request
	buf     []byte
	wrote   time.Time // when the last write began
	once    sync.Once
	free    func()
}

// openStream begins an answer of events, or refuses with 503 when too many are open.
func (s *Server) openStream(w http.ResponseWriter, r *http.Request) (*stream, error) {
	select {
	case s.streams <- struct{}{}:
	default:
		w.Header().Set("Retry-After", "5")
		return nil, fail(http.StatusServiceUnavailable, "too many event streams: at most %d", maxStreams)
	}
	ctx, cancel := context.WithCancel(r.Context())
	unhook := context.AfterFunc(s.stopping, cancel)
	st := &stream{w: w, rc: http.NewResponseController(w), timing: s.timing, ctx: ctx, request: r.Context()}
	st.free = func() { unhook(); cancel(); <-s.streams }
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	_ = st.rc.SetReadDeadline(time.Time{}) // the request is read; the stream may last
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead || st.write([]byte(": gatewayd\n\n")) != nil {
		st.close()
		return nil, errBegun
	}
	return st, nil
}

// close gives the stream's slot back.
func (st *stream) close() { st.once.Do(st.free) }

// event sends one event; an empty id is left out. It blocks for at most the write timeout.
func (st *stream) event(id, name string, data any) error {
	body, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("event %s: %w", name, err)
	}
	st.buf = st.buf[:0]
	if id != "" {
		st.buf = fmt.Appendf(st.buf, "id: %s\n", id)
	}
	st.buf = fmt.Appendf(st.buf, "event: %s\ndata: %s\n\n", name, body)
	return st.write(st.buf)
}

// heartbeat sends a comment, so that a reader and what is between see life.
func (st *stream) heartbeat() error { return st.write([]byte(": still here\n\n")) }

func (st *stream) write(b []byte) error {
	// Best effort: a recorder in a test has no deadline.
	st.wrote = time.Now()
	_ = st.rc.SetWriteDeadline(st.wrote.Add(st.timing.write))
	if _, err := st.w.Write(b); err != nil {
		return fmt.Errorf("stream: %w", err)
	}
	if err := st.rc.Flush(); err != nil {
		return fmt.Errorf("stream: %w", err)
	}
	return nil
}

// follow calls step until it fails or the stream ends. A step waits for one event
// on its context and sends it, unless its reader does not want it; when that context
// ends, a heartbeat is due.
func (st *stream) follow(step func(ctx context.Context) error) error {
	for {
		ctx, cancel := context.WithDeadline(st.ctx, st.wrote.Add(st.timing.heartbeat))
		err := step(ctx)
		due := ctx.Err() != nil
		cancel()
		switch {
		case err == nil && !due:
		case st.ctx.Err() != nil:
			st.drain(step)
			return errBegun
		case due && (err == nil || errors.Is(err, context.DeadlineExceeded)):
			if st.heartbeat() != nil {
				return errBegun
			}
		default:
			return errBegun // the reader is gone, or too slow
		}
	}
}

// drain sends what is left when the server stops, so that readers see the ends of
// flows that ended with it. It waits for nothing new, and is over when the request is.
func (st *stream) drain(step func(ctx context.Context) error) {
	all, cancel := context.WithTimeout(st.request, st.timing.drain/2)
	defer cancel()
	for left := true; left && all.Err() == nil; {
		one, cancel := context.WithTimeout(all, leftover)
		left = step(one) == nil
		cancel()
	}
}

// flowEvents streams opened, closed and blocked flows from now on.
func (s *Server) flowEvents(w http.ResponseWriter, r *http.Request) error {
	sub := s.watch() // before the answer begins: who sees it sees what follows
	defer s.unwatch(sub)
	st, err := s.openStream(w, r)
	if err != nil {
		return err
	}
	defer st.close()
	p := s.privacyFor(r)
	return st.follow(func(ctx context.Context) error {
		ev, missed, err := sub.Next(ctx)
		if err != nil {
			return err
		}
		if err := s.lagged(st, missed); err != nil {
			return err
		}
		return st.event("", ev.Kind.String(), eventShape(&ev, p))
	})
}

// lagged tells the reader how many events it missed, if any, and counts them.
func (s *Server) lagged(st *stream, missed uint64) error {
	if missed == 0 {
		return nil
	}
	s.watching.missed.Add(missed)
	return st.event("", "lagged", Lagged{missed})
}

// watching is who follows the tracker's events, for the metrics.
type watching struct {
	missed atomic.Uint64 // events that readers were told they missed

	mu   sync.Mutex
	subs map[*track.Subscription]bool // guarded by mu
}

// watch subscribes to the tracker's events until unwatch.
func (s *Server) watch() *track.Subscription {
	sub := s.opt.Tracker.Subscribe()
	w := &s.watching
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.subs == nil {
		w.subs = map[*track.Subscription]bool{}
	}
	w.subs[sub] = true
	return sub
}

func (s *Server) unwatch(sub *track.Subscription) {
	w := &s.watching
	w.mu.Lock()
	delete(w.subs, sub)
	w.mu.Unlock()
	sub.Close()
}

// behind is how many events wait for the slowest reader, told as missed included.
func (w *watching) behind() (most uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for sub := range w.subs {
		most = max(most, sub.Behind())
	}
	return most
}

func eventShape(ev *track.Event, p privacy) Flow {
	if ev.Kind == track.Blocked {
		return blockedShape(&ev.Record, p)
	}
	return flowShape(&ev.Record, p)
}

// traffic streams one event per tick, or answers the last snapshot.
func (s *Server) traffic(w http.ResponseWriter, r *http.Request) error {
	p := s.privacyFor(r)
	if q := r.URL.Query(); q.Has("once") {
		if v := q.Get("once"); v != "" && v != "true" && v != "1" {
			return fail(http.StatusBadRequest, "once %q: want no value", v)
		}
		return writeJSON(w, trafficShape(s.opt.Tracker.Snapshot(), p))
	}
	after := s.opt.Tracker.Snapshot().Tick
	st, err := s.openStream(w, r)
	if err != nil {
		return err
	}
	defer st.close()
	return st.follow(func(ctx context.Context) error {
		snap, err := s.opt.Tracker.Watch(ctx, after)
		if err != nil {
			return err
		}
		after = snap.Tick
		return st.event("", "traffic", trafficShape(snap, p))
	})
}
