package flow

import "net/netip"

// Device is who the source of a flow is on the local network: a MAC with all its
// addresses where one is visible, else the address itself. It is a comparable value.
type Device struct {
	Name string     // "mac:3c:22:fb:aa:bb:cc", or the address where no MAC is visible
	MAC  string     // "3c:22:fb:aa:bb:cc"; empty: not visible, as behind another router
	Host string     // what the device calls itself to the DHCP server, in lower case; empty: unknown
	Addr netip.Addr // the address that was asked about, without a zone
}
