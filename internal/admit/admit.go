// Package admit decides who may hold or begin one more of something scarce: how
// many dials, flows or associations each source has (Shares), and how fast it
// begins new ones (Rates).
//
// A source is an address and, beside it, its network: the /24 of an IPv4 address,
// the /64 of an IPv6 one. Who forges source addresses has many addresses, but
// rarely many networks. Nothing here locks, reads the clock or allocates once its
// tables have grown; the owner does the former two.
package admit

import "net/netip"

// key is an address or a network, packed: IPv4 as ::ffff:a.b.c.d.
type key struct {
	addr [16]byte
	bits uint8
}

// Lengths of networks within the 128 bits of a key.
const (
	hostBits = 128
	net4Bits = 96 + 24
	net6Bits = 64
)

func hostOf(a netip.Addr) key { return key{a.As16(), hostBits} }

func netOf(a netip.Addr) key {
	k := key{a.As16(), net6Bits}
	if a.Is4() || a.Is4In6() {
		k.bits = net4Bits
	}
	clear(k.addr[k.bits/8:])
	return k
}

// SameNetwork reports whether a and b are of one network.
func SameNetwork(a, b netip.Addr) bool { return netOf(a) == netOf(b) }
