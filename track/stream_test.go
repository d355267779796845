package track

import (
	"bytes"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// pipe is an end of a net.Pipe as an outbound's connection.
type pipe struct {
	net.Conn
	lingers []int // what SetLinger was told
}

func (p *pipe) CloseWrite() error                 { return nil }
func (p *pipe) SetLinger(seconds int) error       { p.lingers = append(p.lingers, seconds); return nil }
func (p *pipe) ReadFrom(io.Reader) (int64, error) { panic("uncounted") }
func (p *pipe) WriteTo(io.Writer) (int64, error)  { panic("uncounted") }

// dialled is a metered stream, what it is on, and the far side.
func dialled(tr *Tracker) (s *Stream, near *pipe, far net.Conn) {
	a, far := net.Pipe()
	near = &pipe{Conn: a}
	return tr.Stream(over("lan", "direct", 7), near), near, far
}

func TestAStreamIsAFlowFromItsDialToItsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		s, near, far := dialled(tr)
		go func() {
			io.ReadFull(far, make([]byte, 200_000))
			far.Write([]byte("eleven byte"))
			far.Close()
		}()
		if n, err := s.Write(make([]byte, 200_000)); n != 200_000 || err != nil {
			t.Errorf("Write = %d, %v", n, err)
		}
		if b, err := io.ReadAll(s); len(b) != 11 || err != nil {
			t.Errorf("read %d bytes, %v", len(b), err)
		}
		if r, ok := tr.Get(s.Flow().ID()); !ok || r.Up != 200_000 || r.Down != 11 || r.User != 7 {
			t.Errorf("record %+v, %v; want 200,000 up and 11 down", r, ok)
		}
		if err := s.CloseWrite(); err != nil {
			t.Errorf("CloseWrite: %v", err)
		}
		if err := s.Close(); err != nil || s.Close() != nil {
			t.Errorf("Close: %v", err)
		}
		if _, err := s.Write(nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Write after Close: %v", err)
		}
		if _, err := s.Read(nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Read after Close: %v", err)
		}
		c := tr.Closed()
		if tr.Live() != 0 || len(c) != 1 || c[0].Up != 200_000 || c[0].Down != 11 || c[0].Reason != flow.EOF || len(near.lingers) != 0 {
			t.Errorf("closed records %+v, lingers %v", c, near.lingers)
		}
	})
}

func TestAStreamShowsNothingThatGoesUncounted(t *testing.T) {
	s, near, far := dialled(newTracker(t, Options{}))
	defer far.Close()
	defer s.Close()
	for _, c := range []any{s, flow.Stream(s)} {
		if _, ok := c.(syscall.Conn); ok {
			t.Error("the descriptor shows through")
		}
		if _, ok := c.(io.ReaderFrom); ok {
			t.Error("ReadFrom shows through")
		}
		if _, ok := c.(io.WriterTo); ok {
			t.Error("WriteTo shows through")
		}
	}
	if s.LocalAddr() != near.LocalAddr() || s.RemoteAddr() != near.RemoteAddr() {
		t.Errorf("addresses %v, %v", s.LocalAddr(), s.RemoteAddr())
	}
}

// brittle takes and gives the first n bytes of a call, and an error with them.
type brittle struct {
	pipe
	n   int
	err error
}

func (b *brittle) Write([]byte) (int, error) { return b.n, b.err }
func (b *brittle) Read([]byte) (int, error)  { return b.n, b.err }
func (b *brittle) Close() error              { return nil }

