package netstack

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// fragmentOf is the fragment of packet, a whole one without extension headers,
// that carries bytes from to end of what follows its IP header.
func fragmentOf(packet []byte, id uint32, from, end int) []byte {
	var p wire.Packet
	wire.Parse(packet, len(packet), false, &p)
	body := packet[p.HeaderLen:]
	h := wire.Header{
		Src: p.Src, Dst: p.Dst, TClass: p.TClass, TTL: p.TTL,
		ID: id, FragOffset: from, MoreFragments: end < len(body),
	}
	return append(h.AppendIP(nil, p.Proto, end-from), body[from:end]...)
}

// fragments cuts a packet into pieces of size bytes, a multiple of 8.
func fragments(packet []byte, id uint32, size int) (fs [][]byte) {
	n := len(packet) - headerLenOf(packet)
	for from := 0; from < n; from += size {
		fs = append(fs, fragmentOf(packet, id, from, min(from+size, n)))
	}
	return fs
}

func headerLenOf(packet []byte) int {
	if packet[0]>>4 == 6 {
		return wire.IPv6HeaderLen
	}
	return wire.IPv4HeaderLen
}

// putAll delivers packets one after the other.
func (b *tapBed) putAll(packets [][]byte) {
	for _, p := range packets {
		b.put(p, Offload{})
	}
}

// empty fails if the stack holds fragments.
func (b *tapBed) empty() {
	b.t.Helper()
	if err := b.stack.fragments.check(); err != nil || len(b.stack.fragments.mu.sets) > 0 {
		b.t.Fatalf("%d sets remain, %v", len(b.stack.fragments.mu.sets), err)
	}
}

// check compares what is accounted for with what is there, and with the limits.
func (r *reassembler) check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	bytes, listed := 0, 0
	sources := map[[16]byte]fragmentShare{}
	for s := r.mu.ends.newer; s != &r.mu.ends; s = s.newer {
		cost, have := setOverhead, 0
		for i, x := range s.pieces {
			cost += x.data.Capacity() + pieceOverhead
			have += x.data.Size()
			if x.end-x.off != x.data.Size() || i > 0 && s.pieces[i-1].end > x.off {
				return fmt.Errorf("pieces %+v", s.pieces)
			}
		}
		share := sources[s.key.src]
		share.sets, share.bytes = share.sets+1, share.bytes+s.bytes
		sources[s.key.src] = share
		bytes, listed = bytes+cost, listed+1
		if cost != s.bytes || r.mu.sets[s.key] != s || have > 65535 || len(s.pieces) > r.limits.pieces || s.spoilt && have > 0 {
			return fmt.Errorf("a set of %d bytes costs %d and is charged %d", have, cost, s.bytes)
		}
		if share.sets > r.limits.sourceSets || share.bytes > r.limits.sourceBytes {
			return fmt.Errorf("a source has %+v", share)
		}
	}
	if listed != len(r.mu.sets) || bytes != r.mu.bytes || len(sources) != len(r.mu.sources) {
		return fmt.Errorf("%d sets and %d bytes of %d sources, told are %d, %d, %d",
			listed, bytes, len(sources), len(r.mu.sets), r.mu.bytes, len(r.mu.sources))
	}
	for src, share := range sources {
		if r.mu.sources[src] != share {
			return fmt.Errorf("a source has %+v, told is %+v", share, r.mu.sources[src])
		}
	}
	if listed > r.limits.sets || bytes > r.limits.bytes {
		return fmt.Errorf("%d sets with %d bytes", listed, bytes)
	}
	return nil
}

func TestFragmentsOfADatagramReachTheHandlerAsOne(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		largest := 65507
		if dst.Addr().Is6() {
			largest = 65527
		}
		sizes := []int{1, 9, 1473, smallView - 28, smallView - 27, 3000, 9000, largest}
		for i, n := range sizes {
			size := 1480 &^ 7
			if n < size {
				size = 8
			}
			whole := datagram(client, dst, count(n), func(h *wire.Header) { h.TClass = 0xb8 })
			b.putAll(fragments(whole, uint32(i), size))
		}
		if len(*got) != len(sizes) {
			t.Fatalf("%d datagrams arrived of %d: %v", len(*got), len(sizes), b.drops.Map())
		}
		for i, n := range sizes {
			g := (*got)[i]
			if g.f.Source != client || g.f.Dest.Addr != dst || !bytes.Equal(g.t.Payload, count(n)) {
				t.Errorf("%d bytes: %d bytes from %v to %v", n, len(g.t.Payload), g.f.Source, g.f.Dest)
			}
			if g.t.TClass != 0xb8 || g.t.Segment != 0 || g.t.DontFragment {
				t.Errorf("%d bytes: %+v", n, g.t)
			}
		}
		b.dropped(0, 0)
		b.empty()
	})
}

