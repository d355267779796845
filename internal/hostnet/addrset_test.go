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
	if !s.Contains(p.Addr()) || !s.Contains(netip.MustParseAddr("203.0.113.255")) || s.Gen() == gen {
		t.Fatal("want the address, its broadcast address and another generation")
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

func TestABurstOfNewAddressesIsBounded(t *testing.T) {
	var s AddrSet
	for i := range 4 * maxFresh {
		s.add(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 24))
	}
	if n := len(s.now().fresh); n > maxFresh+1 {
		t.Fatalf("%d addresses are searched one by one", n)
	}
}
