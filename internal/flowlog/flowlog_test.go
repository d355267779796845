package flowlog

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/track"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of these tests.
const patience = 10 * time.Second

// bench is a log with its tracker, below a directory of its own.
type bench struct {
	*testing.T
	tracker *track.Tracker
	log     *Log
	said    *lockedBuffer
	dir     string
	target  Target
	stop    func()
}

// lockedBuffer is read while the log writes to it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newBench(t *testing.T) *bench {
	t.Helper()
	tr, err := track.New(track.Options{Interval: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{T: t, tracker: tr, said: &lockedBuffer{}, dir: t.TempDir()}
	b.target = Target{filepath.Join(b.dir, "log", "flows.jsonl"), bufferSize, 3}
	b.log = New(Options{Tracker: tr, Log: slog.New(slog.NewTextHandler(b.said, nil)), Line: lineOf})
	return b
}

// lineOf is the flow's id, padded to the length of a real line.
func lineOf(r *track.Record) ([]byte, error) { return fmt.Appendf(nil, "%0399d\n", r.ID), nil }

func (b *bench) run() {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := b.log.Run(ctx); err != nil {
			b.Errorf("run: %v", err)
		}
	})
	b.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	b.Cleanup(b.stop)
}

// close lets n flows close.
func (b *bench) close(n int) {
	for range n {
		b.tracker.Open(track.Meta{Network: flow.TCP, Source: netip.MustParseAddrPort("10.0.0.2:1")}, nil).Close(nil)
	}
}

// await polls a condition that nothing announces.
func (b *bench) await(what string, holds func() bool) {
	b.Helper()
	end := time.After(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-end:
			b.Fatalf("in vain: %s; %+v", what, b.log.State())
		}
	}
}

func (b *bench) accounted(n uint64) {
	b.Helper()
	b.await(fmt.Sprintf("%d flows are written or dropped", n), func() bool {
		s := b.log.State()
		return s.Written+s.Dropped == n
	})
}

// ids are those of a file's lines; what is no whole line fails the test.
func (b *bench) ids(file string) (ids []int) {
	b.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var id int
		if _, err := fmt.Sscanf(line, "%d\n", &id); err != nil || len(line) != 400 {
			b.Fatalf("%s: line %q: %v", file, line, err)
		}
		ids = append(ids, id)
	}
	return ids
}

// consecutive checks that the ids are from, from+1, … to.
func (b *bench) consecutive(ids []int, from, to int) {
	b.Helper()
	if len(ids) != to-from+1 {
		b.Fatalf("%d lines, want flows %d to %d", len(ids), from, to)
	}
	for i, id := range ids {
		if id != from+i {
			b.Fatalf("flow %d in place %d of flows %d to %d", id, i, from, to)
		}
	}
}

func TestEveryClosedFlowIsALineInTheOrderOfTheirEnds(t *testing.T) {
	b := newBench(t)
	b.target.Size = 1 << 30
	b.close(3) // before the log: not in it
	b.log.Use(b.target)
	b.run()
	b.await("the file is opened", func() bool { _, err := os.Stat(b.target.File); return err == nil })
	b.close(2000)
	b.accounted(2000)
	b.close(5)
	b.stop() // what closed before is written
	b.consecutive(b.ids(b.target.File), 4, 2008)
	if s := b.log.State(); s.Written != 2005 || s.Dropped != 0 || s.Trouble != "" || b.said.String() != "" {
		t.Errorf("%+v; it said %s", s, b.said)
	}
}

func TestFilesAreRotatedBySizeAndNoFlowIsLostBetween(t *testing.T) {
	b := newBench(t)
	w := b.writer()
	const flows = 160*3 + 10 // 163 lines fit a file; a write has fewer
	for n := 0; n < flows; n += 10 {
		b.close(10)
		b.step(w)
	}
	var all []int
	for i := 3; i >= 0; i-- {
		file := numbered(b.target.File, i)
		if info, err := os.Stat(file); i < 3 && (err != nil || info.Size() > b.target.Size) {
			t.Fatalf("%s: %v, %v", file, info, err)
		} else if err == nil {
			all = append(all, b.ids(file)...)
		}
	}
	b.consecutive(all, 1, flows)
	b.close(163 * 4)
	for b.log.State().Written < flows+163*4 {
		b.step(w)
	}
	if _, err := os.Stat(numbered(b.target.File, 4)); err == nil {
		t.Error("a fourth old file is kept")
	}
	newest := b.ids(b.target.File)
	if newest[len(newest)-1] != flows+163*4 {
		t.Errorf("the newest line is %d", newest[len(newest)-1])
	}
}

