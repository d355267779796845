package gateway

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"gatewayd/internal/api"
	"gatewayd/internal/config"
	"gatewayd/internal/hostnet"
	"gatewayd/route"
)

// Status is the gateway's part of GET /v1/status.
func (g *Gateway) Status() api.Status {
	g.apply.Lock()
	cfg := g.apply.config
	g.apply.Unlock()
	s := api.Status{Memory: g.memory.status(), Epoch: g.plane.Load().Epoch(), BlockedSuppressed: g.blocked.suppressed.Load(), Warnings: g.warnings(cfg)}
	if l := g.flowLog.State(); l.File != "" {
		s.FlowLog = &api.FlowLog{File: l.File, Written: l.Written, Dropped: l.Dropped, Error: l.Trouble}
		if l.Trouble != "" {
			s.Warnings = append(s.Warnings, "flow log: "+l.Trouble)
		}
	}
	var ws []string
	s.Ledger, ws = g.ledgerStatus()
	s.Warnings = append(s.Warnings, ws...)
	if w := g.memory.warning(); w != "" {
		s.Warnings = append(s.Warnings, w)
	}
	for _, in := range g.inbounds {
		if in.dev.plain.Load() {
			s.Warnings = append(s.Warnings, fmt.Sprintf("tun %s: super-packets to its clients got lost: offloads are off until the next start", in.tag))
		}
		i := api.Inbound{
			Tag: in.tag, Type: "tun", Device: in.dev.Name(), MTU: in.dev.MTU(),
			Queues: max(in.conf.Queues, 1), Offload: offloadName(in),
		}
		for _, p := range in.dev.Addresses() {
			i.Addresses = append(i.Addresses, p.String())
		}
		s.Inbounds = append(s.Inbounds, i)
		s.Associations += in.udp.Associations()
	}
	return s
}

func offloadName(in *inbound) string {
	switch {
	case in.dev.CanUSO():
		return "tcp+udp"
	case in.dev.CanGSO():
		return "tcp"
	}
	return "off"
}

// warnings are what an operator should know and no error told.
func (g *Gateway) warnings(cfg *config.Config) (ws []string) {
	for _, o := range cfg.Outbounds {
		if o.Interface == "" {
			continue
		}
		if _, ok, err := hostnet.LinkByName(o.Interface); err == nil && !ok {
			ws = append(ws, fmt.Sprintf("outbound %s: this host has no interface %s", o.Tag, o.Interface))
		}
	}
	return ws
}

// Outbounds lists the current versions with those that drain.
func (g *Gateway) Outbounds() []api.Outbound {
	draining := map[string][]api.Draining{}
	for _, v := range g.outbounds.Draining() {
		draining[v.Tag()] = append(draining[v.Tag()], api.Draining{Version: v.N(), Flows: v.Flows()})
	}
	var out []api.Outbound
	for _, v := range g.outbounds.Current() {
		out = append(out, api.Outbound{Tag: v.Tag(), Version: v.N(), Type: v.Type(), Flows: v.Flows(), LastError: v.LastError(), Draining: draining[v.Tag()]})
		delete(draining, v.Tag())
	}
	for tag, d := range draining { // removed, but flows live on
		out = append(out, api.Outbound{Tag: tag, Type: "removed", Draining: d})
	}
	return out
}

// Rules lists the plane's rules, the default route last.
func (g *Gateway) Rules() []api.Rule {
	plane := g.plane.Load()
	hits := plane.Hits()
	var out []api.Rule
	for i, r := range plane.Rules() {
		out = append(out, api.Rule{
			Rule: &i, Name: r.Name, When: when(&r.Match), Outbound: r.Outbound,
			Pin: r.Pin, Record: r.Record, AllowHost: r.AllowHost, Hits: hits[i],
		})
	}
	return append(out, api.Rule{Outbound: g.defaultTag(), Hits: hits[len(hits)-1]})
}

func (g *Gateway) defaultTag() string {
	g.apply.Lock()
	defer g.apply.Unlock()
	return g.apply.config.Route.Default
}

// when writes conditions as one line of configuration.
func when(m *route.Match) string {
	var parts []string
	parts = list(parts, "inbound", m.Inbound)
	parts = list(parts, "network", m.Network)
	parts = list(parts, "source", m.Source)
	parts = list(parts, "source_port", m.SourcePort)
	parts = list(parts, "ip", m.IP)
	parts = list(parts, "port", m.Port)
	parts = list(parts, "user", m.User)
	parts = list(parts, "user_group", m.UserGroup)
	parts = list(parts, "user_state", m.UserState)
	parts = list(parts, "device", m.Device)
	if m.Not != nil {
		parts = append(parts, "not: {"+when(m.Not)+"}")
	}
	parts = nested(parts, "any", m.Any)
	parts = nested(parts, "all", m.All)
	return strings.Join(parts, ", ")
}

func list[T any](parts []string, key string, vs []T) []string {
	if len(vs) == 0 {
		return parts
	}
	texts := make([]string, len(vs))
	for i, v := range vs {
		texts[i] = fmt.Sprint(v)
		_, isName := any(v).(string)
		if isName && !isWord(texts[i]) || strings.Contains(texts[i], ":") { // ::/0 alone would be a map
			texts[i] = strconv.Quote(texts[i])
		}
	}
	return append(parts, key+": ["+strings.Join(texts, ", ")+"]")
}

// isWord reports whether YAML takes a name for text without quotes.
func isWord(name string) bool {
	switch strings.ToLower(name) {
	case "true", "false", "null":
		return false
	}
	return word.MatchString(name)
}

var word = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]*$`)

func nested(parts []string, key string, ms []route.Match) []string {
	if len(ms) == 0 {
		return parts
	}
	texts := make([]string, len(ms))
	for i := range ms {
		texts[i] = "{" + when(&ms[i]) + "}"
	}
	return append(parts, key+": ["+strings.Join(texts, ", ")+"]")
}
