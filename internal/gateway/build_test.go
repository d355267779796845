package gateway

import (
	"net/netip"
	"slices"
	"testing"
)

func TestICMPErrorsComeFromANeighbourOfTheDevicesAddress(t *testing.T) {
	for own, want := range map[string]string{
		"172.31.255.253/30":  "172.31.255.254",
		"172.31.255.254/30":  "172.31.255.253", // the next one is the broadcast address
		"10.0.0.1/24":        "10.0.0.2",
		"10.0.0.0/31":        "10.0.0.1",
		"10.0.0.1/31":        "10.0.0.0",
		"10.0.0.1/32":        "",
		"255.255.255.255/32": "",
		"fd00::1/126":        "fd00::2",
		"fd00::3/126":        "fd00::2",
		"fd00::1/128":        "",
	} {
		var expected []netip.Addr
		if want != "" {
			expected = append(expected, netip.MustParseAddr(want))
		}
		if got := routersOf([]netip.Prefix{netip.MustParsePrefix(own)}); !slices.Equal(got, expected) {
			t.Errorf("%s: got %v, want %q", own, got, want)
		}
	}
}