// A whole packet between fragments must not find their bytes in its place.
func TestFragmentsAndWholePacketsShareABatch(t *testing.T) {
	b := newTapBed(t, nil)
	got := b.heardUDP()
	large, small := datagram(client4, dst4, count(9000), nil), datagram(client4, dst4, count(100), nil)
	sizes := []int{}
	for id := range uint32(5) {
		fs := fragments(large, id, 4000)
		for _, packet := range [][]byte{small, fs[2], large, fs[0], fs[1], small} {
			add(b.batch, wirePacket{packet, Offload{}})
		}
		sizes = append(sizes, 100, 9000, 9000, 100)
	}
	b.batch.Deliver()
	if len(*got) != len(sizes) {
		t.Fatalf("%d datagrams of %d: %v", len(*got), len(sizes), b.drops.Map())
	}
	for i, n := range sizes {
		if !bytes.Equal((*got)[i].t.Payload, count(n)) {
			t.Fatalf("datagram %d has %d other bytes than %d", i, len((*got)[i].t.Payload), n)
		}
	}
}

// Whatever a fragment's packet was verified to be, the datagram is verified.
func TestAReassembledDatagramIsVerified(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		got := b.heardUDP()
		for _, f := range fragments(spoilt(datagram(client, dst, count(3000), nil)), 1, 1480) {
			b.put(f, Offload{Flags: OffloadDataValid})
		}
		b.dropped(flow.DropChecksum, 1)
		if len(*got) > 0 {
			t.Fatal("a datagram with a wrong checksum arrived")
		}
	})
}

func TestFragmentsOfTCPReachTheEndpoint(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		c := h.open()
		s := segment{src: client, dst: dst, seq: h.seq, ack: h.ack, flags: wire.ACK | wire.PSH, payload: count(3000)}
		fs := fragments(s.packet(), 7, 1280)
		bad := fragments(spoilt(s.packet()), 8, 1280)
		slices.Reverse(fs)
		b.putAll(bad)
		b.dropped(flow.DropChecksum, 1)
		b.putAll(fs)
		if _, tcp := b.tcpWritten(); tcp.AckNumber() != h.seq+3000 {
			t.Fatalf("%d bytes are acknowledged", tcp.AckNumber()-h.seq)
		}
		var read bytes.Buffer
		for deadline := time.Now().Add(10 * time.Second); read.Len() < 3000 && time.Now().Before(deadline); {
			c.ep.Read(&read, tcpip.ReadOptions{})
		}
		if !bytes.Equal(read.Bytes(), s.payload) {
			t.Fatalf("other %d bytes arrived", read.Len())
		}
	})
}

func TestACongestedFragmentMakesTheDatagramCongested(t *testing.T) {
	for _, c := range []struct{ first, second, want uint8 }{{2, 3, 3}, {1, 3, 3}, {3, 2, 3}, {0, 3, 0}, {2, 2, 2}} {
		b := newBare(t, defaultFragmentLimits())
		fs := fragments(datagram(client6, dst6, count(2000), func(h *wire.Header) { h.TClass = 0xb8 | c.first }), 1, 1200)
		fs[1][1] = fs[1][1]&0x0f | c.second<<4
		b.put(fs[1])
		whole := b.put(fs[0])
		var p wire.Packet
		if wire.Parse(whole, len(whole), false, &p); p.TClass != 0xb8|c.want {
			t.Errorf("%d and %d: %#x", c.first, c.second, p.TClass)
		}
	}
}

// Extension headers before the fragment header are every fragment's own; what
// follows it is part of the datagram.
func TestExtensionHeadersOfFragments(t *testing.T) {
	b := newTapBed(t, nil)
	got := b.heardUDP()
	udp := datagram(client6, dst6, count(2000), nil)[wire.IPv6HeaderLen:]
	pad := []byte{wire.ProtoUDP, 0, 1, 4, 0, 0, 0, 0} // destination options
	body := slices.Concat(pad, udp)
	build := func(id uint32, from, end int, more bool, next byte) []byte {
		h := wire.Header{Src: clientIP6, Dst: serverIP6, TTL: 64}
		packet := h.AppendIP(nil, 60, 16+end-from)
		packet = append(packet, 44, 0, 1, 4, 0, 0, 0, 0)
		offset := uint16(from)
		if more {
			offset |= 1
		}
		packet = binary.BigEndian.AppendUint16(append(packet, next, 0), offset)
		return append(binary.BigEndian.AppendUint32(packet, id), body[from:end]...)
	}
	b.put(build(1, 0, 1200, true, 60), Offload{})
	b.put(build(1, 1200, len(body), false, 99), Offload{}) // its next header does not count
	if len(*got) != 1 || !bytes.Equal((*got)[0].t.Payload, count(2000)) {
		t.Fatalf("%d datagrams: %v", len(*got), b.drops.Map())
	}
	b.dropped(0, 0)

	// A fragment whose content is a fragment.
	inner := append([]byte{wire.ProtoUDP, 0, 0, 1, 0, 0, 0, 9}, udp[:800]...)
	body = inner
	b.put(build(2, 0, 400, true, 44), Offload{})
	b.put(build(2, 400, len(inner), false, 44), Offload{})
	b.dropped(flow.DropFragment, 1)
	b.empty()
}

