package config

import (
	"fmt"
	"math"
	"net/netip"
	"time"
)

// build makes the Config of the raw structs and reports what is wrong with it.
// The Config is whole only if nothing was reported.
func (l *loader) build() *Config {
	raw := &l.raw
	tags := l.tags()
	c := &Config{
		StateDir:  string(raw.StateDir),
		Profile:   raw.Profile,
		Privacy:   raw.Privacy,
		Sample:    raw.Sample,
		Sweep:     raw.Sweep,
		Limits:    Limits{int(raw.Limits.Flows), SourceLimits(raw.Limits.PerSource)},
		Log:       Log{Format: raw.Log.Format},
		Timeouts:  l.timeouts(),
		API:       l.api(),
		FlowLog:   l.flowLog(),
		TUN:       l.tun(),
		Outbounds: l.outbounds(tags),
		Route:     l.route(tags),
		Groups:    l.groups(tags),
		Users:     l.users(tags),
		Ledger:    l.ledger(),
		Metrics:   Metrics(raw.Metrics),
		Webhooks:  l.webhooks(),
	}
	_ = c.Log.Level.UnmarshalText([]byte(raw.Log.Level)) // the schema has these words only
	l.atLeast("sample", c.Sample, time.Millisecond)
	l.atLeast("sweep", c.Sweep, time.Millisecond)
	l.validate(c)
	return c
}

// tags are what a file may refer to.
type tags struct {
	inbounds, outbounds, groups names
}

// tags gathers them and reports those that are there twice.
func (l *loader) tags() tags {
	t := tags{make(names), make(names), make(names)}
	for i, d := range l.raw.TUN {
		t.inbounds.add(l, element("tun", i)+".tag", string(d.Tag))
	}
	for i, w := range l.raw.WireGuard {
		path := element("wireguard", i) + ".tag"
		t.inbounds.add(l, path, string(w.Tag))
		t.outbounds.add(l, path, string(w.Tag))
	}
	for i, o := range l.raw.Outbounds {
		path := element("outbounds", i) + ".tag"
		if reserved := string(o.Tag); reserved == "reject" || reserved == "drop" || reserved == "dns" {
			l.problem(path, "%s is built in and can not be redefined; choose another tag", reserved)
			continue
		}
		t.outbounds.add(l, path, string(o.Tag))
	}
	for i, g := range l.raw.Groups {
		t.groups.add(l, element("groups", i)+".name", string(g.Name))
	}
	for _, builtIn := range []string{"direct", "reject", "drop"} {
		if _, redefined := t.outbounds[builtIn]; !redefined {
			t.outbounds[builtIn] = ""
		}
	}
	return t
}

// names are values of which each may be there once, with the paths where they are.
type names map[string]string

// add reports a name that is there already. What was not written is no name.
func (n names) add(l *loader, path, name string) {
	if !l.sound(path) {
		return
	}
	if first, taken := n[name]; taken {
		l.problem(path, "%s is taken, by %s at %s; choose another", quote(name), first, l.at(first))
		return
	}
	n[name] = path
}

func (l *loader) atLeast(path string, d, least time.Duration) {
	if d < least && !l.bad[path] {
		l.problem(path, "%s: want at least %s", d, least)
	}
}

func (l *loader) within(path string, d, least, most time.Duration) {
	if (d < least || d > most) && !l.bad[path] {
		l.problem(path, "%s: want %s to %s", d, least, most)
	}
}

func (l *loader) positive(path string, d time.Duration) {
	if d <= 0 && !l.bad[path] {
		l.problem(path, "0: want more than that; a flow needs an end")
	}
}

func (l *loader) wholeSeconds(path string, d time.Duration) {
	if d%time.Second != 0 {
		l.problem(path, "%s: want whole seconds, which is what the kernel counts in", d)
	}
}

func (l *loader) timeouts() Timeouts {
	raw := &l.raw.Timeouts
	k, u := Keepalive(raw.TCP.Keepalive), raw.UDP
	l.positive("timeouts.dial", raw.Dial)
	l.positive("timeouts.tcp.half_closed", raw.TCP.HalfClosed)
	l.positive("timeouts.tcp.peer_idle", raw.TCP.PeerIdle)
	l.positive("timeouts.udp.one_way", u.OneWay)
	l.positive("timeouts.udp.answered", u.Answered)
	l.positive("timeouts.tcp.keepalive.interval", k.Interval)
	l.wholeSeconds("timeouts.tcp.keepalive.interval", k.Interval)
	l.wholeSeconds("timeouts.tcp.keepalive.idle", k.Idle)
	ports := make(map[uint16]time.Duration, len(u.Ports))
	for p, d := range u.Ports {
		l.positive(fmt.Sprintf("timeouts.udp.ports.%d", p), d)
		ports[uint16(p)] = d
	}
	return Timeouts{
		Dial:  raw.Dial,
		Grace: raw.Grace,
		TCP:   TCPTimeouts{k, raw.TCP.HalfClosed, raw.TCP.PeerIdle},
		UDP:   UDPTimeouts{u.OneWay, u.Answered, ports},
	}
}

