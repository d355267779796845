package netstack

import (
	"io"
	"net"
	"testing"
	"time"
)

// Links before the client that take less than the device's 1,500 bytes and say nothing.
func TestASilentLinkThatTakesLessIsPassedInSmallerPieces(t *testing.T) {
	const size = 1 << 20 // bytes
	for name, c := range map[string]struct {
		hole int
		gso  bool
		v6   bool
	}{
		"a tunnel":                  {hole: 1420, gso: true},
		"IPv6's least, no offloads": {hole: 1280, v6: true},
		"what every host can take":  {hole: 576, gso: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, c.gso, nil)
			b.dev.hole = c.hole
			sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
				io.Copy(c, newPattern(size))
				c.Close()
			}))
			dst := dst4
			if c.v6 {
				dst = dst6
			}
			conn := b.mustDial(dst)
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			if n, err := io.Copy(io.Discard, conn); err != nil || n != size {
				t.Fatalf("%d bytes, %v", n, err)
			}
			conn.Close()
			if err := recv(t, sessions).wait(t); err != nil {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

func TestPacketsGetSmallerByStepsAsOneSegmentIsRepeated(t *testing.T) {
	for _, c := range []struct {
		size, repeat, want int
		v4                 bool
	}{
		{1500, 0, 0, true},
		{1500, 2, 0, true},
		{1500, 3, 1280, true},
		{1500, 3, 1280, false},
		{1500, 4, 0, true},
		{1281, 3, 1280, false},
		{1280, 3, 0, true}, // passed before: the client was away again
		{1280, 6, 576, true},
		{1280, 6, 0, false},
		{576, 6, 0, true},
		{1500, 9, 0, true},
	} {
		if got := safeMTU(c.size, c.repeat, c.v4); got != c.want {
			t.Errorf("for %d bytes, repeated %d times, IPv4 %v: %d, want %d", c.size, c.repeat, c.v4, got, c.want)
		}
	}
}

func TestRepetitionsInARowAreCounted(t *testing.T) {
	var s sentCounter
	for i, c := range []struct {
		seq  uint32
		n    int
		want int
	}{
		{0xfffffff0, 100, 0},
		{0xfffffff0, 100, 1},
		{0xfffffff0, 50, 2},
		{84, 100, 0}, // new bytes between do not begin it anew
		{0xfffffff0, 100, 3},
		{34, 100, 1}, // an acknowledgement came
		{34, 150, 2},
	} {
		if got := s.note(c.seq, c.n, true); got != c.want {
			t.Errorf("%d: sent again %d times, want %d", i, got, c.want)
		}
	}
	if n := s.total.Load(); n != 200 {
		t.Errorf("%d bytes were sent, want 200", n)
	}
}
