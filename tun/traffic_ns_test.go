package tun

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/netstack"
	"gatewayd/netstack/wire"
)

const deadline = 10 * time.Second

var (
	host4, peer4 = netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.99.0.2")
	host6, peer6 = netip.MustParseAddr("fd99::1"), netip.MustParseAddr("fd99::2")
	families     = [...]struct{ host, peer netip.Addr }{{host4, peer4}, {host6, peer6}}
)

func config() Config {
	return Config{Name: "gw0", Addresses: []netip.Prefix{netip.PrefixFrom(host4, 24), netip.PrefixFrom(host6, 64)}}
}

// packet is one that came out of the device, copied.
type packet struct {
	wire.Packet
	bytes   []byte
	offload netstack.Offload
}

// running runs a device until the end of the test. What it reads comes out of
// the channel; packets that nobody takes in time are lost.
func running(t *testing.T, d *Device) <-chan packet {
	t.Helper()
	got := make(chan packet, 256)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx, func() *netstack.Batch { return netstack.NewBatch(copying(got)) }) }()
	t.Cleanup(func() {
		cancel()
		within(t, "Run ends with its context", ended)
	})
	return got
}

func copying(got chan<- packet) func(*netstack.Batch) {
	return func(b *netstack.Batch) {
		for i := range b.Len() {
			head, tail, o := b.Packet(i)
			p := packet{bytes: slices.Concat(head, tail), offload: o}
			if _, ok := wire.Parse(p.bytes, len(p.bytes), o.GSO != netstack.GSONone, &p.Packet); !ok {
				continue
			}
			select {
			case got <- p:
			default:
			}
		}
	}
}

// within waits for a nil error.
func within(t *testing.T, what string, ended <-chan error) {
	t.Helper()
	if err := result(t, what, ended); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func result(t *testing.T, what string, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(deadline):
		t.Fatalf("not within %v: %s", deadline, what)
		return nil
	}
}

// next waits for a packet of a protocol to dst.
func next(t *testing.T, got <-chan packet, proto uint8, dst netip.Addr) packet {
	t.Helper()
	timeout := time.After(deadline)
	for {
		select {
		case p := <-got:
			if p.Proto == proto && p.Dst == dst {
				return p
			}
		case <-timeout:
			t.Fatalf("no packet of protocol %d to %v within %v", proto, dst, deadline)
		}
	}
}

// udp opens a socket on the host's side, toward the peer, that has a deadline.
func udp(t *testing.T, host, peer netip.Addr) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(host, 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(peer, 4000)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(deadline)); err != nil {
		t.Fatal(err)
	}
	return c
}

func port(c net.Conn) uint16 {
	return netip.MustParseAddrPort(c.LocalAddr().String()).Port()
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7 >> 3)
	}
	return b
}

func TestWhatTheHostSendsArrivesInABatch(t *testing.T) {
	for _, queues := range []int{1, 4} {
		cfg := config()
		cfg.Queues = queues
		d := opened(t, cfg)
		got := running(t, d)
		for _, f := range families {
			for _, n := range []int{0, 1, 400, 1400, 12} {
				c := udp(t, f.host, f.peer)
				if _, err := c.Write(pattern(n)); err != nil {
					t.Fatal(err)
				}
				p := next(t, got, wire.ProtoUDP, f.peer)
				if p.Src != f.host || !bytes.Equal(p.bytes[p.PayloadOffset:], pattern(n)) {
					t.Errorf("%d queues, %d bytes to %v: %d of them from %v, or changed", queues, n, f.peer, p.PayloadLen, p.Src)
				}
			}
		}
		d.Close()
	}
}

func TestWhatIsWrittenReachesASocket(t *testing.T) {
	for _, offload := range []Offload{OffloadAuto, OffloadOff} {
		cfg := config()
		cfg.Offload = offload
		d := opened(t, cfg)
		for _, f := range families {
			c := udp(t, f.host, f.peer)
			data := pattern(300)
			h := wire.Header{Src: f.peer, Dst: f.host, TTL: 64}
			for i, partial := range []bool{false, true} {
				head := h.AppendUDP(nil, 4000, port(c), data, partial)
				var o netstack.Offload
				if partial {
					o = netstack.Offload{Flags: netstack.OffloadNeedsCsum, CsumStart: uint16(len(head) - 8), CsumOffset: 6}
				}
				if err := d.Write(uint32(i), [][]byte{head, nil, data[:100], data[100:]}, o); err != nil {
					t.Fatal(err)
				}
				room := make([]byte, 1000)
				n, err := c.Read(room)
				if err != nil || !bytes.Equal(room[:n], data) {
					t.Errorf("partial checksum %v: %d bytes, %v", partial, n, err)
				}
			}
		}
		d.Close()
	}
}

