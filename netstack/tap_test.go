package netstack

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
	"gatewayd/netstack/wire"
)

// tap is a Device without a far end: a test delivers packets by hand, on its own
// goroutine, and looks at each packet that the stack writes.
type tap struct {
	mtu      int
	gso, uso bool
	fails    atomic.Bool
	out      chan wirePacket
}

func (d *tap) MTU() int     { return d.mtu }
func (d *tap) CanGSO() bool { return d.gso }
func (d *tap) CanUSO() bool { return d.uso }

func (d *tap) Run(ctx context.Context, _ func() *Batch) error {
	<-ctx.Done()
	return nil
}

func (d *tap) Write(_ uint32, bufs [][]byte, o Offload) error {
	if d.fails.Load() {
		return errors.New("the device takes nothing")
	}
	select {
	case d.out <- wirePacket{slices.Concat(bufs...), o}:
		return nil
	default:
		return errors.New("nobody reads the device")
	}
}

// sink is a Device that takes everything and keeps nothing.
type sink struct{ uso bool }

func (sink) MTU() int                                    { return 1500 }
func (sink) CanGSO() bool                                { return true }
func (s sink) CanUSO() bool                              { return s.uso }
func (sink) Run(context.Context, func() *Batch) error    { return nil }
func (sink) Write(_ uint32, _ [][]byte, _ Offload) error { return nil }

// tapBed is a Stack under test on a tap.
type tapBed struct {
	t     *testing.T
	dev   *tap
	stack *Stack
	batch *Batch
	drops *flow.Drops
	tcp   func(p *Pending)
	udp   func(f flow.Flow, t flow.Train)    // of each train
	burst func(f flow.Flow, ts []flow.Train) // instead of udp, if not nil
	conns chan *Conn                         // what the default tcp accepted
}

func (b *tapBed) HandleTCP(p *Pending) { b.tcp(p) }
func (b *tapBed) HandleDatagrams(f flow.Flow, ts []flow.Train) {
	if b.burst != nil {
		b.burst(f, ts)
		return
	}
	for i := range ts {
		f.Dest = ts[i].Peer
		b.udp(f, ts[i])
	}
}

func newTapBed(t *testing.T, change func(*Config, *tap)) *tapBed {
	t.Helper()
	dev := &tap{mtu: 1500, gso: true, out: make(chan wirePacket, 4096)}
	b := &tapBed{t: t, dev: dev, drops: new(flow.Drops), conns: make(chan *Conn, 1024)}
	b.tcp = func(p *Pending) {
		if c, err := p.Accept(p.Context()); err == nil {
			b.conns <- c
		}
	}
	poller, err := epoll.New()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Tag: "lan", Device: dev, Handler: b, Poller: poller, Drops: b.drops,
		Addresses: []netip.Addr{gateway4, gateway6},
	}
	if change != nil {
		change(&cfg, dev)
	}
	if b.stack, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	b.batch = NewBatch(b.stack.deliver)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { poller.Run(ctx) })
	wg.Go(func() { b.stack.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		goleak.VerifyNone(t)
	})
	return b
}

var (
	gateway4 = netip.MustParseAddr("10.0.0.1")
	gateway6 = netip.MustParseAddr("fd00::1")

	client4 = netip.AddrPortFrom(clientIP4, 40000)
	client6 = netip.AddrPortFrom(clientIP6, 40000)
)

// forFamilies runs a test over IPv4 and over IPv6.
func forFamilies(t *testing.T, f func(t *testing.T, client, dst netip.AddrPort)) {
	t.Run("v4", func(t *testing.T) { f(t, client4, dst4) })
	t.Run("v6", func(t *testing.T) { f(t, client6, dst6) })
}

// put delivers one packet that came from the device.
func (b *tapBed) put(packet []byte, o Offload) {
	add(b.batch, wirePacket{packet, o})
	b.batch.Deliver()
}

// written is the next packet that the stack wrote.
func (b *tapBed) written() wirePacket {
	b.t.Helper()
	return recv(b.t, b.dev.out)
}

// silent fails if the stack writes a packet within d.
func (b *tapBed) silent(d time.Duration) {
	b.t.Helper()
	select {
	case w := <-b.dev.out:
		b.t.Fatalf("the stack wrote % x", w.b[:min(len(w.b), 60)])
	case <-time.After(d):
	}
}

// tcpWritten is the next packet, which has to be TCP and have right checksums.
func (b *tapBed) tcpWritten() (wire.Packet, header.TCP) {
	b.t.Helper()
	w := b.written()
	p := b.parsed(w)
	if p.Proto != wire.ProtoTCP {
		b.t.Fatalf("the stack wrote protocol %d", p.Proto)
	}
	return p, header.TCP(w.b[p.HeaderLen:])
}

// parsed reads a written packet and checks its sums, as the device would leave them.
func (b *tapBed) parsed(w wirePacket) (p wire.Packet) {
	b.t.Helper()
	if cause, ok := wire.Parse(w.b, len(w.b), w.o.GSO == GSOUDP, &p); !ok {
		b.t.Fatalf("the stack wrote a packet that is %s: % x", cause, w.b[:min(len(w.b), 60)])
	}
	sum := binary.BigEndian.Uint16(w.b[p.HeaderLen+sumOffset(p.Proto):])
	if w.o.Flags&OffloadNeedsCsum != 0 {
		if want := wire.PseudoSum(p.Src, p.Dst, p.Proto, p.Length-p.HeaderLen); sum != want {
			b.t.Fatalf("partial checksum %#x, want %#x", sum, want)
		}
	} else if p.Proto == wire.ProtoUDP && sum == 0 || !wire.VerifyTransport(w.b, nil, &p) {
		b.t.Fatalf("the stack wrote a wrong checksum, %#x", sum)
	}
	return p
}