func TestBytesThatMovedBesideAnErrorAreCounted(t *testing.T) {
	for _, c := range []struct {
		err    error
		reason flow.Reason
	}{{syscall.ECONNRESET, flow.Reset}, {errors.New("broken"), flow.Error}, {io.ErrShortWrite, flow.Error}} {
		tr := newTracker(t, Options{})
		s := tr.Stream(over("lan", "direct", 0), &brittle{n: 5, err: c.err})
		if n, err := s.Write(make([]byte, 9)); n != 5 || err != c.err {
			t.Errorf("Write = %d, %v; want 5, %v", n, err, c.err)
		}
		if n, err := s.Read(make([]byte, 9)); n != 5 || err != c.err {
			t.Errorf("Read = %d, %v; want 5, %v", n, err, c.err)
		}
		s.Close()
		if r := tr.Closed()[0]; r.Up != 5 || r.Down != 5 || r.Reason != c.reason {
			t.Errorf("closed with %d up, %d down as %v; want 5, 5, %v", r.Up, r.Down, r.Reason, c.reason)
		}
	}
	s := newTracker(t, Options{}).Stream(over("lan", "direct", 0), &brittle{n: 5})
	if n, err := s.Write(make([]byte, 9)); n != 5 || err != io.ErrShortWrite {
		t.Errorf("a short write without an error: %d, %v", n, err)
	}
}

func TestEveryCauseMatchesItselfAndAnAbortedConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, cause := range []error{ErrKilled, flow.ErrShutdown, flow.ErrPolicy} {
			tr := newTracker(t, Options{})
			s, near, far := dialled(tr)
			errs := make(chan error, 2)
			go func() { _, err := s.Read(make([]byte, 1)); errs <- err }()
			go func() { _, err := s.Write(make([]byte, 1)); errs <- err }()
			synctest.Wait()
			s.Flow().End(cause)
			errs <- s.CloseWrite()
			for range 3 {
				if err := <-errs; !errors.Is(err, cause) || !errors.Is(err, syscall.ECONNABORTED) {
					t.Errorf("%v: a call returned %v", cause, err)
				}
			}
			s.Close()
			if len(near.lingers) != 1 || near.lingers[0] != 0 {
				t.Errorf("lingers %v, want a reset", near.lingers)
			}
			if r := tr.Closed()[0]; r.Reason != flow.ReasonOf(cause) || r.Up != 0 {
				t.Errorf("closed as %v with %d up", r.Reason, r.Up)
			}
			far.Close()
		}
	})
}

func TestDeadlinesOfAStreamAreNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		s, _, far := dialled(tr)
		defer far.Close()
		for name, set := range map[string]func(time.Time) error{"read": s.SetReadDeadline, "write": s.SetWriteDeadline, "both": s.SetDeadline} {
			if err := set(time.Now().Add(time.Minute)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		_, rerr := s.Read(make([]byte, 1))
		_, werr := s.Write(make([]byte, 1))
		for _, err := range []error{rerr, werr} {
			if ne, ok := errors.AsType[net.Error](err); !ok || !ne.Timeout() {
				t.Errorf("after the deadline: %v", err)
			}
		}
		s.Close()
		if r := tr.Closed()[0].Reason; r != flow.EOF {
			t.Errorf("closed as %v, want %v", r, flow.EOF)
		}
	})
}

func TestACloseWaitsForTheBytesOfTheCallUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(t, Options{})
		s, _, far := dialled(tr)
		wrote := make(chan int)
		go func() { n, _ := s.Write(make([]byte, 100)); wrote <- n }()
		io.ReadFull(far, make([]byte, 60)) // the write goes on with 40 bytes left
		s.Close()
		if r := tr.Closed()[0]; <-wrote != 60 || r.Up != 60 || r.Reason != flow.EOF {
			t.Errorf("closed with %d up as %v; want 60, as eof", r.Up, r.Reason)
		}
	})
}

// still is a connection that takes and gives anything at once.
type still struct{ pipe }

func (*still) Write(p []byte) (int, error) { return len(p), nil }
func (*still) Read(p []byte) (int, error)  { return len(p), nil }
func (*still) Close() error                { return nil }

func TestAMeteredTransferAllocatesNothing(t *testing.T) {
	s := newTracker(t, Options{}).Stream(over("lan", "direct", 0), &still{})
	defer s.Close()
	p := bytes.Repeat([]byte{1}, 16<<10)
	if n := testing.AllocsPerRun(100, func() {
		s.Write(p)
		s.Read(p)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
