package config

import (
	"log/slog"
	"net/netip"
	"time"

	"gatewayd/flow"
	"gatewayd/user"
)

// Config is a valid configuration with its defaults filled in: every tag that it
// mentions exists.
type Config struct {
	Log       Log
	StateDir  string // absolute
	Profile   string // auto, tiny or large
	Privacy   string // full, addresses or none
	Limits    Limits
	Timeouts  Timeouts
	Sample    time.Duration // at least a millisecond
	Sweep     time.Duration // at least a millisecond
	API       API
	FlowLog   FlowLog
	TUN       []TUN
	Outbounds []Outbound // direct is always among them; reject, drop and dns never are
	Route     Route
	Groups    []user.Group
	Users     []user.Spec // each group that they name is among Groups
	Ledger    Ledger
	Metrics   Metrics
	Webhooks  []Webhook

	files []*source // the main file, then those it includes
}

// Log is what is logged, and how.
type Log struct {
	Level  slog.Level
	Format string // text or json
}

// Limits are limits of live things. 0 is unlimited.
type Limits struct {
	Flows     int // in all; Auto: by memory
	PerSource SourceLimits
}

// SourceLimits are limits of each source address. 0 is unlimited.
type SourceLimits struct {
	Flows, Dials, Associations int
}

// Timeouts are positive, apart from Grace and Keepalive.Idle, which may be 0.
type Timeouts struct {
	Dial, Grace time.Duration
	TCP         TCPTimeouts
	UDP         UDPTimeouts
}

// TCPTimeouts are those of TCP flows.
type TCPTimeouts struct {
	Keepalive            Keepalive
	HalfClosed, PeerIdle time.Duration
}

// Keepalive is how idle TCP connections are probed. Times are whole seconds.
type Keepalive struct {
	Idle     time.Duration // 0: not at all
	Interval time.Duration
	Probes   int
}

// UDPTimeouts are those of UDP sub-links.
type UDPTimeouts struct {
	OneWay, Answered time.Duration
	Ports            map[uint16]time.Duration // in place of both, toward these ports
}

// API is the HTTP API. Each TCP listener off loopback has TLS, and if there is
// any TCP listener there is a token.
type API struct {
	Listen      []Listener
	SocketGroup string // empty: root only
	Tokens      []Token
	TLS         TLS      // zero: none
	Hosts       []string // in lower case
}

// Token is a bearer token. Its file is not read here.
type Token struct {
	Name, Role string // the role is read, users or admin
	File       string // absolute
}

// TLS names the files of a certificate and its key, both absolute or both empty.
type TLS struct {
	CertFile, KeyFile string
}

// FlowLog is the file of closed flows. The zero value is none.
type FlowLog struct {
	File string // absolute; empty: none
	Size int64  // bytes at which it is rotated, at least 64 KiB
	Keep int    // old files
}

// Ledger is what is kept of usage, and for how long.
type Ledger struct {
	Commit        time.Duration // longest time between a transfer and its being on disk; at least a second
	Hourly, Daily time.Duration // how long the series of hours and of days go back
}

// Metrics is what the metrics show.
type Metrics struct {
	PerUser int // users that get series of their own at most; 0: none
}

// Webhook is where events are posted to.
type Webhook struct {
	URL        string   // http or https
	On         []string // kinds of events, as in user, or single ones, as in user.exhausted
	SecretFile string   // absolute; empty: posts are not signed
}

// TUN is a TUN device. The device name is its identity.
type TUN struct {
	Tag, Device string
	Address     []netip.Prefix // with host bits; empty: automatic
	MTU         int            // bytes; Auto: automatic
	Queues      int            // Auto: automatic
	Offload     string         // auto, on or off
}

// Outbound is a way out of type direct. Two that are equal are one version.
type Outbound struct {
	Tag              string
	Type             string     // direct
	Interface        string     // empty: by the routing table
	Source4, Source6 netip.Addr // invalid: the kernel chooses
	Mark             uint32     // firewall mark of its sockets; 0: none of its own
	Family           string     // auto, ipv4 or ipv6
	Filtering        string     // endpoint-independent, address-dependent or address-and-port-dependent
	Drain            Drain
}

// Route is the rules and what happens to what no rule decides.
type Route struct {
	Rules   []Rule
	Default string // tag of an outbound, or reject or drop
}

// Rule sends the flows that match to an outbound.
type Rule struct {
	Name      string
	Match     Match
	Outbound  string // tag, or reject or drop; empty only with Record: the rule marks and matching goes on
	Pin       bool
	Record    bool
	AllowHost bool
}

// Match is conditions that must all hold; in a list one is enough. An empty list
// is no condition.
type Match struct {
	Inbound    []string
	Network    []flow.Network
	Source, IP []netip.Prefix // without host bits
	SourcePort []PortRange
	Port       []PortRange
	User       []string // names; none of them has to exist
	UserGroup  []string // names; none of them has to exist
	UserState  []string // anonymous, active, disabled, expired, exhausted, throttled or unused
	Device     []flow.DeviceSet
	Not        *Match
	Any, All   []Match
}

// Text is the text of the main file.
func (c *Config) Text() string { return string(c.files[0].text) }

// Files lists the names of the main file and of those it includes.
func (c *Config) Files() []string {
	names := make([]string, len(c.files))
	for i, f := range c.files {
		names[i] = f.name
	}
	return names
}
