package config

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// PortRange is a range of ports, both ends included.
type PortRange struct{ From, To uint16 }

const portWant = "want a port from 1 to 65535, or a range as in 8000-9000"

// UnmarshalText reads "443" or "8000-9000". Ports are 1 to 65535.
func (r *PortRange) UnmarshalText(b []byte) error {
	from, to, ranged := strings.Cut(string(b), "-")
	if !ranged {
		to = from
	}
	var parsed [2]port
	for i, s := range []string{from, to} {
		if err := parsed[i].UnmarshalText([]byte(s)); err != nil {
			return fmt.Errorf("port %s: %s", quote(string(b)), portWant)
		}
	}
	if parsed[0] > parsed[1] {
		return fmt.Errorf("port range %s is reversed; write %s-%s", quote(string(b)), to, from)
	}
	*r = PortRange{uint16(parsed[0]), uint16(parsed[1])}
	return nil
}

func (*PortRange) wants() string { return portWant }

func (*PortRange) schema() map[string]any {
	return map[string]any{"type": []string{"integer", "string"}, "minimum": 1, "maximum": 65535, "pattern": "^[1-9][0-9]*(-[1-9][0-9]*)?$"}
}

// version is the format's: 1.
type version int

func (v *version) UnmarshalText(b []byte) error {
	if string(b) != "1" {
		return fmt.Errorf("%s: %s", quote(string(b)), v.wants())
	}
	*v = 1
	return nil
}

func (*version) wants() string { return "want version: 1, the only one that this gatewayd reads" }

func (*version) schema() map[string]any { return map[string]any{"type": "integer", "const": 1} }

// port is a single port from 1.
type port uint16

func (p *port) UnmarshalText(b []byte) error {
	n, err := wholeNumber(string(b))
	if err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("port %s: want 1 to 65535", quote(string(b)))
	}
	*p = port(n)
	return nil
}

func (*port) wants() string { return "want a port from 1 to 65535" }

func (*port) schema() map[string]any {
	return map[string]any{"type": "integer", "minimum": 1, "maximum": 65535}
}

func (*Size) wants() string { return sizeWant }

func (*Size) schema() map[string]any {
	return map[string]any{"type": []string{"integer", "string"}, "minimum": 0, "pattern": `^[0-9]+(\.[0-9]+)? ?([kKMGT]i?)?B$|^[0-9]+$`}
}

func (*Rate) wants() string { return rateWant }

func (*Rate) schema() map[string]any {
	return map[string]any{"type": []string{"integer", "string"}, "minimum": 0, "pattern": `^[0-9]+(\.[0-9]+)? ?([kKMG]?bit|([kKMGT]i?)?B)/s$|^[0-9]+$`}
}

// choice is a number or auto.
type choice int

func (c *choice) UnmarshalText(b []byte) error {
	if string(b) == "auto" {
		*c = Auto
		return nil
	}
	n, err := wholeNumber(string(b))
	if err != nil {
		return fmt.Errorf("%s: want auto or a whole number", quote(string(b)))
	}
	*c = choice(n)
	return nil
}

func (*choice) wants() string { return "want auto or a whole number" }

func (*choice) schema() map[string]any {
	return map[string]any{"type": []string{"integer", "string"}, "pattern": "^(auto|0|[1-9][0-9]*)$"}
}

// mark is a firewall mark: decimal or hexadecimal.
type mark uint32

func (m *mark) UnmarshalText(b []byte) error {
	s, base := string(b), 10
	if hex, ok := strings.CutPrefix(s, "0x"); ok {
		s, base = hex, 16
	}
	n, err := strconv.ParseUint(s, base, 32)
	if err != nil || base == 10 && len(s) > 1 && s[0] == '0' || s[0] == '+' {
		return fmt.Errorf("mark %s: %s", quote(string(b)), m.wants())
	}
	*m = mark(n)
	return nil
}

func (*mark) wants() string { return "want a number from 0 to 0xffffffff, as in 0x100" }

func (*mark) schema() map[string]any {
	return map[string]any{"type": []string{"integer", "string"}, "minimum": 0, "maximum": uint32(1<<32 - 1), "pattern": "^(0x[0-9a-fA-F]+|0|[1-9][0-9]*)$"}
}

// Drain is what happens to flows on an outbound whose definition changed: a time
// that they have left, DrainKeep or DrainNow.
type Drain time.Duration

