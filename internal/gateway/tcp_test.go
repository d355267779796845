package gateway

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/config"
	"gatewayd/internal/device"
	"gatewayd/internal/epoll"
	"gatewayd/internal/hostnet"
	"gatewayd/netstack"
	"gatewayd/netstack/wire"
	"gatewayd/outbound"
	"gatewayd/route"
	"gatewayd/track"
	"gatewayd/user"
)

// tap is a Device in memory. A test hands packets to in and reads what was
// written, as fields of its headers, from out.
type tap struct {
	in  chan []byte
	out chan seen
}

// seen is a packet that the gateway wrote.
type seen struct {
	wire.Packet
	seq uint32
}

func (*tap) MTU() int     { return 1500 }
func (*tap) CanGSO() bool { return false }
func (*tap) CanUSO() bool { return false }

func (d *tap) Run(ctx context.Context, newBatch func() *netstack.Batch) error {
	b := newBatch()
	for {
		select {
		case p := <-d.in:
			b.Add(copy(b.Bufs()[0], p), netstack.Offload{})
			b.Deliver()
		case <-ctx.Done():
			return nil
		}
	}
}

func (d *tap) Write(_ uint32, bufs [][]byte, _ netstack.Offload) error {
	b := slices.Concat(bufs...)
	var s seen
	wire.Parse(b, len(b), false, &s.Packet)
	if s.Proto == wire.ProtoTCP {
		s.seq = binary.BigEndian.Uint32(b[s.HeaderLen+4:])
	}
	d.out <- s
	return nil
}

// fake is an outbound whose dials do what the test says.
type fake struct {
	dial func(ctx context.Context, f flow.Flow) (flow.Stream, error)
}

func (o fake) DialStream(ctx context.Context, f flow.Flow) (flow.Stream, error) {
	return o.dial(ctx, f)
}

func (fake) OpenLink(context.Context, flow.Flow, flow.Receiver) (flow.Link, error) {
	return nil, syscall.ENETUNREACH
}

// rig is as much of a gateway as carries TCP: no kernel device, one fake outbound
// beside reject and drop.
type rig struct {
	t    *testing.T
	gw   *Gateway
	dev  *tap
	dial func(ctx context.Context, f flow.Flow) (flow.Stream, error)
}

var (
	client = netip.MustParseAddrPort("10.0.0.2:40000")
	server = netip.MustParseAddrPort("203.0.113.10:80")
)

const isn = 1000

func newRig(t *testing.T, rules ...route.Rule) *rig {
	t.Helper()
	r := &rig{t: t, dev: &tap{make(chan []byte, 64), make(chan seen, 64)}}
	g := &Gateway{log: slog.New(slog.DiscardHandler), events: api.NewEvents(), webhooks: newWebhooks(slog.New(slog.DiscardHandler)), hosts: new(hostnet.AddrSet)}
	r.gw = g
	g.devices = device.New(device.Options{})
	g.restless.init()
	g.limits = newLimits(config.Limits{Flows: 2, PerSource: config.SourceLimits{Flows: 2}}, 0)
	g.outbounds = route.NewOutbounds(g.expire)
	var err error
	if g.users, err = user.New(user.Options{Changed: g.userChanged, Events: g.userEvent}); err != nil {
		t.Fatal(err)
	}
	if g.tracker, err = track.New(track.Options{Interval: time.Second}); err != nil {
		t.Fatal(err)
	}
	if g.poller, err = epoll.New(); err != nil {
		t.Fatal(err)
	}
	r.apply(1, "a", rules...)
	in := &inbound{gw: g, tag: "lan"}
	in.stack, err = netstack.New(netstack.Config{
		Tag: "lan", Device: r.dev, Handler: in, Poller: g.poller, Drops: &g.drops,
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")},
	})
	if err != nil {
		t.Fatal(err)
	}
	g.inbounds = []*inbound{in}
	r.run(in)
	return r
}

// apply makes a new version of the fake outbound, and these rules.
func (r *rig) apply(epoch uint64, fingerprint string, rules ...route.Rule) {
	r.t.Helper()
	g := r.gw
	change, err := g.outbounds.Prepare([]route.Definition{
		{Tag: "reject", Type: "reject", New: func() (flow.Outbound, error) { return outbound.Reject(), nil }},
		{Tag: "drop", Type: "drop", New: func() (flow.Outbound, error) { return outbound.Drop(), nil }},
		{Tag: "out", Type: "direct", Fingerprint: fingerprint, New: func() (flow.Outbound, error) {
			return fake{func(ctx context.Context, f flow.Flow) (flow.Stream, error) { return r.dial(ctx, f) }}, nil
		}},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	plane, err := route.Compile(route.Spec{Rules: rules, Default: "out"}, epoch, change.Version)
	if err != nil {
		r.t.Fatal(err)
	}
	g.plane.Store(plane)
	change.Commit()
}

func (r *rig) run(in *inbound) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { r.gw.poller.Run(ctx) })
	wg.Go(func() { in.stack.Run(ctx) })
	r.t.Cleanup(func() {
		r.gw.tracker.EndWhere(flow.ErrShutdown, func(*track.Record) bool { return true })
		in.stack.CancelPending(flow.ErrShutdown)
		r.balanced()
		cancel()
		wg.Wait()
		if err := r.gw.outbounds.Close(); err != nil {
			r.t.Error(err)
		}
		goleak.VerifyNone(r.t)
	})
}

