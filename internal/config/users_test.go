package config

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/user"
)

func TestAUserIsReadAsItIsWritten(t *testing.T) {
	c := parsed(t, `version: 1
groups:
  - {name: staff, limits: {bandwidth: {down: 50Mbit/s, up: 20Mbit/s}, ips: 3}}
users:
  - name: alice
    id: 9007199254740991
    group: staff
    enabled: false
    notes: a
    external_id: b
    limits:
      traffic: {up: 1GB, down: 2GiB, total: 50GB, reset: {every: month, day: 31, zone: Europe/Berlin, carry_over: true}}
      multiplier: 0.333333
      speed: 8Mbit/s
      bandwidth: {up: 1kB/s}
      connections: 7
      ips: 2
      when_exhausted: {throttle: 1Mbit/s}
    expires: {at: 2030-01-31T00:00:00+01:00, after_first_use: 4w2d}
    devices: ["mac:3C-22-FB-AA-BB-CC", "host:Kids-Tablet.lan.", 192.168.1.64/28, 192.168.1.5/32, 192.168.1.6, "FD00:0::1"]
  - {name: bob, limits: {when_exhausted: block}}
  - {name: eve, limits: {when_exhausted: {outbound: reject}}}
`)
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	alice := user.Spec{
		Name: "alice", ID: 1<<53 - 1, Group: "staff", Disabled: true, Notes: "a", ExternalID: "b",
		Limits: user.Limits{
			Traffic: user.Traffic{
				Up: 1e9, Down: 2 << 30, Total: 50e9,
				Reset: user.Reset{Every: user.Monthly, Day: 31, Zone: berlin, CarryOver: true},
			},
			Multiplier: user.Multiplier{Set: true, Millionths: 333333},
			Speed:      1e6, Bandwidth: user.Bandwidth{Up: 1000}, Connections: 7, IPs: 2,
			WhenExhausted: user.Exhausted{Throttle: 125000},
		},
		Expires: user.Expires{At: time.Date(2030, 1, 30, 23, 0, 0, 0, time.UTC), AfterFirstUse: 30 * 24 * time.Hour},
		Devices: []string{"mac:3c:22:fb:aa:bb:cc", "host:kids-tablet.lan", "192.168.1.64/28", "192.168.1.5", "192.168.1.6", "fd00::1"},
		Source:  user.FromConfig,
	}
	staff := user.Group{Name: "staff", Limits: user.Limits{Bandwidth: user.Bandwidth{Up: 2500e3, Down: 6250e3}, IPs: 3}}
	if want := []user.Group{staff}; !reflect.DeepEqual(c.Groups, want) {
		t.Errorf("groups\n%+v, want\n%+v", c.Groups, want)
	}
	eve := user.Spec{Name: "eve", Limits: user.Limits{WhenExhausted: user.Exhausted{Outbound: "reject"}}}
	bob := user.Spec{Name: "bob", Limits: user.Limits{WhenExhausted: user.Exhausted{Block: true}}}
	for i, want := range []user.Spec{alice, bob, eve} {
		if !reflect.DeepEqual(c.Users[i], want) {
			t.Errorf("user %d\n%+v, want\n%+v", i, c.Users[i], want)
		}
	}
}

func TestAResetIsInUTCAndOnTheFirstUnlessItSaysOtherwise(t *testing.T) {
	for every, want := range map[string]user.Reset{
		"hour":  {Every: user.Hourly, Zone: time.UTC},
		"day":   {Every: user.Daily, Zone: time.UTC},
		"week":  {Every: user.Weekly, Zone: time.UTC},
		"month": {Every: user.Monthly, Zone: time.UTC, Day: 1},
	} {
		c := parsed(t, "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: "+every+"}}}}\n")
		if got := c.Users[0].Limits.Traffic.Reset; got != want {
			t.Errorf("%s: %+v, want %+v", every, got, want)
		}
	}
}

