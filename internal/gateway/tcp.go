package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/netstack"
	"gatewayd/route"
	"gatewayd/track"
)

// HandleTCP carries one connection attempt to its verdict, on its own goroutine,
// which ends when the relay runs.
func (in *inbound) HandleTCP(p *netstack.Pending) {
	g := in.gw
	f := p.Flow()
	if g.closing.Load() {
		p.Refuse(flow.VerdictSilent)
		return
	}
	if !g.limits.acquire(f.Source.Addr()) {
		g.drops.Add(flow.DropFlowLimit, 1)
		p.Refuse(flow.VerdictSilent)
		return
	}
	ctx, cancel := context.WithCancel(p.Context())
	defer cancel()
	t := &tcpFlow{gw: g, source: f.Source.Addr(), cancel: cancel}
	who, known := g.meet(ctx, f.Source.Addr())
	if !known {
		g.drops.Add(flow.DropUser, 1)
		t.release()
		p.Refuse(flow.VerdictSilent) // it asks again in a second
		return
	}
	lease, err := g.admit(&who, &f)
	if err != nil {
		g.drops.Add(flow.DropUser, 1)
		t.release()
		p.Refuse(flow.VerdictOf(err))
		return
	}
	if lease != nil {
		t.meter.lease.Store(&leased{Lease: lease})
		lease.Attach(t.userEnds)
		g.users.Opened(who.who.Device)
	}
	d, ok := g.route(&f, &who)
	if !ok {
		t.release()
		p.Refuse(flow.VerdictSilent)
		return
	}
	t.version = d.Outbound
	stream, err := d.Outbound.Outbound().DialStream(ctx, f)
	if err != nil {
		if cause := t.cause.Load(); cause != nil {
			err = refusalOf(flow.TCP, *cause)
		}
		t.release()
		g.refuse(p, f, &who, &d, err)
		return
	}
	t.run(ctx, p, stream, metaOf(f, &who, &d, egressOf(stream)), &who)
}

// route decides f and puts it on the decided version.
func (g *Gateway) route(f *flow.Flow, who *party) (route.Decision, bool) {
	for {
		d, plane := g.decide(f, who, time.Now())
		if d.Outbound.Acquire() {
			plane.Hit(&d)
			f.AllowHost = d.AllowHost
			return d, true
		}
		if g.closing.Load() || g.plane.Load() == plane {
			return d, false
		}
	}
}

// refuse shows the client why there is no connection. One that gave up meanwhile
// is told nothing, as by silence, and is no failure of the outbound.
func (g *Gateway) refuse(p *netstack.Pending, f flow.Flow, who *party, d *route.Decision, err error) {
	if blocked(d.Outbound) {
		g.drops.Add(flow.DropBlocked, 1)
		g.announce(f, who, d)
	} else if p.Context().Err() == nil {
		g.dialFailed(d.Outbound, f, err)
		if flow.Scarce(err) {
			g.drops.Add(flow.DropResources, 1)
		}
	}
	p.Refuse(flow.VerdictOf(err))
}

// dialFailed tells of a dial that failed: at debug, as far sides do refuse, but
// the first time that a version's own way out is at fault as a warning, and once a
// minute that this host is out of something.
func (g *Gateway) dialFailed(v *route.Version, f flow.Flow, err error) {
	level := slog.LevelDebug
	if isLocal(err) && v.Failed(err) || flow.Scarce(err) && g.shortage.due(time.Now()) {
		level = slog.LevelWarn
	}
	g.log.Log(context.Background(), level, "dial failed", "outbound", v.String(), "source", f.Source, "err", err)
}