// send sends a TCP segment of the client's port n.
func (r *rig) send(n uint16, flags uint8, seq, ack uint32, payload string) {
	h := wire.Header{Src: client.Addr(), Dst: server.Addr(), TTL: 64}
	size := 20 + len(payload)
	b := h.AppendIP(nil, wire.ProtoTCP, size)
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, client.Port()+n)
	b = binary.BigEndian.AppendUint16(b, server.Port())
	b = binary.BigEndian.AppendUint32(b, seq)
	b = binary.BigEndian.AppendUint32(b, ack)
	b = append(b, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
	b = append(b, payload...)
	sum := wire.PseudoSum(h.Src, h.Dst, wire.ProtoTCP, size)
	binary.BigEndian.PutUint16(b[start+16:], ^wire.Sum(b[start:], sum))
	r.dev.in <- b
}

func (r *rig) syn(n uint16) { r.send(n, wire.SYN, isn, 0, "") }

func (r *rig) written() seen {
	r.t.Helper()
	return within(r.t, r.dev.out)
}

// within is what comes from c, in time.
func within[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		t.Fatal("nothing within 20 s")
		panic("unreachable")
	}
}

// wantFlags takes the next packet that has one of these flags.
func (r *rig) wantFlags(flags uint8) seen {
	r.t.Helper()
	for {
		if s := r.written(); s.TCPFlags&flags == flags {
			return s
		}
	}
}

// balanced waits until nothing is held: no flow, no slot, no dial, no version.
func (r *rig) balanced() {
	r.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		held := r.gw.tracker.Live() + r.gw.inbounds[0].stack.Pending()
		for _, v := range r.gw.outbounds.Current() {
			held += v.Flows()
		}
		r.gw.limits.mu.Lock()
		held += r.gw.limits.flows.Len() + r.gw.limits.links
		r.gw.limits.mu.Unlock()
		for _, v := range r.gw.users.List("", 0) {
			held += v.Connections
		}
		if held == 0 {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%d things are still held", held)
		}
		<-tick.C
	}
}

// silent fails if something is written within a short while.
func (r *rig) silent() {
	r.t.Helper()
	select {
	case s := <-r.dev.out:
		r.t.Fatalf("the client was told %+v", s)
	case <-time.After(100 * time.Millisecond):
	}
}

// dialLoopback makes dials end at a listener whose connections come back.
func (r *rig) dialLoopback() chan *net.TCPConn {
	r.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	accepted := make(chan *net.TCPConn, 16)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c.(*net.TCPConn)
		}
	})
	r.t.Cleanup(func() { l.Close(); wg.Wait() })
	r.dial = func(ctx context.Context, _ flow.Flow) (flow.Stream, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			return nil, err
		}
		return dialled{c.(*net.TCPConn)}, nil
	}
	return accepted
}

// dialled is a stream that tells where it left from, as an outbound's own does.
type dialled struct{ *net.TCPConn }

func (d dialled) LocalAddrPort() netip.AddrPort { return d.LocalAddr().(*net.TCPAddr).AddrPort() }

func TestADialThatFailsIsRefusedAsOnADirectPathAndNeverRegistered(t *testing.T) {
	for _, c := range []struct {
		name       string
		err        error
		reset      bool
		kind, code uint8 // of the ICMP error; 0: none
	}{
		{"refused", syscall.ECONNREFUSED, true, 0, 0},
		{"no route", syscall.ENETUNREACH, false, 3, 0},
		{"host unreachable", syscall.EHOSTUNREACH, false, 3, 1},
		{"not permitted", syscall.EACCES, false, 3, 13},
		{"toward ourselves", &flow.Refusal{Verdict: flow.VerdictProhibited}, false, 3, 13},
		{"no such name", &net.DNSError{Err: "no such host"}, false, 3, 1},
		{"timed out", syscall.ETIMEDOUT, false, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			events := r.gw.tracker.Subscribe()
			defer events.Close()
			r.dial = func(context.Context, flow.Flow) (flow.Stream, error) {
				return nil, &net.OpError{Op: "dial", Err: c.err}
			}
			r.syn(0)
			switch {
			case c.reset:
				if s := r.written(); s.TCPFlags&wire.RST == 0 {
					t.Fatalf("told %+v", s)
				}
			case c.kind != 0:
				if s := r.written(); s.Proto != wire.ProtoICMP || s.ICMPType != c.kind || s.ICMPCode != c.code {
					t.Fatalf("told %+v, want ICMP %d %d", s, c.kind, c.code)
				}
			default:
				r.silent()
			}
			r.balanced()
			if n := len(r.gw.tracker.Closed()); n != 0 {
				t.Errorf("%d closed records of a dial that failed", n)
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if ev, _, err := events.Next(ended); err == nil {
				t.Errorf("a dial that failed sent %+v", ev)
			}
		})
	}
}

