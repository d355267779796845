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
		Gen:         func() uint64 { return in.gw.plane.Load().Gen() },
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

// resolve decides where the datagrams to one destination go.
func (in *inbound) resolve(f flow.Flow) fanout.Target {
	plane := in.gw.plane.Load()
	now := time.Now()
	d := plane.Route(&route.Query{Flow: f, Now: now})
	plane.Hit(&d)
	t := fanout.Target{
		Outbound: d.Outbound, Name: d.Outbound.String(), Gen: d.Gen, Until: d.Until,
		Pin: d.Pin, AllowHost: d.AllowHost, Ctx: d,
	}
	if f.Network == flow.ICMP {
		t.Outbound, t.Pin = echoStream{d.Outbound, f.Dest}, false
	}
	switch {
	case blocked(d.Outbound):
		t.Blocked, t.Cause = true, flow.DropBlocked
		if d.Outbound.Type() == typeReject {
			t.Refusal = errProhibited
		}
		in.gw.announce(f, &d)
	case !d.AllowHost && outbound.TowardSelf(f.Dest.Addr.Addr(), in.gw.isSelf):
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
	d := t.Ctx.(route.Decision)
	v := d.Outbound
	if !v.Acquire() {
		return fanout.Opened{}, route.ErrDrained
	}
	if !g.limits.acquireLink(f.Source.Addr()) {
		v.Release()
		return fanout.Opened{}, flow.ErrLimit
	}
	release := func() {
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
	fl := g.tracker.Open(metaOf(f, &d, link.LocalAddr()), s.End)
	if v.Expired() {
		fl.End(route.ErrDrained)
	}
	if g.closing.Load() {
		fl.End(flow.ErrShutdown)
	}
	return fanout.Opened{
		Link:     fl.Link(link),
		Receiver: fl.Receiver(s.Down()),
		Close: func(cause error) {
			fl.Close(cause)
			release()
		},
	}, nil
}
