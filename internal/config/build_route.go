package config

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"gatewayd/flow"
)

// outbounds makes those of type direct, the built-in one included.
func (l *loader) outbounds(known tags) []Outbound {
	var made []Outbound
	for i := range l.raw.Outbounds {
		raw, path := &l.raw.Outbounds[i], element("outbounds", i)
		if !l.sound(path + ".type") {
			continue
		}
		l.misplaced(path, raw.Type)
		l.reference(path+".via", string(raw.Via), known)
		for j, m := range raw.Members {
			l.reference(element(path+".members", j), string(m), known)
		}
		if raw.Type != "direct" {
			l.later(path, raw)
			continue
		}
		made = append(made, l.direct(path, raw))
	}
	l.cycles()
	if !slices.ContainsFunc(made, func(o Outbound) bool { return o.Tag == "direct" }) {
		made = append(made, Outbound{
			Tag: "direct", Type: "direct", Family: "auto", Filtering: "endpoint-independent", Drain: DrainKeep,
		})
	}
	return made
}

// later refuses a type that is not there yet.
func (l *loader) later(path string, raw *rawOutbound) {
	switch {
	case raw.Tag == "direct":
		l.problem(path+".type", "%s: the outbound direct can only be redefined with type: direct; choose another tag", raw.Type)
	case raw.Type == "balancer" && len(raw.Members) == 0 && !l.bad[path+".members"]:
		l.problem(path+".members", "a balancer needs members; list the outbounds that it chooses of")
	}
	l.problem(path+".type", "%s: %s", raw.Type, notYet)
}

func (l *loader) direct(path string, raw *rawOutbound) Outbound {
	made := Outbound{
		Tag: string(raw.Tag), Type: raw.Type, Interface: string(raw.Interface), Mark: uint32(raw.Mark),
		Family: raw.Family, Filtering: raw.Filtering, Drain: raw.Drain,
	}
	for j, a := range raw.Source {
		at := element(path+".source", j)
		if !l.sound(at) {
			continue
		}
		source, family, into := netip.Addr(a), "ipv6", &made.Source6
		if source.Is4() {
			family, into = "ipv4", &made.Source4
		}
		switch {
		case into.IsValid():
			l.problem(at, "%s is the second %s address; one of each family is what a socket can leave from", source, family)
		case raw.Family != "auto" && raw.Family != family:
			l.problem(at, "%s is no %s address, which family asks for; remove one of them", source, raw.Family)
		}
		*into = source
	}
	return made
}

// misplaced reports keys that belong to outbounds of other types.
func (l *loader) misplaced(path, kind string) {
	for _, f := range l.fieldsOf(reflect.TypeFor[rawOutbound]()) {
		if at := join(path, f.key); f.types != nil && !slices.Contains(f.types, kind) && l.set(at) {
			s := l.spotOf(at)
			l.report.addf(s.key, s.path, "not a key of type %s; it belongs to %s", kind, strings.Join(f.types, ", "))
		}
	}
}

// reference reports a tag that no outbound has. What was not written refers to nothing.
func (l *loader) reference(path, tag string, known tags) {
	if tag == "dns" && l.sound(path) {
		l.problem(path, "dns: %s", notYet)
		return
	}
	l.refer(path, "outbound", tag, known.outbounds)
}

func (l *loader) refer(path, noun, tag string, known names) {
	if _, ok := known[tag]; ok || !l.sound(path) || l.report.full() {
		return
	}
	if len(known) == 0 {
		l.problem(path, "no %s %s; there is none at all", noun, quote(tag))
		return
	}
	all := slices.Sorted(maps.Keys(known))
	hint := listed(all)
	if near := nearest(tag, all); near != "" {
		hint += "; did you mean " + near + "?"
	}
	l.problem(path, "no %s %s; %s", noun, quote(tag), hint)
}

// cycles reports outbounds that are reached through themselves, by via or as
// members, once for each cycle.
func (l *loader) cycles() {
	w := walk{l, make(map[string]int), make(map[string]bool)}
	for i, o := range l.raw.Outbounds {
		w.index[string(o.Tag)] = i
	}
	for i := range l.raw.Outbounds {
		w.follow(i, nil)
	}
}

// walk is over the outbounds that go through others.
type walk struct {
	*loader
	index map[string]int // tag to place among the outbounds
	done  map[string]bool
}

const maxTrail = 64 // outbounds through each other

// follow goes on from outbound i; trail is the outbounds that led to it.
func (w *walk) follow(i int, trail []string) {
	raw, path := &w.raw.Outbounds[i], element("outbounds", i)
	tag := string(raw.Tag)
	if w.done[tag] {
		return
	}
	trail = append(trail, tag)
	w.step(path+".via", string(raw.Via), trail)
	for j, m := range raw.Members {
		w.step(element(path+".members", j), string(m), trail)
	}
	w.done[tag] = true
}