func TestRejectedAndDroppedFlowsAreCountedAsBlocked(t *testing.T) {
	for tag, reset := range map[string]bool{"reject": true, "drop": false} {
		t.Run(tag, func(t *testing.T) {
			r := newRig(t, route.Rule{Outbound: tag, Match: route.Match{Port: []route.PortRange{{From: 80, To: 80}}}})
			r.syn(0)
			if reset {
				if s := r.written(); s.TCPFlags&wire.RST == 0 {
					t.Fatalf("told %+v", s)
				}
			} else {
				r.silent()
			}
			r.balanced()
			if n := r.gw.drops[flow.DropBlocked].Load(); n != 1 {
				t.Fatalf("%d blocked", n)
			}
		})
	}
}

func TestAFlowIsRegisteredAfterItsDialAndBeforeItsHandshake(t *testing.T) {
	r := newRig(t)
	accepted := r.dialLoopback()
	dial := r.dial
	r.dial = func(ctx context.Context, f flow.Flow) (flow.Stream, error) {
		if n := r.gw.tracker.Live(); n != 0 {
			t.Errorf("%d flows are registered while the first dials", n)
		}
		s, err := dial(ctx, f)
		if n := r.gw.tracker.Live(); n != 0 {
			t.Errorf("%d flows are registered before the dial returned", n)
		}
		return s, err
	}
	r.syn(0)
	r.wantFlags(wire.SYN | wire.ACK)
	flows := r.gw.tracker.Flows()
	if len(flows) != 1 {
		t.Fatalf("%d flows are registered when the client hears of it", len(flows))
	}
	f := flows[0]
	peer := within(t, accepted)
	defer peer.Close()
	if f.Inbound != "lan" || f.Source != client || f.Dest.Addr != server || f.Outbound != "out" || f.Version != 1 ||
		f.Network != flow.TCP || f.Rule != route.DefaultRule || f.Epoch != 1 || f.Egress.String() != peer.RemoteAddr().String() {
		t.Errorf("record %+v", f)
	}
}

func TestAKillReachesAFlowInEachOfItsStates(t *testing.T) {
	for _, relaying := range []bool{false, true} {
		t.Run(map[bool]string{false: "accepting", true: "relaying"}[relaying], func(t *testing.T) {
			r := newRig(t)
			accepted := r.dialLoopback()
			r.syn(0)
			ack := r.wantFlags(wire.SYN|wire.ACK).seq + 1
			peer := within(t, accepted)
			defer peer.Close()
			if relaying {
				r.send(0, wire.ACK|wire.PSH, isn+1, ack, "hello")
				if _, err := io.ReadFull(peer, make([]byte, 5)); err != nil {
					t.Fatal(err)
				}
			}
			begun := time.Now()
			if !r.gw.tracker.Kill(1) {
				t.Fatal("the flow is not registered")
			}
			r.wantFlags(wire.RST)
			r.balanced()
			if d := time.Since(begun); d > 2*time.Second {
				t.Errorf("took %s", d)
			}
			closed := r.gw.tracker.Closed()
			if len(closed) != 1 || closed[0].Reason != flow.Killed {
				t.Fatalf("closed %+v", closed)
			}
			if want := uint64(len("hello")); relaying && closed[0].Up != want {
				t.Errorf("counted %d bytes up, want %d", closed[0].Up, want)
			}
		})
	}
}

func TestDialsInProgressHoldSlotsAndGiveThemBack(t *testing.T) {
	r := newRig(t)
	dialling := make(chan struct{}, 16)
	r.dial = func(ctx context.Context, _ flow.Flow) (flow.Stream, error) {
		dialling <- struct{}{}
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	for n := range uint16(3) { // the limit is 2
		r.syn(n)
	}
	within(t, dialling)
	within(t, dialling)
	r.silent()
	if n := r.gw.drops[flow.DropFlowLimit].Load(); n != 1 {
		t.Fatalf("%d drops by the limit", n)
	}
	r.send(0, wire.RST, isn+1, 0, "")
	r.send(1, wire.RST, isn+1, 0, "")
	r.balanced()
	r.syn(7)
	within(t, dialling)
}

func TestAFlowWhoseVersionDrainsAtOnceEndsAsDrained(t *testing.T) {
	r := newRig(t)
	accepted := r.dialLoopback()
	r.syn(0)
	ack := r.wantFlags(wire.SYN|wire.ACK).seq + 1
	r.send(0, wire.ACK, isn+1, ack, "")
	peer := within(t, accepted)
	defer peer.Close()
	r.apply(2, "b")
	r.wantFlags(wire.RST)
	r.balanced()
	if closed := r.gw.tracker.Closed(); len(closed) != 1 || closed[0].Reason != flow.Drained {
		t.Fatalf("closed %+v", closed)
	}
}

func TestNothingNewBeginsWhileTheGatewayCloses(t *testing.T) {
	r := newRig(t)
	r.dial = func(context.Context, flow.Flow) (flow.Stream, error) {
		t.Error("dialled")
		return nil, syscall.ECONNREFUSED
	}
	r.gw.closing.Store(true)
	r.syn(0)
	r.silent()
}
