package user

import (
	"math"

	"gatewayd/flow"
)

// policy is what holds for one account now: the limits of user and group, what the
// usage adds to them, and the state. It is immutable.
type policy struct {
	up, down, total uint64 // charged bytes at which the traffic is used up; none: no limit
	block           bool   // all flows end then, and no byte moves
	multiplier      uint64 // millionths
	speed, throttle uint64 // bytes/s; 0: unlimited
	bandwidth       [2]uint64
	connections     int // 0: unlimited
	ips             int // 0: unlimited
}

// none is the limit that is never reached.
const none = math.MaxUint64

const (
	maxTransfer = 64 << 10 // bytes that move at once
	minTurn     = 4 << 10  // bytes that a stream may move in a turn, however low its rate
)

// quota reports that there is a limit of traffic.
func (p *policy) quota() bool { return p.up != none || p.down != none || p.total != none }

// unlimited reports that nothing has to be asked before bytes move.
func (p *policy) unlimited() bool {
	return p.speed == 0 && p.throttle == 0 && p.bandwidth == [2]uint64{} && !p.quota()
}

// turn is how many bytes may move in d at once.
func (p *policy) turn(d flow.Dir) int {
	n := uint64(maxTransfer)
	for _, rate := range []uint64{p.bandwidth[d], p.speed, p.throttle} {
		if rate != 0 {
			n = min(n, max(minTurn, bandwidthBurst(rate)))
		}
	}
	return int(n)
}

// reached reports that charged bytes use the traffic up.
func (p *policy) reached(charged [2]uint64) bool {
	return charged[flow.Up] >= p.up || charged[flow.Down] >= p.down ||
		saturate(charged[flow.Up], charged[flow.Down]) >= p.total
}
