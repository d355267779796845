package netstack

import (
	"bytes"
	"crypto/sha256"
	"io"
	"net"
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// Whatever is sent and sent again: a byte is new once, and again at most once, as
// in a plain list of bytes.
func TestWhatIsSentAgainIsCountedOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s sentCounter
		first := rapid.Uint32().Draw(t, "first")
		next, high, again := 0, 0, 0 // as offsets from first
		total := 0
		t.Repeat(map[string]func(*rapid.T){
			"new": func(t *rapid.T) {
				n := rapid.IntRange(1, 65535).Draw(t, "n")
				if got := s.note(first+uint32(next), n, true); got != 0 {
					t.Fatalf("new bytes were sent %d times before", got)
				}
				next += n
			},
			"again": func(t *rapid.T) {
				if next == 0 {
					t.Skip("nothing was sent")
				}
				from := rapid.IntRange(0, next-1).Draw(t, "from")
				n := rapid.IntRange(1, next-from).Draw(t, "n")
				if !s.known(first+uint32(from), n) || s.known(first+uint32(next), 1) {
					t.Fatal("it does not know what was sent")
				}
				s.note(first+uint32(from), n, true)
				again += s.second(first+uint32(from), n)
				if end := from + n; end > high {
					total += min(end-high, n)
					high = end
				}
			},
			"": func(t *rapid.T) {
				if int(s.total.Load()) != next || again != total {
					t.Fatalf("%d sent, %d again; want %d and %d", s.total.Load(), again, next, total)
				}
			},
		})
	})
}

func TestAFlowThatLosesNothingForLongStillTellsItsLosses(t *testing.T) {
	var s sentCounter
	seq := uint32(5)
	for range 5 << 30 / 60_000 { // more than the sequence numbers
		s.note(seq, 60_000, true)
		seq += 60_000
	}
	if n := s.second(seq-1000, 1000); n != 1000 {
		t.Fatalf("%d bytes were sent again, want 1000", n)
	}
}

// A device may lose its offloads while connections live that count on them.
func TestConnectionsGoOnWhenTheDeviceLosesItsOffloads(t *testing.T) {
	forFamilies(t, func(t *testing.T, _, dst netip.AddrPort) {
		const size = 8 << 20
		src := newPattern(size)
		b := newBed(t, true, nil)
		half := make(chan struct{})
		sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
			io.Copy(c, io.LimitReader(src, size/2))
			<-half
			io.Copy(c, src)
			c.Close()
		}))
		c := b.mustDial(dst)
		sum := sha256.New()
		if n, err := io.CopyN(sum, c, size/2); err != nil {
			t.Fatalf("read %d bytes, %v", n, err)
		}
		if b.stack.SuperPackets().Sent == 0 {
			t.Fatal("there were no super-packets: the test shows nothing")
		}
		b.dev.plain.Store(true)
		largest := b.dev.largestDown.Swap(0)
		close(half)
		if n, err := io.Copy(sum, c); err != nil || n != size/2 {
			t.Fatalf("read %d bytes more, %v", n, err)
		}
		if now := b.dev.largestDown.Load(); now > 1500 || largest <= 1500 {
			t.Errorf("the largest packet had %d bytes, then %d", largest, now)
		}
		if !bytes.Equal(sum.Sum(nil), src.sum.Sum(nil)) {
			t.Error("other bytes arrived than were sent")
		}
		c.Close()
		recv(t, sessions).wait(t)
	})
}

func TestADriverThatLosesEverySuperPacketIsToldByTheNumbersAndNoFlowStalls(t *testing.T) {
	const size = 256 << 10
	src := newPattern(size)
	b := newBed(t, true, nil)
	b.dev.losesSupers = true
	sessions := b.relayTo(serve(t, func(c *net.TCPConn) {
		io.Copy(c, src)
		c.Close()
	}))
	c := b.mustDial(dst4)
	sum := sha256.New()
	if n, err := io.Copy(sum, c); err != nil || n != size {
		t.Fatalf("read %d bytes, %v", n, err)
	}
	if !bytes.Equal(sum.Sum(nil), src.sum.Sum(nil)) {
		t.Error("other bytes arrived than were sent")
	}
	p := b.stack.SuperPackets()
	if p.Sent == 0 || p.Losses == 0 || p.Lost*10 < p.Sent*9 {
		t.Errorf("all super-packets got lost, the numbers say %+v", p)
	}
	c.Close()
	recv(t, sessions).wait(t)
}
