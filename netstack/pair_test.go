package netstack

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/buffer"
	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/adapters/gonet"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/network/ipv4"
	"github.com/sagernet/gvisor/pkg/tcpip/network/ipv6"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
	"go.uber.org/goleak"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// pipe is a Device whose other end is a client stack.
type pipe struct {
	gso   bool
	mtu   int
	in    chan wirePacket
	out   func(b []byte, o Offload)
	sizes sync.Map // packet size → *atomic.Int64, of what the gateway wrote
	hole  int      // bytes of the largest packet that gets to the client; 0: all do

	wrapClient func(stack.LinkEndpoint) stack.LinkEndpoint // what the client's stack sees of its link; nil: the link
	largestUp  atomic.Int64                                // of what the client wrote, in bytes

	plain       atomic.Bool  // it has no offloads any more
	losesSupers bool         // what the gateway writes for the device to cut
	largestDown atomic.Int64 // of what the gateway wrote, in bytes
}

type wirePacket struct {
	b []byte
	o Offload
}

func (p *pipe) MTU() int     { return p.mtu }
func (p *pipe) CanGSO() bool { return p.gso && !p.plain.Load() }
func (p *pipe) CanUSO() bool { return false }

func (p *pipe) Run(ctx context.Context, newBatch func() *Batch) error {
	b := newBatch()
	for {
		select {
		case w := <-p.in:
			add(b, w)
			for !b.Full() {
				select {
				case w := <-p.in:
					add(b, w)
					continue
				default:
				}
				break
			}
			b.Deliver()
		case <-ctx.Done():
			return nil
		}
	}
}

func add(b *Batch, w wirePacket) {
	bufs := b.Bufs()
	n := copy(bufs[0], w.b)
	copy(bufs[1], w.b[n:])
	b.Add(len(w.b), w.o)
}

func (p *pipe) Write(_ uint32, bufs [][]byte, o Offload) error {
	var whole []byte
	for _, b := range bufs {
		whole = append(whole, b...)
	}
	n, _ := p.sizes.LoadOrStore(len(whole), new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	p.largestDown.Store(max(p.largestDown.Load(), int64(len(whole))))
	if p.losesSupers && o.GSO != GSONone {
		return nil
	}
	onWire := len(whole)
	if o.GSO != 0 {
		onWire = int(o.HdrLen + o.GSOSize)
	}
	if p.hole == 0 || onWire <= p.hole {
		p.out(whole, o)
	}
	return nil
}

// send injects a packet as if the client had sent it.
func (p *pipe) send(b []byte, o Offload) {
	select {
	case p.in <- wirePacket{b, o}:
	default: // lost, as on a link
	}
}

// bed is a client stack joined to a Stack under test, whose outbounds are kernel
// sockets on loopback.
type bed struct {
	t      *testing.T
	dev    *pipe
	stack  *Stack
	client *stack.Stack
	drops  flow.Drops
	handle func(p *Pending)
	udp    func(f flow.Flow, t flow.Train)

	prepare func(s *session) // of relayTo, before a relay begins; may be nil

	mu       sync.Mutex
	sessions []*session // of relayTo
}

func (b *bed) HandleTCP(p *Pending) { b.handle(p) }
func (b *bed) HandleDatagrams(f flow.Flow, ts []flow.Train) {
	for i := range ts {
		f.Dest = ts[i].Peer
		b.udp(f, ts[i])
	}
}

var (
	clientIP4 = netip.MustParseAddr("10.0.0.2")
	clientIP6 = netip.MustParseAddr("fd00::2")
	serverIP4 = netip.MustParseAddr("203.0.113.10")
	serverIP6 = netip.MustParseAddr("2001:db8::10")
)

func newBed(t *testing.T, gso bool, change func(*Config)) *bed {
	t.Helper()
	b := &bed{t: t, dev: &pipe{gso: gso, mtu: 1500, in: make(chan wirePacket, 4096)}}
	poller, err := epoll.New()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Tag: "lan", Device: b.dev, Handler: b, Poller: poller, Drops: &b.drops,
		HalfClosed: time.Minute,
	}
	if change != nil {
		change(&cfg)
	}
	if b.stack, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	b.client = clientStack(t, b.dev)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { poller.Run(ctx) })
	wg.Go(func() { b.stack.Run(ctx) })
	t.Cleanup(func() {
		b.client.Close()
		if t.Failed() { // no flow and no server of it lives on into other tests
			b.end()
		}
		cancel()
		wg.Wait()
		b.client.Wait()
		goleak.VerifyNone(t)
	})
	return b
}

