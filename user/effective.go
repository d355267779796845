package user

import "cmp"

// State is what a user may do now, in one word.
type State uint8

// The states. Of several that are true the first in this order is told.
const (
	StateDisabled  State = iota // by its definition
	StateExpired                // its time is up
	StateExhausted              // its traffic is used up: nothing moves, or new flows go elsewhere
	StateThrottled              // its traffic is used up: it goes on slowly
	StateUnused                 // nothing moved yet, ever
	StateActive
	numStates
)

var stateNames = [numStates]string{"disabled", "expired", "exhausted", "throttled", "unused", "active"}

// String is the state's word in answers and events.
func (s State) String() string { return stateNames[s] }

// effective are the limits that hold for a user: of its own and its group's the
// smallest that is not 0. The multiplier, the reset and what happens afterwards are
// the user's own if it has any. g may be nil.
func effective(own Limits, g *Group) Limits {
	if g == nil {
		return own
	}
	of := &g.Limits
	l := Limits{
		Traffic: Traffic{
			Up:    smallest(own.Traffic.Up, of.Traffic.Up),
			Down:  smallest(own.Traffic.Down, of.Traffic.Down),
			Total: smallest(own.Traffic.Total, of.Traffic.Total),
			Reset: own.Traffic.Reset,
		},
		Multiplier:    own.Multiplier,
		Speed:         smallest(own.Speed, of.Speed),
		Bandwidth:     Bandwidth{Up: smallest(own.Bandwidth.Up, of.Bandwidth.Up), Down: smallest(own.Bandwidth.Down, of.Bandwidth.Down)},
		Connections:   smallest(own.Connections, of.Connections),
		IPs:           smallest(own.IPs, of.IPs),
		WhenExhausted: own.WhenExhausted,
	}
	if l.Traffic.Reset.Every == Never {
		l.Traffic.Reset = of.Traffic.Reset
	}
	if !l.Multiplier.Set {
		l.Multiplier = of.Multiplier
	}
	if l.WhenExhausted == (Exhausted{}) {
		l.WhenExhausted = of.WhenExhausted
	}
	return l
}

// smallest is the smaller of two limits, of which 0 is none.
func smallest[T cmp.Ordered](a, b T) T {
	var none T
	if a == none || b != none && b < a {
		return b
	}
	return a
}

// policyOf is what holds for an account with that usage.
func policyOf(l *Limits, u *Usage) policy {
	p := policy{
		up: allowance(l.Traffic.Up, u.Extra), down: allowance(l.Traffic.Down, u.Extra), total: allowance(l.Traffic.Total, u.Extra),
		block:       l.WhenExhausted.Throttle == 0 && l.WhenExhausted.Outbound == "",
		multiplier:  one,
		speed:       l.Speed,
		bandwidth:   [2]uint64{l.Bandwidth.Up, l.Bandwidth.Down},
		connections: l.Connections,
		ips:         l.IPs,
	}
	if l.Multiplier.Set {
		p.multiplier = l.Multiplier.Millionths
	}
	if p.used(u) {
		p.throttle = l.WhenExhausted.Throttle
	}
	return p
}

func allowance(limit, extra uint64) uint64 {
	if limit == 0 {
		return none
	}
	return saturate(limit, extra)
}

// used reports that the traffic is used up.
func (p *policy) used(u *Usage) bool { return p.reached([2]uint64{u.ChargedUp, u.ChargedDown}) }

// passed reports that so many percent of the traffic are used up.
func (p *policy) passed(percent uint64, u *Usage) bool {
	most := func(limit, charged uint64) bool {
		return limit != none && charged >= limit/100*percent+limit%100*percent/100
	}
	return most(p.up, u.ChargedUp) || most(p.down, u.ChargedDown) || most(p.total, saturate(u.ChargedUp, u.ChargedDown))
}
