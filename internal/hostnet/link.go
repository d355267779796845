package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// byIndex names a link to the library without asking the kernel for it, so that
// a change can't hit another link that took the name meanwhile.
func byIndex(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

// SetMTU sets a link's MTU in bytes. Like every change here it needs
// CAP_NET_ADMIN, and its error matches the kernel's errno.
func SetMTU(index, mtu int) error {
	if err := netlink.LinkSetMTU(byIndex(index), mtu); err != nil {
		return fmt.Errorf("mtu %d: %w", mtu, err)
	}
	return nil
}

// SetQueueLength sets how many packets wait in a link's transmit queue.
func SetQueueLength(index, packets int) error {
	if err := netlink.LinkSetTxQLen(byIndex(index), packets); err != nil {
		return fmt.Errorf("queue length %d: %w", packets, err)
	}
	return nil
}

// LinkByIndex finds a link by its index in the namespace of the calling thread;
// ok is false if there is none.
func LinkByIndex(index int) (l Link, ok bool, err error) {
	found, err := netlink.LinkByIndex(index)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing || errors.Is(err, unix.ENODEV) {
		return Link{}, false, nil
	}
	if err != nil {
		return Link{}, false, fmt.Errorf("link %d from netlink: %w", index, err)
	}
	return linkOf(found), true, nil
}

// SetUp brings a link up.
func SetUp(index int) error {
	if err := netlink.LinkSetUp(byIndex(index)); err != nil {
		return fmt.Errorf("link up: %w", err)
	}
	return nil
}

const (
	usableWithin = 2 * time.Second
	usableEvery  = time.Millisecond
)

// AddAddress adds an address with the length of its network to a link, which has
// to be up for IPv6. It blocks until packets to the address are delivered: an
// IPv6 address comes without duplicate address detection, which no neighbour on
// a point-to-point device could answer, but even so the kernel puts it into
// effect a moment after it took it.
func AddAddress(index int, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: &net.IPNet{
		IP:   p.Addr().AsSlice(),
		Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen()),
	}}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := netlink.AddrAdd(byIndex(index), a); err != nil {
		return fmt.Errorf("address %s: %w", p, err)
	}
	if p.Addr().Is6() {
		return awaitUsable(p.Addr())
	}
	return nil
}

func awaitUsable(a netip.Addr) error {
	tick := time.NewTicker(usableEvery)
	defer tick.Stop()
	for end := time.Now().Add(usableWithin); !delivered(a); <-tick.C {
		if time.Now().After(end) {
			return fmt.Errorf("address %s: the kernel does not use it after %v", a, usableWithin)
		}
	}
	return nil
}

// delivered reports whether the kernel would deliver a packet to a on this host.
func delivered(a netip.Addr) bool {
	routes, err := netlink.RouteGet(a.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// Delete removes a link.
func Delete(index int) error {
	if err := netlink.LinkDel(byIndex(index)); err != nil {
		return fmt.Errorf("link removal: %w", err)
	}
	return nil
}
