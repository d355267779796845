package netstack

import (
	"bytes"
	"encoding/binary"
	"io"
	"net/netip"
	"slices"
	"testing"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"
	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// delivered is a stack.NetworkDispatcher that keeps the packets it gets.
type delivered struct{ packets [][]byte }

func (d *delivered) DeliverNetworkPacket(_ tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	buf := pkt.ToBuffer()
	d.packets = append(d.packets, buf.Flatten())
	buf.Release()
}

func (d *delivered) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}

// receive is what gVisor gets of packets that arrive in batches of n.
func receive(packets [][]byte, n int) [][]byte {
	var d delivered
	s := &Stack{cfg: Config{Drops: new(flow.Drops)}, link: &link{dispatcher: &d}}
	b := NewBatch(s.deliver)
	for batch := range slices.Chunk(packets, n) {
		for _, p := range batch {
			add(b, wirePacket{p, Offload{Flags: OffloadDataValid}})
		}
		b.Deliver()
	}
	return d.packets
}

// A parsed packet of the tests below.
type tcpSeen struct {
	wire.Packet
	b   []byte
	tcp []byte // its header
	seq uint32
}

func see(t interface{ Fatalf(string, ...any) }, b []byte) (s tcpSeen) {
	if cause, ok := wire.Parse(b, len(b), false, &s.Packet); !ok {
		t.Fatalf("gVisor got a packet that is %s: % x", cause, b[:min(len(b), 60)])
	}
	s.b, s.tcp = b, b[s.HeaderLen:s.PayloadOffset]
	s.seq = binary.BigEndian.Uint32(s.tcp[4:])
	return s
}

func (s *tcpSeen) payload() []byte { return s.b[s.PayloadOffset : s.PayloadOffset+s.PayloadLen] }

// facts is a copy of the headers without what joining changes: lengths, checksums,
// the IPv4 id, sequence number, PSH and FIN.
func (s *tcpSeen) facts() []byte {
	f := slices.Clone(s.b[:s.PayloadOffset])
	if s.Version == 4 {
		clear(f[2:6])
		clear(f[10:12])
	} else {
		clear(f[4:6])
	}
	t := f[s.HeaderLen:]
	clear(t[4:8])
	t[13] &^= wire.PSH | wire.FIN
	clear(t[16:18])
	return f
}

// Whatever packets come in whatever batches: cut where they were joined, what gVisor
// gets of each flow is what it gets one by one, in the same order.
func TestJoinedSegmentsSayWhatTheySaidOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		packets := drawSegments(t)
		want := map[tuple][]tcpSeen{}
		for _, b := range receive(packets, 1) {
			s := see(t, b)
			tp := tuple{s.Source(), s.Destination()}
			want[tp] = append(want[tp], s)
		}
		for _, b := range receive(packets, rapid.IntRange(2, BatchSize).Draw(t, "batch")) {
			s := see(t, b)
			tp := tuple{s.Source(), s.Destination()}
			want[tp] = s.cut(t, want[tp])
		}
		for tp, rest := range want {
			if len(rest) > 0 {
				t.Fatalf("%v: %d packets did not arrive", tp, len(rest))
			}
		}
	})
}

// cut compares a packet with those that it must be made of, the next ones of its
// flow, and gives what is left of these.
func (s *tcpSeen) cut(t *rapid.T, from []tcpSeen) []tcpSeen {
	rest, seq := s.payload(), s.seq
	for n := 1; ; n++ {
		if len(from) == 0 {
			t.Fatalf("%d bytes from nowhere", len(rest))
		}
		x := from[0]
		from = from[1:]
		if !bytes.Equal(x.facts(), s.facts()) || x.seq != seq || !bytes.HasPrefix(rest, x.payload()) {
			t.Fatalf("part %d has header % x, want % x", n, s.b[:s.PayloadOffset], x.b[:x.PayloadOffset])
		}
		rest, seq = rest[x.PayloadLen:], seq+uint32(x.PayloadLen)
		last := len(rest) == 0
		if last && x.TCPFlags != s.TCPFlags || !last && x.TCPFlags != wire.ACK {
			t.Fatalf("part %d has flags %#x, the whole %#x", n, x.TCPFlags, s.TCPFlags)
		}
		if last {
			return from
		}
	}
}

// drawSegments are segments of a few flows, most of which follow on each other.
func drawSegments(t *rapid.T) (packets [][]byte) {
	ends := make([]segment, rapid.IntRange(1, maxRuns+3).Draw(t, "flows"))
	for i := range ends {
		ends[i] = segment{src: client4, dst: dst4, flags: wire.ACK, seq: rapid.Uint32().Draw(t, "isn")}
		if rapid.Bool().Draw(t, "v6") {
			ends[i].src, ends[i].dst = client6, dst6
		}
		ends[i].src = netip.AddrPortFrom(ends[i].src.Addr(), uint16(1000+i))
	}
	for range rapid.IntRange(1, 150).Draw(t, "packets") {
		s := &ends[rapid.IntRange(0, len(ends)-1).Draw(t, "flow")]
		change := rapid.SampledFrom([]string{
			"", "", "", "", "", "", "", "", "seq", "ack", "window", "push", "flags", "options", "bytes",
		}).Draw(t, "change")
		s.payload = fill(rapid.SampledFrom([]int{1448, 1448, 1448, 100, 0, 1}).Draw(t, "size"), byte(len(packets)))
		flags := s.flags
		switch change {
		case "seq":
			s.seq += uint32(rapid.SampledFrom([]int{-1448, -1, 1, 1448}).Draw(t, "off"))
		case "ack":
			s.ack++
		case "window":
			s.window++
		case "push":
			s.flags |= wire.PSH
		case "flags":
			s.flags = rapid.Uint8().Draw(t, "flags") &^ wire.SYN // which would ask the stack for its endpoint
		case "options":
			s.options = []byte{1, 1, 8, 10, 0, 0, 0, rapid.Byte().Draw(t, "time"), 0, 0, 0, 1}
		}
		b := s.packet()
		if change == "bytes" {
			spoilHeader(t, b)
		}
		s.flags = flags
		s.seq += uint32(len(s.payload))
		packets = append(packets, b)
	}
	return packets
}

