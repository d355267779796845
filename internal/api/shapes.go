package api

import (
	"encoding/json"
	"fmt"
	"time"
)

// The types of this file are the JSON of the API. Field names are a contract:
// fields may be added, never renamed. What is unknown is null or absent.

// Time is a moment as the API writes it: RFC 3339 in UTC with milliseconds, null when zero.
type Time time.Time

const timeLayout = "2006-01-02T15:04:05.000Z"

// String is the moment in the API's form, empty when zero.
func (t Time) String() string {
	if time.Time(t).IsZero() {
		return ""
	}
	return time.Time(t).UTC().Format(timeLayout)
}

// IsZero tells that the moment is unknown; it makes omitzero work.
func (t Time) IsZero() bool { return time.Time(t).IsZero() }

// MarshalJSON writes the API's form.
func (t Time) MarshalJSON() ([]byte, error) {
	if t.IsZero() {
		return []byte("null"), nil
	}
	return []byte(`"` + t.String() + `"`), nil
}

// UnmarshalJSON reads any RFC 3339 time, or null.
func (t *Time) UnmarshalJSON(b []byte) error {
	var v *time.Time
	if err := json.Unmarshal(b, &v); err != nil {
		return fmt.Errorf("time %s: %w", b, err)
	}
	*t = Time{}
	if v != nil {
		*t = Time(*v)
	}
	return nil
}

// UserRef names the user of a flow or session.
type UserRef struct {
	ID   uint64 `json:"id"`
	Name string `json:"name"`
}

// Flow is a live or closed flow, or one that a rule refused (without id and counters).
type Flow struct {
	ID          uint64   `json:"id,omitzero"`
	Session     uint64   `json:"session,omitzero"`
	Inbound     string   `json:"inbound"`
	Network     string   `json:"network"`
	Source      string   `json:"source,omitzero"`
	Device      string   `json:"device,omitzero"`
	Destination string   `json:"destination,omitzero"` // "address:port", or "name:port" when a name is dialled
	Domain      string   `json:"domain,omitzero"`
	DomainFrom  string   `json:"domain_from,omitzero"`
	Outbound    string   `json:"outbound"` // "" is the DNS service
	Version     int      `json:"outbound_version"`
	Egress      string   `json:"egress,omitzero"`
	Rule        *int     `json:"rule,omitempty"` // absent: the default route, or the DNS service
	RuleName    string   `json:"rule_name,omitzero"`
	Recorded    bool     `json:"recorded,omitzero"` // a rule with record marked it
	Epoch       uint64   `json:"epoch"`
	User        *UserRef `json:"user,omitempty"` // absent: anonymous
	Started     Time     `json:"started,omitzero"`
	Up          *uint64  `json:"up,omitempty"`   // payload bytes that the opener sent
	Down        *uint64  `json:"down,omitempty"` // payload bytes that the opener received
	Killed      *bool    `json:"killed,omitempty"`
	Ended       Time     `json:"ended,omitzero"`  // closed flows
	Reason      string   `json:"reason,omitzero"` // closed flows
}

// Session is the presence of one peer or promoted device.
type Session struct {
	ID      uint64   `json:"id"`
	Inbound string   `json:"inbound"`
	State   string   `json:"state"`
	User    *UserRef `json:"user,omitempty"`
	Started Time     `json:"started,omitzero"`
	Flows   int      `json:"flows"`
}

// Connections is the answer of GET /v1/connections. Next is what to give as
// `after` for the next page, absent on the last one.
type Connections struct {
	Sessions []Session `json:"sessions"`
	Flows    []Flow    `json:"flows"`
	Next     uint64    `json:"next,omitzero"`
}

// Closed is the answer of a close by selector.
type Closed struct {
	Closed int `json:"closed"`
}

// ClosedFlows is the answer of GET /v1/connections/closed, in the order of their ends.
type ClosedFlows struct {
	Flows []Flow `json:"flows"`
	Next  uint64 `json:"next,omitzero"`
}

// Lagged tells a stream's reader how many events it missed.
type Lagged struct {
	Missed uint64 `json:"missed"`
}

// Stats are bytes since start, bytes per second over the last tick, and live flows.
type Stats struct {
	Up       uint64 `json:"up"`
	Down     uint64 `json:"down"`
	UpRate   uint64 `json:"up_rate"`
	DownRate uint64 `json:"down_rate"`
	Flows    int    `json:"flows"`
}

// UserStats are the Stats of one user.
type UserStats struct {
	User uint64 `json:"user"`
	Name string `json:"name"`
	Stats
}

// Traffic is one tick of the sampler. The key "" of Outbounds is the DNS service.
type Traffic struct {
	Tick       uint64           `json:"tick"`
	IntervalMS float64          `json:"interval_ms"`
	Total      Stats            `json:"total"`
	Inbounds   map[string]Stats `json:"inbounds"`
	Outbounds  map[string]Stats `json:"outbounds"`
	Users      []UserStats      `json:"users"`
}

