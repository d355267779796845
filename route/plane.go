// Package route decides which way out a flow takes: it compiles rules into an
// immutable plane, and keeps the versions of outbounds that flows live on.
//
// A query walks the rules of the plane in order and leaves at the first one that
// decides; rules that only record mark it on the way. The decision holds the
// outbound's version, on which the flow then lives from Acquire to Release.
package route

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/route/match"
)

// DefaultRule is the index, in decisions and steps, of the default route.
const DefaultRule = -1

// PortRange is a range of ports, both ends included; match.ParsePortRange reads it.
type PortRange = match.PortRange

// Match is the conditions of a rule. All that are present must hold; within a
// list one entry is enough. An empty list is absent, and an empty Match holds
// for every flow.
type Match struct {
	Inbound    []string // tags of devices
	Network    []flow.Network
	Source     []netip.Prefix   // the client's address
	SourcePort []PortRange      // never holds for ICMP, whose "port" is an echo id
	IP         []netip.Prefix   // the address that the client dialled
	Port       []PortRange      // the port that the client dialled; never holds for ICMP
	User       []string         // names; never holds for an anonymous flow
	UserGroup  []string         // names; never holds for an anonymous flow
	UserState  []string         // Anonymous, or a user's state
	Device     []flow.DeviceSet // of the client; a prefix holds for its address
	Not        *Match           // does not hold
	Any        []Match          // at least one holds
	All        []Match          // each holds
}

// Rule sends the flows that match to an outbound.
type Rule struct {
	Name      string // optional
	Match     Match
	Outbound  string // tag, as in the configuration; may be empty if Record is set: then the rule marks and matching goes on
	Pin       bool   // a UDP association stays with its first sub-link
	Record    bool   // marks the flow for audit
	AllowHost bool   // the flow may reach addresses of this host
}

// Spec is what a Plane is compiled from.
type Spec struct {
	Rules   []Rule
	Default string // tag of the outbound for what no rule decides
}

// Plane is a compiled routing table. It never changes, apart from its hit
// counters, and is safe for concurrent use.
type Plane struct {
	epoch    uint64
	rules    []rule
	fallback *Version
	source   []Rule
	hits     []atomic.Uint64 // one for each rule, then the default's
}

type rule struct {
	matcher
	name                   string
	outbound               *Version // nil: records only
	pin, record, allowHost bool
}

// Query is what a decision depends on.
type Query struct {
	Flow flow.Flow
	Now  time.Time
	Who  Who
}

// Decision is a plane's answer.
type Decision struct {
	Outbound  *Version // never nil; not acquired yet
	Rule      int      // index of the rule that decided, or DefaultRule
	RuleName  string
	Epoch     uint64
	Pin       bool
	Record    bool // this rule, or one before it that only records, marks the flow
	Recorder  int  // index of the first rule that marked it; DefaultRule if none did
	AllowHost bool
	Until     time.Time // when the answer may change by itself; zero is never
	Gen       uint64    // decision generation: an answer of another one is out of date
}

// Route decides q: the first rule that matches and has an outbound, else the
// default. It is a pure function of the plane and q and does not allocate.
//
// The caller takes its place on the version with Acquire. That fails when a newer
// plane was put in place meanwhile: load it and ask again. It also fails, on every
// plane, once Outbounds is closed.
func (p *Plane) Route(q *Query) Decision {
	f := factsOf(q)
	d := Decision{Outbound: p.fallback, Rule: DefaultRule, Recorder: DefaultRule, Epoch: p.epoch, Gen: p.Gen()}
	for i := range p.rules {
		r := &p.rules[i]
		if r.failing(&f) != nothing {
			continue
		}
		if r.record && !d.Record {
			d.Record, d.Recorder = true, i
		}
		if r.outbound != nil {
			d.Outbound, d.Rule, d.RuleName = r.outbound, i, r.name
			d.Pin, d.AllowHost = r.pin, r.allowHost
			break
		}
	}
	return d
}

// Epoch is the number of the plane: it grows by one with each apply.
func (p *Plane) Epoch() uint64 { return p.epoch }

// Gen is the generation of the decisions that the plane makes now: its epoch, since
// nothing but another plane changes an answer to the same query. Another Who is
// another query, which is the caller's to notice.
func (p *Plane) Gen() uint64 { return p.epoch }

// Rules is a copy of the rules in order; what they point to must not be changed.
func (p *Plane) Rules() []Rule { return slices.Clone(p.source) }

// Hit counts a decision: for the rule that decided (DefaultRule is the default)
// and for the one that first marked the flow.
func (p *Plane) Hit(d *Decision) {
	p.counter(d.Rule).Add(1)
	if d.Record && d.Recorder != d.Rule {
		p.counter(d.Recorder).Add(1)
	}
}

func (p *Plane) counter(rule int) *atomic.Uint64 {
	if rule == DefaultRule {
		rule = len(p.rules)
	}
	return &p.hits[rule]
}

// Hits is how often each rule was counted in this epoch, in order; the last
// figure, one past the rules, is the default's.
func (p *Plane) Hits() []uint64 {
	hits := make([]uint64, len(p.hits))
	for i := range p.hits {
		hits[i] = p.hits[i].Load()
	}
	return hits
}
