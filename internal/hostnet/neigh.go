package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// MAC is an Ethernet address. The zero value is none.
type MAC [6]byte

// String is the usual form in lower case, "3c:22:fb:aa:bb:cc".
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// Neighbour is what the kernel knows of an address on one of its links.
type Neighbour struct {
	Addr      netip.Addr // without a zone
	Index     int        // of the link
	MAC       MAC        // zero: it does not know, or forgot, who has the address
	Confirmed bool       // it heard from the neighbour within the last seconds
}

// valid are the states of an entry whose MAC holds (NUD_VALID of the kernel, without
// NOARP: that is multicast, loopback and links that need no resolution).
const valid = unix.NUD_PERMANENT | unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE

// The ndmsg and its attributes, linux/neighbour.h.
const (
	sizeofNdmsg = 12
	ndaDst      = 1
	ndaLladdr   = 2
	ntfProxy    = 0x08
)

// neighbourOf reads the payload of RTM_NEWNEIGH. ok is false for what is no
// neighbour of IPv4 or IPv6: a bridge's forwarding entries come in the same group.
func neighbourOf(b []byte) (n Neighbour, ok bool) {
	if len(b) < sizeofNdmsg {
		return n, false
	}
	family, state, flags := b[0], nl.NativeEndian().Uint16(b[8:]), b[10]
	if family != unix.AF_INET && family != unix.AF_INET6 || flags&ntfProxy != 0 || state&unix.NUD_NOARP != 0 {
		return n, false
	}
	n.Index = int(int32(nl.NativeEndian().Uint32(b[4:])))
	n.Confirmed = state&unix.NUD_REACHABLE != 0
	for kind, value := range attributes(b[sizeofNdmsg:]) {
		switch {
		case kind == ndaDst:
			n.Addr, _ = netip.AddrFromSlice(value)
		case kind == ndaLladdr && len(value) == len(n.MAC) && state&valid != 0:
			n.MAC = MAC(value)
		}
	}
	return n, n.Addr.IsValid() && n.Addr.Is4() == (family == unix.AF_INET)
}

// neighbourNews is the change that a message of the neighbour group tells.
func neighbourNews(m *syscall.NetlinkMessage) (n Neighbour, ok bool) {
	if m.Header.Type != unix.RTM_NEWNEIGH && m.Header.Type != unix.RTM_DELNEIGH {
		return n, false
	}
	n, ok = neighbourOf(m.Data)
	if m.Header.Type == unix.RTM_DELNEIGH {
		n.MAC, n.Confirmed = MAC{}, false
	}
	return n, ok
}

// OnLink is the link by which this host reaches an address directly; ok is false
// where it has no route to it, or one by way of a router, or has the address itself.
func OnLink(a netip.Addr) (index int, ok bool, err error) {
	routes, err := netlink.RouteGet(a.Unmap().AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("route to %s from netlink: %w", a, err)
	}
	for i := range routes {
		if r := &routes[i]; r.Type == unix.RTN_UNICAST && r.Gw == nil && r.Via == nil {
			return r.LinkIndex, true, nil
		}
	}
	return 0, false, nil
}

// NeighbourAt asks for the kernel's entry of one address on the link by which this
// host reaches it; ok is false where there is none. An address behind a router never
// has one: the entry of the router is not looked at.
func NeighbourAt(a netip.Addr) (n Neighbour, ok bool, err error) {
	index, ok, err := OnLink(a)
	if !ok || err != nil {
		return n, false, err
	}
	req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	req.AddData(&netlink.Ndmsg{Family: uint8(familyOf(a)), Index: uint32(index)})
	req.AddData(nl.NewRtAttr(ndaDst, a.Unmap().AsSlice()))
	found, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) {
		return n, false, nil
	}
	if err != nil {
		return n, false, fmt.Errorf("neighbour %s from netlink: %w", a, err)
	}
	for _, b := range found {
		if n, ok := neighbourOf(b); ok && n.MAC != (MAC{}) {
			return n, true, nil
		}
	}
	return n, false, nil
}

// Solicit has the kernel find out who has an address on a link, as if it had a packet
// for it. It does not wait for the answer. It needs CAP_NET_ADMIN.
func Solicit(a netip.Addr, index int) error {
	err := netlink.NeighSet(&netlink.Neigh{LinkIndex: index, Family: familyOf(a), Flags: netlink.NTF_USE, IP: a.Unmap().AsSlice()})
	if err != nil {
		return fmt.Errorf("solicit %s: %w", a, err)
	}
	return nil
}

func familyOf(a netip.Addr) int {
	if a.Unmap().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
