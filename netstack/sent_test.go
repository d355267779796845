package netstack

import "testing"

func TestWhatTheDeviceRefusedIsCountedOnceItWasSent(t *testing.T) {
	var s sentCounter
	for _, c := range []struct {
		seq  uint32
		sent bool
		want uint64
	}{
		{0xffffffff, false, 0}, // the first one, and the numbers wrap
		{0xffffffff, true, 100},
		{0xffffffff, true, 100}, // again
		{99, false, 100},
		{199, false, 100},
		{99, true, 200},
		{199, true, 300},
	} {
		if s.note(c.seq, 100, c.sent); s.total.Load() != c.want {
			t.Fatalf("seq %d, sent %v: %d bytes, want %d", c.seq, c.sent, s.total.Load(), c.want)
		}
	}
}