// writer is one to be stepped by hand, with the target in use.
func (b *bench) writer() *writer {
	b.log.Use(b.target)
	w := &writer{log: b.log}
	b.Cleanup(w.close)
	w.use(b.target)
	return w
}

// step has the writer write what has closed.
func (b *bench) step(w *writer) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	if err := w.next(ctx); err != nil {
		b.Fatal(err)
	}
}

func TestKeepingFewerRemovesTheRest(t *testing.T) {
	for keep, want := range map[int][]string{0: nil, 1: {"f.1"}, 2: {"f.1", "f.2"}, 9: {"f.1", "f.2", "f.3", "f.4"}} {
		dir := t.TempDir()
		file := filepath.Join(dir, "f")
		for i := range 4 {
			if err := os.WriteFile(numbered(file, i), []byte{byte('0' + i)}, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := shift(file, keep); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i, e := range entries {
			got = append(got, e.Name())
			if text, _ := os.ReadFile(filepath.Join(dir, e.Name())); string(text) != string(rune('0'+i)) {
				t.Errorf("keep %d: %s holds %q", keep, e.Name(), text)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("keep %d: %v are left, want %v", keep, got, want)
		}
	}
}

func TestAFileThatWasMovedOrRemovedIsMadeAnew(t *testing.T) {
	for name, disturb := range map[string]func(b *bench, w *writer) error{
		"logrotate, with a reload": func(b *bench, w *writer) error {
			err := os.Rename(b.target.File, b.target.File+"-old")
			w.use(b.target)
			return err
		},
		"logrotate, without": func(b *bench, w *writer) error {
			w.looked = time.Time{} // a second later
			return os.Rename(b.target.File, b.target.File+"-old")
		},
		"rm -r": func(b *bench, w *writer) error {
			w.looked = time.Time{}
			return os.RemoveAll(filepath.Dir(b.target.File))
		},
		"another in its place": func(b *bench, w *writer) error {
			w.looked = time.Time{}
			if err := os.Remove(b.target.File); err != nil {
				return err
			}
			return os.WriteFile(b.target.File, nil, 0o600)
		},
		"truncated": func(b *bench, w *writer) error {
			w.looked = time.Time{}
			return os.Truncate(b.target.File, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			w := b.writer()
			b.close(2)
			b.step(w)
			if err := disturb(b, w); err != nil {
				t.Fatal(err)
			}
			b.close(3)
			b.step(w)
			b.consecutive(b.ids(b.target.File), 3, 5)
			if w.size != 3*400 || b.said.String() != "" {
				t.Errorf("size %d; it said %s", w.size, b.said)
			}
		})
	}
}

func TestTroubleCostsLinesAndNothingElseAndIsToldOnce(t *testing.T) {
	b := newBench(t)
	if err := os.MkdirAll(b.target.File, 0o755); err != nil { // a directory is where the file should be
		t.Fatal(err)
	}
	w := b.writer()
	if s := b.log.State(); !strings.Contains(s.Trouble, "is a directory") {
		t.Fatalf("%+v", s)
	}
	now := w.retry.Add(-firstPause)
	pauses := []time.Duration{}
	for range 7 {
		now = w.retry
		b.close(1)
		b.gather(w, now)
		w.flush(now)
		pauses = append(pauses, w.retry.Sub(now))
	}
	if want := "[2s 4s 8s 16s 30s 30s 30s]"; fmt.Sprint(pauses) != want {
		t.Errorf("pauses %v, want %s", pauses, want)
	}
	if err := os.Remove(b.target.File); err != nil {
		t.Fatal(err)
	}
	b.close(1)
	b.gather(w, now)
	w.flush(w.retry.Add(-1)) // too early: not even tried
	b.close(1)
	b.gather(w, now)
	w.flush(w.retry)
	b.consecutive(b.ids(b.target.File), 9, 9)
	if s := b.log.State(); s.Written != 1 || s.Dropped != 8 || s.Trouble != "" {
		t.Errorf("%+v", s)
	}
	if said := b.said.String(); strings.Count(said, "\n") != 2 || !strings.Contains(said, "dropped=8") {
		t.Errorf("it said %s", said)
	}
}

// gather puts what has closed into the writer's buffer.
func (b *bench) gather(w *writer, now time.Time) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	records, _, err := w.reader.Next(ctx, nil)
	if err != nil {
		b.Fatal(err)
	}
	for i := range records {
		w.add(&records[i], now)
	}
}

func TestWhatACrashLeftOfALineIsCutOff(t *testing.T) {
	for text, want := range map[string]string{
		"":                                       "",
		"a\nb\n":                                 "a\nb\n",
		"a\nb\n{\"id\":":                         "a\nb\n",
		"{\"id\":":                               "",
		"\n" + strings.Repeat("x", bufferSize-1): "\n",
		"\n" + strings.Repeat("x", 2*bufferSize): "refused",
		strings.Repeat("x", 2*bufferSize) + "\nyy": strings.Repeat("x", 2*bufferSize) + "\n",
	} {
		file := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		w := &writer{target: Target{File: file}}
		err := w.open()
		w.close()
		got, _ := os.ReadFile(file)
		if want == "refused" {
			if err == nil || string(got) != text {
				t.Errorf("a file of other things: %v, %d of %d bytes are left", err, len(got), len(text))
			}
		} else if err != nil || string(got) != want || w.size != int64(len(want)) {
			t.Errorf("%.20q: %v, %.20q is left, size %d", text, err, got, w.size)
		}
	}
}

func TestWhatIsNoFileIsRefusedWithoutWaiting(t *testing.T) {
	b := newBench(t)
	b.target.File = filepath.Join(b.dir, "fifo")
	if err := syscall.Mkfifo(b.target.File, 0o600); err != nil {
		t.Fatal(err)
	}
	b.log.Use(b.target)
	b.run()
	b.await("the trouble is told", func() bool { return strings.Contains(b.log.State().Trouble, "not a regular file") })
	b.close(10)
	b.accounted(10)
}

func TestAFloodOfShortFlowsIsCutToTheRateAndToldOnce(t *testing.T) {
	b := newBench(t)
	w := b.writer()
	w.rate = admit.Rates{All: admit.Rate{PerSecond: 10, Burst: 20}}
	b.close(100)
	b.step(w)
	if s := b.log.State(); s.Written < 20 || s.Written > 40 || s.Written+s.Dropped != 100 || s.Trouble != "" {
		t.Errorf("%+v", s)
	}
	b.close(100)
	b.step(w)
	if said := b.said.String(); strings.Count(said, "\n") != 1 || !strings.Contains(said, "faster than they are written") {
		t.Errorf("it said %s", said)
	}
}

func TestTheTargetIsChangedAndTakenAwayWhileItRuns(t *testing.T) {
	b := newBench(t)
	other := b.target
	other.File = filepath.Join(b.dir, "other")
	b.log.Use(b.target)
	b.run()
	there := func(file string) {
		b.Helper()
		b.await(file+" is there", func() bool { _, err := os.Stat(file); return err == nil })
	}
	there(b.target.File)
	b.close(3)
	b.accounted(3)
	b.log.Use(other)
	there(other.File)
	b.close(4)
	b.accounted(7)
	b.log.Use(Target{})
	b.await("the target is gone", func() bool { return b.log.State().File == "" })
	b.log.Use(other) // at once: whether what closes between is written depends on who is first
	b.close(1)
	b.stop()
	b.consecutive(b.ids(b.target.File), 1, 3)
	if got := b.ids(other.File); len(got) < 4 {
		t.Errorf("the other file has %v", got)
	}
}

func TestAFullDiskCostsTheLinesThatItDidNotTake(t *testing.T) {
	b := newBench(t)
	w := b.writer()
	b.close(1)
	b.step(w)
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.close()
	w.file = full // as if the disk had run full
	b.close(1)
	b.step(w)
	if s := b.log.State(); s.Written != 1 || s.Dropped != 1 || !strings.Contains(s.Trouble, "no space left") {
		t.Errorf("%+v", s)
	}
	b.consecutive(b.ids(b.target.File), 1, 1)
}

func TestWhatALinkLeadsToIsRotatedInItsPlace(t *testing.T) {
	b := newBench(t)
	b.target.Keep = 1
	there := filepath.Join(b.dir, "disk", "flows")
	for _, dir := range []string{filepath.Dir(there), filepath.Dir(b.target.File)} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(there, b.target.File); err != nil {
		t.Fatal(err)
	}
	w := b.writer()
	b.close(300)
	for b.log.State().Written < 300 {
		b.step(w)
	}
	b.consecutive(append(b.ids(numbered(there, 1)), b.ids(there)...), 1, 300)
	if to, err := os.Readlink(b.target.File); to != there {
		t.Errorf("the link leads to %q: %v", to, err)
	}
}
