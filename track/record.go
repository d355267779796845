package track

import (
	"net/netip"
	"time"

	"gatewayd/flow"
)

// Meta is what a flow is, fixed when it opens; only its Principal may change.
type Meta struct {
	Session  uint64           // 0: none
	Inbound  string           // tag of the device that it came from
	Network  flow.Network     // tcp, udp or icmp
	Recorded bool             // a rule marked it for audit
	Source   netip.AddrPort   // the client
	Device   string           // who the source is, if known
	Dest     flow.Destination // of a sub-link: where the datagram went that opened it
	Outbound string           // tag; the DNS service's is empty
	Version  int              // of the outbound's definition
	Egress   netip.AddrPort   // local address that it left from, if known
	Rule     int              // index of the rule that matched; -1: none did
	RuleName string
	Epoch    uint64       // of the plane that routed it
	User     flow.UserKey // 0: anonymous
	UserName string
	Owner    any // what Flow.Owner returns; never in a Record
}

// Principal is who a flow runs under. The zero value is nobody.
type Principal struct {
	Session  uint64
	User     flow.UserKey
	UserName string
}

// Record is a flow at one moment.
type Record struct {
	ID flow.ID
	Meta
	Started  time.Time // when it was registered, after its dial
	Up, Down uint64    // payload bytes
	Killed   bool
	Active   time.Time // the last tick that found it moving bytes; zero: none did
	// Of closed flows. While Ended is zero the flow is live and Reason says nothing.
	Ended  time.Time
	Reason flow.Reason
}

// fill writes the record of a flow as it was seen.
func (r *Record) fill(s *sight) {
	f := s.flow
	*r = Record{ID: f.id, Meta: f.meta, Started: f.started, Up: s.up, Down: s.down, Killed: f.killed()}
	r.Owner = nil // a closed flow's record must not keep it
	if s.changed {
		r.Session, r.User, r.UserName = s.principal.Session, s.principal.User, s.principal.UserName
	}
	if s.active != 0 {
		r.Active = f.tracker.began.Add(time.Duration(s.active))
	}
}
