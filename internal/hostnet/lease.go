package hostnet

import (
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Lease is what a DHCP server noted of one address.
type Lease struct {
	Addr    netip.Addr
	MAC     MAC       // zero: not told, as always for DHCPv6, which goes by DUID
	Host    string    // what the client calls itself, in lower case; empty: not told, or no host name
	Expires time.Time // zero: while it is noted
}

// maxLeases is how many leases are taken from one text.
const maxLeases = 8192

// noTime is the first number in dnsmasq's first field that is a time: below it there
// is a duration, as dnsmasq writes on hosts without a clock.
const noTime = 1_000_000_000

// ParseLeases reads the lease files of dnsmasq and of odhcpd, whose lines can't be
// taken for one another. Lines that are neither, or spoilt, are passed over, as is a
// last line without its end, which is still being written. At most 8,192 leases are
// taken, the first ones.
//
//	dnsmasq: expiry mac address host client-id
//	         expiry iaid address host duid          after a line "duid …"
//	odhcpd:  # interface mac  ipv4 host expiry number 32 address/32
//	         # interface duid iaid host expiry number 128 address/128 …
func ParseLeases(text []byte) []Lease {
	var leases []Lease
	for len(text) > 0 && len(leases) < maxLeases {
		line, rest, whole := bytes.Cut(text, []byte{'\n'})
		if !whole {
			break
		}
		text = rest
		fields := strings.Fields(string(line))
		switch {
		case len(fields) >= 9 && fields[0] == "#":
			leases = appendOdhcpd(leases, fields[1:])
		case len(fields) >= 4:
			leases = appendDnsmasq(leases, fields)
		}
	}
	return leases[:min(len(leases), maxLeases)]
}

func appendDnsmasq(leases []Lease, f []string) []Lease {
	expiry, err := strconv.ParseInt(f[0], 10, 64)
	if err != nil || expiry < 0 {
		return leases
	}
	addr, err := netip.ParseAddr(f[2])
	if err != nil || addr.Zone() != "" {
		return leases
	}
	l := Lease{Addr: addr.Unmap(), Host: hostName(f[3])}
	if l.Addr.Is4() {
		l.MAC = parseMAC(f[1])
	}
	if expiry >= noTime {
		l.Expires = time.Unix(expiry, 0)
	}
	return append(leases, l)
}

func appendOdhcpd(leases []Lease, f []string) []Lease {
	expiry, err := strconv.ParseInt(f[4], 10, 64)
	if err != nil || expiry == 0 { // 0: it has ended
		return leases
	}
	l := Lease{Host: hostName(f[3])}
	if expiry > 0 {
		l.Expires = time.Unix(expiry, 0)
	}
	if f[2] == "ipv4" {
		l.MAC = parseHexMAC(f[1])
	}
	for _, s := range f[7:] {
		p, err := netip.ParsePrefix(s)
		if err == nil && p.IsSingleIP() { // else a delegated prefix: whole networks behind a router
			l.Addr = p.Addr().Unmap()
			leases = append(leases, l)
		}
	}
	return leases
}

// parseMAC is zero for what is no Ethernet address: dnsmasq puts the number of
// another hardware type and a dash before it.
func parseMAC(s string) (m MAC) {
	if b, err := net.ParseMAC(s); err == nil && len(b) == len(m) {
		m = MAC(b)
	}
	return m
}

func parseHexMAC(s string) (m MAC) {
	if b, err := hex.DecodeString(s); err == nil && len(b) == len(m) {
		m = MAC(b)
	}
	return m
}

// hostName is a host name in lower case, and empty for what isn't one: "*" and "-"
// stand for none, and clients call themselves what they like.
func hostName(s string) string {
	if len(s) > 253 || strings.Trim(s, "-._") != s {
		return ""
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return ""
		}
	}
	return strings.ToLower(s)
}
