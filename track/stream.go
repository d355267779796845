package track

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
)

// Stream is a connection that a flow was dialled on, metered as the relay meters: what
// is written is up, what is read is down. It shows nothing of the connection below that
// would go uncounted. Once the flow ended, calls fail with the cause.
type Stream struct {
	flow    *Flow
	next    flow.Stream
	closing sync.Once             // closes next: the owner does, or who ends the flow
	closed  atomic.Bool           // by the owner
	broke   atomic.Pointer[error] // the first failure of next

	// Held during a call of that direction: a meter takes one at a time, and a flow is
	// closed after its last byte was counted.
	reading, writing sync.Mutex
}

var _ flow.Stream = (*Stream)(nil)

// Stream registers a flow for a connection whose dial succeeded, and returns it metered.
// Closing that closes both. Who ends the flow closes s at once, with a reset if s has a
// SetLinger as a TCP connection has: that must not block.
func (t *Tracker) Stream(m Meta, s flow.Stream) *Stream {
	st := &Stream{next: s}
	st.flow = t.Open(m, st.end)
	return st
}

// Flow is the registered flow.
func (s *Stream) Flow() *Flow { return s.flow }

// end is the flow's hook.
func (s *Stream) end(error) {
	if l, ok := s.next.(interface{ SetLinger(seconds int) error }); ok {
		l.SetLinger(0) //nolint:errcheck // at worst a FIN
	}
	s.closeNext() //nolint:errcheck // nothing is left to lose
}

func (s *Stream) closeNext() (err error) {
	s.closing.Do(func() { err = s.next.Close() })
	return err
}

// Read reads from the connection, at most 64 KiB at once.
func (s *Stream) Read(p []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	max, err := s.ready(flow.Down)
	if err != nil {
		return 0, err
	}
	n, err := s.next.Read(p[:min(len(p), max)])
	s.flow.Moved(flow.Down, n)
	return n, s.failed(err)
}

// Write writes to the connection. What an error kept from going out is not counted.
func (s *Stream) Write(p []byte) (n int, err error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	for {
		k, err := s.writeSome(p[n:])
		n += k
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

func (s *Stream) writeSome(p []byte) (int, error) {
	max, err := s.ready(flow.Up)
	if err != nil {
		return 0, err
	}
	p = p[:min(len(p), max)]
	n, err := s.next.Write(p)
	s.flow.Moved(flow.Up, n)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return n, s.failed(err)
}

// CloseWrite sends FIN; reading goes on.
func (s *Stream) CloseWrite() error {
	if _, err := s.ready(flow.Up); err != nil {
		return err
	}
	return s.failed(s.next.CloseWrite())
}

// Close closes the connection, which ends blocked calls, waits for them, and closes the
// flow: for the reason that the connection's first failure stands for.
func (s *Stream) Close() error {
	s.closed.Store(true)
	err := s.closeNext()
	s.reading.Lock()
	defer s.reading.Unlock()
	s.writing.Lock()
	defer s.writing.Unlock()
	var cause error
	if broke := s.broke.Load(); broke != nil {
		cause = *broke
	}
	s.flow.Close(cause)
	return err
}

// ready asks the meter, which is the flow and wants no Took.
func (s *Stream) ready(d flow.Dir) (max int, err error) {
	if max, err = s.flow.Ready(d, nil); err != nil && !s.flow.ended() {
		err = net.ErrClosed
	}
	return max, err
}

// failed makes an error of next the flow's cause, if that is what it comes from, and
// else remembers the first that is about the connection.
func (s *Stream) failed(err error) error {
	switch {
	case err == nil:
	case s.flow.ended():
		return s.flow.Cause()
	case s.closed.Load():
		return net.ErrClosed
	case !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrDeadlineExceeded):
		first := err // which alone escapes
		s.broke.CompareAndSwap(nil, &first)
	}
	return err
}

// LocalAddr is that of the connection below.
func (s *Stream) LocalAddr() net.Addr { return s.next.LocalAddr() }

// RemoteAddr is that of the connection below.
func (s *Stream) RemoteAddr() net.Addr { return s.next.RemoteAddr() }

// SetDeadline sets that of the connection below.
func (s *Stream) SetDeadline(t time.Time) error { return s.next.SetDeadline(t) }

// SetReadDeadline sets that of the connection below.
func (s *Stream) SetReadDeadline(t time.Time) error { return s.next.SetReadDeadline(t) }

// SetWriteDeadline sets that of the connection below.
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.next.SetWriteDeadline(t) }