func TestADatagramThatBecomesTooLongIsDropped(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := wire.Header{Src: client.Addr(), Dst: dst.Addr(), TTL: 64, FragOffset: 65528}
		b.put(append(h.AppendIP(nil, wire.ProtoUDP, 8), make([]byte, 8)...), Offload{})
		b.dropped(flow.DropMalformed, 1)
		b.empty()
	})
}

// bare is a reassembler with a handful of sets' room, and time at its hands.
type bare struct {
	*reassembler
	t     *testing.T
	now   time.Time
	drops flow.Drops
}

func newBare(t *testing.T, limits fragmentLimits) *bare {
	b := &bare{t: t, now: time.Unix(1000, 0)}
	b.reassembler = newReassembler(limits, &b.drops, func(*fragmentSet) {})
	return b
}

// put gives the datagram that f completes, or nil.
func (b *bare) put(f []byte) []byte {
	b.t.Helper()
	var p wire.Packet
	if cause, ok := wire.Parse(f, len(f), false, &p); !ok || !p.Fragment {
		b.t.Fatalf("no fragment: %s, %+v", cause, p)
	}
	head := f[:min(len(f), smallView)]
	s := b.add(b.now, head, f[len(head):], &p)
	if err := b.check(); err != nil {
		b.t.Fatal(err)
	}
	if s == nil {
		return nil
	}
	defer b.release(s)
	whole := make([]byte, s.size())
	n := min(len(whole), smallView)
	s.write(whole[:n], whole[n:])
	return whole
}

func (b *bare) counted(n uint64) {
	b.t.Helper()
	if got := b.drops[flow.DropFragment].Load(); got != n {
		b.t.Fatalf("%d fragments were counted as dropped, want %d", got, n)
	}
}

// from is a datagram of n bytes of a client's by its number.
func from(client, n int) []byte {
	src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(client >> 8), byte(client)}), 40000)
	return datagram(src, dst4, count(n), nil)
}

func TestIncompleteSetsExpireAndAreCounted(t *testing.T) {
	b := newBare(t, defaultFragmentLimits())
	v4, v6 := datagram(client4, dst4, count(3000), nil), datagram(client6, dst6, count(3000), nil)
	fs4, fs6 := fragments(v4, 1, 1000), fragments(v6, 1, 1000)
	b.put(fs4[0])
	b.put(fs4[1])
	b.put(fs6[0])
	b.expire(b.now.Add(30*time.Second - 1))
	b.counted(0)
	b.expire(b.now.Add(30 * time.Second))
	b.counted(2)
	b.expire(b.now.Add(60*time.Second - 1))
	b.counted(2)
	// A fragment that comes before the sweep does not join what is too old.
	b.now = b.now.Add(60 * time.Second)
	for i := 1; i < len(fs6); i++ {
		if b.put(fs6[i]) != nil {
			t.Fatal("a set outlived its time")
		}
	}
	b.counted(3)
	if whole := b.put(fs6[0]); whole == nil {
		t.Fatal("the newer set is not whole")
	}
	b.expire(b.now.Add(time.Hour))
	b.counted(3)
	if len(b.mu.sets) > 0 || b.mu.bytes != 0 {
		t.Fatalf("%d sets remain", len(b.mu.sets))
	}
}

func TestTheStackSweepsFragments(t *testing.T) {
	b := newTapBed(t, nil)
	b.stack.fragments.mu.Lock()
	b.stack.fragments.limits.life4 = time.Millisecond
	b.stack.fragments.mu.Unlock()
	b.put(fragments(datagram(client4, dst4, count(3000), nil), 1, 1480)[0], Offload{})
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for b.drops[flow.DropFragment].Load() == 0 {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("nobody looked")
		}
	}
	b.empty()
}

