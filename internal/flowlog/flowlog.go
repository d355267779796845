// Package flowlog writes closed flows to a file, a line each, and rotates it.
//
// One goroutine, Run, does everything with the file: it follows the tracker's ring
// of closed flows, makes their lines and writes them whenever it has read the ring
// empty or gathered 64 KiB. No flow ever waits for it. What the ring overwrote before
// it was read, what is over the rate, and what the file system did not take is
// counted as dropped.
//
// After a failure it tries again in ever longer pauses, up to half a minute. A line
// that was written in part is cut off again.
package flowlog

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"

	"gatewayd/internal/admit"
	"gatewayd/track"
)

// lineRate is what flash and processor of a small router stand beside their work: a
// flood of short flows must not take them from the flows.
var lineRate = admit.Rate{PerSecond: 5000, Burst: 20_000}

// Target is the file to write to.
type Target struct {
	File string // its path; empty: none
	Size int64  // bytes at which it is rotated
	Keep int    // old files, FILE.1 the newest
}

// Options are what a Log is made of.
type Options struct {
	Tracker *track.Tracker
	Line    func(*track.Record) ([]byte, error) // its line, with the line feed
	Log     *slog.Logger
}

// Log is a flow log. Its methods are safe for concurrent use; Run may be called once.
type Log struct {
	opt              Options
	written, dropped atomic.Uint64

	mu      sync.Mutex
	target  Target // guarded by mu
	again   func() // guarded by mu; makes Run look at the target, nil before it runs
	trouble string // guarded by mu; why nothing is written, empty: it is
}

// New makes a log without a target.
func New(o Options) *Log { return &Log{opt: o} }

// Use makes Run write to t from soon on, and open its file again even if t is the
// same: whoever moved the file away wants a new one. It does not block.
func (l *Log) Use(t Target) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.target = t
	if l.again != nil {
		l.again()
	}
}

// State is how a log fares.
type State struct {
	Target
	Written, Dropped uint64 // flows
	Trouble          string // why nothing is written now; empty: it is
}

// State is how the log fares.
func (l *Log) State() State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return State{l.target, l.written.Load(), l.dropped.Load(), l.trouble}
}

// Run writes what closes until ctx ends, then the rest of what closed before, and
// returns nil: trouble with the file is told in the log and in State.
func (l *Log) Run(ctx context.Context) error { return l.run(ctx, lineRate) }

func (l *Log) run(ctx context.Context, rate admit.Rate) error {
	w := writer{log: l, rate: admit.Rates{All: rate}}
	defer w.close()
	for ctx.Err() == nil {
		until, target := l.begin(ctx)
		w.use(target)
		if target.File == "" {
			<-until.Done()
			continue
		}
		for w.next(until) == nil {
		}
	}
	for w.reader != nil && w.next(ctx) == nil { // what is there is read even so
	}
	w.tell()
	return nil
}

// begin is the target to write to until the context ends.
func (l *Log) begin(ctx context.Context) (context.Context, Target) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.again != nil {
		l.again()
	}
	until, cancel := context.WithCancel(ctx)
	l.again = cancel
	return until, l.target
}

// troubled notes what keeps lines from being written, nil for nothing, and logs its
// beginning and its end; lost is how many flows it cost.
func (l *Log) troubled(err error, lost uint64) {
	l.mu.Lock()
	before, file := l.trouble, l.target.File
	l.trouble = ""
	if err != nil {
		l.trouble = err.Error()
	}
	l.mu.Unlock()
	switch {
	case err != nil && before == "":
		l.opt.Log.Error("flow log can't be written: flows are dropped from it", "file", file, "err", err)
	case err == nil && before != "":
		l.opt.Log.Warn("flow log is written again", "file", file, "dropped", lost)
	}
}
