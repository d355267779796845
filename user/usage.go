package user

import "time"

// Usage is what is kept of one user's traffic, over restarts. A reset, by hand or by
// the calendar, sets the byte counters to 0 and adds 1 to Generation; nothing else
// makes them fall.
type Usage struct {
	Up, Down               uint64 // payload bytes that moved in this period
	ChargedUp, ChargedDown uint64 // of these, times the multiplier
	CarryUp, CarryDown     uint64 // millionths of a byte that are not charged yet
	WireRx, WireTx         uint64 // encrypted bytes of WireGuard sessions
	Extra                  uint64 // bytes added to this period's allowances, by top-up or carried over
	Extended               time.Duration
	FirstUse               time.Time // first payload byte; zero: never; a reset keeps it
	LastSeen               time.Time
	PeriodStart            time.Time
	Generation             uint64
	Earlier                Moved // before this period: what a reset clears of the above is added here
}

// Moved is what moved, in bytes.
type Moved struct {
	Up, Down               uint64 // payload
	ChargedUp, ChargedDown uint64
	WireRx, WireTx         uint64
}

// Lifetime is everything that ever moved. Nothing makes it fall.
func (u *Usage) Lifetime() Moved {
	return u.Earlier.plus(Moved{u.Up, u.Down, u.ChargedUp, u.ChargedDown, u.WireRx, u.WireTx})
}

// payload is how many bytes of it ever moved. Nothing makes it fall.
func (u *Usage) payload() uint64 { return u.Earlier.Up + u.Earlier.Down + u.Up + u.Down }

func (m Moved) plus(n Moved) Moved {
	return Moved{
		m.Up + n.Up, m.Down + n.Down, m.ChargedUp + n.ChargedUp, m.ChargedDown + n.ChargedDown, m.WireRx + n.WireRx, m.WireTx + n.WireTx,
	}
}

// since is what moved after m was old, each of them not less than 0.
func (m Moved) since(old Moved) Moved {
	return Moved{
		grown(m.Up, old.Up), grown(m.Down, old.Down), grown(m.ChargedUp, old.ChargedUp), grown(m.ChargedDown, old.ChargedDown),
		grown(m.WireRx, old.WireRx), grown(m.WireTx, old.WireTx),
	}
}

func grown(n, old uint64) uint64 { return n - min(n, old) }