// needUSO skips the test where the kernel has no UDP segmentation; with CI=true
// that is a failure.
func needUSO(t *testing.T, d *Device) {
	t.Helper()
	const why = "needs USO: Linux 6.2"
	switch {
	case d.CanUSO():
	case os.Getenv("CI") == "true":
		t.Fatal(why)
	default:
		t.Skip(why)
	}
}

func TestAUDPSuperPacketIsSplitByTheKernelForASocket(t *testing.T) {
	d := opened(t, config())
	needUSO(t, d)
	for _, f := range families {
		c := udp(t, f.host, f.peer)
		data := pattern(2500)
		h := wire.Header{Src: f.peer, Dst: f.host, TTL: 64}
		head := h.AppendUDP(nil, 4000, port(c), data, true)
		err := d.Write(0, [][]byte{head, data}, netstack.Offload{
			Flags: netstack.OffloadNeedsCsum, GSO: netstack.GSOUDP, GSOSize: 1000,
			HdrLen: uint16(len(head)), CsumStart: uint16(len(head) - 8), CsumOffset: 6,
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range [][]byte{data[:1000], data[1000:2000], data[2000:]} {
			room := make([]byte, 3000)
			if n, err := c.Read(room); err != nil || !bytes.Equal(room[:n], want) {
				t.Errorf("%v: a datagram of %d bytes, %v: want %d", f.host, n, err, len(want))
			}
		}
	}
}

func TestAUDPTrainOfTheHostArrivesWhole(t *testing.T) {
	d := opened(t, config())
	needUSO(t, d)
	got := running(t, d)
	for _, f := range families {
		c := udp(t, f.host, f.peer)
		control(t, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) })
		if _, err := c.Write(pattern(20500)); err != nil {
			t.Fatal(err)
		}
		p := next(t, got, wire.ProtoUDP, f.peer)
		if p.offload.GSO != netstack.GSOUDP || p.offload.GSOSize != 1000 || !bytes.Equal(p.bytes[p.PayloadOffset:], pattern(20500)) {
			t.Errorf("%d bytes with %+v: want 20500 in segments of 1000", p.PayloadLen, p.offload)
		}
	}
}

func TestADeviceThatDroppedItsOffloadsGetsPlainPackets(t *testing.T) {
	d := opened(t, config())
	got := running(t, d)
	if err := d.DropOffloads(); err != nil || d.CanGSO() || d.CanUSO() {
		t.Fatalf("%v; GSO %v, USO %v", err, d.CanGSO(), d.CanUSO())
	}
	for _, f := range families {
		c := udp(t, f.host, f.peer)
		control(t, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) })
		if _, err := c.Write(pattern(20500)); err != nil {
			t.Fatal(err)
		}
		for n := 0; n < 20500; {
			p := next(t, got, wire.ProtoUDP, f.peer)
			if p.PayloadLen > 1000 || p.offload.GSO != netstack.GSONone || p.offload.Flags&netstack.OffloadNeedsCsum != 0 {
				t.Fatalf("%d bytes with %+v", p.PayloadLen, p.offload)
			}
			n += p.PayloadLen
		}
	}
}

func control(t *testing.T, c *net.UDPConn, f func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
}

// segment builds the headers of a TCP segment with a partial checksum.
func segment(src, dst netip.AddrPort, seq, ack uint32, flags uint8, options []byte, payload int) (head []byte, o netstack.Offload) {
	h := wire.Header{Src: src.Addr(), Dst: dst.Addr(), TTL: 64}
	n := 20 + len(options)
	head = h.AppendIP(nil, wire.ProtoTCP, n+payload)
	ip := len(head)
	head = binary.BigEndian.AppendUint16(head, src.Port())
	head = binary.BigEndian.AppendUint16(head, dst.Port())
	head = binary.BigEndian.AppendUint32(head, seq)
	head = binary.BigEndian.AppendUint32(head, ack)
	head = append(head, byte(n/4)<<4, flags, 0xff, 0xff)
	head = binary.BigEndian.AppendUint16(head, wire.PseudoSum(src.Addr(), dst.Addr(), wire.ProtoTCP, n+payload))
	head = append(append(head, 0, 0), options...)
	return head, netstack.Offload{Flags: netstack.OffloadNeedsCsum, CsumStart: uint16(ip), CsumOffset: 16, HdrLen: uint16(len(head))}
}

