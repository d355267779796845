package hostnet

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	maxLeaseFiles = 16
	maxLeaseBytes = 1 << 20 // that are read of one file
)

// LeaseFiles follows the lease files of DHCP servers. It is used by one goroutine.
type LeaseFiles struct {
	patterns []string
	files    map[string]leaseFile
}

type leaseFile struct {
	stamp  fileStamp
	leases []Lease
}

// fileStamp changes when a file is written or replaced.
type fileStamp struct {
	mod   int64 // ns
	size  int64
	inode uint64
}

// NewLeaseFiles follows the files that the patterns match, as in filepath.Match, the
// first 16 of them. Files that aren't there may come later.
func NewLeaseFiles(patterns []string) *LeaseFiles {
	return &LeaseFiles{patterns: patterns}
}

// Poll looks at the files and reads those that changed, of each at most 1 MiB.
// changed is true if any did, came or went; leases are all of theirs then, at most
// 8,192. A file that can't be read counts as one without leases, and the error tells
// of it; what else is returned holds all the same.
func (l *LeaseFiles) Poll() (leases []Lease, changed bool, err error) {
	next := make(map[string]leaseFile)
	paths := l.paths()
	var errs []error
	for _, path := range paths {
		f, again, err := l.look(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("lease file: %w", err))
			continue
		}
		changed = changed || again
		next[path] = f
	}
	for path := range l.files {
		_, still := next[path]
		changed = changed || !still
	}
	l.files = next
	if changed {
		for _, path := range paths {
			leases = append(leases, next[path].leases...)
		}
		leases = leases[:min(len(leases), maxLeases)]
	}
	return leases, changed, errors.Join(errs...)
}

func (l *LeaseFiles) paths() (paths []string) {
	for _, pattern := range l.patterns {
		found, _ := filepath.Glob(pattern) // a bad pattern matches nothing
		paths = append(paths, found...)
	}
	slices.Sort(paths)
	paths = slices.Compact(paths)
	return paths[:min(len(paths), maxLeaseFiles)]
}

// look is the state of one file; changed is false if it is that of the last time.
func (l *LeaseFiles) look(path string) (f leaseFile, changed bool, err error) {
	stamp, err := stampOf(path)
	if err != nil {
		return f, false, err
	}
	before, known := l.files[path]
	if known && before.stamp == stamp {
		return before, false, nil
	}
	text, err := readSome(path)
	if err != nil {
		return f, false, err
	}
	// One that is written meanwhile has another stamp the next time.
	return leaseFile{stamp: stamp, leases: ParseLeases(text)}, true, nil
}

// stampOf is fs.ErrNotExist for what is no file with text in it.
func stampOf(path string) (s fileStamp, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return s, err
	}
	if !info.Mode().IsRegular() {
		return s, fs.ErrNotExist
	}
	s = fileStamp{mod: info.ModTime().UnixNano(), size: info.Size()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = uint64(st.Ino)
	}
	return s, nil
}

// readSome reads the beginning of a file. It does not wait where a pipe took the
// file's place.
func readSome(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxLeaseBytes))
}
