package store

import (
	"os"
	"path/filepath"
	"testing"
)

// Whatever is in a journal, reading it ends with records or an error, and what was read
// is the same when it is written and read again.
func FuzzJournal(f *testing.F) {
	if b, err := os.ReadFile("testdata/format1/state"); err == nil {
		f.Add(b)
		f.Add(b[:len(b)-3])
	}
	header := current.header(nil)
	f.Add(header)
	f.Add(appendSnapshot(header, start, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := current.read(b)
		if err != nil {
			return
		}
		if c.size > int64(len(b)) || c.snapshot > c.size {
			t.Fatalf("size %d, snapshot %d of %d", c.size, c.snapshot, len(b))
		}
		again, err := current.read(appendSnapshot(current.header(nil), c.at, c.records))
		if err != nil || again.records.count() != c.records.count() || !again.at.Equal(c.at) {
			t.Fatalf("read again: %v", err)
		}
	})
}

// Frames whose checksums are right may have anything in them.
func FuzzPayload(f *testing.F) {
	f.Add(appendChanges(nil, start, changes(change{Usage, "a", []byte("1")}, change{IDs, "b", nil}))[frameHeader:])
	f.Add(appendBlock(nil, Block{Hourly, 7, []Row{{"k", []byte("v")}}})[frameHeader:])
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, payload []byte) {
		_, _, _ = newRecords().replay(payload)
		frame, at := beginFrame(nil)
		frame = endFrame(append(frame, payload...), at)
		if err := os.WriteFile(filepath.Join(dir, "hourly-0"), frame, 0o600); err != nil {
			t.Fatal(err)
		}
		_ = readSegment(dir, "hourly-0", 1<<28-1, -1<<60, 1<<60, func(int64, []byte, []byte) {})
	})
}
