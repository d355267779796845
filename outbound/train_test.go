package outbound

import (
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"gatewayd/flow"
)

// heard are the datagrams that an ear got.
func (e *ear) heard() (list []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, tr := range e.got {
		list = append(list, label(tr.TClass, tr.Payload))
	}
	return list
}

// label is a datagram as a short text that differs from others'.
func label(class uint8, payload []byte) string {
	return fmt.Sprintf("%d %d:%08x", class, len(payload), crc32.ChecksumIEEE(payload))
}

func (e *ear) forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.got, e.trains = nil, 0
}

// drawTrain is a datagram or a train, likely to go well with the one before it.
func drawTrain(t *rapid.T, i int) (tr flow.Train) {
	size := rapid.SampledFrom([]int{0, 1, 64, 500, 500, 500, 1472}).Draw(t, "size")
	n := rapid.SampledFrom([]int{1, 1, 1, 1, 2, 3, 70}).Draw(t, "count")
	less := rapid.SampledFrom([]int{0, 0, 1, size / 2}).Draw(t, "less")
	if n > 3 && size > 64 {
		n = 1
	}
	tr.Payload = make([]byte, max(0, size*n-less))
	for j := range tr.Payload {
		tr.Payload[j] = byte(j*7 + j>>8 + i*31)
	}
	if len(tr.Payload) > size {
		tr.Segment = size
	}
	tr.TClass = rapid.SampledFrom([]uint8{0, 0, 0, 2}).Draw(t, "class")
	tr.DontFragment = rapid.SampledFrom([]bool{false, false, true}).Draw(t, "df")
	return tr
}

// Whatever a link sends, and however the kernel wants it: each peer gets these
// datagrams, in this order, and they are told to have moved.
func TestEveryDatagramOfATrainArrivesInOrder(t *testing.T) {
	for name, prepare := range map[string]func(l *link){
		"segmented": func(*link) {},
		"one by one": func(l *link) {
			refuseSegmentation(l)
		},
		"refused by the kernel": func(l *link) { // which can't cut up what has no checksum
			s := &l.send.sockets[1]
			s.gso = maxSegmentsLen
			unix.SetsockoptInt(int(s.fd), unix.SOL_SOCKET, unix.SO_NO_CHECK, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, drops := direct(t, nil)
			from, _ := open(t, d, netip.MustParseAddrPort("127.0.0.1:9"))
			send(t, from, to(netip.MustParseAddrPort("[::1]:9"), "")) // opens the second socket
			var peers [3]netip.AddrPort
			var ears [3]*ear
			for i, addr := range []string{"127.0.0.1:9", "127.0.0.1:9", "[::1]:9"} {
				var l flow.Link
				l, ears[i] = open(t, d, netip.MustParseAddrPort(addr))
				peers[i] = l.LocalAddr()
			}
			rapid.Check(t, func(rt *rapid.T) {
				prepare(from.(*link))
				var ts []flow.Train
				var want [3][]string
				total, room := 0, 120 // datagrams, so that no receive buffer overflows
				for i := range rapid.IntRange(1, 40).Draw(rt, "trains") {
					tr := drawTrain(rt, i)
					if room -= tr.Count(); room < 0 {
						break
					}
					to := rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(rt, "peer")
					tr.Peer.Addr = peers[to]
					ts = append(ts, tr)
					total += len(tr.Payload)
					one := tr
					for rest, n := tr.Payload, tr.Count(); n > 0; n-- {
						one.Payload = rest
						if tr.Segment > 0 {
							one.Payload = rest[:min(tr.Segment, len(rest))]
						}
						rest = rest[len(one.Payload):]
						want[to] = append(want[to], label(one.TClass, one.Payload))
					}
				}
				if taken, moved, err := from.Send(ts); taken != len(ts) || moved != total || err != nil {
					rt.Fatalf("%d of %d trains taken, %d of %d bytes moved, %v", taken, len(ts), moved, total, err)
				}
				for i, e := range ears {
					eventually(t, "all datagrams", func() bool { return e.count() >= len(want[i]) })
					got := e.heard()
					for j := range want[i] {
						if got[j] != want[i][j] || len(got) != len(want[i]) {
							rt.Fatalf("datagram %d of %d toward peer %d is %s, want %s of %d", j, len(got), i, got[j], want[i][j], len(want[i]))
						}
					}
					e.forget()
				}
				if n := drops[flow.DropSendFailed].Load(); n != 0 {
					rt.Fatalf("%d counted as lost", n)
				}
			})
		})
	}
}

