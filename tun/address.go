package tun

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"gatewayd/internal/exitcode"
	"gatewayd/internal/hostnet"
)

// The networks that a device without configured addresses chooses from: the
// first pair that overlaps neither an address nor a route of this host. The
// device gets the first address after the network's own, so 172.31.255.253 and
// fd86:6761:7465::1 as a rule. The IPv4 networks are the ends of the three
// private ranges (RFC 1918), where the fewest sites number their hosts.
func automaticPairs() [][2]netip.Prefix {
	v4 := [...]string{
		"172.31.255.252/30", "172.31.255.248/30", "172.31.255.244/30", "172.31.255.240/30",
		"10.255.255.252/30", "10.255.255.248/30", "192.168.255.252/30", "192.168.255.248/30",
	}
	v6 := netip.MustParseAddr("fd86:6761:7465::").As16()
	pairs := make([][2]netip.Prefix, 0, len(v4))
	for _, p := range v4 {
		pairs = append(pairs, [2]netip.Prefix{netip.MustParsePrefix(p), netip.PrefixFrom(netip.AddrFrom16(v6), 126)})
		v6[15] += 4
	}
	return pairs
}

// defaultLike is the length of a prefix, in bits, below which a route is a
// default route in effect (0.0.0.0/0, or its halves) and takes no network.
const defaultLike = 8

// automatic picks addresses for a device that none were configured for.
func automatic() ([]netip.Prefix, error) {
	taken, err := takenNetworks()
	if err != nil {
		return nil, err
	}
	if pair, ok := firstFree(automaticPairs(), taken); ok {
		return []netip.Prefix{first(pair[0]), first(pair[1])}, nil
	}
	return nil, exitcode.With(exitcode.Collision, errors.New(
		"every automatic address overlaps an address or route of this host: set the device's addresses"))
}

func takenNetworks() ([]netip.Prefix, error) {
	addrs, err := hostnet.Addresses()
	if err != nil {
		return nil, err
	}
	var taken []netip.Prefix
	for _, a := range addrs {
		taken = append(taken, a.Net, netip.PrefixFrom(a.Addr, a.Addr.BitLen()))
	}
	pairs := automaticPairs()
	err = hostnet.EachRoute(func(r hostnet.Route) bool {
		// Only what matters is kept: a router may carry a million routes.
		inPair := func(p [2]netip.Prefix) bool { return p[0].Overlaps(r.Dst) || p[1].Overlaps(r.Dst) }
		if r.Dst.Bits() >= defaultLike && slices.ContainsFunc(pairs, inPair) {
			taken = append(taken, r.Dst)
		}
		return true
	})
	return taken, err
}

// firstFree is the first pair that overlaps nothing in taken.
func firstFree(pairs [][2]netip.Prefix, taken []netip.Prefix) (pair [2]netip.Prefix, ok bool) {
	for _, pair = range pairs {
		used := func(t netip.Prefix) bool { return t.Overlaps(pair[0]) || t.Overlaps(pair[1]) }
		if !slices.ContainsFunc(taken, used) {
			return pair, true
		}
	}
	return pair, false
}

// first is the first host address of a network, with the network's length.
func first(network netip.Prefix) netip.Prefix {
	return netip.PrefixFrom(network.Addr().Next(), network.Bits())
}

// clash tells which link of this host has one of the wanted addresses, or a
// network that overlaps one, as an error. Link-local networks are each link's own.
func clash(wanted []netip.Prefix) error {
	addrs, err := hostnet.Addresses()
	if err != nil {
		return err
	}
	for _, want := range wanted {
		for _, a := range addrs {
			if !want.Addr().IsLinkLocalUnicast() && (want.Overlaps(a.Net) || want.Contains(a.Addr)) {
				return exitcode.With(exitcode.Collision, fmt.Errorf(
					"address %s overlaps %s on %s: choose another address", want,
					netip.PrefixFrom(a.Addr, a.Net.Bits()), a.Link))
			}
		}
	}
	return nil
}
