package testnet

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"
	"time"
)

// burst is how many small datagrams a socket's buffer holds for certain.
const burst = 80

// roundTrips sends n bursts of numbered datagrams and returns the numbers that
// came back, in their order, and the time that the very first took.
func roundTrips(t *testing.T, c net.Conn, n int) (order []uint32, first time.Duration) {
	t.Helper()
	start := time.Now()
	buf := make([]byte, 4)
	for i := range n * burst {
		binary.BigEndian.PutUint32(buf, uint32(i))
		if _, err := c.Write(buf); err != nil {
			t.Fatal(err)
		}
		if (i+1)%burst != 0 {
			continue
		}
		for range burst {
			if err := c.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(buf); err != nil {
				break
			}
			if len(order) == 0 {
				first = time.Since(start)
			}
			order = append(order, binary.BigEndian.Uint32(buf))
		}
	}
	return order, first
}

func TestAShimDelaysLosesAndReorders(t *testing.T) {
	Require(t)
	lab := New(t, Options{Shim: WANDevice})
	lab.Srv.UDPEcho("[" + ServerV6 + "]:7")
	c := dial(t, lab.Cli, "udp", "["+ServerV6+"]:7")
	if err := c.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if order, first := roundTrips(t, c, 3); len(order) != 3*burst || first > 30*time.Millisecond {
		t.Errorf("without impairment: %d came back, the first after %v", len(order), first)
	}
	lab.Shim.SetBoth(Link{Delay: 30 * time.Millisecond, Jitter: 5 * time.Millisecond})
	if order, first := roundTrips(t, c, 3); len(order) != 3*burst || first < 60*time.Millisecond || first > 120*time.Millisecond {
		t.Errorf("30 to 35 ms each way: %d came back, the first after %v", len(order), first)
	}
	lab.Shim.Set(Link{Loss: 0.2, Seed: 3}, Link{})
	if order, _ := roundTrips(t, c, 10); len(order) < 570 || len(order) > 710 {
		t.Errorf("20 %% loss: %d of %d came back", len(order), 10*burst)
	}
	lab.Shim.Set(Link{}, Link{Delay: 20 * time.Millisecond, Reorder: 0.05, Seed: 4})
	if order, _ := roundTrips(t, c, 4); len(order) != 4*burst || slices.IsSorted(order) {
		t.Errorf("reordering: %d came back, in order %v", len(order), slices.IsSorted(order))
	}
	up, down := lab.Shim.Counts()
	if up.Lost < 90 || down.Lost != 0 || down.Reordered < 5 || up.Reordered != 0 || up.Passed < 1000 || up.Overflowed != 0 {
		t.Errorf("counted up %+v, down %+v", up, down)
	}
}

func TestAShimCarriesTCPByteExact(t *testing.T) {
	Require(t)
	lab := New(t, Options{Shim: WANDevice})
	lab.Shim.SetBoth(Link{Delay: time.Millisecond, Loss: 0.005, Seed: 1})
	const size = 4 << 20
	for _, host := range []string{FarV4, FarV6} {
		address := net.JoinHostPort(host, "80")
		lab.Srv.Source(address, size)
		c := dial(t, lab.Cli, "tcp", address)
		if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if n, err := ReadPattern(c); n != size || err != nil {
			t.Errorf("%s: %d bytes, %v", host, n, err)
		}
	}
	if up, down := lab.Shim.Counts(); down.Lost == 0 || down.Passed < 2*size/1500 {
		t.Errorf("counted up %+v, down %+v: the packets were not the wire's", up, down)
	}
}

func TestTheSameSeedLosesTheSamePackets(t *testing.T) {
	fates := func(seed uint64) (kept []byte) {
		w := newWay(nil, nil)
		w.set(Link{Loss: 0.3, Reorder: 0.1, Delay: time.Second, Seed: seed})
		now := time.Now()
		for i := range 200 {
			w.decide([]byte{byte(i)}, now)
		}
		for {
			frame, _, _ := w.queue.next(now.Add(time.Minute))
			if frame == nil {
				return kept
			}
			kept = append(kept, frame[0])
		}
	}
	a, b, other := fates(1), fates(1), fates(2)
	if !slices.Equal(a, b) {
		t.Error("the same seed decided otherwise")
	}
	if slices.Equal(a, other) || len(a) < 100 || len(a) > 180 || slices.IsSorted(a) {
		t.Errorf("%d of 200 kept, in order %v", len(a), slices.IsSorted(a))
	}
}

func TestAFullShimDropsTheNewest(t *testing.T) {
	w := newWay(nil, nil)
	w.set(Link{Delay: time.Second})
	now := time.Now()
	for i := range shimQueue + 3 {
		w.decide([]byte{byte(i)}, now)
	}
	if c := w.counts(); c.Overflowed != 3 {
		t.Errorf("%d of 3 dropped", c.Overflowed)
	}
	if frame, _, _ := w.queue.next(now); frame != nil {
		t.Error("a frame came before its time")
	}
	if frame, _, _ := w.queue.next(now.Add(time.Second)); len(frame) != 1 || frame[0] != 0 {
		t.Errorf("the first is %v", frame)
	}
}