// isLocal reports whether a dial failed before anything left this host.
func isLocal(err error) bool {
	return slices.ContainsFunc(localErrors, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

var localErrors = []syscall.Errno{
	syscall.ENODEV, syscall.ENXIO, syscall.EADDRNOTAVAIL, syscall.ENETUNREACH, syscall.ENETDOWN,
	syscall.EPERM, syscall.EACCES,
}

// shortageEvery is the time between warnings of a lack of resources.
const shortageEvery = time.Minute

// shortage is when a lack of resources was warned of last.
type shortage struct{ last atomic.Pointer[time.Time] }

// due reports that it is time for the next warning, to one of those who ask.
func (s *shortage) due(now time.Time) bool {
	last := s.last.Load()
	return (last == nil || now.Sub(*last) >= shortageEvery) && s.last.CompareAndSwap(last, &now)
}

func metaOf(f flow.Flow, who *party, d *route.Decision, egress netip.AddrPort) track.Meta {
	return track.Meta{
		Inbound: f.Inbound, Network: f.Network, Source: f.Source, Device: who.who.Device.Name, Dest: f.Dest,
		Outbound: d.Outbound.Tag(), Version: d.Outbound.N(), Egress: egress,
		Rule: d.Rule, RuleName: d.RuleName, Recorded: d.Record, Epoch: d.Epoch, User: f.User, UserName: who.who.User,
	}
}

// egressOf is the local address that s left from, if it tells.
func egressOf(s flow.Stream) netip.AddrPort {
	if l, ok := s.(interface{ LocalAddrPort() netip.AddrPort }); ok {
		return l.LocalAddrPort()
	}
	return netip.AddrPort{}
}

// tcpFlow is a TCP flow from its admission to its close. It is accepting until the
// client's handshake completed, then relaying; end reaches it in either state.
type tcpFlow struct {
	gw      *Gateway
	version *route.Version // nil until it is routed
	source  netip.Addr
	meter   meter
	cancel  context.CancelFunc    // of the dial and the accept
	cause   atomic.Pointer[error] // why it ends, if that was before the relay

	mu   sync.Mutex
	open bool           // registered: meter.flow is set; guarded by mu
	conn *netstack.Conn // once relaying; guarded by mu
}

// run registers the flow, accepts the client and starts the relay.
func (t *tcpFlow) run(ctx context.Context, p *netstack.Pending, stream flow.Stream, m track.Meta, who *party) {
	m.Owner = &t.meter
	t.register(m)
	if t.version.Expired() {
		t.meter.flow.End(route.ErrDrained)
	}
	if t.gw.closing.Load() {
		t.meter.flow.End(flow.ErrShutdown)
	}
	t.gw.settle(&t.meter, who)
	conn, err := p.Accept(ctx)
	if err != nil {
		reset(stream)
		t.done(err)
		return
	}
	if err := conn.Relay(stream, &t.meter, t.done); err != nil {
		t.done(err)
		return
	}
	t.mu.Lock()
	t.conn = conn
	t.mu.Unlock()
	if cause := t.cause.Load(); cause != nil {
		conn.End(*cause)
	}
}

// register makes the attempt a flow. What its user ended before is ended after.
func (t *tcpFlow) register(m track.Meta) {
	t.meter.open(t.gw, m, t.end)
	t.mu.Lock()
	t.open = true
	t.mu.Unlock()
	if cause := t.cause.Load(); cause != nil {
		t.meter.flow.End(*cause)
	}
}

// reset closes a stream whose client is gone: the far side sees that, not an
// orderly end.
func reset(s flow.Stream) {
	if sc, ok := s.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			raw.Control(func(fd uintptr) { //nolint:errcheck // at worst a FIN
				unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) //nolint:errcheck
			})
		}
	}
	s.Close() //nolint:errcheck // nothing was sent
}

// end is the flow's hook for a kill, a drain, the shutdown.
func (t *tcpFlow) end(cause error) {
	t.cause.CompareAndSwap(nil, &cause)
	t.mu.Lock()
	conn := t.conn
	t.mu.Unlock()
	if conn != nil {
		conn.End(cause)
	} else {
		t.cancel()
	}
}

// userEnds is the hook of the lease that the flow was admitted with.
func (t *tcpFlow) userEnds(cause error) {
	t.mu.Lock()
	open := t.open
	if !open {
		t.cause.CompareAndSwap(nil, &cause)
	}
	t.mu.Unlock()
	if open {
		t.meter.flow.End(cause)
	} else {
		t.cancel()
	}
}

// done is called when both sides were told, or when it came to no relay.
func (t *tcpFlow) done(cause error) {
	t.meter.flow.Close(cause)
	t.release()
}

func (t *tcpFlow) release() {
	t.meter.close()
	if t.version != nil {
		t.version.Release()
	}
	t.gw.limits.release(t.source)
}
