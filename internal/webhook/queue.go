package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// queue is what waits for one target.
type queue struct {
	sender *Sender
	target Target
	wake   chan struct{} // has one when something was put
	ended  chan struct{} // closed when the target goes
	stop   sync.Once

	mu      sync.Mutex
	waiting []*event // oldest first; the one that is being posted is among them
}

func newQueue(s *Sender, t Target) *queue {
	return &queue{sender: s, target: t, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

func (q *queue) end() { q.stop.Do(func() { close(q.ended) }) }

func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

func (q *queue) put(e *event) {
	q.mu.Lock()
	if len(q.waiting) >= queueLength {
		q.waiting[0] = nil
		q.waiting = q.waiting[1:]
		q.sender.dropped.Add(1)
	}
	q.waiting = append(q.waiting, e)
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// first is the oldest event; nil if none waits.
func (q *queue) first() *event {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.waiting = nil
		return nil
	}
	return q.waiting[0]
}

// done takes e out. It may have been dropped meanwhile.
func (q *queue) done(e *event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) > 0 && q.waiting[0] == e {
		q.waiting[0] = nil
		q.waiting = q.waiting[1:]
	}
}

// run posts one event after the other until ctx or the target ends.
func (q *queue) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-q.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	log := q.sender.opt.Log.With("url", q.target.URL)
	pause, failing := firstPause, false
	for {
		e := q.first()
		if e == nil {
			select {
			case <-ctx.Done():
				return
			case <-q.wake:
			}
			continue
		}
		again, err := q.post(ctx, e)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			q.sender.sent.Add(1)
			if failing {
				log.Info("webhook takes events again")
			}
			pause, failing = firstPause, false
			q.done(e)
			continue
		case !again.retry:
			q.sender.refused.Add(1)
			log.Warn("webhook refused an event", "type", e.kind, "err", err)
			q.done(e)
			continue
		}
		if !failing {
			log.Warn("webhook takes no events; they wait", "type", e.kind, "err", err)
			failing = true
		}
		if !sleep(ctx, max(pause, again.after)) {
			return
		}
		pause = min(2*pause, lastPause)
		if time.Since(e.made) > maxAge {
			q.sender.dropped.Add(1)
			q.done(e)
		}
	}
}

// sleep waits for d; false if ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// again is whether a failed post is worth another try, and when at the earliest.
type again struct {
	retry bool
	after time.Duration
}

// post makes one try.
func (q *queue) post(ctx context.Context, e *event) (again, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, q.target.URL, bytes.NewReader(e.body))
	if err != nil {
		return again{}, err
	}
	stamp := strconv.FormatInt(time.Now().Unix(), 10)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("User-Agent", "gatewayd")
	r.Header.Set("Gatewayd-Event", e.kind)
	r.Header.Set("Gatewayd-Delivery", e.id)
	r.Header.Set("Gatewayd-Timestamp", stamp)
	if q.target.Secret != "" {
		r.Header.Set("Gatewayd-Signature", sign(q.target.Secret, stamp, e.body))
	}
	answer, err := q.sender.client.Do(r)
	if err != nil {
		return again{retry: true}, err
	}
	answer.Body.Close()
	switch code := answer.StatusCode; {
	case code/100 == 2:
		return again{}, nil
	case code/100 == 5, code == http.StatusRequestTimeout, code == http.StatusTooEarly, code == http.StatusTooManyRequests:
		seconds, _ := strconv.ParseUint(answer.Header.Get("Retry-After"), 10, 32)
		return again{true, min(time.Duration(seconds)*time.Second, lastPause)}, fmt.Errorf("answered %s", answer.Status)
	default:
		return again{}, fmt.Errorf("answered %s", answer.Status)
	}
}

// sign is the signature of a body that is posted at a time.
func sign(secret, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, []byte(secret))
	_, _ = io.WriteString(mac, stamp+".")
	_, _ = mac.Write(body)
	return "v1=" + hex.EncodeToString(mac.Sum(nil))
}
