package gateway

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"gatewayd/fanout"
	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/config"
	"gatewayd/internal/exitcode"
	"gatewayd/internal/hostnet"
	"gatewayd/netstack"
	"gatewayd/outbound"
	"gatewayd/route"
	"gatewayd/tun"
)

// usePlane makes cfg's outbounds and rules the ones that serve, all or nothing.
func (g *Gateway) usePlane(cfg *config.Config, epoch uint64) error {
	change, err := g.outbounds.Prepare(g.definitions(cfg))
	if err != nil {
		return err
	}
	plane, err := route.Compile(specOf(cfg.Route), epoch, change.Version)
	if err != nil {
		change.Discard()
		return err
	}
	g.plane.Store(plane)
	g.gen.Add(1)
	change.Commit()
	for _, w := range g.warnings(cfg) {
		g.log.Warn(w)
	}
	return nil
}

// definitions lists the outbounds of cfg and the built-in ones.
func (g *Gateway) definitions(cfg *config.Config) []route.Definition {
	defs := []route.Definition{
		{Tag: typeReject, Type: typeReject, New: func() (flow.Outbound, error) { return outbound.Reject(), nil }},
		{Tag: typeDrop, Type: typeDrop, New: func() (flow.Outbound, error) { return outbound.Drop(), nil }},
	}
	for _, o := range cfg.Outbounds {
		drain := route.Drain{Keep: o.Drain == config.DrainKeep, After: 0}
		if o.Drain > 0 {
			drain.After = time.Duration(o.Drain)
		}
		defs = append(defs, route.Definition{
			Tag: o.Tag, Type: o.Type, Drain: drain, Fingerprint: fingerprint(o, cfg.Timeouts),
			New: func() (flow.Outbound, error) { return g.newDirect(o, cfg.Timeouts) },
		})
	}
	return defs
}

const (
	typeReject = "reject"
	typeDrop   = "drop"
)

// blocked reports whether a version refuses by design: its flows are free.
func blocked(v *route.Version) bool { return v.Type() == typeReject || v.Type() == typeDrop }

// fingerprint says what makes a definition a new version. How it drains does not.
func fingerprint(o config.Outbound, t config.Timeouts) string {
	o.Drain = 0
	return fmt.Sprintf("%+v %v %v", o, t.Dial, t.TCP.Keepalive)
}

func (g *Gateway) newDirect(o config.Outbound, t config.Timeouts) (flow.Outbound, error) {
	return outbound.NewDirect(outbound.DirectConfig{
		Name:        o.Tag,
		Interface:   o.Interface,
		Source4:     o.Source4,
		Source6:     o.Source6,
		Mark:        o.Mark,
		Family:      families[o.Family],
		DialTimeout: t.Dial,
		Keepalive:   outbound.Keepalive(t.TCP.Keepalive),
		Self:        g.isSelf,
		SelfGen:     g.hosts.Gen,
		Filtering:   filterings[o.Filtering],
		Poller:      g.poller,
		Drops:       &g.drops,
	})
}

var families = map[string]outbound.Family{
	"auto": outbound.AnyFamily,
	"ipv4": outbound.IPv4Only,
	"ipv6": outbound.IPv6Only,
}

var filterings = map[string]outbound.Filtering{
	"endpoint-independent":       outbound.EndpointIndependent,
	"address-dependent":          outbound.AddressDependent,
	"address-and-port-dependent": outbound.AddressAndPortDependent,
}

// isSelf reports whether a belongs to this host, or to the network of one of its
// devices: what is dialled there would come back in.
func (g *Gateway) isSelf(a netip.Addr) bool {
	if g.hosts.Contains(a) {
		return true
	}
	for _, in := range g.inbounds {
		for _, p := range in.nets {
			if p.Contains(a.Unmap()) {
				return true
			}
		}
	}
	return false
}

func specOf(r config.Route) route.Spec {
	s := route.Spec{Default: r.Default}
	for _, rule := range r.Rules {
		s.Rules = append(s.Rules, route.Rule{
			Name: rule.Name, Match: matchOf(rule.Match), Outbound: rule.Outbound,
			Pin: rule.Pin, Record: rule.Record, AllowHost: rule.AllowHost,
		})
	}
	return s
}

func matchOf(m config.Match) route.Match {
	r := route.Match{
		Inbound: m.Inbound, Network: m.Network, Source: m.Source, IP: m.IP,
		SourcePort: portsOf(m.SourcePort), Port: portsOf(m.Port),
		User: m.User, UserGroup: m.UserGroup, UserState: m.UserState, Device: m.Device,
	}
	if m.Not != nil {
		not := matchOf(*m.Not)
		r.Not = &not
	}
	for _, a := range m.Any {
		r.Any = append(r.Any, matchOf(a))
	}
	for _, a := range m.All {
		r.All = append(r.All, matchOf(a))
	}
	return r
}

