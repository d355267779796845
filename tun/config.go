package tun

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"

	"gatewayd/flow"
)

// Offload says whether a device leaves checksums and segmentation to the
// netstack and gets super-packets from the kernel.
type Offload uint8

// The offload settings.
const (
	OffloadAuto Offload = iota // what the kernel has
	OffloadOn                  // at least checksums and TCP segmentation, or Open fails
	OffloadOff                 // plain packets only
)

// The limits of a Config.
const (
	MaxName    = 15    // bytes of a device name
	MinMTU     = 576   // bytes; the smallest that an IPv4 host has to take (RFC 791)
	MaxMTU     = 65535 // bytes
	DefaultMTU = 1500  // bytes
	MaxQueues  = 256   // the kernel's own limit
	minMTUv6   = 1280  // bytes (RFC 8200, section 5)
)

// Config describes a device to open.
type Config struct {
	Name      string         // of the device, at most MaxName bytes
	MTU       int            // bytes; 0 is DefaultMTU
	Queues    int            // 0 is 1
	Addresses []netip.Prefix // the host's own addresses on the device; none: Open picks a pair
	Offload   Offload
	Logger    *slog.Logger // nil logs nothing
	Drops     *flow.Drops  // nil counts nowhere
}

// checked is a copy of c with defaults filled in, or what is wrong with it.
func (c Config) checked() (Config, error) {
	if c.MTU == 0 {
		c.MTU = DefaultMTU
	}
	if c.Queues == 0 {
		c.Queues = 1
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Drops == nil {
		c.Drops = new(flow.Drops)
	}
	if err := CheckName(c.Name); err != nil {
		return c, err
	}
	if c.MTU < MinMTU || c.MTU > MaxMTU {
		return c, fmt.Errorf("device %s: mtu %d: want %d to %d bytes", c.Name, c.MTU, MinMTU, MaxMTU)
	}
	if c.Queues < 1 || c.Queues > MaxQueues {
		return c, fmt.Errorf("device %s: %d queues: want 1 to %d", c.Name, c.Queues, MaxQueues)
	}
	if err := checkAddresses(c.Addresses); err != nil {
		return c, fmt.Errorf("device %s: %w", c.Name, err)
	}
	return c, nil
}

// CheckName tells what keeps name from being a device's name, as the kernel sees
// it; names that mean all devices to sysctl are out, too.
func CheckName(name string) error {
	switch {
	case name == "":
		return errors.New("device name is empty: want 1 to 15 bytes")
	case len(name) > MaxName:
		return fmt.Errorf("device name %q has %d bytes: want at most %d", name, len(name), MaxName)
	case name == ".", name == "..", name == "all", name == "default":
		return fmt.Errorf("device name %q is reserved: choose another", name)
	}
	for _, b := range []byte(name) {
		if b <= ' ' || b >= 0x7f || strings.IndexByte("/:%", b) >= 0 {
			return fmt.Errorf("device name %q: byte %q is not allowed: use letters, digits, '-', '_' and '.'", name, b)
		}
	}
	return nil
}

func checkAddresses(ps []netip.Prefix) error {
	for i, p := range ps {
		a := p.Addr()
		switch {
		case !p.IsValid():
			return errors.New("address: invalid prefix")
		case a.IsUnspecified(), a.IsMulticast(), a.IsLoopback(), a.Is4In6(), a.Zone() != "":
			return fmt.Errorf("address %s: want a unicast address of a host", p)
		}
		for _, other := range ps[:i] {
			if other.Overlaps(p) {
				return fmt.Errorf("address %s overlaps %s of the same device", p, other)
			}
		}
	}
	return nil
}
