package user

import (
	"time"

	"gatewayd/flow"
)

// Spec is a user as an operator wrote it. A limit that is 0 is none.
type Spec struct {
	Name       string       // unique; not all digits
	ID         flow.UserKey // durable; 0: to be assigned
	Group      string       // of which it is a member; empty: none
	Disabled   bool
	Notes      string
	ExternalID string // in another system
	Limits     Limits
	Expires    Expires
	Devices    []string // "mac:…", "host:…", an address or a prefix
	Source     Source
}

// Source is where a definition comes from, and therefore who may change it.
type Source uint8

// The sources.
const (
	FromConfig Source = iota // the configuration file: read-only at run time
	FromStore                // the state store, by API and command line
)

// String is "config" or "store".
func (s Source) String() string { return [...]string{"config", "store"}[s] }

// Group gives limits to its members, each of which has an allowance of its own. Of a
// user's and its group's limit the smallest that is not 0 holds.
type Group struct {
	Name   string
	Limits Limits
	Source Source
}

// Limits bound what one user may do. 0 is unlimited.
type Limits struct {
	Traffic       Traffic
	Multiplier    Multiplier
	Speed         uint64 // bytes/s of both directions together
	Bandwidth     Bandwidth
	Connections   int // live flows at once, dials in progress included
	IPs           int // distinct source addresses at once
	WhenExhausted Exhausted
}

// Traffic is how many charged payload bytes a user may move in a period.
type Traffic struct {
	Up, Down, Total uint64 // bytes
	Reset           Reset
}

// Multiplier is the factor of what is charged. The zero value is 1.
type Multiplier struct {
	Set        bool
	Millionths uint64 // at most MaxMultiplier
}

const (
	one = 1_000_000 // Millionths of the factor 1

	// MaxMultiplier is the largest factor, 1,000.
	MaxMultiplier = 1000 * one
)

// Bandwidth is in bytes/s, each direction for itself.
type Bandwidth struct{ Up, Down uint64 }

// Exhausted is what happens when the traffic is used up. The zero value blocks, unless
// the group says something else.
type Exhausted struct {
	Block    bool   // whatever the group says
	Throttle uint64 // bytes/s that it goes on with, as a further speed; 0: none
	Outbound string // tag that new flows are sent to; empty: none
}

// Reset is when the traffic's period begins anew. The zero value is never.
type Reset struct {
	Every     Period
	Day       int            // of the month, 1 to 31; in shorter months the last
	Zone      *time.Location // nil: UTC
	CarryOver bool           // what is left is added to the next period, once
}

// Period is the length of a period.
type Period uint8

// The periods.
const (
	Never Period = iota
	Hourly
	Daily
	Weekly // from Monday
	Monthly
)

// Expires is when a user's time is up: the earlier of the two.
type Expires struct {
	At            time.Time     // zero: never
	AfterFirstUse time.Duration // 0: never
}