// Drains that are not a time.
const (
	DrainKeep Drain = -1 // they live on
	DrainNow  Drain = 0  // they end at once
)

// UnmarshalText reads keep, now or a duration.
func (d *Drain) UnmarshalText(b []byte) error {
	switch s := string(b); s {
	case "keep":
		*d = DrainKeep
	case "now":
		*d = DrainNow
	default:
		t, err := ParseDuration(s)
		if err != nil {
			return fmt.Errorf("drain %s: %s", quote(s), d.wants())
		}
		*d = Drain(t)
	}
	return nil
}

func (*Drain) wants() string { return "want keep, now or a duration, as in 10m" }

func (*Drain) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": `^(keep|now|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h|d|w))+)$`}
}

// tagName names an inbound, an outbound or a set: it stands in logs, selectors and metrics.
type tagName string

const tagPattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

// Patterns, compiled once.
var (
	tagRegexp  = regexp.MustCompile(tagPattern)
	hostRegexp = regexp.MustCompile(hostPattern)
)

func (t *tagName) UnmarshalText(b []byte) error {
	if !tagRegexp.Match(b) {
		return fmt.Errorf("tag %s: %s", quote(string(b)), t.wants())
	}
	*t = tagName(b)
	return nil
}

func (*tagName) wants() string {
	return "want 1 to 63 letters, digits, dots, underscores and hyphens, a letter or digit first"
}

func (*tagName) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": tagPattern}
}

// deviceName is a network device's name (Linux dev_valid_name, IFNAMSIZ).
type deviceName string

func (d *deviceName) UnmarshalText(b []byte) error {
	const longest = 15
	s := string(b)
	switch {
	case len(s) > longest:
		return fmt.Errorf("device %s is %d bytes long; the kernel allows %d", quote(s), len(s), longest)
	case s == "" || s == "." || s == ".." || !printable(s) || strings.ContainsAny(s, "/:%"):
		return fmt.Errorf("device %s: %s", quote(s), d.wants())
	}
	*d = deviceName(s)
	return nil
}

// printable reports whether s is printable ASCII without blanks.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

func (*deviceName) wants() string {
	return "want 1 to 15 printable ASCII characters without blanks, /, : and %"
}

func (*deviceName) schema() map[string]any {
	return map[string]any{"type": "string", "minLength": 1, "maxLength": 15, "pattern": "^[^/:%\\s]+$"}
}

// absPath is a file's absolute path.
type absPath string

func (p *absPath) UnmarshalText(b []byte) error {
	if !filepath.IsAbs(string(b)) {
		return fmt.Errorf("path %s: %s", quote(string(b)), p.wants())
	}
	*p = absPath(filepath.Clean(string(b)))
	return nil
}

func (*absPath) wants() string { return "want an absolute path, beginning with /" }

func (*absPath) schema() map[string]any { return map[string]any{"type": "string", "pattern": "^/"} }

// network is a set of addresses: an address or a prefix without host bits.
type network netip.Prefix

func (n *network) UnmarshalText(b []byte) error {
	p, err := parsePrefix(string(b))
	if err != nil {
		return err
	}
	if masked := p.Masked(); p != masked {
		return fmt.Errorf("prefix %s has host bits; write %s, or %s for the one address", p, masked, p.Addr())
	}
	*n = network(p)
	return nil
}

func (*network) wants() string { return "want an address or prefix, as in 192.0.2.0/24" }

func (*network) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^[0-9a-fA-F:.]+(/[0-9]{1,3})?$"}
}

// interfaceAddress is an address of a device with its prefix length.
type interfaceAddress netip.Prefix

func (a *interfaceAddress) UnmarshalText(b []byte) error {
	s := string(b)
	p, err := parsePrefix(s)
	if err != nil {
		return err
	}
	addr := p.Addr()
	switch {
	case !strings.Contains(s, "/"):
		return fmt.Errorf("address %s lacks its prefix length; write %s/24 or the like", s, s)
	case addr.IsUnspecified() || addr.IsMulticast() || addr.IsLoopback():
		return fmt.Errorf("address %s can not be a device's own", s)
	case addr.Is4() && p.Bits() < 31 && addr == p.Masked().Addr():
		return fmt.Errorf("address %s is the network's own; write %s/%d", s, addr.Next(), p.Bits())
	case addr.Is4() && p.Bits() < 31 && !p.Contains(addr.Next()):
		return fmt.Errorf("address %s is the broadcast address; write %s/%d", s, addr.Prev(), p.Bits())
	}
	*a = interfaceAddress(p)
	return nil
}

