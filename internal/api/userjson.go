package api

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"gatewayd/internal/config"
	"gatewayd/user"
)

// The types of this file are the JSON of users, as those of shapes.go.

// UserSpec is a user as an operator writes it. A limit that is 0 or missing is none.
type UserSpec struct {
	ID         uint64   `json:"id"` // durable; 0: to be assigned
	Name       string   `json:"name"`
	Group      string   `json:"group"`
	Enabled    bool     `json:"enabled"` // missing: true
	Notes      string   `json:"notes,omitzero"`
	ExternalID string   `json:"external_id,omitzero"`
	Limits     Limits   `json:"limits"`
	Expires    Expires  `json:"expires"`
	Devices    []string `json:"devices"`
}

// User is a user with its state and usage. What UserSpec does not have is ignored in
// a request, so that an answer may be sent back.
type User struct {
	UserSpec
	State     string    `json:"state"`
	Source    string    `json:"source"` // config: read-only; store
	Left      Left      `json:"left"`
	ExpiresAt Time      `json:"expires_at"` // when its time is up as things are; null: never
	PeriodEnd Time      `json:"period_end"` // when the traffic begins anew; null: never
	Usage     UserUsage `json:"usage"`
}

// UserList is the answer of GET /v1/users. Next is what to give as `after`.
type UserList struct {
	Users []User `json:"users"`
	Next  string `json:"next,omitzero"`
}

// Group gives limits to its members.
type Group struct {
	Name   string `json:"name"`
	Limits Limits `json:"limits"`
	Source string `json:"source"` // config: read-only; store. Ignored in a request
}

// Groups is the answer of GET /v1/groups.
type Groups struct {
	Groups []Group `json:"groups"`
}

// Limits bound what a user may do. 0 is unlimited. Rates are read as integers of
// bytes/s or with a unit, as in "20Mbit/s"; sizes likewise, as in "50GB".
type Limits struct {
	Traffic       TrafficLimit `json:"traffic"`
	Bandwidth     Bandwidth    `json:"bandwidth"`
	Speed         config.Rate  `json:"speed"` // of both directions together
	Connections   uint32       `json:"connections"`
	IPs           uint32       `json:"ips"`
	Multiplier    Multiplier   `json:"multiplier,omitzero"`
	WhenExhausted Exhausted    `json:"when_exhausted,omitzero"`
}

// TrafficLimit is how many charged bytes may be moved in a period.
type TrafficLimit struct {
	Up    config.Size `json:"up"`
	Down  config.Size `json:"down"`
	Total config.Size `json:"total"`
	Reset *Reset      `json:"reset"` // null: never
}

// Reset is when the traffic's period begins anew.
type Reset struct {
	Every     string `json:"every"`         // hour, day, week or month
	Day       uint32 `json:"day,omitzero"`  // of the month; missing: 1
	Zone      string `json:"zone,omitzero"` // missing: UTC
	CarryOver bool   `json:"carry_over,omitzero"`
}

// Bandwidth is in bytes/s.
type Bandwidth struct {
	Up   config.Rate `json:"up"`
	Down config.Rate `json:"down"`
}

// Expires is when a user's time is up: the earlier of the two.
type Expires struct {
	At            Time     `json:"at"`
	AfterFirstUse Duration `json:"after_first_use"`
}

// UserUsage is what a user moved in its period, in bytes, and what it has now.
type UserUsage struct {
	Up          uint64   `json:"up"`
	Down        uint64   `json:"down"`
	ChargedUp   uint64   `json:"charged_up"`
	ChargedDown uint64   `json:"charged_down"`
	WireRx      uint64   `json:"wire_rx"`
	WireTx      uint64   `json:"wire_tx"`
	Extra       uint64   `json:"extra"` // added to this period's allowances
	FirstUse    Time     `json:"first_use"`
	LastSeen    Time     `json:"last_seen"`
	PeriodStart Time     `json:"period_start"`
	Generation  uint64   `json:"generation"` // grows by one with each reset
	Connections int      `json:"connections"`
	IPs         []string `json:"ips"`
}

// Left is how many charged bytes are left in the period; null is unlimited.
type Left struct {
	Up    *uint64 `json:"up"`
	Down  *uint64 `json:"down"`
	Total *uint64 `json:"total"`
}

