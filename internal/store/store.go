// Package store keeps small state over restarts: users, groups, assigned numbers,
// promotions, usage and its series, in files of one directory.
//
// # What is on disk
//
//	lock      who uses the directory: held with flock while a process does
//	state     the journal: a snapshot of all records, then a frame for each commit
//	state.good               the journal before the last snapshot: the last good copy
//	state.corrupt-TIME       what could not be read, kept aside; the newest three
//	hourly-N, daily-N        blocks of rows, appended once when a slot of time is over
//
// Every frame has its length and a CRC-32C, so that a torn or changed one is seen. A
// commit is one frame: it is there whole or not at all. The journal also holds the
// length of each series file up to which it is valid; what a crash left behind that is
// cut off before the next block. So a crash neither loses what was committed nor
// leaves anything in twice.
//
// All records live in memory, which is the truth; the files follow. Without a directory
// that can be written the store goes on in memory, says so, and tries again: files need
// neither shared mappings nor more than append, rename and fsync.
//
// Nothing here may be called on the data path: a commit waits for the disk.
package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Bucket is a kind of records. Its number is written to disk.
type Bucket uint8

// The buckets. Definitions and usage are apart.
const (
	Users      Bucket = 1   // definitions of users that came by API, by name
	Groups     Bucket = 2   // definitions of groups that came by API, by name
	IDs        Bucket = 3   // numbers assigned to names
	Promotions Bucket = 4   // devices that became a user, by device
	Usage      Bucket = 5   // the ledger's accounts
	Takes      Bucket = 6   // what billing took of the accounts
	segments   Bucket = 255 // the valid length of each series file, by file name
)

// Changes are new values of records, one behind the other as a frame has them. The last
// one of a key holds.
type Changes []byte

// Set adds a new value of a record; a nil one deletes it. Key and value are copied.
func (c *Changes) Set(b Bucket, key string, value []byte) { *c = appendRecord(*c, b, key, value) }

// Series is a kind of rows over time.
type Series uint8

// The series.
const (
	Hourly Series = iota
	Daily
)

// Row is one value of a block.
type Row struct {
	Key   string
	Value []byte
}

// Block is what one slot of time got, or some more of it: a slot may have several
// blocks.
type Block struct {
	Series Series
	Slot   int64
	Rows   []Row
}

// Batch is one commit.
type Batch struct {
	Changes Changes
	Blocks  []Block
}

// ErrNotDurable is wrapped by the error of every commit that did not reach the disk.
var ErrNotDurable = errors.New("the state is not saved")

const (
	firstPause = time.Second // before a failed commit is tried again
	lastPause  = 5 * time.Minute

	// stampEvery is how long nothing is written where nothing changed: for LastCommit.
	stampEvery = 10 * time.Minute

	// maxPending bounds the rows, in bytes, that wait in memory for a disk that takes none.
	maxPending = 16 << 20
)

// records are all of them, by bucket. A value lies behind a pointer so that another one
// costs neither memory nor a new place in the map.
type records []map[string]*[]byte

func newRecords() records { return make(records, math.MaxUint8+1) }

// get is nil if there is no such record.
func (r records) get(b Bucket, key string) []byte {
	if kept := r[b][key]; kept != nil {
		return *kept
	}
	return nil
}

// set copies key and value.
func (r records) set(b Bucket, key, value []byte) {
	if value == nil {
		delete(r[b], string(key))
		return
	}
	kept := r[b][string(key)]
	if kept == nil {
		if r[b] == nil {
			r[b] = make(map[string]*[]byte)
		}
		kept = &[]byte{}
		r[b][string(key)] = kept
	}
	*kept = append((*kept)[:0], value...)
}

func (r records) count() (n int) {
	for _, m := range r {
		n += len(m)
	}
	return n
}

// Store is safe for any number of callers.
type Store struct {
	dir string
	fs  *directory

	commit struct { // held over the disk's work: one commit at a time
		sync.Mutex
		dirty map[dirtyKey]struct{} // changed in memory, not on disk
		pause time.Duration         // after the next failure
		retry time.Time             // nothing that can wait is tried before
	}

	mem struct { // never held over the disk's work
		sync.RWMutex
		records records
		waiting []Block // not on disk, oldest first
		held    int     // bytes of waiting
		lost    uint64  // rows of waiting that were given up
		last    time.Time
		trouble error
	}
}

type dirtyKey struct {
	bucket Bucket
	key    string
}

