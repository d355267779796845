package flowlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"gatewayd/internal/admit"
	"gatewayd/track"
)

const (
	bufferSize = 64 << 10 // bytes that are gathered for one write; no larger than the least Target.Size
	lookEvery  = time.Second
	tellEvery  = time.Minute
	firstPause = time.Second // after a failure
	lastPause  = 30 * time.Second
)

// writer is Run's alone.
type writer struct {
	log     *Log
	target  Target
	rate    admit.Rates
	reader  *track.ClosedReader // nil without a target
	records []track.Record

	file   *os.File  // nil: to be opened
	size   int64     // of file, bytes of whole lines
	looked time.Time // when the path was last seen to be file

	buf   []byte
	lines uint64 // in buf

	pause time.Duration // after the next failure
	retry time.Time     // nothing is tried before
	lost  uint64        // flows that this trouble cost

	skipped uint64    // flows that nobody was told of: they closed too fast
	told    time.Time // when somebody was
}

// use begins to write to t, with a file that is opened anew.
func (w *writer) use(t Target) {
	w.close()
	w.target, w.pause, w.retry = t, firstPause, time.Time{}
	if t.File == "" {
		w.reader = nil
		return
	}
	if w.reader == nil {
		w.reader = w.log.opt.Tracker.FollowClosed()
	}
	w.settle(w.open(), time.Now())
}

// next waits for closed flows and writes them. It fails only when ctx ended.
func (w *writer) next(ctx context.Context) (err error) {
	var missed uint64
	if w.records, missed, err = w.reader.Next(ctx, w.records[:0]); err != nil {
		return err
	}
	now := time.Now()
	w.skip(missed)
	for i := range w.records {
		w.add(&w.records[i], now)
	}
	w.flush(now)
	if now.Sub(w.told) >= tellEvery {
		w.tell()
		w.told = now
	}
	return nil
}

// skip counts flows that closed faster than they are written.
func (w *writer) skip(n uint64) {
	w.log.dropped.Add(n)
	w.skipped += n
}

// tell logs what was skipped since the last time.
func (w *writer) tell() {
	if w.skipped > 0 {
		w.log.opt.Log.Warn("flow log: flows closed faster than they are written", "file", w.target.File, "dropped", w.skipped)
		w.skipped = 0
	}
}

// drop counts flows that the file did not take.
func (w *writer) drop(n uint64) {
	w.log.dropped.Add(n)
	w.lost += n
}

// add puts a flow's line into the buffer.
func (w *writer) add(r *track.Record, now time.Time) {
	if !w.rate.Allow(r.Source.Addr(), now) {
		w.skip(1)
		return
	}
	line, err := w.log.opt.Line(r)
	if err != nil || len(line) > bufferSize {
		w.drop(1)
		return
	}
	if len(w.buf)+len(line) > bufferSize {
		w.flush(now)
	}
	w.buf = append(w.buf, line...)
	w.lines++
}

// flush writes the buffer, or drops it.
func (w *writer) flush(now time.Time) {
	lines := w.lines
	if lines == 0 {
		return
	}
	defer func() { w.buf, w.lines = w.buf[:0], 0 }()
	if now.Before(w.retry) {
		w.drop(lines)
		return
	}
	err := w.write(now)
	if err == nil {
		w.log.written.Add(lines)
	} else {
		w.drop(lines)
	}
	w.settle(err, now)
}

// settle plans the next try after a failure, and tells of trouble and its end.
func (w *writer) settle(err error, now time.Time) {
	if err != nil {
		w.close()
		w.retry, w.pause = now.Add(w.pause), min(2*w.pause, lastPause)
		w.log.troubled(err, 0)
		return
	}
	w.log.troubled(nil, w.lost)
	w.pause, w.lost = firstPause, 0
}

// write appends the buffer to the file, all of it or nothing.
func (w *writer) write(now time.Time) error {
	if w.file != nil && now.Sub(w.looked) >= lookEvery && !w.inPlace(now) {
		w.close()
	}
	if w.file == nil {
		if err := w.open(); err != nil {
			return err
		}
	}
	if w.size > 0 && w.size+int64(len(w.buf)) > w.target.Size {
		if err := w.rotate(); err != nil {
			return err
		}
	}
	if _, err := w.file.Write(w.buf); err != nil {
		return errors.Join(err, w.file.Truncate(w.size))
	}
	w.size += int64(len(w.buf))
	return nil
}

// inPlace reports whether the path still leads to the file: it may have been moved,
// or removed with its directory. One that was cut off by somebody else stays in use.
func (w *writer) inPlace(now time.Time) bool {
	w.looked = now
	there, err := os.Stat(w.target.File)
	if err != nil {
		return false
	}
	open, err := w.file.Stat()
	if err != nil || !os.SameFile(there, open) {
		return false
	}
	w.size = open.Size()
	return true
}

// open opens the file to append to it, and makes it and its directory if they are
// not there.
func (w *writer) open() error {
	if err := os.MkdirAll(filepath.Dir(w.target.File), 0o755); err != nil {
		return err
	}
	// For reading too, so that a FIFO, which is refused below, does not wait for a reader.
	f, err := os.OpenFile(w.target.File, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o640)
	if err != nil {
		return err
	}
	size, err := wholeLines(f)
	if err != nil {
		f.Close() //nolint:errcheck // nothing was written
		return fmt.Errorf("%s: %w", w.target.File, err)
	}
	w.file, w.size, w.looked = f, size, time.Now()
	return nil
}

// wholeLines cuts off what a crash left of the last line, and returns the file's size.
func wholeLines(f *os.File) (int64, error) {
	info, err := f.Stat()
	switch {
	case err != nil:
		return 0, err
	case !info.Mode().IsRegular():
		return 0, errors.New("not a regular file")
	case info.Size() == 0:
		return 0, nil
	}
	tail := make([]byte, min(info.Size(), bufferSize))
	start := info.Size() - int64(len(tail))
	if _, err := f.ReadAt(tail, start); err != nil && err != io.EOF {
		return 0, err
	}
	end := start + int64(bytes.LastIndexByte(tail, '\n')+1)
	switch {
	case end == info.Size():
		return end, nil
	case end == start && start > 0:
		return 0, errors.New("no flow log: its last line is too long")
	}
	return end, f.Truncate(end)
}

// rotate moves the file and the old ones up by one, and begins a new one. A link is
// followed: one that was moved itself would have the log go on where it lies.
func (w *writer) rotate() error {
	w.close()
	file := w.target.File
	if real, err := filepath.EvalSymlinks(file); err == nil {
		file = real
	}
	if err := shift(file, w.target.Keep); err != nil {
		return err
	}
	return w.open()
}

// shift removes the oldest file, with those that a larger keep once left, and gives
// each other one the next number. What is not there is none the worse.
func shift(file string, keep int) error {
	for i := keep; ; i++ {
		err := os.Remove(numbered(file, i))
		if errors.Is(err, fs.ErrNotExist) && i > keep {
			break
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for i := keep - 1; i >= 0; i-- {
		if err := os.Rename(numbered(file, i), numbered(file, i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// numbered is the path of the i-th old file; the 0th is the one that is written to.
func numbered(file string, i int) string {
	if i == 0 {
		return file
	}
	return file + "." + strconv.Itoa(i)
}

func (w *writer) close() {
	if w.file != nil {
		w.file.Close() //nolint:errcheck // what write returned was told; nothing is buffered
		w.file = nil
	}
}
