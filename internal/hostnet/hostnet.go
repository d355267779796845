// Package hostnet is what the kernel tells, through rtnetlink but for the MTU of a
// route, about this host's links, addresses, routes and neighbours, watches over their
// changes, and the few changes to links that the gateway's own devices need; and what
// DHCP servers on this host note of their leases.
//
// Each function asks the kernel anew, in the network namespace of the calling
// thread, and blocks for an exchange with it. Who asks often keeps an AddrSet.
package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Link is a network interface.
type Link struct {
	Index int
	Name  string
	Kind  string // as `ip -d link` shows it: "tun", "bridge", "veth", …; "device" for hardware
	MTU   int    // bytes
	Up    bool   // administratively
}

// Address is an address of this host on one of its links.
type Address struct {
	Addr  netip.Addr   // without a zone
	Net   netip.Prefix // the network that it makes reachable on the link; that of the far end on a point-to-point link
	Index int          // of the link
	Link  string       // its name
}

// Route is a unicast route of the main table.
type Route struct {
	Dst   netip.Prefix // 0.0.0.0/0 and ::/0 are the default routes
	Index int          // of the link that it leaves by; 0 for several next hops
}

// dumpTries is how often a dump is repeated that the kernel says changed meanwhile.
const dumpTries = 8

// dump repeats f while the kernel reports an inconsistent answer.
func dump[T any](what string, f func() (T, error)) (T, error) {
	var (
		got T
		err error
	)
	for range dumpTries {
		if got, err = f(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return got, fmt.Errorf("%s from netlink: %w", what, err)
	}
	return got, nil
}

// Links lists the links of this host.
func Links() ([]Link, error) {
	found, err := dump("links", netlink.LinkList)
	if err != nil {
		return nil, err
	}
	links := make([]Link, 0, len(found))
	for _, l := range found {
		links = append(links, linkOf(l))
	}
	return links, nil
}

// LinkByName finds a link by its name or an alternative name; ok is false if
// there is none.
func LinkByName(name string) (l Link, ok bool, err error) {
	found, err := netlink.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return Link{}, false, nil
	}
	if err != nil {
		return Link{}, false, fmt.Errorf("link %s from netlink: %w", name, err)
	}
	return linkOf(found), true, nil
}

func linkOf(l netlink.Link) Link {
	a := l.Attrs()
	kind := l.Type()
	if kind == "tuntap" {
		kind = "tun"
	}
	return Link{Index: a.Index, Name: a.Name, Kind: kind, MTU: a.MTU, Up: a.Flags&net.FlagUp != 0}
}

// Addresses lists the addresses of this host, both families, all links.
func Addresses() ([]Address, error) {
	found, err := dump("addresses", func() ([]netlink.Addr, error) {
		return netlink.AddrList(nil, netlink.FAMILY_ALL)
	})
	if err != nil {
		return nil, err
	}
	links, err := Links()
	if err != nil {
		return nil, err
	}
	names := make(map[int]string, len(links))
	for _, l := range links {
		names[l.Index] = l.Name
	}
	addrs := make([]Address, 0, len(found))
	for i := range found {
		if a, ok := addressOf(&found[i]); ok {
			a.Link = names[a.Index]
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

func addressOf(a *netlink.Addr) (Address, bool) {
	if a.IPNet == nil {
		return Address{}, false
	}
	own, ok := prefixOf(a.IPNet)
	if !ok {
		return Address{}, false
	}
	reach := own
	if a.Peer != nil {
		if p, ok := prefixOf(a.Peer); ok {
			reach = p
		}
	}
	return Address{Addr: own.Addr(), Net: reach.Masked(), Index: a.LinkIndex}, true
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	a, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	bits, _ := n.Mask.Size()
	if len(n.Mask) == net.IPv4len {
		a = a.Unmap()
	}
	p := netip.PrefixFrom(a, bits)
	return p, p.IsValid()
}

// EachRoute calls f for the unicast routes of the main table, both families,
// until f returns false. A route may come twice if the table changes meanwhile.
func EachRoute(f func(Route) bool) error {
	for _, family := range [...]int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		stopped := false
		_, err := dump("routes", func() (struct{}, error) {
			return struct{}{}, netlink.RouteListFilteredIter(family, new(netlink.Route), 0, func(r netlink.Route) bool {
				if dst, ok := destinationOf(r, family); ok {
					stopped = stopped || !f(Route{Dst: dst, Index: r.LinkIndex})
				}
				return !stopped
			})
		})
		if stopped {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// destinationOf is false for routes that lead nowhere: unreachable, blackhole, …
func destinationOf(r netlink.Route, family int) (netip.Prefix, bool) {
	switch {
	case r.Type != unix.RTN_UNICAST:
		return netip.Prefix{}, false
	case r.Dst != nil:
		return prefixOf(r.Dst)
	case family == netlink.FAMILY_V4:
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0), true
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0), true
}
