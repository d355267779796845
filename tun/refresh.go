package tun

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"gatewayd/internal/hostnet"
)

// Refresh looks at what others did to the device: a changed MTU is followed;
// addresses that it lost come back (the kernel takes IPv6 ones away while a device
// is down or its MTU below 1280, for ever); and Run of a device that is no longer
// in this namespace ends. It is to be called after links or addresses of the host
// changed, by one goroutine at a time, and blocks for a few exchanges with the kernel.
func (d *Device) Refresh() error {
	if d.closed.Load() {
		return nil
	}
	l, ok, err := hostnet.LinkByIndex(d.index)
	switch {
	case err != nil:
		return fmt.Errorf("device %s: %w", d.name, err)
	case !ok:
		d.gone.Store(true)
		d.interrupt()
		return nil
	}
	d.mtu.Store(int32(l.MTU))
	if !l.Up {
		return nil
	}
	if err := d.restore(l); err != nil {
		return fmt.Errorf("device %s: %w", d.name, err)
	}
	return nil
}

// restore adds the addresses of the device that are missing and that it can have.
func (d *Device) restore(l hostnet.Link) error {
	addrs, err := hostnet.Addresses()
	if err != nil {
		return err
	}
	why, _ := withoutIPv6(l.Name, l.MTU)
	for _, p := range d.addresses {
		there := func(a hostnet.Address) bool { return a.Index == d.index && a.Addr == p.Addr() }
		if p.Addr().Is6() && why != "" || slices.ContainsFunc(addrs, there) {
			continue
		}
		if err := hostnet.AddAddress(d.index, p); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return nil
}
