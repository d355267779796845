package hostnet

import (
	"net/netip"
	"testing"
)

func TestAnAddressIsInTheSetAsSoonAsTheKernelTold(t *testing.T) {
	s, err := NewAddrSet()
	if err != nil {
		t.Fatal(err)
	}
	gen := s.Gen()
	p := netip.MustParsePrefix("203.0.113.7/24") // of no host
	if s.Contains(p.Addr()) {
		t.Fatal("it was there before")
	}
	s.add(p)
	last := netip.MustParseAddr("203.0.113.255")
	if !s.Contains(p.Addr()) || !s.Contains(last) || s.Gen() == gen {
		t.Fatal("want the address, its broadcast address and another generation")
	}
	if s.IsBroadcast(p.Addr()) || !s.IsBroadcast(last) {
		t.Fatal("want the last address of the network, and no other, as broadcast")
	}
	s.add(netip.MustParsePrefix("2001:db8::7/64"))
	if !s.Contains(p.Addr()) || !s.Contains(netip.MustParseAddr("2001:db8::7")) {
		t.Fatal("the second address took the place of the first")
	}
	gen = s.Gen()
	if err := s.Refresh(); err != nil {
		t.Fatal(err)
	}
	if s.Contains(p.Addr()) || s.Gen() == gen {
		t.Fatal("an address that the host does not have outlives a dump")
	}
}

func TestAnAddressOfTheHostIsNoBroadcastThoughANetworkEndsWithIt(t *testing.T) {
	var s AddrSet
	for _, p := range []string{"192.0.2.1/24", "192.0.2.255/32"} {
		s.add(netip.MustParsePrefix(p))
	}
	if last := netip.MustParseAddr("192.0.2.255"); s.IsBroadcast(last) || !s.Contains(last) {
		t.Error("the host's own address counts as broadcast")
	}
	if s.IsBroadcast(netip.MustParseAddr("2001:db8::ffff")) {
		t.Error("IPv6 has no broadcast")
	}
}

func TestABurstOfNewAddressesIsBounded(t *testing.T) {
	var s AddrSet
	for i := range 4 * maxFresh {
		s.add(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 24))
	}
	if n := len(s.now().fresh); n > maxFresh {
		t.Fatalf("%d addresses are searched one by one", n)
	}
}
