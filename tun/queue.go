package tun

// In: the reader of each queue, one goroutine, waits in Go's poller until its
// descriptor is readable → reads {header, small view, large view} of its own
// batch until the queue is empty or the batch is full → the batch delivers, on
// the same goroutine.
// Out: Write runs on the goroutine of whoever sends → takes an array of iovecs
// from a pool → one writev; the kernel copies, so that the buffers stay the
// sender's. Writers of one queue don't wait for each other.

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/netstack"
)

// queue is one descriptor of the device. The file's reference count keeps the
// descriptor's number from being used again before the last call on it is over.
type queue struct {
	file   *os.File
	raw    syscall.RawConn
	closed *atomic.Bool // the device's
	drops  *flow.Drops
}

// reader fills one batch from one queue.
type reader struct {
	*queue
	batch  *netstack.Batch
	header [headerSize]byte
	excess [1]byte // where the first byte goes that the batch has no room for
	iov    [4]unix.Iovec
	err    error // why reading ended
}

// run reads until the read deadline (nil), the close of the device (nil), or an
// error, which includes the removal of the device.
func (q *queue) run(batch *netstack.Batch) error {
	r := &reader{queue: q, batch: batch}
	turn := r.turn
	for r.err == nil {
		// A turn that fills its batch returns here, and Read looks for a close
		// or deadline before it begins the next one.
		if err := q.raw.Read(turn); err != nil {
			return q.ended(err)
		}
	}
	return r.err
}

// ended tells what an error of the poller, not of the device, means.
func (q *queue) ended(err error) error {
	if q.closed.Load() || errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	// The poller reports a descriptor without a device as not pollable.
	return removed(err)
}

func removed(err error) error {
	return fmt.Errorf("%w: %w", ErrRemoved, err)
}

// turn delivers what is there to read. It returns false when the queue is empty,
// so that the poller waits and calls it again.
func (r *reader) turn(fd uintptr) (done bool) {
	empty := r.fill(fd)
	r.batch.Deliver()
	return !empty
}

func (r *reader) fill(fd uintptr) (empty bool) {
	refused := 0
	for range netstack.BatchSize {
		n, errno := r.read(fd)
		switch errno {
		case 0:
			r.take(n)
		case unix.EAGAIN:
			return true
		case unix.EINTR:
		case unix.EINVAL: // the kernel took a packet from the queue that it can't describe
			r.drops.Add(flow.DropMalformed, 1)
			refused++
		case unix.EBADFD:
			r.err = removed(errno)
			return false
		default:
			r.err = fmt.Errorf("read: %w", errno)
			return false
		}
	}
	if refused == netstack.BatchSize { // it is not about packets
		r.err = fmt.Errorf("read: %w", unix.EINVAL)
	}
	return false
}

func (r *reader) read(fd uintptr) (int, unix.Errno) {
	bufs := r.batch.Bufs()
	iov := append(r.iov[:0], part(r.header[:]))
	for _, b := range bufs {
		iov = append(iov, part(b))
	}
	return readv(fd, append(iov, part(r.excess[:])))
}

// take adds a packet of which n bytes were read, header included, to the batch.
// The kernel cuts a packet short that does not fit, without a word.
func (r *reader) take(n int) {
	room := 0
	for _, b := range r.batch.Bufs() {
		room += len(b)
	}
	if n -= headerSize; n <= 0 || n > room {
		r.drops.Add(flow.DropMalformed, 1)
		return
	}
	r.batch.Add(n, decode(&r.header))
}

// maxParts is the kernel's limit of iovecs in one call (UIO_MAXIOV).
const maxParts = 1024

// writeCall is the reusable state of one write.
type writeCall struct {
	header [headerSize]byte
	iov    []unix.Iovec
	errno  unix.Errno
	run    func(fd uintptr) // the method write, bound once
}

func newWriteCall() any {
	w := &writeCall{iov: make([]unix.Iovec, 0, 16)}
	w.run = w.write
	return w
}

// prepare is false if the packet has too many parts.
func (w *writeCall) prepare(bufs [][]byte, o netstack.Offload) bool {
	if len(bufs) >= maxParts {
		return false
	}
	encode(&w.header, o)
	w.iov = append(w.iov[:0], part(w.header[:]))
	for _, b := range bufs {
		if len(b) > 0 {
			w.iov = append(w.iov, part(b))
		}
	}
	return true
}

// forget drops the pointers to the sender's buffers.
func (w *writeCall) forget() {
	clear(w.iov)
	w.iov = w.iov[:0]
}

func (w *writeCall) write(fd uintptr) {
	for {
		if _, w.errno = writev(fd, w.iov); w.errno != unix.EINTR {
			return
		}
	}
}
