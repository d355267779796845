package gateway

import (
	"context"
	"net/netip"
	"time"

	"gatewayd/flow"
	"gatewayd/route"
	"gatewayd/track"
	"gatewayd/user"
)

// party is who a flow runs for, as it was at one moment.
type party struct {
	gen    uint64       // of decisions, from before the rest was looked up
	key    flow.UserKey // 0: anonymous
	who    route.Who
	detour string // tag of the outbound for who used up the traffic
}

// partyOf looks up who has an address. It takes no lock.
func (g *Gateway) partyOf(a netip.Addr) party {
	p := party{gen: g.gen.Load()}
	p.who.Device = g.devices.Lookup(a)
	if key, ok := g.users.UserOf(p.who.Device); ok {
		p.key = key
		p.who.User, p.who.Group, p.who.State = g.users.Facts(key)
		p.detour = g.users.Detour(key)
	}
	return p
}

// meet is partyOf for who begins a flow. Where users are known by MAC or name it finds
// out whose an address is that nobody knows yet, and blocks for that, 200 ms at most;
// false: too many ask for that now.
func (g *Gateway) meet(ctx context.Context, a netip.Addr) (party, bool) {
	if g.users.NamesDevices() {
		if _, sure := g.devices.Meet(ctx, a); !sure {
			return party{}, false
		}
	}
	return g.partyOf(a), true
}

// refusal is why its user gets no flow as it is now, "" if it may.
func (p *party) refusal() user.Refusal {
	switch p.who.State {
	case user.StateDisabled.String():
		return user.RefusedDisabled
	case user.StateExpired.String():
		return user.RefusedExpired
	case user.StateExhausted.String():
		if p.detour == "" {
			return user.RefusedTraffic
		}
	}
	if p.key != 0 && p.who.User == "" {
		return user.RefusedUnknown
	}
	return ""
}

// errRefused is what a flow ends with whose device got a user that refuses it.
var errRefused = &flow.Cause{Reason: flow.Policy, Text: "the limits of its user refuse the flow"}

// refusalOf shows a client whose user refuses it what became of it.
func refusalOf(n flow.Network, err error) *flow.Refusal {
	r := &flow.Refusal{Verdict: flow.VerdictProhibited, Text: err.Error(), Drop: flow.DropUser}
	if n == flow.TCP {
		r.Verdict = flow.VerdictReset
	}
	return r
}

// admit asks the user of a party for a lease: nil for an anonymous flow. The error is
// a *flow.Refusal.
func (g *Gateway) admit(p *party, f *flow.Flow) (*user.Lease, error) {
	f.User = p.key
	if p.key == 0 {
		return nil, nil
	}
	l, err := g.users.Admit(p.key, subjectOf(f.Inbound, f.Source))
	if err != nil {
		return nil, refusalOf(f.Network, err)
	}
	return l, nil
}

func subjectOf(inbound string, source netip.AddrPort) user.Subject {
	return user.Subject{Source: source.Addr().Unmap(), Inbound: inbound, Client: source}
}

// decide routes f for a party, on the current plane. Who used up the traffic and has an
// outbound for that gets it, unless a rule refuses the flow.
func (g *Gateway) decide(f *flow.Flow, p *party, now time.Time) (d route.Decision, plane *route.Plane) {
	plane = g.plane.Load()
	d = plane.Route(&route.Query{Flow: *f, Now: now, Who: p.who})
	if tag := p.detour; tag != "" && !blocked(d.Outbound) {
		v, ok := g.outbounds.Find(tag)
		if !ok { // removed since the limit was written: never the way of those who have traffic left
			v, _ = g.outbounds.Find(typeReject)
		}
		d.Outbound, d.Rule, d.RuleName, d.Pin = v, route.DefaultRule, "", false
	}
	return d, plane
}

// rebind puts live flows that pick picks under the users that their devices have now.
// One that its new user or a rule about it refuses ends.
func (g *Gateway) rebind(pick func(*track.Record) bool) {
	g.managing.Lock()
	defer g.managing.Unlock()
	g.tracker.EachFlow(func(f *track.Flow, r *track.Record) bool {
		if m, ok := f.Owner().(*meter); ok && pick(r) {
			g.rebindLocked(m, f, r)
		}
		return true
	})
}

func (g *Gateway) rebindLocked(m *meter, of *track.Flow, r *track.Record) {
	p := g.partyOf(r.Source.Addr())
	if p.key == r.User {
		return
	}
	f := flow.Flow{Inbound: r.Inbound, Network: r.Network, Source: r.Source}
	l, err := g.admit(&p, &f)
	if err != nil {
		of.End(errRefused)
		return
	}
	m.hand(l, track.Principal{User: p.key, UserName: p.who.User})
	if g.forbidden(r, time.Now()) {
		of.End(flow.ErrPolicy)
	}
}

// settle looks again at a flow that was registered while decisions or bindings
// changed: whoever changed them may not have seen it.
func (g *Gateway) settle(m *meter, p *party) {
	if g.gen.Load() == p.gen {
		return
	}
	g.managing.Lock()
	r, live := g.tracker.Get(m.flow.ID())
	if live {
		g.rebindLocked(m, m.flow, &r)
	}
	g.managing.Unlock()
	if live && g.forbidden(&r, time.Now()) {
		m.flow.End(flow.ErrPolicy)
	}
}

// endForbidden decides live flows of users again: those that a rule refuses now end.
func (g *Gateway) endForbidden(users map[flow.UserKey]bool) {
	now := time.Now()
	g.tracker.EndWhere(flow.ErrPolicy, func(r *track.Record) bool { return users[r.User] && g.forbidden(r, now) })
}

// forbidden reports that a rule refuses a live flow now.
func (g *Gateway) forbidden(r *track.Record, now time.Time) bool {
	f := flow.Flow{Inbound: r.Inbound, Source: r.Source, Dest: r.Dest, User: r.User, Network: r.Network}
	p := g.partyOf(r.Source.Addr())
	d, _ := g.decide(&f, &p, now)
	return blocked(d.Outbound)
}