func sumOffset(proto uint8) int {
	switch proto {
	case wire.ProtoTCP:
		return 16
	case wire.ProtoUDP:
		return 6
	}
	return 2
}

// dropped fails unless exactly n drops of this cause and no others were counted.
func (b *tapBed) dropped(cause flow.Drop, n uint64) {
	b.t.Helper()
	for i := range b.drops {
		want := uint64(0)
		if flow.Drop(i) == cause {
			want = n
		}
		if got := b.drops[i].Load(); got != want {
			b.t.Fatalf("%d drops as %s, want %d", got, flow.Drop(i), want)
		}
	}
}

// segment is a TCP segment to be built.
type segment struct {
	src, dst netip.AddrPort
	seq, ack uint32
	flags    uint8
	window   uint16 // 0: 65535
	closed   bool   // the window is
	options  []byte // a multiple of 4 bytes
	payload  []byte
}

// packet is the segment with complete checksums.
func (s segment) packet() []byte {
	h := wire.Header{Src: s.src.Addr(), Dst: s.dst.Addr(), TTL: 64, DontFragment: true}
	size := 20 + len(s.options) + len(s.payload)
	b := h.AppendIP(nil, wire.ProtoTCP, size)
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, s.src.Port())
	b = binary.BigEndian.AppendUint16(b, s.dst.Port())
	b = binary.BigEndian.AppendUint32(b, s.seq)
	b = binary.BigEndian.AppendUint32(b, s.ack)
	window := s.window
	if window == 0 && !s.closed {
		window = 65535
	}
	b = append(b, byte(20+len(s.options))<<2, s.flags)
	b = binary.BigEndian.AppendUint16(b, window)
	b = append(b, 0, 0, 0, 0)
	b = append(append(b, s.options...), s.payload...)
	sum := wire.PseudoSum(h.Src, h.Dst, wire.ProtoTCP, size)
	binary.BigEndian.PutUint16(b[start+16:], ^wire.Sum(b[start:], sum))
	return b
}

// spoilt is a packet with another TCP checksum.
func spoilt(b []byte) []byte {
	b = slices.Clone(b)
	var p wire.Packet
	wire.Parse(b, len(b), false, &p)
	b[p.HeaderLen+sumOffset(p.Proto)] ^= 0x5a
	return b
}

// synOptions are MSS 1460 and a window scale of 7.
var synOptions = []byte{2, 4, 0x05, 0xb4, 1, 3, 3, 7}

// hand is a TCP client played by hand: it answers nothing by itself.
type hand struct {
	b        *tapBed
	src, dst netip.AddrPort
	seq, ack uint32
	window   uint16
}

func (b *tapBed) hand(src, dst netip.AddrPort) *hand {
	return &hand{b: b, src: src, dst: dst, seq: 1000}
}

func (h *hand) send(flags uint8, payload []byte) {
	h.b.put(segment{
		src: h.src, dst: h.dst, seq: h.seq, ack: h.ack, flags: flags, window: h.window, payload: payload,
	}.packet(), Offload{})
	h.seq += uint32(len(payload))
	if flags&(wire.SYN|wire.FIN) != 0 {
		h.seq++
	}
}

// syn sends a SYN, again and again the same.
func (h *hand) syn(extra uint8) {
	h.b.put(segment{src: h.src, dst: h.dst, seq: h.seq, flags: wire.SYN | extra, window: h.window, options: synOptions}.packet(), Offload{})
}

// answered takes the SYN-ACK and completes the handshake.
func (h *hand) answered() header.TCP {
	h.b.t.Helper()
	_, tcp := h.b.tcpWritten()
	if f := uint8(tcp.Flags()); f&(wire.SYN|wire.ACK|wire.RST) != wire.SYN|wire.ACK {
		h.b.t.Fatalf("the answer to the SYN has flags %#x", f)
	}
	h.seq++
	h.ack = tcp.SequenceNumber() + 1
	h.send(wire.ACK, nil)
	return tcp
}

// open connects, with the bed's default handler.
func (h *hand) open() *Conn {
	h.b.t.Helper()
	h.syn(0)
	h.answered()
	c := recv(h.b.t, h.b.conns)
	h.b.t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
	return c
}

// socketPair is a descriptor of a connected loopback socket, and its peer.
func socketPair(t *testing.T) (fd int, peer net.Conn) {
	t.Helper()
	peers := make(chan net.Conn, 1)
	release := make(chan struct{})
	addr := serve(t, func(c *net.TCPConn) {
		peers <- c
		<-release
		c.Close()
	})
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); close(release) })
	if fd, err = descriptor(c.(*net.TCPConn)); err != nil {
		t.Fatal(err)
	}
	return fd, recv(t, peers)
}

// waiting is how many bytes can be read from fd.
func waiting(t *testing.T, fd int) int {
	t.Helper()
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
