package track

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"gatewayd/flow"
)

// killRounds is how often each race is run. It is cheap, and meant for the race detector.
const killRounds = 1000

// victim is a flow in the state in which it is killed.
type victim struct {
	*Flow
	calls int        // that have to end with the cause
	ends  chan error // theirs
	moved [2]uint64  // what the calls returned, once they ended
	close func()     // by the owner
	over  bool       // it may be closed before the kill
}

// racing are the states. Round i decides how far the flow came.
var racing = map[string]func(tr *Tracker, i int) *victim{
	"parked read": func(tr *Tracker, i int) *victim {
		s, far, v := streamed(tr)
		go far.Write(make([]byte, i%3))
		v.call(func() error { return v.readAll(s) })
		return v
	},
	"parked write": func(tr *Tracker, i int) *victim {
		s, far, v := streamed(tr)
		go io.CopyN(io.Discard, far, int64(i%5)*1000)
		v.call(func() error { return v.writeOn(s) })
		return v
	},
	"both ways": func(tr *Tracker, _ int) *victim {
		s, far, v := streamed(tr)
		go io.Copy(far, far)
		v.call(func() error { return v.writeOn(s) })
		v.call(func() error { return v.readAll(s) })
		return v
	},
	"half-closed": func(tr *Tracker, _ int) *victim {
		s, _, v := streamed(tr)
		if err := s.CloseWrite(); err != nil {
			panic(err)
		}
		v.call(func() error { return v.readAll(s) })
		return v
	},
	"paced": func(tr *Tracker, i int) *victim {
		p := &paced{allowed: i % 4, ended: make(chan struct{})}
		v := &victim{ends: make(chan error, 1)}
		p.Flow = tr.Open(over("lan", "direct", 0), func(error) { close(p.ended) })
		v.Flow, v.close = p.Flow, func() { p.Close(io.EOF) }
		v.call(func() error {
			var err error
			v.moved[flow.Up], err = p.relay()
			return err
		})
		return v
	},
	"shutting down": func(tr *Tracker, _ int) *victim {
		s, _, v := streamed(tr)
		v.over = true
		v.call(func() error { return v.readAll(s) })
		go s.CloseWrite()
		go tr.EndWhere(flow.ErrShutdown, func(r *Record) bool { return r.ID == v.ID() })
		go s.Close()
		return v
	},
}

func streamed(tr *Tracker) (*Stream, net.Conn, *victim) {
	s, _, far := dialled(tr)
	v := &victim{Flow: s.Flow(), ends: make(chan error, 2)}
	v.close = func() { s.Close(); far.Close() }
	return s, far, v
}

func (v *victim) call(do func() error) {
	v.calls++
	go func() { v.ends <- do() }()
}

func (v *victim) readAll(s *Stream) error {
	p := make([]byte, 100)
	for {
		n, err := s.Read(p)
		if v.moved[flow.Down] += uint64(n); err != nil {
			return err
		}
	}
}

func (v *victim) writeOn(s *Stream) error {
	for {
		n, err := s.Write(make([]byte, 700))
		if v.moved[flow.Up] += uint64(n); err != nil {
			return err
		}
	}
}

// paced is a meter as a gateway with pacing composes it: the kill is asked first.
type paced struct {
	*Flow
	allowed int // calls until it pauses for ever
	ended   chan struct{}
}

func (p *paced) Ready(d flow.Dir, wake func()) (int, error) {
	if n, err := p.Flow.Ready(d, wake); err != nil {
		return n, err
	}
	if p.allowed--; p.allowed < 0 {
		return 0, flow.ErrPaused
	}
	return 1000, nil
}

// relay moves what the meter allows; paused, it is woken by the end alone.
func (p *paced) relay() (moved uint64, err error) {
	for {
		switch n, err := p.Ready(flow.Up, func() {}); {
		case err == nil:
			p.Took(flow.Up, n)
			p.Moved(flow.Up, n)
			moved += uint64(n)
		case errors.Is(err, flow.ErrPaused):
			<-p.ended
		default:
			return moved, err
		}
	}
}

