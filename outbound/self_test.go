package outbound

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

// Nobody tells that the address is this host's: what leaves from the address that
// it goes to shows it.
func TestAConnectionThatEndsOnThisHostIsResetAndCounted(t *testing.T) {
	ns := namespace(t)
	d, drops := direct(t, nil)
	for i, own := range []string{"192.0.2.1:0", "[2001:db8::1]:0"} {
		ns.do(func() {
			l, dest := listener(t, own)
			f := toward(flow.TCP, dest)
			f.AllowHost = false
			s, err := d.DialStream(t.Context(), f)
			if s != nil || !errors.Is(err, errSelf) || drops[flow.DropSelf].Load() != uint64(i+1) {
				t.Fatalf("%v, %v, counted %d", s, err, drops[flow.DropSelf].Load())
			}
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the listener's end: %v, want a reset", err)
			}
			f.AllowHost = true
			if s, err = d.DialStream(t.Context(), f); err != nil {
				t.Fatalf("a rule that allows this host: %v", err)
			}
			s.Close()
		})
	}
}

// The address becomes this host's while the connection is made.
func TestAnAddressIsCheckedAgainOnceItIsConnected(t *testing.T) {
	_, dest := listener(t, "127.0.0.1:0")
	d, drops := direct(t, func(c *DirectConfig) { c.Source4 = netip.MustParseAddr("127.0.0.2") })
	if s, err := d.dialChecked(t.Context(), dest, false, time.Now().Add(patience)); s != nil || err != error(errSelf) || drops[flow.DropSelf].Load() != 1 {
		t.Fatalf("%v, %v, counted %d", s, err, drops[flow.DropSelf].Load())
	}
}

func TestDatagramsAreCheckedAgainWhenTheHostsAddressesChange(t *testing.T) {
	d, _ := direct(t, nil)
	var own atomic.Uint64 // generation; odd ones own it
	d.c.SelfGen = own.Load
	d.c.Self = func(netip.Addr) bool { return own.Load()%2 == 1 }
	var a approved
	addr := netip.MustParseAddr("192.0.2.1")
	for gen := range uint64(6) {
		own.Store(gen)
		for range 2 {
			want := error(nil)
			if gen%2 == 1 {
				want = errSelf
			}
			if err := d.approve(&a, addr, false); err != want {
				t.Fatalf("generation %d: %v, want %v", gen, err, want)
			}
		}
	}
	if err := d.approve(new(approved), netip.Addr{}, false); err == nil {
		t.Fatal("no address is approved")
	}
	own.Store(6)
	if n := testing.AllocsPerRun(100, func() { d.approve(&a, addr, false) }); n != 0 { //nolint:errcheck
		t.Errorf("%v allocations", n)
	}
}

func TestFormsOfOwnAddressesAreTowardSelf(t *testing.T) {
	own := func(a netip.Addr) bool {
		return a == netip.MustParseAddr("198.51.100.7") || a == netip.MustParseAddr("2001:db8::7")
	}
	for addr, want := range map[string]bool{
		"198.51.100.7": true, "::ffff:198.51.100.7": true, "64:ff9b::198.51.100.7": true, "64:ff9b:1::198.51.100.7": true,
		"2002:c633:6407::1": true, "::198.51.100.7": true, "2001:db8::7": true,
		"0.0.0.0": true, "0.9.9.9": true, "127.8.8.8": true, "169.254.169.254": true, "100.100.100.200": true,
		"64:ff9b::127.0.0.1": true, "64:ff9b::100.100.100.200": true, "::": true, "::1": true, "fe80::1%eth0": true, "fd00:ec2::254": true,
		"198.51.100.8": false, "64:ff9b::198.51.100.8": false, "2001:db8::8": false, "100.100.100.201": false, "64:ff9c::198.51.100.7": false,
	} {
		if got := TowardSelf(netip.MustParseAddr(addr), own); got != want {
			t.Errorf("%s: %v, want %v", addr, got, want)
		}
	}
}