// Inbound is one device that packets come from.
type Inbound struct {
	Tag       string   `json:"tag"`
	Type      string   `json:"type"` // tun
	Device    string   `json:"device"`
	MTU       int      `json:"mtu"` // bytes
	Addresses []string `json:"addresses"`
	Queues    int      `json:"queues,omitzero"`
	Offload   string   `json:"offload,omitzero"`
}

// Outbound is one way out in its current version, with the older ones that drain.
type Outbound struct {
	Tag       string     `json:"tag"`
	Version   int        `json:"version"`
	Type      string     `json:"type"`
	Healthy   *bool      `json:"healthy"` // null: not checked
	Flows     int        `json:"flows"`   // of the current version
	Members   []string   `json:"members,omitempty"`
	Selected  string     `json:"selected,omitzero"`
	LatencyMS *float64   `json:"latency_ms"`
	LastError string     `json:"last_error,omitzero"`
	Draining  []Draining `json:"draining"`
}

// Draining is a superseded version that flows still live on.
type Draining struct {
	Version int `json:"version"`
	Flows   int `json:"flows"`
}

// Outbounds is the answer of GET /v1/outbounds.
type Outbounds struct {
	Outbounds []Outbound `json:"outbounds"`
}

// Rule is one rule of the plane; the default route has no index.
type Rule struct {
	Rule      *int   `json:"rule"`
	Name      string `json:"name,omitzero"`
	When      string `json:"when,omitzero"` // its conditions, as one line of configuration
	Outbound  string `json:"outbound"`
	Pin       bool   `json:"pin,omitzero"`
	Record    bool   `json:"record,omitzero"`
	AllowHost bool   `json:"allow_host,omitzero"`
	Hits      uint64 `json:"hits"` // in this epoch
}

// Rules is the answer of GET /v1/rules.
type Rules struct {
	Rules []Rule `json:"rules"`
}

// MemoryLevels are the levels of Memory: how short memory is. At the last one new
// flows are refused.
var MemoryLevels = [...]string{"normal", "elevated", "high", "severe", "full"}

// Memory is what the process holds, in bytes.
type Memory struct {
	RSS        uint64 `json:"rss"`
	Heap       uint64 `json:"heap"`
	Stacks     uint64 `json:"stacks"`
	Runtime    uint64 `json:"runtime"` // everything that the Go runtime took from the system
	Limit      uint64 `json:"limit,omitzero"`
	Budget     uint64 `json:"budget,omitzero"` // absent: there is no limit
	Used       uint64 `json:"used"`            // of the budget: what no collection would free
	Level      string `json:"level"`           // one of MemoryLevels
	Goroutines int    `json:"goroutines"`
}

// Ledger tells whether usage is durable. Absent while there is no ledger.
type Ledger struct {
	Writable   bool `json:"writable"`
	LastCommit Time `json:"last_commit"`
}

// Status is the answer of GET /v1/status. The gateway fills Epoch, Inbounds,
// Associations, Ledger, FlowLog, BlockedSuppressed, Warnings and of Memory Budget,
// Used and Level; the server does the rest.
type Status struct {
	Version      string            `json:"version"`
	UptimeS      float64           `json:"uptime_s"`
	Epoch        uint64            `json:"epoch"`
	Inbounds     []Inbound         `json:"inbounds"`
	Outbounds    []Outbound        `json:"outbounds"`
	Flows        int               `json:"flows"`
	Associations int               `json:"associations"`
	Memory       Memory            `json:"memory"`
	Drops        map[string]uint64 `json:"drops"`
	Ledger       *Ledger           `json:"ledger,omitempty"`
	FlowLog      *FlowLog          `json:"flow_log,omitempty"`
	Warnings     []string          `json:"warnings"`

	BlockedSuppressed uint64 `json:"blocked_suppressed,omitzero"` // events that were over their rate
}

// FlowLog is how the file of closed flows fares. Absent while none is configured.
type FlowLog struct {
	File    string `json:"file"`
	Written uint64 `json:"written"`        // flows since the start
	Dropped uint64 `json:"dropped"`        // flows that are not in the file
	Error   string `json:"error,omitzero"` // why nothing is written now
}

// Applied is the answer of a configuration that was applied.
type Applied struct {
	Epoch uint64 `json:"epoch"`
	ETag  string `json:"etag"` // unquoted
}

// Problem is an error as RFC 9457 writes it; it is an error itself.
type Problem struct {
	Type   string   `json:"type"`
	Title  string   `json:"title"`
	Status int      `json:"status"`
	Detail string   `json:"detail"`
	Errors []string `json:"errors,omitempty"` // one per mistake of a configuration or a record

	Refusal string `json:"refusal,omitzero"` // why a promotion was refused: a word of admission
}

// Error is the detail.
func (p *Problem) Error() string { return p.Detail }