func TestAKillEndsAFlowAtOnceInEveryState(t *testing.T) {
	for name, begin := range racing {
		t.Run(name, func(t *testing.T) {
			tr := newTracker(t, Options{Closed: 1})
			sub := tr.Subscribe()
			defer sub.Close()
			bystander := tr.Open(over("lan", "direct", 0), nil)
			var truth [2]uint64
			for i := range killRounds {
				v := begin(tr, i)
				for range i % 7 {
					runtime.Gosched()
				}
				if err := v.kill(tr, i); err != nil {
					t.Fatalf("round %d: %v", i, err)
				}
				if err := v.wait(); err != nil {
					t.Fatalf("round %d: %v", i, err)
				}
				v.close()
				r := tr.Closed()[0]
				if r.ID != v.ID() || r.Up != v.moved[flow.Up] || r.Down != v.moved[flow.Down] || !v.over && (r.Reason != flow.Killed || !r.Killed) {
					t.Fatalf("round %d: closed as %+v; moved %v", i, r, v.moved)
				}
				if tr.Kill(v.ID()) || tr.KillWhere(func(r *Record) bool { return r.ID == v.ID() }) != 0 {
					t.Fatalf("round %d: a flow that is gone was killed", i)
				}
				truth[0], truth[1] = truth[0]+r.Up, truth[1]+r.Down
			}
			tr.Final()
			if s := tr.Snapshot().Total; [2]uint64{s.Up, s.Down} != truth || s.Flows != 1 || bystander.Cause() != nil {
				t.Errorf("total %+v, want %v; the flow that was not killed: %v", s, truth, bystander.Cause())
			}
			told(t, sub, 1+2*killRounds)
		})
	}
}

// kill kills the flow by its id, or by a predicate, or by both at once.
func (v *victim) kill(tr *Tracker, i int) error {
	byID := func() bool { return tr.Kill(v.ID()) }
	killed := make(chan int, 2)
	where := func() { killed <- tr.KillWhere(func(r *Record) bool { return r.ID == v.ID() }) }
	switch i % 3 {
	case 0:
		if first, again := byID(), byID(); !v.over && !(first && again) {
			return fmt.Errorf("the kill found it: %v, the second: %v", first, again)
		}
	case 1:
		where()
		where()
		if n, again := <-killed, <-killed; again != 0 || !v.over && n != 1 {
			return fmt.Errorf("killed %d, then %d", n, again)
		}
	default:
		go where()
		go where()
		if n := <-killed + <-killed; n > 1 || !v.over && n != 1 {
			return fmt.Errorf("two at once killed %d", n)
		}
	}
	return nil
}

// wait expects that every call ends with the cause.
func (v *victim) wait() error {
	deadline := time.After(10 * time.Second)
	for range v.calls {
		select {
		case err := <-v.ends:
			if v.over && (errors.Is(err, net.ErrClosed) || errors.Is(err, flow.ErrShutdown)) {
				continue
			}
			if !errors.Is(err, ErrKilled) || !errors.Is(err, syscall.ECONNABORTED) {
				return fmt.Errorf("a call ended with %w", err)
			}
		case <-deadline:
			return errors.New("a call did not end")
		}
	}
	return nil
}

// told expects that a subscriber who slept is told of n events, read or missed, in
// order for each flow.
func told(t *testing.T, sub *Subscription, n uint64) {
	t.Helper()
	opened := make(map[flow.ID]bool)
	heard, all := uint64(0), uint64(0)
	for all < n {
		ev, missed, err := sub.Next(soon(t))
		if err != nil {
			t.Fatalf("after %d events of %d: %v", all, n, err)
		}
		all += 1 + missed
		id := ev.Record.ID
		if wasOpen := opened[id]; ev.Kind == Opened && wasOpen || ev.Kind == Closed && !wasOpen && heard > 0 {
			t.Fatalf("%v of %v, open before: %v", ev.Kind, id, wasOpen)
		}
		opened[id] = ev.Kind == Opened
		heard++
	}
	if all != n || heard != min(n, DefaultEvents) {
		t.Errorf("%d events, %d of them read; want %d", all, heard, n)
	}
}