// clientStack makes the client's end, with the same kind of link.
func clientStack(t *testing.T, dev *pipe) *stack.Stack {
	t.Helper()
	l := &link{dev: &clientEnd{pipe: dev}, drops: new(flow.Drops), pending: new(pendingTable)}
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	var seen stack.LinkEndpoint = l
	if dev.wrapClient != nil {
		seen = dev.wrapClient(l)
	}
	if err := s.CreateNIC(1, seen); err != nil {
		t.Fatal(err)
	}
	sack, recovery := tcpip.TCPSACKEnabled(true), tcpip.TCPRecovery(0)
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: 1 << 20, Max: 4 << 20}
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &recovery)
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &rcv)
	for _, a := range []netip.Addr{clientIP4, clientIP6} {
		s.AddProtocolAddress(1, tcpip.ProtocolAddress{
			Protocol:          protocolOf(a),
			AddressWithPrefix: tcpip.AddrFromSlice(a.AsSlice()).WithPrefix(),
		}, stack.AddressProperties{})
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}, {Destination: header.IPv6EmptySubnet, NIC: 1}})
	dev.out = func(b []byte, _ Offload) {
		proto := header.IPv4ProtocolNumber
		if b[0]>>4 == 6 {
			proto = header.IPv6ProtocolNumber
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
		l.dispatcher.DeliverNetworkPacket(proto, pkt)
		pkt.DecRef()
	}
	return s
}

// clientEnd is the device as the client writes to it.
type clientEnd struct{ *pipe }

func (e *clientEnd) Write(_ uint32, bufs [][]byte, o Offload) error {
	var whole []byte
	for _, b := range bufs {
		whole = append(whole, b...)
	}
	e.largestUp.Store(max(e.largestUp.Load(), int64(len(whole))))
	e.send(whole, o)
	return nil
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return header.IPv4ProtocolNumber
	}
	return header.IPv6ProtocolNumber
}

// dial connects the client to dst, an address that the handler maps to a socket.
func (b *bed) dial(dst netip.AddrPort) (*gonet.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return gonet.DialContextTCP(ctx, b.client, tcpip.FullAddress{
		NIC: 1, Addr: tcpip.AddrFromSlice(dst.Addr().AsSlice()), Port: dst.Port(),
	}, protocolOf(dst.Addr()))
}

func (b *bed) mustDial(dst netip.AddrPort) *gonet.TCPConn {
	b.t.Helper()
	c, err := b.dial(dst)
	if err != nil {
		b.t.Fatalf("dial %s: %v", dst, err)
	}
	return c
}

// counter is a Meter that counts, and can pause or end its flow. It panics when it is
// not asked as meters have to be.
type counter struct {
	mu      sync.Mutex
	n       [2]uint64 // moved
	took    [2]uint64
	asked   [2]bool // and not told what was taken yet
	left    [2]int  // calls of Leave
	err     [2]error
	max     int
	waiting func()
}

func (m *counter) Ready(d flow.Dir, wake func()) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.asked[d] {
		panic("Ready again before Took")
	}
	if m.err[d] != nil {
		m.waiting = wake
		return 0, m.err[d]
	}
	m.asked[d] = true
	if m.max > 0 {
		return m.max, nil
	}
	return 64 << 10, nil
}