// A reload compares what it read with what there is: a zone has to be itself.
func TestTwoUsersOfAZoneShareIt(t *testing.T) {
	reset := ", limits: {traffic: {reset: {every: day, zone: Asia/Tokyo}}}}"
	c := parsed(t, "version: 1\nusers: [{name: a"+reset+", {name: b"+reset+"]\n")
	if a, b := c.Users[0].Limits.Traffic.Reset, c.Users[1].Limits.Traffic.Reset; a != b || a.Zone.String() != "Asia/Tokyo" {
		t.Errorf("resets %+v and %+v", a, b)
	}
}

func TestAMultiplierIsExact(t *testing.T) {
	for text, want := range map[string]user.Multiplier{
		"0": {Set: true}, "0.0": {Set: true}, "1": {Set: true, Millionths: 1e6}, "0.1": {Set: true, Millionths: 100000},
		"0.000001": {Set: true, Millionths: 1}, "1.100000": {Set: true, Millionths: 1100000}, "1000": {Set: true, Millionths: user.MaxMultiplier},
		"999.999999": {Set: true, Millionths: 999999999},
	} {
		if got, err := ParseMultiplier(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", text, got, err, want)
		}
		if c := parsed(t, "version: 1\nusers: {name: a, limits: {multiplier: "+text+"}}\n"); c.Users[0].Limits.Multiplier != want {
			t.Errorf("%s in a file: %+v", text, c.Users[0].Limits.Multiplier)
		}
	}
	for _, text := range []string{"", ".", "1.", ".5", "+1", "01", "1e3", "0x1", "1_0", "1000.000001", "1001", "0.0000000", "-1", "99999999999999999999", "1 "} {
		if got, err := ParseMultiplier(text); err == nil {
			t.Errorf("%q is %+v, want an error", text, got)
		}
	}
}

func TestARuleMayNameUsersThatAreMadeLater(t *testing.T) {
	c := parsed(t, "version: 1\nroute:\n  rules:\n    - {user: ann, user_group: [a, b], user_state: [exhausted, anonymous], device: [\"mac:3C:22:FB:AA:BB:CC\", 10.0.0.1], outbound: drop}\n")
	var devices []flow.DeviceSet
	for _, s := range []string{"mac:3c:22:fb:aa:bb:cc", "10.0.0.1"} {
		d, err := flow.ParseDeviceSet(s)
		if err != nil {
			t.Fatal(err)
		}
		devices = append(devices, d)
	}
	want := Match{User: []string{"ann"}, UserGroup: []string{"a", "b"}, UserState: []string{"exhausted", "anonymous"}, Device: devices}
	if got := c.Route.Rules[0].Match; !reflect.DeepEqual(got, want) {
		t.Errorf("match %+v, want %+v", got, want)
	}
}

func TestWebhooksAndLedgerAreRead(t *testing.T) {
	c := parsed(t, "version: 1\nledger: {commit: 60s, hourly: 2d, daily: 2w}\nmetrics: {per_user: 500}\n"+
		"events: {webhooks: [{url: \"https://a.example/hook\", on: [user.near, outbound], secret_file: /k}, {url: \"http://10.0.0.1:80/\", on: warning}]}\n")
	want := []Webhook{{"https://a.example/hook", []string{"user.near", "outbound"}, "/k"}, {"http://10.0.0.1:80/", []string{"warning"}, ""}}
	if !reflect.DeepEqual(c.Webhooks, want) || c.Metrics != (Metrics{500}) || c.Ledger != (Ledger{time.Minute, 48 * time.Hour, 336 * time.Hour}) {
		t.Errorf("webhooks %+v, metrics %+v, ledger %+v", c.Webhooks, c.Metrics, c.Ledger)
	}
}

func TestManyUsersAreReadSoon(t *testing.T) {
	text := "version: 1\nusers:\n" + repeatNumbered("  - {name: u%d, id: %[2]d, limits: {traffic: {total: 5GB, reset: {every: day, zone: Europe/Berlin}}}, devices: \"host:u%[1]d\"}\n")
	start := time.Now()
	c := parsed(t, text)
	if took := time.Since(start); took > 20*time.Second || len(c.Users) != strings.Count(text, "name:") {
		t.Errorf("%d users took %s", len(c.Users), took)
	}
}
