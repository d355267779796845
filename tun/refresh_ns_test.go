package tun

import (
	"errors"
	"strings"
	"testing"

	"gatewayd/internal/hostnet"
	"gatewayd/internal/hostnet/hostnettest"
)

func refreshed(t *testing.T, d *Device) {
	t.Helper()
	if err := d.Refresh(); err != nil {
		t.Fatal(err)
	}
}

// lacks lists the device's addresses that the link does not have.
func lacks(t *testing.T, d *Device) (missing []string) {
	t.Helper()
	addrs, err := hostnet.Addresses()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Addresses() {
		found := false
		for _, a := range addrs {
			found = found || a.Index == d.Index() && a.Addr == p.Addr()
		}
		if !found {
			missing = append(missing, p.String())
		}
	}
	return missing
}

func TestAnMTUThatOthersSetIsFollowed(t *testing.T) {
	d := opened(t, config())
	for _, mtu := range []string{"576", "9000", "1500"} {
		hostnettest.IP(t, "link set gw0 mtu "+mtu)
		refreshed(t, d)
		if l, _, _ := hostnet.LinkByName("gw0"); d.MTU() != l.MTU {
			t.Errorf("the MTU is %d, want %d", d.MTU(), l.MTU)
		}
	}
	if gone := lacks(t, d); len(gone) > 0 {
		t.Errorf("addresses %v are gone", gone)
	}
}

func TestAddressesThatALinkLostComeBackWhenItIsUp(t *testing.T) {
	d := opened(t, config())
	hostnettest.IP(t, "link set gw0 down")
	refreshed(t, d)
	if gone := lacks(t, d); len(gone) == 0 {
		t.Fatal("the kernel takes no addresses away: this test proves nothing")
	}
	hostnettest.IP(t, "link set gw0 up")
	refreshed(t, d)
	if gone := lacks(t, d); len(gone) > 0 {
		t.Errorf("addresses %v are gone", gone)
	}
	hostnettest.IP(t, "link set gw0 mtu 600") // too small for IPv6
	refreshed(t, d)
	if gone := lacks(t, d); len(gone) == 0 {
		t.Error("an IPv6 address was added to a link that can't have it")
	}
}

func TestADeviceThatLeftItsNamespaceEndsRun(t *testing.T) {
	d := opened(t, config())
	ended, _ := started(t, d)
	hostnettest.IP(t, "netns add elsewhere")
	t.Cleanup(func() { hostnettest.IP(t, "netns del elsewhere") })
	hostnettest.IP(t, "link set gw0 netns elsewhere")
	refreshed(t, d)
	if err := result(t, "Run ends", ended); !errors.Is(err, ErrRemoved) || !strings.Contains(err.Error(), "gw0") {
		t.Errorf("Run: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	refreshed(t, d) // nothing, once closed
}
