package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	journalName = "state"
	goodName    = "state.good"
	newName     = "state.new" // a snapshot that is being written
	asideMark   = ".corrupt-"
	asideKept   = 3

	// compactAfter is how many bytes of commits a journal gets at least before a
	// snapshot replaces it; a large snapshot lets as many come as it has itself. So
	// snapshots at most double what is written.
	compactAfter = 1 << 20
)

var (
	// ErrInUse is wrapped by Open's error where another process has the directory.
	ErrInUse = errors.New("in use")
	// ErrNewer is wrapped by Open's error where a newer version wrote the journal.
	ErrNewer = errors.New("written by a newer gatewayd")

	errAppeared = errors.New("state appeared that this run did not begin with: start anew to use it")
)

// directory is what the store has on disk. Its states:
//
//	journal != nil           commits are appended at size
//	journal == nil           nothing could be written when it was last tried (why); a
//	                         save locks the directory if it must, and begins with a snapshot
//	stranger                 and what is there is not what this run began with: it is left alone
//
// Store.commit guards all of it.
type directory struct {
	path   string
	format format

	lock     *os.File
	journal  *os.File
	size     int64 // of whole frames
	snapshot int64 // of it, what was written with the snapshot
	read     bool  // the journal that is there was read, or is ours
	why      error

	lengths Changes // of series files, by the last save
	buf     []byte
}

func (d *directory) writable() bool { return d.journal != nil }

func (d *directory) file(name string) string { return filepath.Join(d.path, name) }

// open locks the directory, reads the journal or the last good copy, and prepares to write.
func (d *directory) open(now time.Time) (found content, notes []string, err error) {
	if d.why = d.acquire(); errors.Is(d.why, ErrInUse) {
		return found, nil, d.why
	}
	found, damaged, err := d.load()
	if err != nil {
		d.close()
		return found, nil, err
	}
	for i, name := range damaged {
		used := i == len(damaged)-1 && found.records != nil && !found.whole
		notes = append(notes, d.setAside(name, used, now))
	}
	if found.records == nil {
		found.records = newRecords()
	}
	if len(damaged) > 0 {
		notes = append(notes, fmt.Sprintf("%d records of %s are used", found.records.count(), found.at.Format(time.RFC3339)))
	}
	if d.why != nil {
		return found, notes, nil
	}
	if d.why = d.begin(found, now); d.why == nil {
		d.sweep(found.records)
	}
	return found, notes, nil
}

// acquire creates and locks the directory.
func (d *directory) acquire() error {
	if d.lock != nil {
		return nil
	}
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return err
	}
	lock, err := lockFile(d.file("lock"))
	if errors.Is(err, ErrInUse) {
		return fmt.Errorf("state directory %s: %w", d.path, err)
	}
	d.lock = lock
	return err
}

