package route

import (
	"io"
	"strconv"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// ErrDrained ends the flows of a version whose drain period is over.
var ErrDrained = &flow.Cause{Reason: flow.Drained, Text: "the outbound this flow was opened on was drained"}

// Version is one applied definition of an outbound, "tag@vN".
//
//	current     in the newest apply
//	draining    superseded or removed; takes flows of decisions made before that
//	expired     draining, and its drain period is over; takes no flow
//	closed      takes no flow, and its outbound is closed
//
// It goes to closed when it is superseded and no flow lives on it. Each step is
// one way. All of it is in state, so that a flow comes and goes by one atomic
// addition, and the one that leaves last sees that it does.
type Version struct {
	tag, kind   string
	n           int
	fingerprint string
	outbound    flow.Outbound
	owner       *Outbounds
	state       atomic.Uint64 // flows in the lower half, then the flags
	failed      atomic.Pointer[string]

	drain Drain       // guarded by owner.locked
	timer *time.Timer // runs in the drain period; guarded by owner.locked
}

const (
	flowsMask  = 1<<32 - 1
	superseded = 1 << 32
	expired    = 1 << 33
	closed     = 1 << 34
)

// Tag is the outbound's tag.
func (v *Version) Tag() string { return v.tag }

// N is the version's number: 1, 2, 3, … for each tag, never used twice.
func (v *Version) N() int { return v.n }

// Type is the outbound's type as in the configuration.
func (v *Version) Type() string { return v.kind }

// Failed notes an error by which the version itself, not a far side, let a dial
// down, and reports whether it was the first.
func (v *Version) Failed(err error) bool {
	text := err.Error()
	return v.failed.Swap(&text) == nil
}

// LastError is the text of the last such error; empty if there was none.
func (v *Version) LastError() string {
	if text := v.failed.Load(); text != nil {
		return *text
	}
	return ""
}

// Outbound is what dials for this version. Nobody dials without Acquire.
func (v *Version) Outbound() flow.Outbound { return v.outbound }

// String is the form of logs, "tag@vN". The DNS service, whose tag is empty, is
// called as in the configuration.
func (v *Version) String() string {
	tag := v.tag
	if tag == "" {
		tag = "dns"
	}
	return tag + "@v" + strconv.Itoa(v.n)
}

// Acquire puts one flow, or one dial, on the version; Release takes it off. False
// means that the version is gone or its drain period is over: the decision came
// from an old plane.
func (v *Version) Acquire() bool { return v.entered(v.state.Add(1)) }

// entered ends an Acquire that made the state s. One in vain leaves by Release:
// the last flow may have left meanwhile and seen that it was not the last.
func (v *Version) entered(s uint64) bool {
	if s&(expired|closed) == 0 {
		return true
	}
	v.Release()
	return false
}

// Release takes off what Acquire put on. The last one of a superseded version
// closes its outbound, if it is an io.Closer, on this goroutine; no lock is held.
// Release without Acquire panics.
func (v *Version) Release() {
	s := v.state.Add(^uint64(0))
	if s&flowsMask == flowsMask {
		panic("route: release of " + v.String() + " without acquire")
	}
	if s&(flowsMask|superseded) == superseded {
		v.closeIfLeft()
	}
}

// Flows is how many flows and dials are on the version.
func (v *Version) Flows() int { return int(v.state.Load() & flowsMask) }

// Draining reports that the version was superseded or removed, and isn't closed.
func (v *Version) Draining() bool { return v.state.Load()&(superseded|closed) == superseded }

// Expired reports that flows must not stay: the drain period is over, or the
// version is closed. A flow that was dialling meanwhile asks after it registered,
// and so is seen by expire or sees it here.
func (v *Version) Expired() bool { return v.state.Load()&(expired|closed) != 0 }

// supersede makes a current version a draining one.
func (v *Version) supersede() {
	v.state.Or(superseded)
	v.closeIfLeft()
}

// end ends the drain period.
func (v *Version) end() {
	if v.state.Or(expired)&(expired|closed) == 0 {
		v.owner.expire(v)
	}
}

// closeIfLeft closes a superseded version that no flow lives on. It tries again
// when a flag changed meanwhile; when a flow came, that flow's Release comes here.
func (v *Version) closeIfLeft() {
	for {
		s := v.state.Load()
		if s&(superseded|closed|flowsMask) != superseded {
			return
		}
		if v.state.CompareAndSwap(s, s|closed) {
			v.owner.forget(v)
			// Nothing uses the outbound any more, and nobody could act on an error.
			_ = v.closeOutbound()
			return
		}
	}
}

// shut closes the version whatever lives on it.
func (v *Version) shut() error {
	if v.state.Or(superseded|expired|closed)&closed != 0 {
		return nil
	}
	return v.closeOutbound()
}

func (v *Version) closeOutbound() error {
	if c, ok := v.outbound.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
