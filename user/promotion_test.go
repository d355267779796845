package user

import (
	"net/netip"

	"gatewayd/flow"
)

// device is who has the address, and the MAC if one is visible.
func device(addr, mac string) flow.Device {
	d := flow.Device{Name: addr, Addr: netip.MustParseAddr(addr), MAC: mac}
	if mac != "" {
		d.Name = "mac:" + mac
	}
	return d
}
