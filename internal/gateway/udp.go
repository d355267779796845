package gateway

import (
	"context"
	"net/netip"
	"time"

	"gatewayd/fanout"
	"gatewayd/flow"
	"gatewayd/internal/config"
	"gatewayd/outbound"
	"gatewayd/route"
)

// HandleDatagrams runs on the goroutine that reads the device.
func (in *inbound) HandleDatagrams(f flow.Flow, ts []flow.Train) { in.udp.Handle(f, ts) }

func (in *inbound) fanoutConfig(cfg *config.Config) fanout.Config {
	return fanout.Config{
		Resolve:     in.resolve,
		Gen:         in.gw.gen.Load,
		Open:        in.openLink,
		Reply:       in.reply,
		Unreachable: in.unreachable,
		Refused: func(c fanout.Client, tr flow.Train, err error) {
			in.stack.SendRefusal(c.Network, c.Source, tr, flow.VerdictOf(err))
		},
		Timeouts:     fanout.Timeouts(cfg.Timeouts.UDP),
		Sweep:        cfg.Sweep,
		Associations: in.gw.limits.associations(),
		PerSource:    cfg.Limits.PerSource.Associations,
		Opens:        openRates,
		Trusted:      func(a netip.Addr) bool { return in.stack.Trusted(a) },
		Full:         in.gw.memory.full,
		Drops:        &in.gw.drops,
		Log:          in.gw.log,
	}
}

// reply carries what came back to the client.
func (in *inbound) reply(c fanout.Client, ts []flow.Train) (moved int) {
	if c.Network == flow.ICMP {
		return in.stack.SendEchoReplies(c.Source, ts)
	}
	return in.stack.SendDatagrams(c.Source, ts)
}

// unreachable passes an ICMP error on. One of this host itself, about a neighbour
// that does not answer, comes from the gateway like any other error of its own.
func (in *inbound) unreachable(c fanout.Client, e flow.ICMPError) {
	if e.Offender.IsValid() && in.gw.isSelf(e.Offender) {
		e.Offender = netip.Addr{}
	}
	in.stack.SendUnreachable(c.Network, c.Source, e)
}

// errProhibited refuses datagrams on purpose, as a packet filter does.
var errProhibited = &flow.Refusal{Verdict: flow.VerdictProhibited, Text: "datagrams to this destination are prohibited"}

// resolved is what a target was made from, for whoever opens it.
type resolved struct {
	who      party
	decision route.Decision
}

// resolve decides where the datagrams to one destination go.
func (in *inbound) resolve(f flow.Flow) fanout.Target {
	g := in.gw
	now := time.Now()
	who := g.partyOf(f.Source.Addr())
	f.User = who.key
	d, plane := g.decide(&f, &who, now)
	plane.Hit(&d)
	t := fanout.Target{
		Outbound: d.Outbound, Name: d.Outbound.String(), Gen: who.gen, Until: d.Until,
		Pin: d.Pin, AllowHost: d.AllowHost, Ctx: &resolved{who, d},
	}
	if f.Network == flow.ICMP {
		t.Outbound, t.Pin = echoStream{d.Outbound, f.Dest}, false
	}
	refusal := who.refusal()
	switch {
	case refusal != "":
		g.users.Refused(refusal)
		t.Blocked, t.Cause, t.Refusal = true, flow.DropUser, errProhibited
	case blocked(d.Outbound):
		t.Blocked, t.Cause = true, flow.DropBlocked
		if d.Outbound.Type() == typeReject {
			t.Refusal = errProhibited
		}
		g.announce(f, &who, &d)
	case !d.AllowHost && outbound.TowardSelf(f.Dest.Addr.Addr(), g.isSelf):
		// The outbound refuses it too, but a sub-link would be opened to hear that.
		t.Blocked, t.Cause, t.Refusal = true, flow.DropSelf, errProhibited
		if again := now.Add(addressAge); t.Until.IsZero() || again.Before(t.Until) {
			t.Until = again
		}
	}
	return t
}

// echoStream keeps the echo requests that a client sends to several hosts with one
// id, as Windows does, apart: each is a flow of its own.
type echoStream struct {
	version *route.Version
	dest    flow.Destination
}

// addressAge is how long the answer that an address is this host's own may stand.
const addressAge = time.Second

// openLink opens a sub-link on the decided version, then registers it.
func (in *inbound) openLink(ctx context.Context, f flow.Flow, t fanout.Target, s *fanout.Sub) (fanout.Opened, error) {
	g := in.gw
	r := t.Ctx.(*resolved)
	v := r.decision.Outbound
	m := new(meter)
	if who, known := g.meet(ctx, f.Source.Addr()); !known {
		return fanout.Opened{}, &flow.Refusal{Verdict: flow.VerdictSilent, Text: "whose the source is was not found out in time", Drop: flow.DropUser}
	} else if who.key != r.who.key || who.who.Device != r.who.who.Device {
		return fanout.Opened{}, route.ErrDrained // what waits is decided again, for whom it is from
	}
	lease, err := g.admit(&r.who, &f)
	if err != nil {
		return fanout.Opened{}, err
	}
	if lease != nil {
		m.lease.Store(&leased{Lease: lease})
		lease.Attach(s.End)
		g.users.Opened(r.who.who.Device)
	}
	if !v.Acquire() {
		m.close()
		return fanout.Opened{}, route.ErrDrained
	}
	if !g.limits.acquireLink(f.Source.Addr()) {
		m.close()
		v.Release()
		return fanout.Opened{}, flow.ErrLimit
	}
	release := func() {
		m.close()
		g.limits.releaseLink(f.Source.Addr())
		v.Release()
	}
	f.AllowHost = t.AllowHost
	link, err := v.Outbound().OpenLink(ctx, f, s)
	if err != nil {
		g.dialFailed(v, f, err)
		release()
		return fanout.Opened{}, err
	}
	meta := metaOf(f, &r.who, &r.decision, link.LocalAddr())
	meta.Owner = m
	m.open(g, meta, s.End)
	ways := m.through(link, s.Down(), s)
	if v.Expired() {
		m.flow.End(route.ErrDrained)
	}
	if g.closing.Load() {
		m.flow.End(flow.ErrShutdown)
	}
	g.settle(m, &r.who)
	return fanout.Opened{
		Link:     ways,
		Receiver: ways,
		Close: func(cause error) {
			m.flow.Close(cause)
			release()
		},
	}, nil
}
