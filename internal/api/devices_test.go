package api_test

import (
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/api"
	"gatewayd/track"
	"gatewayd/user"
)

func TestADeviceIsPromotedAndDemoted(t *testing.T) {
	f := start(t, nil)
	f.users.Change("ann", func(*user.View) {})
	f.devices.Add(api.Device{Device: "mac:3c:22:fb:aa:bb:cc", MAC: "3c:22:fb:aa:bb:cc", Addresses: []string{"192.168.1.9"}})
	for _, path := range []string{
		"/v1/devices/mac:3c:22:fb:aa:bb:cc/user", "/v1/devices/3C-22-FB-AA-BB-CC/user", "/v1/devices/10.0.0.7/user",
		"/v1/devices/192.168.1.64%2F28/user", "/v1/devices/192.168.2.64/28/user", "/v1/devices/2001:DB8::1/user",
	} {
		want[struct{}](f, 204, "users", "PUT", path, `{"user":"ann","idle":"10m","session":"8h"}`)
	}
	var names []string
	for _, d := range want[api.DeviceList](f, 200, "read", "GET", "/v1/devices", "").Devices {
		names = append(names, d.Device)
		if d.User == nil || d.User.Name != "ann" || d.Promotion == nil || time.Duration(d.Promotion.Session) != 8*time.Hour || d.Addresses == nil {
			t.Errorf("%+v", d)
		}
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"10.0.0.7", "192.168.1.64/28", "192.168.2.64/28", "2001:db8::1", "mac:3c:22:fb:aa:bb:cc"}) {
		t.Errorf("%v", names)
	}
	page := want[api.DeviceList](f, 200, "read", "GET", "/v1/devices?limit=2", "")
	if rest := want[api.DeviceList](f, 200, "read", "GET", "/v1/devices?after="+url.QueryEscape(page.Next), ""); len(page.Devices) != 2 || len(rest.Devices) != 3 {
		t.Errorf("%d, then %d", len(page.Devices), len(rest.Devices))
	}
	want[struct{}](f, 204, "users", "DELETE", "/v1/devices/192.168.1.64/28/user", "")
	resp, body := f.send("users", "DELETE", "/v1/devices/192.168.1.64%2F28/user", "")
	f.wantProblem(resp, body, 404, "is not promoted")
	resp, body = f.send("users", "PUT", "/v1/devices/printer/user", `{"user":"ann"}`)
	f.wantProblem(resp, body, 400, "want a MAC, an address or a prefix without host bits")
	resp, body = f.send("users", "PUT", "/v1/devices/10.0.0.7/user", `{}`)
	f.wantProblem(resp, body, 422, "user: want the name of one")
}

func TestARefusedPromotionNamesTheRefusal(t *testing.T) {
	f := start(t, nil)
	f.users.Change("ann", func(v *user.View) { v.Disabled = true })
	for name, refusal := range map[string]string{"ann": "disabled", "nobody": "unknown"} {
		resp, body := f.send("users", "PUT", "/v1/devices/10.0.0.7/user", `{"user":"`+name+`"}`)
		f.wantProblem(resp, body, 422, `"refusal":"`+refusal+`"`)
	}
}

func TestADeviceSeesItselfAndNobodyElse(t *testing.T) {
	f := start(t, nil)
	resp, body := f.ask("", "GET", "/v1/me", nil)
	f.wantProblem(resp, body, 404, "127.0.0.1 is no device")
	f.devices.Add(api.Device{Device: "10.0.0.2", Addresses: []string{"10.0.0.2"}, User: &api.UserRef{ID: 9, Name: "bob"}})
	f.devices.Add(api.Device{Device: "127.0.0.1", Addresses: []string{"127.0.0.1"}})
	if me := want[api.Me](f, 200, "", "GET", "/v1/me", ""); me.State != "anonymous" || me.User != nil || me.Left != nil || me.Device != "127.0.0.1" {
		t.Errorf("%+v", me)
	}
	f.users.Change("ann", func(v *user.View) {
		v.Limits.Traffic.Total, v.Usage = 1000, user.Usage{Up: 5, ChargedUp: 10, FirstUse: time.UnixMilli(1)}
		v.Notes, v.IPs, v.PeriodEnd = "pays late", []netip.Addr{netip.MustParseAddr("10.0.0.8")}, time.UnixMilli(7000)
	})
	if err := f.devices.Promote("127.0.0.1", "ann", 0, time.Hour); err != nil {
		t.Fatal(err)
	}
	_, body = f.ask("", "GET", "/v1/me", func(r *http.Request) { r.Header.Set("X-Forwarded-For", "10.0.0.2") })
	const mine = `{"device":"127.0.0.1","user":{"id":1,"name":"ann"},"state":"active","left":{"up":null,"down":null,"total":990},` +
		`"usage":{"up":5,"down":0,"charged_up":10,"charged_down":0},"expires_at":null,"period_end":"1970-01-01T00:00:07.000Z",` +
		`"promotion":{"user":"ann","idle":null,"session":"1h"}}` + "\n"
	if body != mine {
		t.Errorf("got  %s\nwant %s", body, mine)
	}
	var me api.Me
	if err := f.unix.Get(f.within(), "/v1/me", nil, &me); statusOf(err) != 404 {
		t.Errorf("over the Unix socket: %v %+v", err, me)
	}
	if err := f.users.Delete("ann"); err != nil {
		t.Fatal(err)
	}
	if me := want[api.Me](f, 200, "", "GET", "/v1/me", ""); me.State != "unknown" || me.User != nil || me.Left != nil {
		t.Errorf("%+v", me)
	}
}

