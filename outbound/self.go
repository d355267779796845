package outbound

import (
	"context"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

// errSelf refuses a destination that no client may reach through the gateway.
var errSelf = &flow.Refusal{Verdict: flow.VerdictProhibited, Text: "destination is this host or link-local"}

// errFamily refuses a destination of a family that the outbound does not use.
var errFamily error = unix.ENETUNREACH

// metadata are the addresses of cloud metadata services beyond the link-local
// 169.254.169.254: AWS, Google, Alibaba.
var metadata = [...]netip.Addr{
	netip.AddrFrom16([16]byte{0: 0xfd, 2: 0x0e, 3: 0xc2, 14: 0x02, 15: 0x54}),
	netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x20, 3: 0xce, 14: 0x02, 15: 0x54}),
	netip.AddrFrom4([4]byte{100, 100, 100, 200}),
}

// check refuses addr when it is of no family in use, or toward ourselves
// without allowHost. Multicast and broadcast are refused always.
func (d *Direct) check(addr netip.Addr, allowHost bool) error {
	addr = addr.Unmap()
	if !d.takes(addr) {
		return errFamily
	}
	if !addr.IsValid() || addr.IsMulticast() || addr == broadcast {
		return errSelf
	}
	if allowHost {
		return nil
	}
	if TowardSelf(addr, d.c.Self) {
		return errSelf
	}
	return nil
}

// dialChecked is dial that looks again once the connection stands: while it was
// made the address may have become this host's. Nothing was sent yet.
func (d *Direct) dialChecked(ctx context.Context, addr netip.AddrPort, allowHost bool, deadline time.Time) (*stream, error) {
	s, err := d.dial(ctx, addr, deadline)
	if err != nil || allowHost {
		return s, err
	}
	if s.LocalAddrPort().Addr() == addr.Addr() {
		err = errSelf // what leaves from the address that it goes to has not left
	} else {
		err = d.check(addr.Addr(), false)
	}
	if err == nil {
		return s, nil
	}
	unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) //nolint:errcheck // a reset, or else an end
	s.Close()                                                                            //nolint:errcheck
	d.c.Drops.Add(flow.DropSelf, 1)
	return nil, err
}

// approved is the last address that passed check, as long as what is this host's
// own stays the same. The zero value approves none.
type approved struct {
	addr netip.Addr
	gen  uint64
}

// approve is check for datagrams, of which most go where the last one went.
func (d *Direct) approve(a *approved, addr netip.Addr, allowHost bool) error {
	gen := uint64(0)
	if d.c.SelfGen != nil {
		gen = d.c.SelfGen()
	}
	if addr.IsValid() && *a == (approved{addr, gen}) {
		return nil
	}
	if err := d.check(addr, allowHost); err != nil {
		return err
	}
	*a = approved{addr, gen}
	return nil
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// TowardSelf reports whether what is sent to addr would, or could, end on this
// host or on a service that trusts it: loopback, unspecified, link-local, cloud
// metadata, what own says is this host's (nil: nothing), and the IPv6 forms that a
// translator makes one of these of.
func TowardSelf(addr netip.Addr, own func(netip.Addr) bool) bool {
	addr = addr.Unmap().WithZone("")
	if isSelf(addr, own) {
		return true
	}
	inner, ok := embedded(addr)
	return ok && isSelf(inner, own)
}

func isSelf(addr netip.Addr, own func(netip.Addr) bool) bool {
	switch {
	case addr.IsLoopback(), addr.IsUnspecified(), addr.IsLinkLocalUnicast(), addr.IsMulticast():
		return true
	case addr.Is4() && addr.As4()[0] == 0: // "this network", RFC 1122
		return true
	}
	for _, m := range metadata {
		if addr == m {
			return true
		}
	}
	return own != nil && own(addr)
}

// embedded is the IPv4 address that a translator would make of addr: NAT64
// (RFC 6052, RFC 8215), 6to4 (RFC 3056), IPv4-compatible (RFC 4291).
func embedded(addr netip.Addr) (netip.Addr, bool) {
	if !addr.Is6() {
		return netip.Addr{}, false
	}
	b := addr.As16()
	last := netip.AddrFrom4([4]byte(b[12:]))
	switch {
	case [12]byte(b[:12]) == [12]byte{0: 0x00, 1: 0x64, 2: 0xff, 3: 0x9b}:
		return last, true
	case [6]byte(b[:6]) == [6]byte{0x00, 0x64, 0xff, 0x9b, 0x00, 0x01}:
		return last, true
	case [12]byte(b[:12]) == [12]byte{}:
		return last, true
	case b[0] == 0x20 && b[1] == 0x02:
		return netip.AddrFrom4([4]byte(b[2:6])), true
	}
	return netip.Addr{}, false
}
