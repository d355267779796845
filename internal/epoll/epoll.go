// Package epoll watches kernel descriptors edge-triggered, with a few goroutines
// for any number of them, and calls a descriptor's owner when it became ready.
//
// Stages: a descriptor is added to one of a few sets, by its number. One goroutine
// a set waits for events inside Go's own poller (the set's descriptor is itself
// pollable, so that no thread is parked in a system call), and calls the owners
// one after the other. Nothing here allocates for an event.
package epoll

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Events says what a descriptor became ready for; a bit set of EPOLLIN and so on.
type Events uint32

// Readable reports that a read would not block: data, the end, or an error.
func (e Events) Readable() bool {
	return e&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
}

// Writable reports that a write would not block: room, or an error.
func (e Events) Writable() bool { return e&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0 }

// Handler owns a watched descriptor.
type Handler interface {
	// Ready is called on one of the poller's goroutines after the descriptor
	// became ready (edge-triggered: once, until it would block again). It must
	// not block. Calls for one descriptor never overlap. One call may still be
	// under way, or begin, while Remove returns.
	Ready(ev Events)
}

const batch = 128 // events taken from the kernel at once

// Poller watches descriptors. Create it with New; it works while Run does.
type Poller struct {
	sets []*set
}

type set struct {
	fd   int
	file *os.File
	raw  syscall.RawConn

	mu    sync.Mutex // guards growth and writes of table
	table atomic.Pointer[[]atomic.Pointer[entry]]
	gen   uint32
}

type entry struct {
	gen    uint32
	events uint32
	h      Handler
}

// New makes a poller with one set per processor.
func New() (*Poller, error) {
	p := &Poller{}
	for range runtime.GOMAXPROCS(0) {
		s, err := newSet()
		if err != nil {
			p.Close()
			return nil, err
		}
		p.sets = append(p.sets, s)
	}
	return p, nil
}

func newSet() (*set, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("epoll: non-blocking mode: %w", err)
	}
	s := &set{fd: fd, file: os.NewFile(uintptr(fd), "epoll")}
	table := make([]atomic.Pointer[entry], 64)
	s.table.Store(&table)
	if s.raw, err = s.file.SyscallConn(); err != nil {
		s.file.Close()
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return s, nil
}

// Run serves events until ctx ends, then closes the poller and returns nil.
// Descriptors still watched are forgotten; their owners close them.
func (p *Poller) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, p.Close)
	defer stop()
	errs := make(chan error, len(p.sets))
	for _, s := range p.sets {
		go func() { errs <- s.run() }()
	}
	var first error
	for range p.sets {
		if err := <-errs; err != nil && first == nil {
			first = err
			p.Close()
		}
	}
	return first
}

// Close ends Run, or frees a poller that never ran. It may be called again.
func (p *Poller) Close() {
	for _, s := range p.sets {
		s.file.Close() //nolint:errcheck // closed already
	}
}

// Add watches fd for reading and writing. If fd is ready already, h hears of it
// at once, possibly before Add returns. The caller keeps owning fd and calls
// Remove before closing it.
func (p *Poller) Add(fd int, h Handler) error {
	return p.setOf(fd).add(fd, h, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET)
}

// AddReader watches fd for reading and errors only.
func (p *Poller) AddReader(fd int, h Handler) error {
	return p.setOf(fd).add(fd, h, unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLET)
}

// Rearm has fd's owner called again if fd is still ready, after other
// descriptors had their turn: for an owner that stopped before the end of what
// there is to read. A descriptor that is not watched is left alone.
func (p *Poller) Rearm(fd int) { p.setOf(fd).rearm(fd) }

// Remove stops watching fd. It must come before fd is closed.
func (p *Poller) Remove(fd int) { p.setOf(fd).remove(fd) }

func (p *Poller) setOf(fd int) *set { return p.sets[fd%len(p.sets)] }

func (s *set) add(fd int, h Handler, events uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	table := *s.table.Load()
	if fd >= len(table) {
		grown := make([]atomic.Pointer[entry], max(fd+1, 2*len(table)))
		for i := range table {
			grown[i].Store(table[i].Load())
		}
		table = grown
		s.table.Store(&table)
	}
	s.gen++
	table[fd].Store(&entry{gen: s.gen, events: events, h: h})
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: int32(s.gen)}
	if err := unix.EpollCtl(s.fd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		table[fd].Store(nil)
		return fmt.Errorf("epoll: watch descriptor %d: %w", fd, err)
	}
	return nil
}

func (s *set) rearm(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	table := *s.table.Load()
	if fd >= len(table) {
		return
	}
	if e := table[fd].Load(); e != nil {
		ev := unix.EpollEvent{Events: e.events, Fd: int32(fd), Pad: int32(e.gen)}
		unix.EpollCtl(s.fd, unix.EPOLL_CTL_MOD, fd, &ev) //nolint:errcheck // the descriptor is gone at worst
	}
}

func (s *set) remove(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	table := *s.table.Load()
	if fd >= len(table) || table[fd].Load() == nil {
		return
	}
	table[fd].Store(nil)
	unix.EpollCtl(s.fd, unix.EPOLL_CTL_DEL, fd, nil) //nolint:errcheck // the descriptor is gone at worst
}

func (s *set) run() error {
	events := make([]unix.EpollEvent, batch)
	for {
		n, err := s.wait(events)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("epoll_wait: %w", err)
		}
		table := *s.table.Load() // holds whatever is told of: an entry comes before its descriptor is watched
		for _, ev := range events[:n] {
			if e := table[ev.Fd].Load(); e != nil && e.gen == uint32(ev.Pad) {
				e.h.Ready(Events(ev.Events))
			}
		}
	}
}

// wait blocks until there are events, or the set is closed.
func (s *set) wait(events []unix.EpollEvent) (n int, err error) {
	rerr := s.raw.Read(func(fd uintptr) bool {
		n, err = poll(int(fd), events)
		return n > 0 || err != nil && err != unix.EINTR
	})
	if rerr != nil { // of the file, not of epoll_wait: it was closed
		return 0, os.ErrClosed
	}
	return n, err
}

// poll takes what is ready and does not wait, so that Go's scheduler need not know.
func poll(fd int, events []unix.EpollEvent) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