func TestATCPSuperPacketOfTheHostArrivesWhole(t *testing.T) {
	d := opened(t, config())
	got := running(t, d)
	for _, f := range families {
		peer := netip.AddrPortFrom(f.peer, 80)
		ended := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		defer cancel()
		go func() { // the host's kernel connects, and sends as much as it may at first
			c, err := new(net.Dialer).DialContext(ctx, "tcp", peer.String())
			if err == nil {
				defer c.Close()
				c.SetDeadline(time.Now().Add(deadline))
				_, err = c.Write(pattern(10000))
			}
			ended <- err
		}()
		syn := next(t, got, wire.ProtoTCP, f.peer)
		seq := binary.BigEndian.Uint32(syn.bytes[syn.HeaderLen+4:])
		head, o := segment(peer, syn.Source(), 1000, seq+1, wire.SYN|wire.ACK, []byte{2, 4, 1000 >> 8, 1000 & 0xff}, 0)
		if err := d.Write(0, [][]byte{head}, o); err != nil {
			t.Fatal(err)
		}
		within(t, "the host connects and sends", ended)
		p := next(t, got, wire.ProtoTCP, f.peer)
		for p.PayloadLen == 0 {
			p = next(t, got, wire.ProtoTCP, f.peer)
		}
		if p.PayloadLen <= d.MTU() || p.offload.GSO == netstack.GSONone || p.offload.GSOSize != 1000 ||
			!bytes.HasPrefix(pattern(10000), p.bytes[p.PayloadOffset:]) {
			t.Errorf("%v: a segment of %d bytes with %+v: want a large one of 1000 each", f.host, p.PayloadLen, p.offload)
		}
	}
}

func TestATCPSuperPacketIsTakenWholeByTheKernel(t *testing.T) {
	d := opened(t, config())
	raw, err := net.ListenIP("ip4:tcp", &net.IPAddr{IP: host4.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	raw.SetDeadline(time.Now().Add(deadline))
	data := pattern(60000)
	head, o := segment(netip.AddrPortFrom(peer4, 80), netip.AddrPortFrom(host4, 9), 1, 1, wire.ACK, nil, len(data))
	o.GSO, o.GSOSize = netstack.GSOTCPv4, 1460
	if err := d.Write(0, [][]byte{head, data[:30000], data[30000:]}, o); err != nil {
		t.Fatal(err)
	}
	room := make([]byte, 70000)
	for {
		n, from, err := raw.ReadFrom(room)
		if err != nil {
			t.Fatal(err)
		}
		if from.String() == peer4.String() {
			if !bytes.Equal(room[20:n], data) {
				t.Fatalf("a segment of %d bytes, want 60000", n-20)
			}
			return
		}
	}
}

func TestReadingAndWritingAllocateNothing(t *testing.T) {
	d := opened(t, config())
	c := udp(t, host4, peer4)
	data := pattern(200)
	head := (&wire.Header{Src: peer4, Dst: host4, TTL: 64}).AppendUDP(nil, 4000, port(c), data, false)
	bufs := [][]byte{head, data}
	if n := testing.AllocsPerRun(1000, func() { d.Write(7, bufs, netstack.Offload{}) }); n != 0 {
		t.Errorf("%v allocations a write", n)
	}

	packets := 0
	r := &reader{queue: d.queues[0], batch: netstack.NewBatch(func(b *netstack.Batch) { packets += b.Len() })}
	turn := func(fd uintptr) bool { r.turn(fd); return true }
	if n := testing.AllocsPerRun(1000, func() {
		c.Write(data)
		r.raw.Read(turn)
	}); n != 0 {
		t.Errorf("%v allocations a read", n)
	}
	if packets < 1000 {
		t.Errorf("%d packets were read, want 1000", packets)
	}
}
