package wire

import (
	"net/netip"

	"gatewayd/flow"
)

// Deliverable reports whether a packet between these addresses may become a flow;
// if not, under which cause it is dropped. It knows no addresses of devices: a
// subnet's directed broadcast and the gateway's own addresses are the caller's.
func Deliverable(src, dst netip.Addr) (cause flow.Drop, ok bool) {
	switch {
	case isGroup(dst), dst.IsLinkLocalUnicast(), src.IsLinkLocalUnicast(), isUnspecified(dst):
		return flow.DropMulticast, false
	case isGroup(src), isUnspecified(src), src.IsLoopback(), src.Is4In6(), src == dst:
		return flow.DropSource, false
	case dst.IsLoopback():
		return flow.DropSelf, false
	case dst.Is4In6(): // never on a wire (RFC 4942, 2.2): it would slip past rules about IPv4
		return flow.DropMalformed, false
	}
	return 0, true
}

// isGroup reports addresses that are more than one host.
func isGroup(a netip.Addr) bool {
	return a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// isUnspecified reports :: and 0.0.0.0/8, "this network" (RFC 1122, 3.2.1.3).
func isUnspecified(a netip.Addr) bool {
	return a.IsUnspecified() || a.Is4() && a.As4()[0] == 0
}
