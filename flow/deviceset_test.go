package flow

import "testing"

func TestADeviceSetHasOneForm(t *testing.T) {
	for text, want := range map[string]string{
		"mac:3C-22-FB-AA-BB-CC": "mac:3c:22:fb:aa:bb:cc", "mac:3c22.fbaa.bbcc": "mac:3c:22:fb:aa:bb:cc",
		"host:Kids-Tablet": "host:kids-tablet", "host:_a.Lan.": "host:_a.lan", "host:7": "host:7",
		"192.0.2.5": "192.0.2.5", "192.0.2.5/32": "192.0.2.5", "192.0.2.0/24": "192.0.2.0/24", "0.0.0.0/0": "0.0.0.0/0",
		"FD00:0::1": "fd00::1", "fd00::1/128": "fd00::1", "fd00:0::/64": "fd00::/64",
	} {
		s, err := ParseDeviceSet(text)
		if err != nil || s.String() != want {
			t.Errorf("%s: %s, %v, want %s", text, s, err, want)
			continue
		}
		if again, err := ParseDeviceSet(s.String()); err != nil || again != s {
			t.Errorf("%s reads back as %+v, %v, want %+v", s, again, err, s)
		}
	}
	for _, text := range []string{
		"", "tablet", "mac:", "mac:3c:22:fb:aa:bb", "mac:01:00:5e:00:00:01", "mac:00:00:00:00:00:00", "mac:02:00:5e:10:00:00:00:01",
		"host:", "host:a b", "host:a..b", "host:-a", "host:.", "host:ä", "fe80::1%eth0", "::ffff:10.0.0.1", "::ffff:10.0.0.0/104",
		"10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/08", "10.0.0", "MAC:3c:22:fb:aa:bb:cc",
	} {
		if s, err := ParseDeviceSet(text); err == nil {
			t.Errorf("%q is %s, want an error", text, s)
		}
	}
}

func FuzzDeviceSet(f *testing.F) {
	for _, s := range []string{"mac:3C-22-FB-AA-BB-CC", "host:Kids-Tablet.", "192.0.2.5/32", "FD00:0::/64", "10.0.0.1/8"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseDeviceSet(text)
		if err != nil {
			return
		}
		if again, err := ParseDeviceSet(s.String()); err != nil || again != s || again.String() != s.String() {
			t.Errorf("%q is %+v, and %s is %+v, %v", text, s, s, again, err)
		}
	})
}
