package flow

import (
	"errors"
	"net"
	"net/netip"
	"regexp"
	"strings"
)

// DeviceSet is the devices that a rule or a user's definition names: the one with a
// MAC address, those with a host name, or those with an address of a prefix. One
// field is set. It is comparable; two that name the same are equal.
type DeviceSet struct {
	MAC    string       // in lower case with colons
	Host   string       // in lower case
	Prefix netip.Prefix // without host bits; a single address has all its bits
}

// DeviceSetWant says how a DeviceSet is written, for errors.
const DeviceSetWant = "want mac:3c:22:fb:aa:bb:cc, host:NAME, an address or a prefix"

// hostLabel is as DHCP clients name themselves: also with underscores, and longer
// names as they are in DNS.
var hostLabel = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*$`)

// ParseDeviceSet reads mac:ADDRESS, host:NAME, an address or a prefix. The error
// says what is wrong with it and not which text it was.
func ParseDeviceSet(s string) (DeviceSet, error) {
	switch kind, rest, _ := strings.Cut(s, ":"); kind {
	case "mac":
		return macSet(rest)
	case "host":
		host := strings.TrimSuffix(strings.ToLower(rest), ".")
		if len(host) > 253 || !hostLabel.MatchString(host) {
			return DeviceSet{}, errors.New("no host name; want letters, digits, hyphens and dots, as in host:kids-tablet")
		}
		return DeviceSet{Host: host}, nil
	}
	return prefixSet(s)
}

func macSet(s string) (DeviceSet, error) {
	const ethernet = 6 // bytes
	mac, err := net.ParseMAC(s)
	switch {
	case err != nil || len(mac) != ethernet:
		return DeviceSet{}, errors.New("no MAC address; want six bytes, as in mac:3c:22:fb:aa:bb:cc")
	case mac[0]&1 != 0:
		return DeviceSet{}, errors.New("a multicast address is no device's own")
	case [ethernet]byte(mac) == [ethernet]byte{}:
		return DeviceSet{}, errors.New("a MAC address of zeros is no device's own")
	}
	return DeviceSet{MAC: mac.String()}, nil
}

func prefixSet(s string) (DeviceSet, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" {
			return DeviceSet{}, errors.New(DeviceSetWant)
		}
		if a.Is4In6() {
			return DeviceSet{}, errors.New("an IPv4 address in IPv6; write it as " + a.Unmap().String())
		}
		return DeviceSet{Prefix: netip.PrefixFrom(a, a.BitLen())}, nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return DeviceSet{}, errors.New(DeviceSetWant)
	case p.Addr().Is4In6():
		return DeviceSet{}, errors.New("an IPv4 prefix in IPv6; write it as IPv4")
	case p != p.Masked():
		return DeviceSet{}, errors.New("has host bits; write " + p.Masked().String() + ", or " + p.Addr().String() + " for the one address")
	}
	return DeviceSet{Prefix: p}, nil
}

// String is the one form in which a DeviceSet is kept: "mac:3c:22:fb:aa:bb:cc",
// "host:kids-tablet", "192.168.1.5" or "192.168.1.64/28".
func (s DeviceSet) String() string {
	switch {
	case s.MAC != "":
		return "mac:" + s.MAC
	case s.Host != "":
		return "host:" + s.Host
	case s.Prefix.IsSingleIP():
		return s.Prefix.Addr().String()
	}
	return s.Prefix.String()
}

// Has tells whether d is one of the set.
func (s DeviceSet) Has(d Device) bool {
	switch {
	case s.MAC != "":
		return s.MAC == d.MAC
	case s.Host != "":
		return s.Host == d.Host
	}
	return s.Prefix.Contains(d.Addr.Unmap())
}