func (w *walk) step(at, next string, trail []string) {
	if !w.sound(at) {
		return
	}
	if start := slices.Index(trail, next); start >= 0 {
		w.problem(at, "cycle: %s → %s; an outbound can not go through itself", strings.Join(trail[start:], " → "), next)
		return
	}
	if len(trail) == maxTrail {
		w.problem(at, "more than %d outbounds through each other", maxTrail)
		return
	}
	if i, ok := w.index[next]; ok {
		w.follow(i, trail)
	}
}

func (l *loader) route(known tags) Route {
	made := Route{Default: string(l.raw.Route.Default)}
	l.reference("route.default", made.Default, known)
	named := make(names)
	for i := range l.raw.Route.Rules {
		raw, path := &l.raw.Route.Rules[i], element("route.rules", i)
		named.add(l, path+".name", raw.Name)
		l.reference(path+".outbound", string(raw.Outbound), known)
		if !l.set(path+".outbound") && !raw.Record && l.sound(path) {
			l.problem(path+".outbound", "missing; write outbound: and a tag; %s", listed(slices.Sorted(maps.Keys(known.outbounds))))
		}
		made.Rules = append(made.Rules, Rule{
			Name: raw.Name, Match: l.match(path, &raw.rawMatch, known, 0), Outbound: string(raw.Outbound),
			Pin: raw.Pin, Record: raw.Record, AllowHost: raw.AllowHost,
		})
	}
	return made
}

const maxMatchDepth = 16 // not, any and all inside each other

func (l *loader) match(path string, raw *rawMatch, known tags, depth int) Match {
	if depth > maxMatchDepth {
		l.problem(path, "conditions are nested more than %d deep", maxMatchDepth)
		return Match{}
	}
	made := Match{
		Inbound: stringsOf(raw.Inbound), Network: raw.Network, Source: prefixes(raw.Source), IP: prefixes(raw.IP),
		SourcePort: raw.SourcePort, Port: raw.Port,
		User: stringsOf(raw.User), UserGroup: stringsOf(raw.UserGroup), UserState: raw.UserState,
	}
	for _, d := range raw.Device {
		made.Device = append(made.Device, flow.DeviceSet(d))
	}
	for i, tag := range raw.Inbound {
		l.refer(element(path+".inbound", i), "inbound", string(tag), known.inbounds)
	}
	if raw.Not != nil {
		inner := l.nested(path+".not", raw.Not, known, depth)
		made.Not = &inner
	}
	for i := range raw.Any {
		made.Any = append(made.Any, l.nested(element(path+".any", i), &raw.Any[i], known, depth))
	}
	for i := range raw.All {
		made.All = append(made.All, l.nested(element(path+".all", i), &raw.All[i], known, depth))
	}
	l.emptyLists(path)
	l.portsOfICMP(path, &made)
	return made
}

// nested is a match inside not, any or all, where it has to say something.
func (l *loader) nested(path string, raw *rawMatch, known tags, depth int) Match {
	if !slices.ContainsFunc(l.fieldsOf(reflect.TypeFor[rawMatch]()), func(f field) bool { return l.set(join(path, f.key)) }) && l.sound(path) {
		l.problem(path, "no condition; write one, or remove it")
	}
	return l.match(path, raw, known, depth+1)
}

// emptyLists reports lists of conditions that nothing could satisfy.
func (l *loader) emptyLists(path string) {
	for _, f := range l.fieldsOf(reflect.TypeFor[rawMatch]()) {
		if at := join(path, f.key); l.sound(at) && !l.set(element(at, 0)) && f.list() {
			l.problem(at, "an empty list matches nothing; remove it, or the rule")
		}
	}
}

// portsOfICMP reports conditions that exclude each other.
func (l *loader) portsOfICMP(path string, m *Match) {
	only := len(m.Network) > 0 && !slices.ContainsFunc(m.Network, func(n flow.Network) bool { return n != flow.ICMP })
	for _, key := range []string{"port", "source_port"} {
		if at := join(path, key); only && l.sound(at) && l.sound(path+".network") {
			l.problem(at, "icmp has no ports; remove it, or add tcp or udp to network")
		}
	}
}

func prefixes(raw []network) []netip.Prefix {
	var made []netip.Prefix
	for _, p := range raw {
		made = append(made, netip.Prefix(p))
	}
	return made
}

func stringsOf[S ~string](raw []S) []string {
	var made []string
	for _, s := range raw {
		made = append(made, string(s))
	}
	return made
}