// load reads the journal, or where nothing of it can be used the last good copy. Damaged
// are the names of files that were not whole.
func (d *directory) load() (found content, damaged []string, err error) {
	for _, name := range []string{journalName, goodName} {
		b, err := os.ReadFile(d.file(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			d.why = err
			return found, damaged, nil
		}
		c, err := d.format.read(b)
		if errors.Is(err, ErrNewer) {
			return found, damaged, fmt.Errorf("%s: %w", d.file(name), err)
		}
		if err != nil || !c.whole {
			damaged = append(damaged, name)
		}
		if err == nil {
			d.read = name == journalName
			return c, damaged, nil
		}
	}
	return found, damaged, nil
}

// begin goes on with the journal that was read, or where there is none, or an old or a
// damaged one, with a new one.
func (d *directory) begin(found content, now time.Time) error {
	if !d.read || !found.whole || found.version != d.format.version {
		at := found.at
		if at.IsZero() {
			at = now
		}
		return d.compact(found.records, at, nil)
	}
	f, err := os.OpenFile(d.file(journalName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := f.Truncate(found.size); err != nil {
		f.Close()
		return err
	}
	d.journal, d.size, d.snapshot = f, found.size, found.snapshot
	return nil
}

// source is where a save finds what is in memory.
type source interface {
	length(segment string) int64
	all() records // before the batch that is saved; nobody changes them meanwhile
}

// save brings b to the disk. One that is awaited makes no snapshot before the journal is
// twice as long as others let it become.
func (d *directory) save(b Batch, from source, now time.Time, awaited bool) error {
	if err := d.ready(); err != nil {
		return err
	}
	lengths, err := d.appendBlocks(b.Blocks, from)
	if err != nil {
		return err
	}
	d.buf = appendChanges(d.buf[:0], now, b.Changes, lengths)
	most := max(compactAfter, d.snapshot)
	if awaited {
		most *= 2
	}
	anew := d.journal == nil || d.size-d.snapshot+int64(len(d.buf)) > most
	if anew {
		err = d.compact(from.all(), now, d.buf)
	}
	if !anew || err != nil && d.journal != nil { // where a snapshot finds no room a commit may
		err = d.append(d.buf)
	}
	if cap(d.buf) > compactAfter {
		d.buf = nil
	}
	if err != nil {
		return err
	}
	d.lengths = lengths
	return nil
}

// ready sees to it that the directory is ours and its journal the one that we have open.
func (d *directory) ready() error {
	if err := d.acquire(); err != nil {
		return err
	}
	there, err := os.Stat(d.file(journalName))
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case d.journal == nil && err == nil && !d.read:
		return errAppeared
	case d.journal == nil:
		return nil
	}
	mine, err2 := d.journal.Stat()
	if err == nil && err2 == nil && os.SameFile(there, mine) && there.Size() >= d.size {
		return nil
	}
	d.close() // somebody removed, replaced or cut it: write all of it again
	return d.acquire()
}

// append writes one frame. After a failure nothing of it stays.
func (d *directory) append(frame []byte) error {
	_, err := d.journal.WriteAt(frame, d.size)
	if err == nil {
		err = d.journal.Sync()
		if err == nil {
			d.size += int64(len(frame))
			return nil
		}
		d.drop() // nobody knows what of it is on disk
		return err
	}
	if d.journal.Truncate(d.size) != nil {
		d.drop()
	}
	return err
}

// compact writes a journal that is a snapshot and the frame of the commit after it. The
// journal before becomes the last good copy.
func (d *directory) compact(r records, at time.Time, frame []byte) error {
	b := make([]byte, 0, int(d.snapshot)+2*len(frame)) // about
	b = append(appendSnapshot(d.format.header(b), at, r), frame...)
	f, err := os.OpenFile(d.file(newName), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(d.file(journalName), d.file(goodName))
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err == nil {
		err = os.Rename(d.file(newName), d.file(journalName))
	}
	if err == nil {
		err = syncDir(d.path)
	}
	if err != nil {
		f.Close()
		os.Remove(d.file(newName))
		return err
	}
	d.drop()
	d.journal, d.size, d.snapshot, d.read = f, int64(len(b)), int64(len(b)), true
	return nil
}

// drop gives the open journal up.
func (d *directory) drop() {
	if d.journal != nil {
		d.journal.Close()
		d.journal = nil
	}
}

// setAside renames a damaged file and removes the oldest of its like. One whose beginning
// is used keeps its name too: it is all there is until the next snapshot is on disk.
func (d *directory) setAside(name string, used bool, now time.Time) string {
	aside := name + asideMark + now.UTC().Format("20060102T150405.000")
	move := os.Rename
	if used {
		move = os.Link
	}
	if err := move(d.file(name), d.file(aside)); err != nil {
		return fmt.Sprintf("%s is damaged and can't be kept aside: %v", name, err)
	}
	old, err := filepath.Glob(d.file("*" + asideMark + "*"))
	if err == nil {
		slices.SortFunc(old, func(a, b string) int {
			_, a, _ = strings.Cut(a, asideMark)
			_, b, _ = strings.Cut(b, asideMark)
			return strings.Compare(b, a)
		})
		for _, o := range old[min(asideKept, len(old)):] {
			os.Remove(o)
		}
	}
	return fmt.Sprintf("%s was damaged and is kept as %s", name, aside)
}

// sweep removes what an interrupted run left: a snapshot that was not finished, series
// files that the journal does not know.
func (d *directory) sweep(r records) {
	os.Remove(d.file(newName))
	entries, _ := os.ReadDir(d.path)
	for _, e := range entries {
		if _, _, ok := parseSegment(e.Name()); ok && r[segments][e.Name()] == nil {
			os.Remove(d.file(e.Name()))
		}
	}
}

// appendBlocks adds blocks to their files, and tells the new valid lengths.
func (d *directory) appendBlocks(blocks []Block, from source) (lengths Changes, err error) {
	if len(blocks) == 0 {
		return nil, nil
	}
	byFile := make(map[string][]byte)
	for _, b := range blocks {
		name := segmentName(b.Series, segmentOf(b.Series, b.Slot))
		byFile[name] = appendBlock(byFile[name], b)
	}
	for name, data := range byFile {
		length, err := appendSegment(d.file(name), from.length(name), data)
		if err != nil {
			return nil, err
		}
		lengths.Set(segments, name, binary.AppendUvarint(nil, uint64(length)))
	}
	return lengths, syncDir(d.path)
}

func (d *directory) close() {
	d.drop()
	if d.lock != nil {
		d.lock.Close()
		d.lock = nil
	}
}

// syncDir makes names durable.
func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