func TestADeviceThatAsksAllTheTimeIsToldToWait(t *testing.T) {
	f := start(t, nil)
	f.await("the rate is reached", func() bool {
		resp, _ := f.ask("", "GET", "/v1/me", nil)
		return resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") == "1"
	})
}

func TestMetricsOfUsersAreCappedAndNameWhatIsLeft(t *testing.T) {
	f := start(t, func(o *api.Options) { o.PerUser = 2 })
	f.users.Sums = user.Counts{
		States: map[string]int{"active": 2, "disabled": 1}, Refusals: map[string]uint64{"ips": 4, "traffic": 3},
		Enforced: 2, Latency: 1500 * time.Millisecond, Slowest: time.Second,
	}
	for _, name := range []string{"zoe", "ann", "bob"} { // the first two have series
		f.users.Change(name, func(v *user.View) {
			v.Limits.Traffic.Down, v.Usage.Up, v.Usage.ChargedDown, v.Connections = 100, 5, 30, 2
		})
	}
	_, body := f.ask("read", "GET", "/metrics", nil)
	lines := strings.Split(strings.TrimSpace(body), "\n")
	for _, line := range []string{
		`gatewayd_users{state="active"} 2`, `gatewayd_users{state="disabled"} 1`, `gatewayd_user_refusals_total{cause="ips"} 4`,
		"gatewayd_enforcements_total 2", "gatewayd_enforcement_seconds_total 1.5", "gatewayd_enforcement_slowest_seconds 1",
		`gatewayd_user_bytes_total{user="zoe",direction="up"} 5`, `gatewayd_user_quota_left_bytes{user="ann",limit="down"} 70`,
		`gatewayd_user_connections{user="ann"} 2`, `gatewayd_user_state{user="zoe",state="unused"} 1`, "gatewayd_user_series_left_out 1",
		"gatewayd_ledger_writable 0", "gatewayd_ledger_last_commit_timestamp_seconds 1.5",
	} {
		if !slices.Contains(lines, line) {
			t.Errorf("no line %s", line)
		}
	}
	if strings.Contains(body, `user="bob"`) || strings.Contains(body, `limit="total"`) {
		t.Error("more than the cap, or a limit that nobody has")
	}
	checkExposition(t, lines)
}

func TestUserEventsComeWithTheirTypes(t *testing.T) {
	f := start(t, nil)
	events := f.follow("/v1/events", url.Values{"types": {"user,device"}}, "")
	f.events.Publish("config.applied", "not asked for")
	f.events.Publish("user.near", api.UserEventOf(user.Event{User: 1, Name: "ann", State: "active"}))
	f.events.Publish("device.promoted", api.UserEventOf(user.Event{User: 1, Name: "ann", State: "active", Device: "10.0.0.7"}))
	if ev := f.next(events); ev.Name != "user.near" || string(ev.Data) != `{"user":{"id":1,"name":"ann"},"state":"active"}` {
		t.Errorf("%s %s", ev.Name, ev.Data)
	}
	if ev := f.next(events); ev.Name != "device.promoted" || string(ev.Data) != `{"user":{"id":1,"name":"ann"},"state":"active","device":"10.0.0.7"}` {
		t.Errorf("%s %s", ev.Name, ev.Data)
	}
}

func TestFlowsOfAUserAreListedAndKilledByName(t *testing.T) {
	f := start(t, nil)
	f.users.Change("ann", func(*user.View) {})
	f.open(func(m *track.Meta) { m.User, m.UserName, m.Device = f.key("ann"), "ann", "mac:3c:22:fb:aa:bb:cc" })
	promoted := f.open(func(m *track.Meta) { m.Device, m.Source = "192.168.1.70", netip.MustParseAddrPort("192.168.1.70:9") })
	f.open(nil)
	promoted.Change(track.Principal{User: f.key("ann"), UserName: "ann"})
	count := func(query string, n int) {
		t.Helper()
		if got := want[api.Connections](f, 200, "read", "GET", "/v1/connections?"+query, "").Flows; len(got) != n {
			t.Errorf("%s: %d flows, want %d", query, len(got), n)
		}
	}
	count("user=ann", 2)
	count("user=bob", 0)
	count("device=3c:22:fb:aa:bb:cc", 1)
	count("device=10.0.0.2", 2) // an address that a device with a MAC has is that device's
	count("device=192.168.1.64%2F28&user=ann", 1)
	count("device=192.168.1.80%2F28", 0)
	resp, body := f.ask("read", "GET", "/v1/connections?device=192.168.1.70%2F28", nil)
	f.wantProblem(resp, body, 400, "want a MAC, an address or a prefix without host bits")
	f.tracker.Final()
	if users := want[api.Traffic](f, 200, "read", "GET", "/v1/traffic?once", "").Users; len(users) != 1 || users[0].Name != "ann" || users[0].Flows != 2 {
		t.Errorf("%+v", users)
	}
	if closed := want[api.Closed](f, 200, "admin", "DELETE", "/v1/connections?user=ann", ""); closed.Closed != 2 {
		t.Errorf("closed %d", closed.Closed)
	}
}