func (m *counter) Took(d flow.Dir, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.asked[d] {
		panic("Took without Ready")
	}
	m.asked[d] = false
	m.took[d] += uint64(n)
}

func (m *counter) Moved(d flow.Dir, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.n[d] += uint64(n); m.n[d] > m.took[d] {
		panic("moved more than was taken")
	}
}

func (m *counter) Leave(d flow.Dir) {
	m.mu.Lock()
	m.left[d]++
	m.mu.Unlock()
}

func (m *counter) moved(d flow.Dir) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.n[d]
}

// pause has a direction stand still until resume.
func (m *counter) pause(d flow.Dir) {
	m.mu.Lock()
	m.err[d] = flow.ErrPaused
	m.mu.Unlock()
}

// resume ends pause.
func (m *counter) resume(d flow.Dir) {
	m.mu.Lock()
	m.err[d] = nil
	wake := m.waiting
	m.mu.Unlock()
	if wake != nil { // else no turn has met the pause yet
		wake()
	}
}

// session is one relayed flow of a test.
type session struct {
	meter counter
	conn  *Conn
	done  chan error
	over  chan struct{} // closed when done has the cause
}

// end ends all flows of relayTo.
func (b *bed) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sessions {
		s.conn.End(flow.ErrShutdown)
	}
	for _, s := range b.sessions {
		select {
		case <-s.over:
		case <-time.After(20 * time.Second):
			b.t.Error("a relay that was ended lives on")
		}
	}
}

// relayTo makes the bed dial a loopback listener for every SYN, and relay.
// Sessions appear on the returned channel.
func (b *bed) relayTo(addr string) chan *session {
	sessions := make(chan *session, 4096)
	b.handle = func(p *Pending) {
		out, err := net.Dial("tcp", addr)
		if err != nil {
			p.Refuse(flow.VerdictOf(err))
			return
		}
		s := &session{done: make(chan error, 1), over: make(chan struct{})}
		if s.conn, err = p.Accept(p.Context()); err != nil {
			out.Close()
			return
		}
		if b.prepare != nil {
			b.prepare(s)
		}
		b.mu.Lock()
		b.sessions = append(b.sessions, s)
		b.mu.Unlock()
		sessions <- s
		s.conn.Relay(out.(*net.TCPConn), &s.meter, func(err error) { s.done <- err; close(s.over) })
	}
	return sessions
}

func (s *session) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-s.done:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("the relay did not end within 20 s")
		return nil
	}
}

func recv[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		t.Fatal("nothing within 20 s")
		panic("unreachable")
	}
}

// recvMoving is recv for what ends a session's transfer, however slow the machine is:
// it fails when nothing moved for 20 s.
func recvMoving[T any](t *testing.T, s *session, c <-chan T) T {
	t.Helper()
	for {
		before := s.meter.moved(flow.Up) + s.meter.moved(flow.Down)
		select {
		case v := <-c:
			return v
		case <-time.After(20 * time.Second):
		}
		if up, down := s.meter.moved(flow.Up), s.meter.moved(flow.Down); up+down == before {
			t.Fatalf("nothing moved for 20 s after %d bytes up and %d down", up, down)
		}
	}
}

// serve listens on loopback and hands each connection to f on its own goroutine.
func serve(t *testing.T, f func(c *net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { f(c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		if !t.Failed() { // else relays may live on, and their servers with them
			wg.Wait()
		}
	})
	return l.Addr().String()
}

// swallow reads a connection to its end.
func swallow(c *net.TCPConn) {
	io.Copy(io.Discard, c)
	c.Close()
}

func isReset(err error) bool {
	return err != nil && (flow.ReasonOf(err) == flow.Reset || contains(err.Error(), "reset") || err == syscall.ECONNRESET)
}

func contains(s, sub string) bool {
	for i := 0; i+len(sub) <= len(s); i++ {
		if s[i:i+len(sub)] == sub {
			return true
		}
	}
	return false
}
