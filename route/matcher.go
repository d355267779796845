package route

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"

	"gatewayd/flow"
	"gatewayd/route/match"
)

// MaxDepth is how many levels of not, any and all a rule may have. It bounds the
// recursion of a query.
const MaxDepth = 32

// matcher is a compiled Match: the zero value matches everything.
type matcher struct {
	networks           uint8 // set of networkBit; 0: any
	inbounds           []string
	ports, sourcePorts *match.Ports    // nil: any
	whose              *whose          // nil: anyone
	ips, sources       *match.Prefixes // nil: any
	not                *matcher
	all, any           []matcher
}

// facts is what a matcher looks at, in the form it wants.
type facts struct {
	network             flow.Network
	hasPorts            bool
	port, sourcePort    uint16
	inbound             string
	destination, source netip.Addr
	who                 *Who
}

func factsOf(q *Query) facts {
	f := &q.Flow
	return facts{
		network:     f.Network,
		hasPorts:    f.Network != flow.ICMP,
		port:        f.Dest.Addr.Port(),
		sourcePort:  f.Source.Port(),
		inbound:     f.Inbound,
		destination: f.Dest.Addr.Addr(),
		source:      f.Source.Addr(),
		who:         &q.Who,
	}
}

// networkBit is 0 for what is no network: it is in no list of networks.
func networkBit(n flow.Network) uint8 { return 1 << n >> 1 }

// condition names a kind of condition.
type condition uint8

const (
	nothing condition = iota
	onNetwork
	onInbound
	onPort
	onSourcePort
	onWho
	onIP
	onSource
	onNot
	onAll
	onAny

	// those of onWho
	onUserState
	onUser
	onUserGroup
	onDevice
)

// failing is the first condition that does not hold, nothing if m matches. The
// cheap ones come first: they filter most rules before a table is looked at.
func (m *matcher) failing(f *facts) condition {
	switch {
	case m.networks != 0 && m.networks&networkBit(f.network) == 0:
		return onNetwork
	case len(m.inbounds) > 0 && !slices.Contains(m.inbounds, f.inbound):
		return onInbound
	case m.ports != nil && !(f.hasPorts && m.ports.Contains(f.port)):
		return onPort
	case m.sourcePorts != nil && !(f.hasPorts && m.sourcePorts.Contains(f.sourcePort)):
		return onSourcePort
	case m.whose != nil && m.whose.failing(f) != nothing:
		return onWho
	case m.ips != nil && !m.ips.Contains(f.destination):
		return onIP
	case m.sources != nil && !m.sources.Contains(f.source):
		return onSource
	case m.not != nil && m.not.failing(f) == nothing:
		return onNot
	case firstFailing(m.all, f) >= 0:
		return onAll
	case len(m.any) > 0 && !anyMatches(m.any, f):
		return onAny
	}
	return nothing
}

// firstFailing is the index of the first of ms that does not match, -1 if all do.
func firstFailing(ms []matcher, f *facts) int {
	for i := range ms {
		if ms[i].failing(f) != nothing {
			return i
		}
	}
	return -1
}

func anyMatches(ms []matcher, f *facts) bool {
	for i := range ms {
		if ms[i].failing(f) == nothing {
			return true
		}
	}
	return false
}

// Compile makes the plane of an epoch. version finds the version that a tag
// stands for from now on (Change.Version). What s points to must not be changed
// afterwards. An error names the rule, by index and name, and the condition.
func Compile(s Spec, epoch uint64, version func(tag string) (*Version, bool)) (*Plane, error) {
	p := &Plane{
		epoch:  epoch,
		rules:  make([]rule, len(s.Rules)),
		source: slices.Clone(s.Rules),
		hits:   make([]atomic.Uint64, len(s.Rules)+1),
	}
	for i := range s.Rules {
		if err := p.rules[i].compile(&s.Rules[i], version); err != nil {
			return nil, fmt.Errorf("rule %s: %w", label(i, s.Rules[i].Name), err)
		}
	}
	var err error
	if p.fallback, err = find(s.Default, version); err != nil {
		return nil, fmt.Errorf("default: %w", err)
	}
	return p, nil
}

func label(i int, name string) string {
	if name == "" {
		return strconv.Itoa(i)
	}
	return fmt.Sprintf("%d %q", i, name)
}

func find(tag string, version func(tag string) (*Version, bool)) (*Version, error) {
	if tag == "" {
		return nil, errors.New("outbound: missing")
	}
	v, ok := version(tag)
	if !ok {
		return nil, fmt.Errorf("outbound %q: not defined", tag)
	}
	return v, nil
}

func (r *rule) compile(s *Rule, version func(tag string) (*Version, bool)) (err error) {
	r.name, r.pin, r.record, r.allowHost = s.Name, s.Pin, s.Record, s.AllowHost
	if s.Outbound != "" || !s.Record {
		if r.outbound, err = find(s.Outbound, version); err != nil {
			return err
		}
	}
	return r.matcher.compile(&s.Match, "", MaxDepth)
}

// compile fills m from s, which stands at the path at and may have depth further
// levels below it.
func (m *matcher) compile(s *Match, at string, depth int) (err error) {
	if slices.Contains(s.Inbound, "") {
		return fmt.Errorf("%sinbound: tag is empty", at)
	}
	m.inbounds = slices.Clone(s.Inbound)
	if m.networks, err = networks(s.Network); err != nil {
		return fmt.Errorf("%snetwork: %w", at, err)
	}
	if m.ports, err = ports(s.Port); err != nil {
		return fmt.Errorf("%sport: %w", at, err)
	}
	if m.sourcePorts, err = ports(s.SourcePort); err != nil {
		return fmt.Errorf("%ssource_port: %w", at, err)
	}
	if m.whose, err = compileWho(s, at); err != nil {
		return err
	}
	if m.ips, err = prefixes(s.IP); err != nil {
		return fmt.Errorf("%sip: %w", at, err)
	}
	if m.sources, err = prefixes(s.Source); err != nil {
		return fmt.Errorf("%ssource: %w", at, err)
	}
	return m.compileNested(s, at, depth)
}

func (m *matcher) compileNested(s *Match, at string, depth int) (err error) {
	if s.Not == nil && len(s.All) == 0 && len(s.Any) == 0 {
		return nil
	}
	if depth == 0 {
		return fmt.Errorf("%snot, any, all: nested deeper than %d", at, MaxDepth)
	}
	if s.Not != nil {
		m.not = new(matcher)
		if err := m.not.compile(s.Not, at+"not.", depth-1); err != nil {
			return err
		}
	}
	if m.all, err = compileList(s.All, at+"all", depth-1); err != nil {
		return err
	}
	m.any, err = compileList(s.Any, at+"any", depth-1)
	return err
}

func compileList(list []Match, at string, depth int) ([]matcher, error) {
	ms := make([]matcher, len(list))
	for i := range list {
		if err := ms[i].compile(&list[i], fmt.Sprintf("%s[%d].", at, i), depth); err != nil {
			return nil, err
		}
	}
	return ms, nil
}

func networks(list []flow.Network) (bits uint8, err error) {
	for _, n := range list {
		if n < flow.TCP || n > flow.ICMP {
			return 0, fmt.Errorf("%v: want tcp, udp or icmp", n)
		}
		bits |= networkBit(n)
	}
	return bits, nil
}

func ports(list []PortRange) (*match.Ports, error) {
	if len(list) == 0 {
		return nil, nil
	}
	return match.NewPorts(list)
}

func prefixes(list []netip.Prefix) (*match.Prefixes, error) {
	if len(list) == 0 {
		return nil, nil
	}
	return match.NewPrefixes(list)
}