func portsOf(rs []config.PortRange) (out []route.PortRange) {
	for _, r := range rs {
		out = append(out, route.PortRange(r))
	}
	return out
}

// listen makes the API and binds it.
func (g *Gateway) listen(cfg *config.Config) error {
	o := api.Options{
		SocketGroup: cfg.API.SocketGroup, Hosts: cfg.API.Hosts, Privacy: cfg.Privacy,
		Version: g.opt.Version, Log: g.log, Tracker: g.tracker, Gateway: g, Drops: &g.drops, Events: g.events,
		Users: registry{g.users, g.bindingsChanged}, Billing: g.ledger, Devices: book{g}, PerUser: cfg.Metrics.PerUser,
	}
	for _, l := range cfg.API.Listen {
		o.Listen = append(o.Listen, l.Network+":"+l.Address)
	}
	o.Tokens = tokensOf(cfg)
	var err error
	if o.TLS, err = tlsOf(cfg); err != nil {
		return exitcode.With(exitcode.Config, err)
	}
	s, err := api.New(o)
	if err != nil {
		return exitcode.With(exitcode.Config, err)
	}
	g.api = s
	return s.Listen()
}

// CheckFiles tells what is wrong with the files that cfg names and a start reads:
// tokens, certificate and key, webhooks' secrets. The error has exitcode.Config.
func CheckFiles(cfg *config.Config) error {
	_, err := tlsOf(cfg)
	_, secrets := targetsOf(cfg.Webhooks)
	return exitcode.With(exitcode.Config, errors.Join(api.CheckTokens(tokensOf(cfg)), err, secrets))
}

func tokensOf(cfg *config.Config) (tokens []api.Token) {
	for _, t := range cfg.API.Tokens {
		tokens = append(tokens, api.Token(t))
	}
	return tokens
}

// tlsOf is nil without a certificate.
func tlsOf(cfg *config.Config) (*tls.Config, error) {
	if cfg.API.TLS.CertFile == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(cfg.API.TLS.CertFile, cfg.API.TLS.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("api.tls: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}, nil
}

// inbound is a device with all that its packets meet first.
type inbound struct {
	gw    *Gateway
	tag   string
	conf  config.TUN
	dev   *tunDevice
	nets  []netip.Prefix // of the device's addresses
	stack *netstack.Stack
	udp   *fanout.Table
}

func (g *Gateway) openTUN(cfg *config.Config, t config.TUN) (*inbound, error) {
	in := &inbound{gw: g, tag: t.Tag, conf: t}
	var err error
	if in.udp, err = fanout.New(in.fanoutConfig(cfg)); err != nil {
		return nil, err
	}
	if in.dev, err = openDevice(tun.Config{
		Name: t.Device, MTU: max(t.MTU, 0), Queues: max(t.Queues, 0), Addresses: t.Address,
		Offload: offloads[t.Offload], Logger: g.log, Drops: &g.drops,
	}, g.log); err != nil {
		return nil, err
	}
	for _, p := range in.dev.Addresses() {
		in.nets = append(in.nets, p.Masked())
	}
	keep := cfg.Timeouts.TCP.Keepalive
	in.stack, err = netstack.New(netstack.Config{
		Tag: t.Tag, Device: in.dev, Handler: in, Poller: g.poller,
		Addresses: routersOf(in.dev.Addresses()), IsBroadcast: g.hosts.IsBroadcast, MTUToward: hostnet.MTUToward,
		Drops: &g.drops, Keepalive: netstack.Keepalive(keep), HalfClosed: cfg.Timeouts.TCP.HalfClosed,
		Dials: g.limits.dials(cfg.Limits.PerSource.Dials), SYNs: synRates, Buffers: g.memory.plan.buffers, Full: g.memory.full,
	})
	if err != nil {
		in.dev.Close() //nolint:errcheck // the first error says it
		return nil, err
	}
	return in, nil
}

var offloads = map[string]tun.Offload{"auto": tun.OffloadAuto, "on": tun.OffloadOn, "off": tun.OffloadOff}

// routersOf are the addresses that ICMP errors on a device with networks ps come
// from: a neighbour of each of its own. Its own ones won't do, since the kernel
// drops what a device sends in the name of this host (martians). A network of
// one address has none.
func routersOf(ps []netip.Prefix) (as []netip.Addr) {
	for _, p := range ps {
		for _, a := range []netip.Addr{p.Addr().Next(), p.Addr().Prev()} {
			broadcast := a.Is4() && p.Bits() < 31 && !p.Contains(a.Next())
			if p.Contains(a) && !broadcast {
				as = append(as, a)
				break
			}
		}
	}
	return as
}