// Open uses the directory dir, which it creates, alone. An error means that it must not
// be used: another process does (the error names it), or a newer version wrote it. If it
// cannot be read or written the store begins with what could be read, and Trouble tells.
// Notes tell what was found damaged and what was done about it. An empty dir keeps
// everything in memory.
func Open(dir string, now time.Time) (s *Store, notes []string, err error) {
	return open(dir, now, current)
}

func open(dir string, now time.Time, f format) (*Store, []string, error) {
	s := &Store{dir: dir}
	s.commit.dirty = make(map[dirtyKey]struct{})
	s.commit.pause = firstPause
	s.mem.records = newRecords()
	if dir == "" {
		s.mem.trouble = fmt.Errorf("%w: no state_dir", ErrNotDurable)
		return s, nil, nil
	}
	s.fs = &directory{path: dir, format: f}
	found, notes, err := s.fs.open(now)
	if err != nil {
		return nil, notes, err
	}
	s.mem.records, s.mem.last = found.records, found.at
	if !s.fs.writable() {
		s.mem.trouble = fmt.Errorf("%w: %w", ErrNotDurable, s.fs.why)
		s.commit.retry = now.Add(s.commit.pause)
	}
	return s, notes, nil
}

// Get returns a copy of a record; nil if there is none.
func (s *Store) Get(b Bucket, key string) []byte {
	s.mem.RLock()
	defer s.mem.RUnlock()
	return bytes.Clone(s.mem.records.get(b, key))
}

// Each calls f for every record of a bucket, in no order. f must not call the store, nor
// change or keep value.
func (s *Store) Each(b Bucket, f func(key string, value []byte)) {
	s.mem.RLock()
	defer s.mem.RUnlock()
	for key, value := range s.mem.records[b] {
		f(key, *value)
	}
}

// Write commits b, and what waited: it is on disk when Write returns nil. Else the error
// wraps ErrNotDurable and b is forgotten. It waits for the disk.
func (s *Store) Write(b Batch, now time.Time) error {
	s.commit.Lock()
	defer s.commit.Unlock()
	if err := s.save(b, now, true); err != nil {
		return err
	}
	s.apply(b.Changes)
	return nil
}

// Keep commits b, and what waited. Unlike Write it holds b in memory where the disk takes
// nothing, and tries again with a later call; the error, which wraps ErrNotDurable, says
// so. After a failure the disk is left alone for a while. It waits for the disk.
func (s *Store) Keep(b Batch, now time.Time) error {
	s.commit.Lock()
	defer s.commit.Unlock()
	err := s.Trouble()
	if err == nil || !now.Before(s.commit.retry) || s.commit.retry.Sub(now) > lastPause {
		err = s.save(b, now, false)
	}
	if err != nil {
		for p := (reader{b: b.Changes}); len(p.b) > 0; {
			bucket, key, _ := p.change()
			s.commit.dirty[dirtyKey{bucket, string(key)}] = struct{}{}
		}
	}
	s.apply(b.Changes)
	if err != nil {
		s.wait(b.Blocks)
	}
	return err
}

// apply makes the changes visible.
func (s *Store) apply(c Changes) {
	s.mem.Lock()
	defer s.mem.Unlock()
	s.mem.records.apply(&reader{b: c})
}

// wait keeps blocks until the disk takes them, the newest if they are too many.
func (s *Store) wait(blocks []Block) {
	s.mem.Lock()
	defer s.mem.Unlock()
	for _, b := range blocks {
		s.mem.waiting = append(s.mem.waiting, b)
		s.mem.held += b.size()
	}
	for s.mem.held > maxPending {
		first := s.mem.waiting[0]
		s.mem.waiting[0] = Block{}
		s.mem.waiting = s.mem.waiting[1:]
		s.mem.held -= first.size()
		s.mem.lost += uint64(len(first.Rows))
	}
}

// save brings b and what waited to the disk. What it wrote is not applied yet. Where
// somebody waits for an answer a snapshot is put off, if it can be.
func (s *Store) save(b Batch, now time.Time, awaited bool) error {
	if s.fs == nil {
		return s.Trouble()
	}
	full := s.withWaiting(b)
	if idle := now.Sub(s.LastCommit()); len(full.Changes)+len(full.Blocks) == 0 && s.Trouble() == nil && idle >= 0 && idle < stampEvery {
		return nil
	}
	err := s.fs.save(full, s, now, awaited)
	s.mem.Lock()
	defer s.mem.Unlock()
	if err != nil {
		s.commit.retry = now.Add(s.commit.pause)
		s.commit.pause = min(2*s.commit.pause, lastPause)
		s.mem.trouble = fmt.Errorf("%w: %w", ErrNotDurable, err)
		return s.mem.trouble
	}
	clear(s.commit.dirty)
	s.commit.pause = firstPause
	s.mem.waiting, s.mem.held, s.mem.trouble, s.mem.last = nil, 0, nil, now
	s.mem.records.apply(&reader{b: s.fs.lengths})
	return nil
}