// spoilHeader changes a field that tells something, and keeps the packet valid.
func spoilHeader(t *rapid.T, b []byte) {
	var p wire.Packet
	wire.Parse(b, len(b), false, &p)
	at := map[uint8][]int{4: {1, 5, 6, 8}, 6: {0, 1, 2, 3, 7}}[p.Version]
	at = append(at, p.HeaderLen+12, p.HeaderLen+19)
	i := rapid.SampledFrom(at).Draw(t, "byte")
	mask := byte(0xff)
	switch {
	case i == 0 || i == p.HeaderLen+12: // beside a version or length
		mask = 0x0f
	case p.Version == 4 && i == 6: // DF
		mask = 0x40
	case i == 8 && p.Version == 4 || i == 7 && p.Version == 6: // not expired
		mask = 0x7c
	}
	b[i] ^= rapid.Byte().Draw(t, "bits") & mask
	if i == 8 && p.Version == 4 || i == 7 && p.Version == 6 {
		b[i] |= 2
	}
	if p.Version == 4 {
		clear(b[10:12])
		binary.BigEndian.PutUint16(b[10:], ^wire.Sum(b[:p.HeaderLen], 0))
	}
}

// stream is n segments that follow on each other.
func stream(src, dst netip.AddrPort, n, size int) (packets [][]byte) {
	s := segment{src: src, dst: dst, flags: wire.ACK, seq: 1<<32 - 5000}
	for i := range n {
		s.payload = fill(size, byte(i))
		packets = append(packets, s.packet())
		s.seq += uint32(size)
	}
	return packets
}

func TestABatchOfOneFlowBecomesPacketsOfUpTo64KiB(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		got := receive(stream(client, dst, BatchSize, 1440), BatchSize)
		if len(got) != 2 {
			t.Fatalf("%d packets", len(got))
		}
		if s := see(t, got[0]); s.Length > maxRun || s.Length+1440 <= maxRun {
			t.Fatalf("the first has %d bytes", s.Length)
		}
	})
}

func TestFlowsThatTakeTurnsAreJoinedApart(t *testing.T) {
	var packets [][]byte
	streams := make([][][]byte, maxRuns)
	for i := range streams {
		streams[i] = stream(netip.AddrPortFrom(clientIP4, uint16(1000+i)), dst4, 8, 1440)
	}
	for i := range 8 {
		for _, s := range streams {
			packets = append(packets, s[i])
		}
	}
	if got := receive(packets, BatchSize); len(got) != maxRuns {
		t.Fatalf("%d packets of %d flows", len(got), maxRuns)
	}
}

func TestSegmentsMarkedAsCongestedAreNotJoined(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		packets := stream(client, dst, 8, 1000)
		for _, p := range packets {
			if p[0]>>4 == 6 {
				p[1] |= 3 << 4
				continue
			}
			p[1] |= 3
			clear(p[10:12])
			binary.BigEndian.PutUint16(p[10:], ^wire.Sum(p[:wire.IPv4HeaderLen], 0))
		}
		if got := receive(packets, BatchSize); len(got) != len(packets) {
			t.Fatalf("%d packets became %d", len(packets), len(got))
		}
	})
}

// The sender's window grows by what is acknowledged, and it waits for that.
func TestABatchOfSegmentsIsAcknowledgedAtOnce(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	packets := stream(h.src, h.dst, 40, 1448)
	for _, p := range packets {
		binary.BigEndian.PutUint32(p[24:], h.seq)
		binary.BigEndian.PutUint32(p[28:], h.ack)
		h.seq += 1448
		add(b.batch, wirePacket{p, Offload{Flags: OffloadDataValid}})
	}
	b.batch.Deliver()
	if _, tcp := b.tcpWritten(); tcp.AckNumber() != h.seq {
		t.Fatalf("the first acknowledgement is of %d bytes less than what came", h.seq-tcp.AckNumber())
	}
	n, err := c.ep.Read(io.Discard, tcpip.ReadOptions{})
	if err != nil || n.Count != 40*1448 {
		t.Fatalf("read %d bytes, %v", n.Count, err)
	}
}

func BenchmarkJoinABatchOfSegments(b *testing.B) {
	s := &Stack{cfg: Config{Drops: new(flow.Drops)}, link: &link{dispatcher: discard{}}}
	batch := NewBatch(s.deliver)
	packets := stream(client4, dst4, BatchSize, 1448)
	b.SetBytes(BatchSize * 1448)
	for b.Loop() {
		for _, p := range packets {
			add(batch, wirePacket{p, Offload{Flags: OffloadDataValid}})
		}
		batch.Deliver()
	}
}

// discard is a stack.NetworkDispatcher that keeps nothing.
type discard struct{}

func (discard) DeliverNetworkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}
func (discard) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer)    {}