func (l *loader) api() API {
	raw := &l.raw.API
	made := API{Listen: raw.Listen, SocketGroup: raw.SocketGroup}
	if !l.set("api.listen") {
		made.Listen = []Listener{{"unix", "/run/gatewayd/api.sock"}}
	}
	if raw.TLS != nil {
		made.TLS = TLS{string(raw.TLS.Cert), string(raw.TLS.Key)}
	}
	for _, h := range raw.Hosts {
		made.Hosts = append(made.Hosts, string(h))
	}
	tokens, listeners := make(names), make(names)
	for i, t := range raw.Tokens {
		tokens.add(l, element("api.tokens", i)+".name", t.Name)
		made.Tokens = append(made.Tokens, Token{t.Name, t.Role, string(t.File)})
	}
	for i, at := range raw.Listen {
		path := element("api.listen", i)
		listeners.add(l, path, at.Network+":"+at.Address)
		l.listener(path, at)
	}
	return made
}

// minFlowLog is the least size of a flow log, which has room for some hundred flows.
const minFlowLog = 64 << 10

func (l *loader) flowLog() FlowLog {
	raw := l.raw.Events.FlowLog
	if raw == nil {
		return FlowLog{}
	}
	const path = "events.flow_log.size"
	if (raw.Size < minFlowLog || raw.Size > math.MaxInt64) && !l.bad[path] {
		l.problem(path, "%d bytes: want at least 64KiB, and less than 8EiB", raw.Size)
	}
	return FlowLog{string(raw.File), int64(min(raw.Size, math.MaxInt64)), raw.Keep}
}

// listener reports a TCP listener that anyone could use, or listen in on.
func (l *loader) listener(path string, at Listener) {
	if at.Network != "tcp" || l.bad[path] {
		return
	}
	if !l.set("api.tokens") || len(l.raw.API.Tokens) == 0 {
		l.problem(path, "a TCP listener needs a token; add api.tokens: [{name: ops, role: admin, file: /etc/gatewayd/tokens/ops}]")
	}
	if !at.Loopback() && l.raw.API.TLS == nil {
		l.problem(path, "a TCP listener off loopback needs TLS; add api.tls: {cert_file: …, key_file: …}, or listen on 127.0.0.1")
	}
}

func (l *loader) tun() []TUN {
	var made []TUN
	devices := make(names)
	if len(l.raw.TUN) > maxTUN {
		l.problem("tun", "%d devices; %d is the most", len(l.raw.TUN), maxTUN)
		return nil
	}
	for i, t := range l.raw.TUN {
		path := element("tun", i)
		devices.add(l, path+".device", string(t.Device))
		d := TUN{Tag: string(t.Tag), Device: string(t.Device), MTU: int(t.MTU), Queues: int(t.Queues), Offload: t.Offload}
		if len(t.Address) > maxAddresses {
			l.problem(path+".address", "%d addresses; %d is the most", len(t.Address), maxAddresses)
			continue
		}
		for j, a := range t.Address {
			p := netip.Prefix(a)
			d.Address = append(d.Address, p)
			if at := element(path+".address", j); d.MTU != Auto && d.MTU < minIPv6MTU && p.Addr().Is6() && l.sound(path+".mtu") && l.sound(at) {
				l.problem(path+".mtu", "%d: below %d the kernel takes no IPv6 address; raise it, or remove %s", d.MTU, minIPv6MTU, p)
			}
		}
		if d.MTU != Auto && d.MTU < minIPv6MTU && len(d.Address) == 0 && l.sound(path+".mtu") {
			l.problem(path+".mtu", "%d: below %d there is no IPv6; list the IPv4 addresses that the device has", d.MTU, minIPv6MTU)
		}
		if l.set(path+".address") && len(d.Address) == 0 && !l.bad[path+".address"] {
			l.problem(path+".address", "empty; remove it for automatic addresses")
		}
		made = append(made, d)
	}
	l.overlaps(made)
	return made
}

// Limits of TUN devices; a gateway has one or a few.
const (
	maxTUN       = 64
	maxAddresses = 64 // of one device
)

const minIPv6MTU = 1280 // bytes, RFC 8200 section 5

// overlaps reports addresses whose prefixes are on two devices, and those that a
// device has twice.
func (l *loader) overlaps(devices []TUN) {
	type owned struct {
		path   string
		device int
		prefix netip.Prefix
	}
	var seen []owned
	for i, d := range devices {
		for j, p := range d.Address {
			path := element(element("tun", i)+".address", j)
			if !l.sound(path) {
				continue
			}
			for _, o := range seen {
				if o.device != i && o.prefix.Overlaps(p) || o.prefix.Addr() == p.Addr() {
					l.problem(path, "%s overlaps %s of %s; choose another prefix", p, o.prefix, o.path)
					break
				}
			}
			seen = append(seen, owned{path, i, p})
		}
	}
}
