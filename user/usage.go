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
}
