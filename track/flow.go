package track

import (
	"errors"
	"io"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// maxTransfer is what a flow may take from its source at once, in bytes.
const maxTransfer = 64 << 10

// ErrKilled is the cause of flows that an operator ended.
var ErrKilled = &flow.Cause{Reason: flow.Killed, Text: "the flow was killed"}

// Flow is one registered flow, in the hands of the relay that moves its bytes. It
// is a flow.Meter that counts. Its methods are safe for concurrent use.
type Flow struct {
	tracker    *Tracker
	slot       *slot // shared with later flows; generation tells whether it is still ours
	generation uint16
	id         flow.ID
	started    time.Time
	end        func(cause error)
	ending     atomic.Pointer[ending] // nil while nobody ended it; set once
	meta       Meta
}

var _ flow.Meter = (*Flow)(nil)

// ending is why a flow ends.
type ending struct {
	err    error // never nil
	killed bool
	byEnd  bool // else by Close
}

// ID is the flow's number.
func (f *Flow) ID() flow.ID { return f.id }

// Owner is what its Meta had as Owner: who opened it finds his own things by it.
func (f *Flow) Owner() any { return f.meta.Owner }

// Ready lets the relay take up to 64 KiB, or returns the cause once the flow ended.
// It never pauses and keeps nothing of wake.
func (f *Flow) Ready(flow.Dir, func()) (int, error) {
	if e := f.ending.Load(); e != nil {
		return 0, e.err
	}
	return maxTransfer, nil
}

// Took does nothing: a flow that is never paused reserves nothing.
func (f *Flow) Took(flow.Dir, int) {}

// Leave does nothing: there is no line.
func (f *Flow) Leave(flow.Dir) {}

// Moved counts n payload bytes, after they moved. It takes no lock. What is reported
// after Close is not counted anywhere.
func (f *Flow) Moved(d flow.Dir, n int) {
	if n <= 0 {
		return
	}
	c := &f.slot.up
	if d == flow.Down {
		c = &f.slot.down
	}
	c.add(f.generation, uint64(n))
}

// End ends the flow with a cause (nil stands for io.EOF): Ready fails with it from
// now on, and the hook given to Open is called, on this goroutine. The first cause
// wins; later ones, and those after Close, change nothing. The flow stays registered
// until its owner closes it.
func (f *Flow) End(cause error) { f.endOnce(cause) }

// endOnce reports whether this call ended the flow.
func (f *Flow) endOnce(cause error) bool {
	e := newEnding(cause)
	e.byEnd = true
	if !f.ending.CompareAndSwap(nil, e) {
		return false
	}
	if f.end != nil {
		f.end(e.err)
	}
	return true
}

func newEnding(cause error) *ending {
	if cause == nil {
		cause = io.EOF
	}
	return &ending{err: cause, killed: errors.Is(cause, ErrKilled)}
}

// ordinary is the end of most flows.
var ordinary = newEnding(nil)

// Cause is what ended the flow: the first End's cause, else what Close was given
// (io.EOF for nil), or nil while it lives.
func (f *Flow) Cause() error {
	if e := f.ending.Load(); e != nil {
		return e.err
	}
	return nil
}

// ended is whether End ended it.
func (f *Flow) ended() bool {
	e := f.ending.Load()
	return e != nil && e.byEnd
}

func (f *Flow) killed() bool {
	e := f.ending.Load()
	return e != nil && e.killed
}

// Change puts a live flow under another principal, the zero one for nobody. What it
// moved so far stays with the one before. It reports whether the flow is registered.
func (f *Flow) Change(p Principal) bool { return f.tracker.shardOf(f.id).change(f, p) }

// Close takes the flow out of the registry, keeps its record with the final counters
// among the closed ones, and sends the closed event. The reason is that of the cause
// by which End ended it, else that of cause; nil is the ordinary end. Only the first
// call does anything.
func (f *Flow) Close(cause error) {
	e := ordinary
	if cause != nil {
		e = newEnding(cause)
	}
	f.ending.CompareAndSwap(nil, e)
	t := f.tracker
	final, ok := t.shardOf(f.id).close(f)
	if !ok {
		return
	}
	t.live.Add(-1)
	var r Record
	r.fill(&final)
	r.Ended = time.Now()
	r.Reason = flow.ReasonOf(f.Cause())
	t.closed.add(&r)
	t.events.publish(Closed, &r)
}