// The source that takes too much loses its oldest sets, nobody else any.
func TestOneSourceCannotStarveOthers(t *testing.T) {
	limits := defaultFragmentLimits()
	b := newBare(t, limits)
	other := fragments(from(1, 20_000), 1, 1480)
	for _, f := range other[1:] {
		b.put(f)
	}
	flood := fragments(from(2, 60_000), 0, 1480)
	for id := range 500 {
		b.put(fragmentOf(from(2, 20), uint32(1000+id), 0, 16))
		for _, f := range flood[1:] {
			f = slices.Clone(f)
			setID(f, uint16(id))
			b.put(f)
		}
	}
	share := b.mu.sources[netip.MustParseAddr("10.1.0.2").As16()]
	if share.bytes > limits.sourceBytes || share.sets > limits.sourceSets || share.bytes < limits.sourceBytes/2 {
		t.Fatalf("the flood has %+v", share)
	}
	if b.put(other[0]) == nil {
		t.Fatal("another source lost its fragments")
	}
}

func setID(packet []byte, id uint16) {
	binary.BigEndian.PutUint16(packet[4:], id)
	binary.BigEndian.PutUint16(packet[10:], 0)
	binary.BigEndian.PutUint16(packet[10:], ^wire.Sum(packet[:20], 0))
}

func TestTheLimitsHoldAndTheOldestGoFirst(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(l *fragmentLimits)
		source func(i int) int
		kept   int // sets of the 100
	}{
		{"sets of a source", func(l *fragmentLimits) { l.sourceSets = 10 }, func(int) int { return 1 }, 10},
		{"bytes of a source", func(l *fragmentLimits) { l.sourceBytes = 10 * (setOverhead + pieceOverhead + 1024) }, func(int) int { return 1 }, 10},
		{"sets in all", func(l *fragmentLimits) { l.sets = 10 }, func(i int) int { return i }, 10},
		{"bytes in all", func(l *fragmentLimits) { l.bytes = 10 * (setOverhead + pieceOverhead + 1024) }, func(i int) int { return i }, 10},
		{"no room at all", func(l *fragmentLimits) { l.bytes = 100 }, func(i int) int { return i }, 0},
		{"the default", func(*fragmentLimits) {}, func(int) int { return 1 }, 64},
	} {
		t.Run(c.name, func(t *testing.T) {
			limits := defaultFragmentLimits()
			c.change(&limits)
			b := newBare(t, limits)
			for i := range 100 {
				b.put(fragments(from(c.source(i), 1500), uint32(i), 1000)[0])
			}
			b.counted(uint64(100 - c.kept))
			for i := 100 - c.kept; i < 100; i++ {
				if b.put(fragments(from(c.source(i), 1500), uint32(i), 1000)[1]) == nil {
					t.Fatalf("datagram %d was forgotten before older ones", i)
				}
			}
			if len(b.mu.sets) != 0 {
				t.Fatalf("%d older ones remain", len(b.mu.sets))
			}
		})
	}
}

func TestADatagramInTooManyPiecesIsDropped(t *testing.T) {
	limits := defaultFragmentLimits()
	b := newBare(t, limits)
	packet := datagram(client4, dst4, count(8*(limits.pieces+1)-8), nil)
	fs := fragments(packet, 1, 8)
	for _, f := range fs {
		if b.put(f) != nil {
			t.Fatal("it was put together")
		}
	}
	b.counted(uint64(len(fs)))
	packet = datagram(client4, dst4, count(8*limits.pieces-8), nil)
	var whole []byte
	for _, f := range fragments(packet, 2, 8) {
		whole = b.put(f)
	}
	if !samePacket(whole, packet) {
		t.Fatal("one with just not too many was not put together")
	}
}

// samePacket compares but for the id.
func samePacket(a, b []byte) bool {
	if len(a) != len(b) || len(a) == 0 {
		return false
	}
	a, b = slices.Clone(a), slices.Clone(b)
	if a[0]>>4 == 4 {
		setID(a, 0)
		setID(b, 0)
	}
	return bytes.Equal(a, b)
}

// Datagrams of other addresses, protocols or ids are other datagrams; over IPv6
// the protocol of a later fragment means nothing.
func TestFragmentsAreToldApart(t *testing.T) {
	b := newBare(t, defaultFragmentLimits())
	packet := datagram(client4, dst4, count(1500), nil)
	first, second := fragmentOf(packet, 1, 0, 1000), fragmentOf(packet, 1, 1000, 1508)
	b.put(first)
	for at, what := range map[int]string{9: "protocol", 15: "source", 19: "destination", 5: "id"} {
		f := slices.Clone(second)
		f[at] ^= 4
		setID(f, binary.BigEndian.Uint16(f[4:]))
		if b.put(f) != nil {
			t.Errorf("one of another %s was taken", what)
		}
	}
	if !samePacket(b.put(second), packet) {
		t.Error("the right one was not")
	}
}
