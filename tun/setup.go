package tun

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/exitcode"
	"gatewayd/internal/hostnet"
)

// setup gives the link of an opened device its MTU and addresses and brings it
// up. IPv6 addresses come last: some kernels take none on a link that is down.
func (d *Device) setup(cfg *Config, addrs []netip.Prefix) error {
	l, ok, err := hostnet.LinkByName(d.name)
	if err != nil || !ok {
		return errors.Join(errors.New("its link can't be found"), err)
	}
	d.index = l.Index
	if err := hostnet.SetMTU(l.Index, cfg.MTU); err != nil {
		return err
	}
	hostnet.SetQueueLength(l.Index, queueLength) //nolint:errcheck // the kernel's own length works too
	v4, v6, err := d.families(cfg, addrs)
	if err != nil {
		return err
	}
	quieten(d.name)
	if err := d.add(v4); err != nil {
		return err
	}
	if err := hostnet.SetUp(l.Index); err != nil {
		return err
	}
	return d.add(v6)
}

// queueLength is how many packets the kernel keeps for a reader that is late: for
// 100 ms of a flood of 20,000 a second, so that the flood's neighbours are not lost
// while the cores are busy with it. The kernel's own 500 last 25 ms.
const queueLength = 2000

func (d *Device) add(addrs []netip.Prefix) error {
	for _, p := range addrs {
		if err := hostnet.AddAddress(d.index, p); err != nil {
			return err
		}
		d.addresses = append(d.addresses, p)
	}
	return nil
}

// families splits addresses by family. Where IPv6 can't be had it leaves those
// out with one warning, unless they are all there is or are required.
func (d *Device) families(cfg *Config, addrs []netip.Prefix) (v4, v6 []netip.Prefix, err error) {
	for _, p := range addrs {
		if p.Addr().Is4() {
			v4 = append(v4, p)
		} else {
			v6 = append(v6, p)
		}
	}
	why, fix := withoutIPv6(d.name, cfg.MTU)
	if why == "" || len(v6) == 0 {
		return v4, v6, nil
	}
	if len(v4) == 0 {
		return nil, nil, exitcode.With(exitcode.Missing, fmt.Errorf("IPv6 is required, but %s: %s", why, fix))
	}
	cfg.Logger.Warn("the device has IPv4 only", "device", d.name, "cause", why, "fix", fix)
	return v4, nil, nil
}

// withoutIPv6 tells why a device can't have IPv6, and the fix; "" if it can.
func withoutIPv6(name string, mtu int) (why, fix string) {
	if mtu < minMTUv6 {
		return fmt.Sprintf("its mtu is %d", mtu), fmt.Sprintf("set it to at least %d", minMTUv6)
	}
	off, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6")
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "the kernel has no IPv6", "boot without ipv6.disable=1, or load the module ipv6"
	case err == nil && !bytes.Equal(bytes.TrimSpace(off), []byte("0")):
		return "it is switched off on this host", "set net.ipv6.conf.default.disable_ipv6=0 with sysctl"
	}
	return "", ""
}

// quieten keeps the kernel from sending packets of its own into the device
// (router solicitations, duplicate address detection, a link-local address and
// what goes with it) and from dropping replies from addresses that the host
// routes elsewhere. All of it as far as it is possible: a read-only /proc/sys in
// a container is no reason to fail.
func quieten(name string) {
	v4, v6 := "/proc/sys/net/ipv4/conf/", "/proc/sys/net/ipv6/conf/"+name+"/"
	for _, set := range [...][2]string{
		{v6 + "accept_ra", "0"},
		{v6 + "router_solicitations", "0"},
		{v6 + "dad_transmits", "0"},
		{v6 + "addr_gen_mode", "1"},
		{v4 + name + "/rp_filter", reversePath(v4 + "all/rp_filter")},
	} {
		os.WriteFile(set[0], []byte(set[1]), 0) //nolint:errcheck // best effort
	}
}

// reversePath is the value for our own rp_filter. The kernel uses the larger one
// of the device's and all's, so against a strict all (1) only loose (2) helps.
func reversePath(all string) string {
	if v, err := os.ReadFile(all); err == nil && bytes.Equal(bytes.TrimSpace(v), []byte("1")) {
		return "2"
	}
	return "0"
}

// chooseError names the device in an error of choose, which only asks: a refusal
// there is no missing capability, but a sandbox.
func chooseError(name string, err error) error {
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return exitcode.With(exitcode.Missing, fmt.Errorf(
			"device %s: rtnetlink is refused: allow AF_NETLINK in the service's RestrictAddressFamilies or seccomp filter: %w", name, err))
	}
	return fmt.Errorf("device %s: %w", name, err)
}

// setupError names the device in an error of setup.
func (d *Device) setupError(err error) error {
	if errors.Is(err, unix.EPERM) {
		return permissionError(d.name, err)
	}
	return fmt.Errorf("device %s: %w", d.name, err)
}

const (
	goneWithin = 2 * time.Second
	goneEvery  = 5 * time.Millisecond
)

// awaitGone waits until no link of that name and index is left, so that a new
// device can have the name at once.
func awaitGone(name string, index int) error {
	tick := time.NewTicker(goneEvery)
	defer tick.Stop()
	for end := time.Now().Add(goneWithin); ; <-tick.C {
		l, ok, err := hostnet.LinkByName(name)
		if err != nil {
			return fmt.Errorf("device %s: close: %w", name, err)
		}
		if !ok || l.Index != index {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("device %s: still there %v after its close: remove it with `ip link del %s`", name, goneWithin, name)
		}
	}
}
