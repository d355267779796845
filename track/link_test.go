package track

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"gatewayd/flow"
)

// wire takes the first trains that it is told to, sends some bytes, and hears
// everything.
type wire struct {
	takes    int
	moves    int
	err      error
	received int
	errors   int
	closed   error
	down     bool
}

func (w *wire) Send([]flow.Train) (taken, moved int, err error) { return w.takes, w.moves, w.err }
func (w *wire) Close() error                                    { w.down = true; return nil }
func (w *wire) LocalAddr() netip.AddrPort                       { return netip.MustParseAddrPort("192.0.2.2:4000") }

func (w *wire) Receive(ts []flow.Train) (moved int) { w.received += len(ts); return w.moves }
func (w *wire) Unreachable(flow.ICMPError)          { w.errors++ }
func (w *wire) Closed(err error)                    { w.closed = err }

// trains are a datagram of 100 bytes, an empty one, and three of 400, 400 and 200.
func trains() []flow.Train {
	return []flow.Train{{Payload: make([]byte, 100)}, {}, {Payload: make([]byte, 1000), Segment: 400}}
}

func TestALinkCountsTheBytesThatLeft(t *testing.T) {
	full := errors.New("full")
	for _, c := range []struct {
		takes, moves int
		err          error
	}{{3, 1100, nil}, {3, 700, nil}, {3, 0, nil}, {2, 100, full}, {0, 0, full}} {
		tr := newTracker(t, Options{})
		f := tr.Open(over("lan", "direct", 0), nil)
		l := f.Link(&wire{takes: c.takes, moves: c.moves, err: c.err})
		if n, moved, err := l.Send(trains()); n != c.takes || moved != c.moves || err != c.err {
			t.Errorf("Send = %d, %d, %v; want what the link below said: %+v", n, moved, err, c)
		}
		if r, _ := tr.Get(f.ID()); r.Up != uint64(c.moves) || r.Down != 0 {
			t.Errorf("%d moved: %d up, %d down", c.moves, r.Up, r.Down)
		}
	}
}

func TestAReceiverCountsTheBytesThatLeftTowardTheClient(t *testing.T) {
	tr := newTracker(t, Options{})
	f := tr.Open(over("lan", "direct", 0), nil)
	w := wire{moves: 700} // of 1100
	r := f.Receiver(&w)
	if moved := r.Receive(trains()); moved != 700 {
		t.Errorf("it tells of %d bytes", moved)
	}
	w.moves = 0
	r.Receive([]flow.Train{{}})
	r.Unreachable(flow.ICMPError{})
	rec, _ := tr.Get(f.ID())
	if w.received != 4 || w.errors != 1 || rec.Down != 700 || rec.Up != 0 {
		t.Errorf("received %d, errors %d, %d down, %d up; want 4, 1, 700, 0", w.received, w.errors, rec.Down, rec.Up)
	}
}

func TestAKilledSubLinkCarriesNothingMore(t *testing.T) {
	tr := newTracker(t, Options{})
	f := tr.Open(over("lan", "direct", 0), nil)
	w := wire{takes: 3, moves: 1100}
	l, r := f.Link(&w), f.Receiver(&w)
	tr.Kill(f.ID())
	if n, moved, err := l.Send(trains()); n != 0 || moved != 0 || !errors.Is(err, ErrKilled) {
		t.Errorf("Send = %d, %d, %v", n, moved, err)
	}
	r.Receive(trains())
	r.Unreachable(flow.ICMPError{})
	if w.received != 0 || w.errors != 0 {
		t.Errorf("%d trains and %d errors got through", w.received, w.errors)
	}
	r.Closed(syscall.ECONNRESET)
	if err := l.Close(); err != nil || !w.down || w.closed != syscall.ECONNRESET {
		t.Errorf("the ends did not get through: %v, %v, %v", err, w.down, w.closed)
	}
	if rec, ok := tr.Get(f.ID()); !ok || rec.Up != 0 || rec.Down != 0 {
		t.Errorf("record %+v, %v; want it registered, without bytes", rec, ok)
	}
}

func TestAMeteredLinkShowsNothingThatGoesUncounted(t *testing.T) {
	f := newTracker(t, Options{}).Open(over("lan", "direct", 0), nil)
	if _, ok := f.Link(&struct {
		wire
		syscall.Conn
	}{}).(syscall.Conn); ok {
		t.Error("the descriptor shows through")
	}
	l := f.Link(&wire{})
	if l.LocalAddr() != (&wire{}).LocalAddr() {
		t.Errorf("local address %v", l.LocalAddr())
	}
	w := wire{takes: 3}
	l = f.Link(&w)
	ts := trains()
	if n := testing.AllocsPerRun(100, func() { _, _, _ = l.Send(ts) }); n != 0 {
		t.Errorf("Send: %v allocations", n)
	}
}
