package flow

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// ID numbers flows in the order in which they opened: 1, 2, 3, … It is never
// reused while the process lives; 0 is no flow.
type ID uint64

// String gives the form that logs and the command line use, "flow#17".
func (id ID) String() string { return "flow#" + strconv.FormatUint(uint64(id), 10) }

// ParseID reads "17" or "flow#17".
func ParseID(s string) (ID, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(s, "flow#"), 10, 64)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("flow id %q: want a number from 1, as in 17 or flow#17", s)
	}
	return ID(n), nil
}

// Network is the kind of traffic that a flow carries.
type Network uint8

// The networks. The zero value is none.
const (
	TCP Network = iota + 1
	UDP
	ICMP
)

var networkNames = [...]string{TCP: "tcp", UDP: "udp", ICMP: "icmp"}

// String is "tcp", "udp" or "icmp".
func (n Network) String() string {
	if int(n) < len(networkNames) {
		return networkNames[n]
	}
	return "network(" + strconv.Itoa(int(n)) + ")"
}

// MarshalText makes a Network its name in JSON.
func (n Network) MarshalText() ([]byte, error) { return []byte(n.String()), nil }

// UnmarshalText reads the name back.
func (n *Network) UnmarshalText(b []byte) error {
	for i, name := range networkNames {
		if name != "" && name == string(b) {
			*n = Network(i)
			return nil
		}
	}
	return fmt.Errorf("network %q: want tcp, udp or icmp", b)
}

// DomainSource tells where the domain of a destination came from.
type DomainSource uint8

// The sources of a domain, best first.
const (
	NoDomain   DomainSource = iota
	FromClient              // the client asked for the name itself (SOCKS5, fake-IP address)
	FromSNI                 // TLS server name
	FromHTTP                // HTTP Host
	FromQUIC                // QUIC Initial
	FromDNS                 // the newest answer that this client got for the address
)

var domainSourceNames = [...]string{"", "fake_ip", "sni", "http", "quic", "dns"}

// String is the record's domain_from: "", "fake_ip", "sni", "http", "quic" or "dns".
func (s DomainSource) String() string { return domainSourceNames[s] }

// Destination is where a flow goes. Addr is what the client dialled; a Domain
// with FromClient stays a name to the outbound, which resolves it.
type Destination struct {
	Addr   netip.AddrPort
	Domain string
	From   DomainSource
}

// String is what is dialled: "name:port" when a name is, else "addr:port".
func (d Destination) String() string {
	if d.From == FromClient {
		return d.Domain + ":" + strconv.Itoa(int(d.Addr.Port()))
	}
	return d.Addr.String()
}

// UserKey is a user's durable number; 0 is anonymous.
type UserKey uint64

// Flow is one routed outbound to be: a comparable value, fixed before the dial.
type Flow struct {
	Inbound   string         // tag of the device that it came from
	Source    netip.AddrPort // the client; for ICMP the port is the echo id
	Dest      Destination
	User      UserKey
	Network   Network
	AllowHost bool // the rule lets it reach addresses of this host
}

// Dir is a direction, seen from the side that opened the flow.
type Dir uint8

// The directions: Up is what the opener sends, Down what it receives.
const (
	Up Dir = iota
	Down
)

// String is "up" or "down".
func (d Dir) String() string { return [...]string{"up", "down"}[d] }