// withWaiting is b with what an earlier commit could not write.
func (s *Store) withWaiting(b Batch) Batch {
	s.mem.RLock()
	defer s.mem.RUnlock()
	if len(s.commit.dirty)+len(s.mem.waiting) == 0 {
		return b
	}
	full := Batch{Blocks: append(slices.Clone(s.mem.waiting), b.Blocks...)}
	for d := range s.commit.dirty {
		full.Changes.Set(d.bucket, d.key, s.mem.records.get(d.bucket, d.key))
	}
	full.Changes = append(full.Changes, b.Changes...)
	return full
}

// length is how much of a series file is valid.
func (s *Store) length(segment string) int64 {
	s.mem.RLock()
	defer s.mem.RUnlock()
	return decodeLength(s.mem.records.get(segments, segment))
}

// all is every record. Nobody but a commit changes one, and they follow each other.
func (s *Store) all() records { return s.mem.records }

// Rows calls f for every row of a series whose slot is from ≤ slot < to; a slot and a key
// may come several times, to be added up. f must not call the store, nor change or keep
// what it gets. What can't be read is left out, and the first such error returned.
func (s *Store) Rows(series Series, from, to int64, f func(slot int64, key, value []byte)) error {
	s.mem.RLock()
	valid := make(map[string]int64)
	for name, length := range s.mem.records[segments] {
		valid[name] = decodeLength(*length)
	}
	waiting := slices.Clone(s.mem.waiting)
	s.mem.RUnlock()
	var first error
	for _, n := range slices.Sorted(segmentsOf(valid, series, from, to)) {
		name := segmentName(series, n)
		if err := readSegment(s.dir, name, valid[name], from, to, f); err != nil {
			first = cmp.Or(first, fmt.Errorf("%s: %w", name, err))
		}
	}
	for _, b := range waiting {
		if b.Series == series && from <= b.Slot && b.Slot < to {
			for _, r := range b.Rows {
				f(b.Slot, []byte(r.Key), r.Value)
			}
		}
	}
	return first
}

// Forget deletes files of a series that have only slots before the given one.
func (s *Store) Forget(series Series, before int64, now time.Time) error {
	s.mem.RLock()
	var old []int64
	for name := range s.mem.records[segments] {
		if of, n, ok := parseSegment(name); ok && of == series && n < segmentOf(series, before) {
			old = append(old, n)
		}
	}
	s.mem.RUnlock()
	var b Batch
	for _, n := range old {
		b.Changes.Set(segments, segmentName(series, n), nil)
	}
	if len(old) == 0 {
		return nil
	}
	if err := s.Write(b, now); err != nil { // first the record, so that no crash leaves one without its file
		return err
	}
	for _, n := range old {
		os.Remove(filepath.Join(s.dir, segmentName(series, n))) // what stays goes with the next Open
	}
	return nil
}

// Writable says whether the last commit reached the disk.
func (s *Store) Writable() bool { return s.Trouble() == nil }

// Trouble is why the last commit did not reach the disk, wrapping ErrNotDurable; nil if it did.
func (s *Store) Trouble() error {
	s.mem.RLock()
	defer s.mem.RUnlock()
	return s.mem.trouble
}

// Lost counts rows of series that were given up while the disk took none.
func (s *Store) Lost() uint64 {
	s.mem.RLock()
	defer s.mem.RUnlock()
	return s.mem.lost
}

// LastCommit is the wall clock of the last commit that reached the disk, also of an
// earlier run; zero if there was none.
func (s *Store) LastCommit() time.Time {
	s.mem.RLock()
	defer s.mem.RUnlock()
	return s.mem.last
}

// Flash says whether the directory is on flash that wear matters to, as far as the file
// system or the device tells.
func (s *Store) Flash() bool { return s.dir != "" && onFlash(s.dir) }

// Close writes what waited and lets the directory go.
func (s *Store) Close(now time.Time) error {
	s.commit.Lock()
	defer s.commit.Unlock()
	if s.fs == nil {
		return nil
	}
	err := s.save(Batch{}, now, false)
	s.fs.close()
	return err
}