// UserEvent is the data of the events user.… and device.….
type UserEvent struct {
	User   UserRef `json:"user"`
	State  string  `json:"state"`           // now
	Device string  `json:"device,omitzero"` // of promotions
	Why    string  `json:"why,omitzero"`    // of device.demoted

	Percent int `json:"percent,omitzero"` // of user.near: 80 or 95, of the traffic
}

// UserEventOf is the event's form in JSON.
func UserEventOf(ev user.Event) UserEvent {
	return UserEvent{User: UserRef{uint64(ev.User), ev.Name}, State: ev.State, Device: ev.Device, Why: ev.Why, Percent: ev.Percent}
}

// Duration is written as in "30d", "12h" or "1h30m"; null when 0.
type Duration time.Duration

// String is the duration as the configuration has it.
func (d Duration) String() string {
	t, day := time.Duration(d), 24*time.Hour
	if t >= day && t%day == 0 {
		return strconv.FormatInt(int64(t/day), 10) + "d"
	}
	text := t.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// MarshalJSON writes the text.
func (d Duration) MarshalJSON() ([]byte, error) {
	if d == 0 {
		return []byte("null"), nil
	}
	return json.Marshal(d.String())
}

// UnmarshalJSON reads the text, or null.
func (d *Duration) UnmarshalJSON(b []byte) error {
	*d = 0
	if string(b) == "null" {
		return nil
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return fmt.Errorf(`%s: want a duration as text, as in "30d" or "12h"`, b)
	}
	t, err := config.ParseDuration(text)
	*d = Duration(t)
	return err
}

// Multiplier is the factor of what is charged, a number with at most six decimals.
type Multiplier user.Multiplier

// IsZero tells that there is none of its own.
func (m Multiplier) IsZero() bool { return !m.Set }

// decimals of a factor.
const decimals = 6

// MarshalJSON writes a decimal number.
func (m Multiplier) MarshalJSON() ([]byte, error) {
	text := fmt.Sprintf("%0*d", decimals+1, m.Millionths)
	cut := len(text) - decimals
	text = strings.TrimRight(text[:cut]+"."+text[cut:], "0")
	return []byte(strings.TrimSuffix(text, ".")), nil
}

// UnmarshalJSON reads a decimal number, or null.
func (m *Multiplier) UnmarshalJSON(b []byte) error {
	*m = Multiplier{}
	if string(b) == "null" {
		return nil
	}
	whole, fraction, _ := strings.Cut(string(b), ".")
	digits := whole + fraction + strings.Repeat("0", max(0, decimals-len(fraction)))
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || len(fraction) > decimals || n > user.MaxMultiplier {
		return fmt.Errorf("multiplier %s: want a number from 0 to 1000 with at most %d decimals", b, decimals)
	}
	*m = Multiplier{Set: true, Millionths: n}
	return nil
}

// Exhausted is what happens when the traffic is used up: "block", or an object with
// throttle (a rate) or outbound (a tag). The zero value, null, is the group's.
type Exhausted struct {
	Block    bool
	Throttle config.Rate
	Outbound string
}

// exhaustion is the object.
type exhaustion struct {
	Throttle config.Rate `json:"throttle,omitzero"`
	Outbound string      `json:"outbound,omitzero"`
}

// shown says "block" where nothing is said, for answers.
func (e Exhausted) shown() Exhausted {
	e.Block = e.Throttle == 0 && e.Outbound == ""
	return e
}

// MarshalJSON writes "block" or the object.
func (e Exhausted) MarshalJSON() ([]byte, error) {
	if e.shown().Block {
		return []byte(`"block"`), nil
	}
	return json.Marshal(exhaustion{e.Throttle, e.Outbound})
}

// UnmarshalJSON reads "block", the object, or null.
func (e *Exhausted) UnmarshalJSON(b []byte) error {
	*e = Exhausted{Block: string(b) == `"block"`}
	if e.Block || string(b) == "null" {
		return nil
	}
	var o exhaustion
	err := decodeStrict(b, &o)
	if err == nil && (o.Throttle == 0) == (o.Outbound == "") {
		err = fmt.Errorf(`%s: want "block", {"throttle": RATE} or {"outbound": TAG}`, b)
	}
	*e = Exhausted{Throttle: o.Throttle, Outbound: o.Outbound}
	return err
}