func TestEqualDatagramsLeaveAsOneMessage(t *testing.T) {
	d, _ := direct(t, nil)
	from, _ := open(t, d, netip.MustParseAddrPort("127.0.0.1:9"))
	l, ear := open(t, d, netip.MustParseAddrPort("127.0.0.1:9"))
	one := to(l.LocalAddr(), "12345678")
	short := to(l.LocalAddr(), "1")
	marked := one
	marked.TClass = 2
	send(t, from, one, one, one, short, one, one, marked, one, short, short, to(l.LocalAddr(), ""), one)
	eventually(t, "all datagrams", func() bool { return ear.count() == 12 })
	// Four with a short last one, two, the marked one, two, a short one, an empty one, one.
	if ear.trains != 7 {
		t.Errorf("12 datagrams came in %d trains, want 7", ear.trains)
	}
}

func TestARefusedTrainIsToldAndThoseBeforeItHaveLeft(t *testing.T) {
	ns := namespace(t)
	d, drops := direct(t, nil)
	ns.do(func() {
		near, dest := peer(t, "192.0.2.1:0")
		l, _ := open(t, d, dest)
		good, bad := to(dest, "good"), to(netip.MustParseAddrPort("203.0.113.1:9"), "bad") // no route
		ts := []flow.Train{good, good, bad, bad, good}
		for _, want := range []struct{ from, taken, moved int }{{0, 2, 8}, {3, 0, 0}, {4, 1, 4}} {
			taken, moved, err := l.Send(ts[want.from:])
			if taken != want.taken || moved != want.moved || (err == nil) != (want.from == 4) {
				t.Errorf("from %d on: %d taken, %d bytes moved, %v", want.from, taken, moved, err)
			}
		}
		for range 3 {
			b := make([]byte, 10)
			if n, _, err := near.ReadFromUDPAddrPort(b); err != nil || string(b[:n]) != "good" {
				t.Errorf("received %q, %v", b[:n], err)
			}
		}
		if n := drops[flow.DropSendFailed].Load(); n != 0 {
			t.Errorf("%d counted by the link, which is the caller's to do", n)
		}
	})
}

func BenchmarkSend(b *testing.B) {
	for _, c := range []struct {
		name string
		gso  int
		n    int
	}{{"datagram", maxSegmentsLen, 1}, {"train", maxSegmentsLen, 40}, {"one by one", noSegmentation, 40}} {
		b.Run(c.name, func(b *testing.B) {
			d, _ := direct(b, nil)
			_, dest := peer(b, "127.0.0.1:0") // full soon, which costs the sender nothing
			l, _ := open(b, d, dest)
			l.(*link).send.sockets[1].gso = c.gso
			one := to(dest, string(make([]byte, 1200)))
			ts := slices.Repeat([]flow.Train{one}, c.n)
			b.SetBytes(int64(c.n * 1200))
			b.ReportAllocs()
			for b.Loop() {
				if taken, _, err := l.Send(ts); taken != c.n {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkReceiveTrain(b *testing.B) {
	d, _ := direct(b, nil)
	from, _ := open(b, d, netip.MustParseAddrPort("127.0.0.1:9"))
	l, _ := open(b, d, netip.MustParseAddrPort("127.0.0.1:9"))
	s := &l.(*link).send.sockets[1]
	d.c.Poller.Remove(int(s.fd)) // the benchmark reads itself
	l.(*link).r = deaf{}
	one := to(l.LocalAddr(), string(make([]byte, 1200)))
	ts := slices.Repeat([]flow.Train{one}, 40)
	b.SetBytes(40 * 1200)
	b.ReportAllocs()
	for b.Loop() {
		from.Send(ts)
		s.Ready(unix.EPOLLIN)
	}
}