func (*interfaceAddress) wants() string {
	return "want an address with its prefix length, as in 10.0.0.1/24"
}

func (*interfaceAddress) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^[0-9a-fA-F:.]+/[0-9]{1,3}$"}
}

// parsePrefix reads an address (all its bits) or a prefix, with or without host bits.
func parsePrefix(s string) (netip.Prefix, error) {
	written, length, sliced := strings.Cut(s, "/")
	addr, err := netip.ParseAddr(written)
	if err != nil || addr.Zone() != "" {
		return netip.Prefix{}, fmt.Errorf("%s is no address or prefix; want one as in 192.0.2.0/24 or 2001:db8::/32", quote(s))
	}
	if addr.Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%s is an IPv4 address in IPv6; write it as %s", quote(s), addr.Unmap())
	}
	if !sliced {
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	bits, err := wholeNumber(length)
	if err != nil || int(bits) > addr.BitLen() {
		return netip.Prefix{}, fmt.Errorf("prefix length %s: want 0 to %d for %s", quote(length), addr.BitLen(), addr)
	}
	return netip.PrefixFrom(addr, int(bits)), nil
}

// address is a single address.
type address netip.Addr

func (a *address) UnmarshalText(b []byte) error {
	p, err := parsePrefix(string(b))
	if err != nil || strings.Contains(string(b), "/") || p.Addr().IsUnspecified() || p.Addr().IsMulticast() {
		return fmt.Errorf("address %s: %s", quote(string(b)), a.wants())
	}
	*a = address(p.Addr())
	return nil
}

func (*address) wants() string { return "want an address without prefix length, as in 192.0.2.1" }

func (*address) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^[0-9a-fA-F:.]+$"}
}

// Listener is where the API listens.
type Listener struct {
	Network string // "unix" or "tcp"
	Address string // an absolute path, or address:port with a literal address
}

// Loopback reports whether only this host can reach the listener.
func (l Listener) Loopback() bool {
	at, err := netip.ParseAddrPort(l.Address)
	return l.Network == "unix" || err == nil && at.Addr().IsLoopback()
}

// UnmarshalText reads unix:PATH or tcp:ADDRESS:PORT.
func (l *Listener) UnmarshalText(b []byte) error {
	kind, where, _ := strings.Cut(string(b), ":")
	var err error
	switch kind {
	case "unix":
		err = checkSocketPath(where)
	case "tcp":
		err = checkSocketAddress(where)
	default:
		err = errors.New(l.wants())
	}
	if err != nil {
		return fmt.Errorf("listener %s: %w", quote(string(b)), err)
	}
	*l = Listener{kind, where}
	return nil
}

func checkSocketPath(s string) error {
	const longest = 107 // sun_path and its zero
	switch {
	case !filepath.IsAbs(s):
		return errors.New("want an absolute path, as in unix:/run/gatewayd/api.sock")
	case len(s) > longest:
		return fmt.Errorf("path is %d bytes long; the kernel allows %d", len(s), longest)
	}
	return nil
}

func checkSocketAddress(s string) error {
	at, err := netip.ParseAddrPort(s)
	switch {
	case err != nil:
		return errors.New("want a literal address and a port, as in tcp:127.0.0.1:8690 or tcp:[::1]:8690")
	case at.Port() == 0:
		return errors.New("port 0: want 1 to 65535")
	}
	return nil
}

func (*Listener) wants() string { return "want unix:PATH or tcp:ADDRESS:PORT" }

func (*Listener) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^(unix:/|tcp:.+:[0-9]+$)"}
}

// hostName is a DNS name or an address, without a port.
type hostName string

func (h *hostName) UnmarshalText(b []byte) error {
	s := string(b)
	_, err := netip.ParseAddr(s)
	if err != nil && (len(s) > 253 || !hostRegexp.MatchString(s)) {
		return fmt.Errorf("host %s: %s", quote(s), h.wants())
	}
	*h = hostName(strings.ToLower(s))
	return nil
}

const hostPattern = `^[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?$`

func (*hostName) wants() string { return "want a host name or address without a port" }

func (*hostName) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^[0-9A-Za-z._:-]+$"}
}
