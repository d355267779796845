package fanout

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// model is one association as a list, least recently sent-to first.
type model struct {
	subs []modelSub
	last time.Duration
}

type modelSub struct {
	outbound int
	seen     time.Duration
	general  bool
	answered bool
	port     time.Duration
}

func (s *modelSub) limit() time.Duration {
	limit := s.port
	if s.general {
		limit = max(limit, time.Minute)
		if s.answered {
			limit = max(limit, 5*time.Minute)
		}
	}
	return limit
}

var modelPorts = map[int]time.Duration{9: 0, 53: 10 * time.Second, 443: 30 * time.Second}

func (m *model) send(outbound, port int, now time.Duration) {
	i := slices.IndexFunc(m.subs, func(s modelSub) bool { return s.outbound == outbound })
	s := modelSub{outbound: outbound}
	if i >= 0 {
		s = m.subs[i]
		m.subs = slices.Delete(m.subs, i, i+1)
	} else if len(m.subs) == 64 {
		m.subs = m.subs[1:]
	}
	s.seen = now
	s.general = s.general || modelPorts[port] == 0
	s.port = max(s.port, modelPorts[port])
	m.subs = append(m.subs, s)
	m.last = now
}

func (m *model) sweep(now time.Duration) {
	m.subs = slices.DeleteFunc(m.subs, func(s modelSub) bool { return now-s.seen >= s.limit() })
}

func (m *model) outbounds() (list []string) {
	for _, s := range m.subs {
		list = append(list, fmt.Sprintf("out%d@v1", s.outbound))
	}
	slices.Sort(list)
	return list
}

// liveLink is the open link of an outbound.
func (w *world) liveLink(outbound int) *fakeLink {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range slices.Backward(w.links) {
		if l.name == fmt.Sprintf("out%d@v1", outbound) && !l.isClosed() {
			return l
		}
	}
	return nil
}

func (w *world) outbounds() (list []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.links {
		if !l.isClosed() {
			list = append(list, l.name)
		}
	}
	slices.Sort(list)
	return list
}

func TestLiveSubLinksAreThoseOfTheModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		ops := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) [3]int {
			return [3]int{
				rapid.IntRange(0, 9).Draw(t, "kind"),
				rapid.IntRange(0, 79).Draw(t, "outbound"),
				rapid.SampledFrom([]int{9, 53, 443}).Draw(t, "port"),
			}
		}), 1, 150).Draw(rt, "ops")
		synctest.Test(t, func(*testing.T) { // its T is not rapid's: failures go to rt
			w := newWorld(rt, nil)
			defer w.stop()
			runModel(rt, w, ops)
		})
	})
}

func runModel(rt *rapid.T, w *world, ops [][3]int) {
	var m model
	start := time.Now()
	time.Sleep(time.Millisecond) // off the sweep's beat
	for i, op := range ops {
		now := time.Since(start)
		switch kind, outbound, port := op[0], op[1], op[2]; kind {
		case 8: // the far side answers
			if l := w.liveLink(outbound); l != nil {
				l.answer("192.0.2.1:9", "x")
				k := slices.IndexFunc(m.subs, func(s modelSub) bool { return s.outbound == outbound })
				m.subs[k].seen, m.subs[k].answered = now, true
			}
		case 9: // time passes, with a sweep each second
			for range outbound {
				wait(time.Second)
				m.sweep((time.Since(start) - time.Millisecond))
			}
		default:
			w.say(alice, fmt.Sprintf("192.0.%d.1:%d", outbound, port), "x")
			m.send(outbound, port, now)
		}
		if got, want := w.outbounds(), m.outbounds(); !slices.Equal(got, want) {
			rt.Fatalf("after %d operations live: %v, want %v", i+1, got, want)
		}
	}
}

var _ flow.Link = (*fakeLink)(nil)
