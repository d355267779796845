package hostnet

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const dnsmasqText = `1767225600 3C:22:FB:AA:BB:CC 192.168.1.20 Kids-Tablet 01:3c:22:fb:aa:bb:cc
0 3c:22:fb:aa:bb:01 192.168.1.21 * *
43200 3c:22:fb:aa:bb:02 192.168.1.22 clockless *
1767225600 20-3c:22:fb:aa:bb:cc:00:01 192.168.1.23 infiniband *
duid 00:01:00:01:2a:aa:aa:aa:3c:22:fb:00:00:01
1767225600 8675309 fd00::6f9 laptop 00:01:00:01:2b:bb:bb:bb:3c:22:fb:aa:bb:03
1767225600 T8675310 fd00::6fa * 00:03:00:01:3c:22:fb:aa:bb:04
`

const odhcpdText = `# br-lan 3c22fbaabbcc ipv4 Printer 1767225600 c0a80164 32 192.168.1.100/32
192.168.1.100	printer.lan	printer
# br-lan 0001000123456789aabbccddeeff 1a2b3c4d laptop -1 6f9 128 fd00::6f9/128 2001:db8::6f9/128
fd00::6f9	laptop.lan	laptop
# br-lan 0001000123456789aabbccddeeff 1a2b3c4e broken\x20my 1767225600 6fa 128 fd00::6fa/128
# br-lan 0001000123456789aabbccddeef0 2 router 1767225600 10 62 fd00:0:0:10::/62
# br-lan 0001000123456789aabbccddeef1 3 - 0 10 128 fd00::77/128
`

func lease(addr, mac, host string, expires int64) Lease {
	l := Lease{Addr: netip.MustParseAddr(addr), MAC: parseMAC(mac), Host: host}
	if expires != 0 {
		l.Expires = time.Unix(expires, 0)
	}
	return l
}

func TestLeasesOfBothServersAreRead(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []Lease
	}{
		"dnsmasq": {dnsmasqText, []Lease{
			lease("192.168.1.20", "3c:22:fb:aa:bb:cc", "kids-tablet", 1767225600),
			lease("192.168.1.21", "3c:22:fb:aa:bb:01", "", 0),
			lease("192.168.1.22", "3c:22:fb:aa:bb:02", "clockless", 0),
			lease("192.168.1.23", "", "infiniband", 1767225600),
			lease("fd00::6f9", "", "laptop", 1767225600),
			lease("fd00::6fa", "", "", 1767225600),
		}},
		"odhcpd": {odhcpdText, []Lease{
			lease("192.168.1.100", "3c:22:fb:aa:bb:cc", "printer", 1767225600),
			lease("fd00::6f9", "", "laptop", 0),
			lease("2001:db8::6f9", "", "laptop", 0),
			lease("fd00::6fa", "", "", 1767225600),
		}},
		"a line that is being written": {"0 3c:22:fb:aa:bb:01 192.168.1.21 whole *\n0 3c:22:fb:aa:bb:02 192.168.1.2", []Lease{
			lease("192.168.1.21", "3c:22:fb:aa:bb:01", "whole", 0),
		}},
	} {
		if diff := cmp.Diff(c.want, ParseLeases([]byte(c.text)), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestANameThatIsNoHostNameIsNone(t *testing.T) {
	for name, want := range map[string]string{
		"Alice-Phone": "alice-phone", "a.b_c-1": "a.b_c-1",
		"*": "", "-": "", "": "", "-a": "", "a.": "", `a"b`: "", "a\x1b[2J": "", "gänse": "", strings.Repeat("a", 254): "",
	} {
		if got := hostName(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestLeasesOfOneTextAreBounded(t *testing.T) {
	one := "0 3c:22:fb:aa:bb:01 192.168.1.21 h *\n"
	if n := len(ParseLeases([]byte(strings.Repeat(one, maxLeases+9)))); n != maxLeases {
		t.Errorf("%d leases of dnsmasq", n)
	}
	many := "# lan 00 1 h -1 1 128" + strings.Repeat(" fd00::1/128", maxLeases+9) + "\n"
	if n := len(ParseLeases([]byte(many))); n != maxLeases {
		t.Errorf("%d leases of odhcpd", n)
	}
}

func FuzzLeases(f *testing.F) {
	f.Add([]byte(dnsmasqText))
	f.Add([]byte(odhcpdText))
	f.Add([]byte("# a b ipv4 d 1 f 32 ::ffff:1.2.3.4/128\n9999999999999999999 a fe80::1%e h\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		leases := ParseLeases(text)
		if len(leases) > maxLeases {
			t.Fatalf("%d leases", len(leases))
		}
		for _, l := range leases {
			if !l.Addr.IsValid() || l.Addr.Zone() != "" || l.Addr.Is4In6() || hostName(l.Host) != l.Host {
				t.Fatalf("lease %+v", l)
			}
		}
	})
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func poll(t *testing.T, l *LeaseFiles) ([]Lease, bool) {
	t.Helper()
	leases, changed, err := l.Poll()
	if err != nil {
		t.Fatal(err)
	}
	return leases, changed
}

func TestLeaseFilesAreFollowed(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "dhcp.leases"), filepath.Join(dir, "odhcpd.lan")
	l := NewLeaseFiles([]string{a, filepath.Join(dir, "odhcpd*"), filepath.Join(dir, "od*")})
	if leases, changed := poll(t, l); changed || leases != nil {
		t.Fatalf("missing files: %v, changed %v", leases, changed)
	}
	write(t, a, dnsmasqText)
	write(t, b, odhcpdText)
	if leases, changed := poll(t, l); !changed || len(leases) != 10 {
		t.Fatalf("%d leases, changed %v; want 10 of both, each file once", len(leases), changed)
	}
	if _, changed := poll(t, l); changed {
		t.Fatal("unchanged files count as changed")
	}
	// Written anew with the same size, as when a client comes back with another MAC.
	write(t, b, strings.Replace(odhcpdText, "3c22fbaabbcc", "3c22fbaabbcd", 1))
	if err := os.Chtimes(b, time.Time{}, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	leases, changed := poll(t, l)
	if !changed || len(leases) != 10 || leases[6].MAC.String() != "3c:22:fb:aa:bb:cd" {
		t.Fatalf("%v, changed %v", leases, changed)
	}
	if err := os.Remove(a); err != nil {
		t.Fatal(err)
	}
	if leases, changed := poll(t, l); !changed || len(leases) != 4 {
		t.Fatalf("%d leases after one file went, changed %v", len(leases), changed)
	}
}

func TestALeaseFileThatCannotBeReadHidesNoOther(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "good"), dnsmasqText)
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	leases, changed, err := NewLeaseFiles([]string{filepath.Join(dir, "*")}).Poll()
	if err == nil || !changed || len(leases) != 6 {
		t.Fatalf("%d leases, changed %v, error %v", len(leases), changed, err)
	}
}

func TestALongLeaseFileIsReadInPart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	write(t, path, strings.Repeat("x", maxLeaseBytes)+"\n"+dnsmasqText)
	if leases, _ := poll(t, NewLeaseFiles([]string{path})); len(leases) != 0 {
		t.Fatalf("%d leases from beyond the first MiB", len(leases))
	}
}
