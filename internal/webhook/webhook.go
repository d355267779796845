// Package webhook posts events to URLs.
//
// Each target has a bounded queue and a goroutine that posts one event after the other,
// oldest first. What is not taken is tried again in ever longer pauses, for an hour at
// most; a full queue drops its oldest. Whoever sends never waits.
//
// A post is JSON, {"id", "type", "time", "data"}, with the headers
//
//	Gatewayd-Event      the type, as user.near
//	Gatewayd-Delivery   the id: the same when a post is repeated
//	Gatewayd-Timestamp  when this post was made, in seconds since 1970
//	Gatewayd-Signature  "v1=" and the hexadecimal HMAC-SHA256, with the target's secret,
//	                    of the timestamp, a full stop and the body; if there is a secret
//
// A status of 2xx takes the event. 408, 425, 429 and 5xx ask for another try, no sooner
// than Retry-After says; any other one refuses it. Redirects are followed within the
// same scheme, host and port only, and never with another method.
package webhook

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	queueLength  = 256
	maxBody      = 64 << 10 // bytes of one event
	maxAge       = time.Hour
	postTimeout  = 10 * time.Second
	firstPause   = time.Second
	lastPause    = 5 * time.Minute
	maxRedirects = 3
)

// Target is where events go.
type Target struct {
	URL    string
	On     []string // types, as user.near, and kinds of them, as user
	Secret string   // empty: posts are not signed
}

func (t *Target) equal(o *Target) bool {
	return t.URL == o.URL && t.Secret == o.Secret && slices.Equal(t.On, o.On)
}

// wants says whether the target is told of events of the type.
func (t *Target) wants(kind string) bool {
	general, _, _ := strings.Cut(kind, ".")
	return slices.Contains(t.On, kind) || slices.Contains(t.On, general)
}

// Options are what a Sender is made of.
type Options struct {
	// Dial connects, with whatever keeps the connection out of the gateway itself. The
	// address has a name or an IP address, and a port.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	Log  *slog.Logger
}

// Sender posts events. Its methods are safe for concurrent use; Run may be called once.
type Sender struct {
	opt    Options
	client *http.Client

	sent, dropped, refused atomic.Uint64

	mu      sync.Mutex
	run     func(*queue) // starts a queue's goroutine; nil before and after Run
	targets []*queue
}

// New makes a sender without targets.
func New(o Options) *Sender {
	return &Sender{opt: o, client: &http.Client{
		Transport: &http.Transport{
			DialContext: o.Dial, DisableKeepAlives: true, // events are rare
			TLSHandshakeTimeout: postTimeout, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: sameHost,
		Timeout:       postTimeout,
	}}
}

// Use makes targets those that events go to from now on. One that stays as it is keeps
// what waits for it; what waits for one that goes is dropped.
func (s *Sender) Use(targets []Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.targets
	s.targets = nil
	for i := range targets {
		at := slices.IndexFunc(old, func(q *queue) bool { return q.target.equal(&targets[i]) })
		if at >= 0 {
			s.targets = append(s.targets, old[at])
			old = slices.Delete(slices.Clone(old), at, at+1)
			continue
		}
		q := newQueue(s, targets[i])
		s.targets = append(s.targets, q)
		if s.run != nil {
			s.run(q)
		}
	}
	for _, q := range old {
		q.end()
	}
}

// Send hands an event to all targets that want it. Data becomes JSON before it returns.
// It does not block.
func (s *Sender) Send(kind string, at time.Time, data any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var e *event
	for _, q := range s.targets {
		if !q.target.wants(kind) {
			continue
		}
		if e == nil {
			var err error
			if e, err = newEvent(kind, at, data); err != nil {
				s.dropped.Add(1)
				s.opt.Log.Warn("event can't be posted", "type", kind, "err", err)
				return
			}
		}
		q.put(e)
	}
}

// Run posts until ctx ends, and returns nil. What waits then is dropped.
func (s *Sender) Run(ctx context.Context) error {
	var running sync.WaitGroup
	s.mu.Lock()
	s.run = func(q *queue) { running.Go(func() { q.run(ctx) }) }
	for _, q := range s.targets {
		s.run(q)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.run = nil
	s.mu.Unlock()
	running.Wait()
	return nil
}

// State is how a sender fares.
type State struct {
	Sent    uint64 // posts that were taken
	Dropped uint64 // events for a target that a full queue, their age or their size cost
	Refused uint64 // posts that the target will not have
	Waiting int
}

// State is how the sender fares.
func (s *Sender) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := State{Sent: s.sent.Load(), Dropped: s.dropped.Load(), Refused: s.refused.Load()}
	for _, q := range s.targets {
		st.Waiting += q.length()
	}
	return st
}

// event is what is posted, to any number of targets.
type event struct {
	id, kind string
	made     time.Time // monotonic
	body     []byte
}

func newEvent(kind string, at time.Time, data any) (*event, error) {
	e := &event{id: rand.Text(), kind: kind, made: time.Now()}
	var err error
	e.body, err = json.Marshal(struct {
		ID   string `json:"id"`
		Type string `json:"type"`
		Time string `json:"time"`
		Data any    `json:"data"`
	}{e.id, kind, at.UTC().Format("2006-01-02T15:04:05.000Z07:00"), data})
	if err == nil && len(e.body) > maxBody {
		err = fmt.Errorf("%d bytes, more than %d", len(e.body), maxBody)
	}
	return e, err
}

// sameHost lets a redirect go where the post was meant for, and repeat it as it is.
func sameHost(r *http.Request, via []*http.Request) error {
	first := via[0].URL
	if len(via) > maxRedirects || r.URL.Scheme != first.Scheme || r.URL.Host != first.Host || r.Method != http.MethodPost {
		return http.ErrUseLastResponse
	}
	return nil
}
