package user

import "math"

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
