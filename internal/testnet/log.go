package testnet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

const (
	logKept = 2_000   // lines of a process' log
	logLine = 4 << 10 // bytes kept of one line
)

// logBuffer keeps a bounded part of a log and lets others wait for lines.
type logBuffer struct {
	mu      sync.Mutex // guards all
	rest    []byte     // a line without its end yet
	lines   []string
	dropped int
	ended   bool
	changed chan struct{} // closed and replaced at each change
}

var errLogEnded = errors.New("the process ended")

func newLogBuffer() *logBuffer { return &logBuffer{changed: make(chan struct{})} }

// Write takes a piece of the log.
func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rest = append(b.rest, p...)
	for {
		line, rest, found := bytes.Cut(b.rest, []byte("\n"))
		if !found {
			break
		}
		b.keepLocked(string(line[:min(len(line), logLine)]))
		b.rest = rest
	}
	b.rest = bytes.Clone(b.rest) // or what was cut off stays in memory
	if len(b.rest) > logLine {
		b.rest = b.rest[:logLine]
	}
	b.signalLocked()
	return len(p), nil
}

func (b *logBuffer) keepLocked(line string) {
	b.lines = append(b.lines, line)
	if len(b.lines) > logKept { // the first half stays: how it began is worth most
		b.lines = append(b.lines[:logKept/2], b.lines[logKept/2+1:]...)
		b.dropped++
	}
}

func (b *logBuffer) signalLocked() {
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *logBuffer) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	b.signalLocked()
}

// wait returns the first line, kept or coming, that pred picks.
func (b *logBuffer) wait(ctx context.Context, pred func(string) bool) (string, error) {
	for {
		b.mu.Lock()
		lines, ended, changed := slices.Clone(b.lines), b.ended, b.changed
		b.mu.Unlock()
		for _, line := range lines {
			if pred(line) {
				return line, nil
			}
		}
		if ended {
			return "", errLogEnded
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// String is what was kept.
func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := strings.Join(b.lines, "\n") + "\n" + string(b.rest)
	if b.dropped > 0 {
		s = fmt.Sprintf("(%d lines from the middle are missing)\n%s", b.dropped, s)
	}
	return s
}
