package api_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/user"
)

// What the fakes stand for.
var (
	_ api.Users   = (*user.Users)(nil)
	_ api.Billing = (*user.Ledger)(nil)
)

// send makes one request with a body over TCP.
func (f *fixture) send(role, method, path, body string) (*http.Response, string) {
	f.Helper()
	return f.ask(role, method, path, func(r *http.Request) {
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
	})
}

// want makes one request that has to succeed, and reads its answer.
func want[T any](f *fixture, status int, role, method, path, body string) (v T) {
	f.Helper()
	resp, text := f.send(role, method, path, body)
	if resp.StatusCode != status {
		f.Fatalf("%s %s %s: %d %s: want %d", method, path, body, resp.StatusCode, text, status)
	}
	if status == http.StatusNoContent {
		return v
	}
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		f.Fatalf("%s: %v", text, err)
	}
	return v
}

const wholeUser = `{"name":"alice","group":"staff","enabled":false,"notes":"pays late","external_id":"crm-7",
	"limits":{"traffic":{"up":"1GB","down":2000000000,"total":"2.5GB","reset":{"every":"month","day":31,"zone":"Europe/Berlin","carry_over":true}},
		"bandwidth":{"up":"20Mbit/s","down":5000000},"speed":"2500kB/s","connections":100,"ips":3,"multiplier":1.25,"when_exhausted":{"throttle":"1Mbit/s"}},
	"expires":{"at":"2030-01-31T00:00:00+01:00","after_first_use":"30d"},"devices":["mac:3c:22:fb:aa:bb:cc","192.168.1.64/28"]}`

func TestAUserHasTheShapeOfTheContract(t *testing.T) {
	f := start(t, nil)
	f.users.AddGroup(user.Group{Name: "staff", Source: user.FromConfig})
	resp, body := f.send("users", "POST", "/v1/users", wholeUser)
	if resp.StatusCode != 201 || resp.Header.Get("Location") != "/v1/users/alice" {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	f.users.Change("alice", func(v *user.View) {
		v.Usage = user.Usage{
			Up: 10, Down: 20, ChargedUp: 12, ChargedDown: 25, WireRx: 1, WireTx: 2, Extra: 1000,
			FirstUse: time.UnixMilli(1000), LastSeen: time.UnixMilli(2000), PeriodStart: time.UnixMilli(500), Generation: 3,
		}
		v.Connections, v.IPs, v.PeriodEnd = 2, []netip.Addr{netip.MustParseAddr("10.0.0.2")}, time.UnixMilli(9000)
	})
	resp, body = f.ask("read", "GET", "/v1/users/alice", nil)
	const shape = `{"id":1,"name":"alice","group":"staff","enabled":false,"notes":"pays late","external_id":"crm-7",` +
		`"limits":{"traffic":{"up":1000000000,"down":2000000000,"total":2500000000,"reset":{"every":"month","day":31,"zone":"Europe/Berlin","carry_over":true}},` +
		`"bandwidth":{"up":2500000,"down":5000000},"speed":2500000,"connections":100,"ips":3,"multiplier":1.25,"when_exhausted":{"throttle":125000}},` +
		`"expires":{"at":"2030-01-30T23:00:00.000Z","after_first_use":"30d"},"devices":["mac:3c:22:fb:aa:bb:cc","192.168.1.64/28"],` +
		`"state":"disabled","source":"store","left":{"up":1000000988,"down":2000000975,"total":2500000963},` +
		`"expires_at":"2030-01-30T23:00:00.000Z","period_end":"1970-01-01T00:00:09.000Z",` +
		`"usage":{"up":10,"down":20,"charged_up":12,"charged_down":25,"wire_rx":1,"wire_tx":2,"extra":1000,` +
		`"first_use":"1970-01-01T00:00:01.000Z","last_seen":"1970-01-01T00:00:02.000Z","period_start":"1970-01-01T00:00:00.500Z","generation":3,"connections":2,"ips":["10.0.0.2"]}}` + "\n"
	if body != shape {
		t.Errorf("got  %s\nwant %s", body, shape)
	}
	if resp.Header.Get("ETag") == "" {
		t.Error("no etag")
	}
}

func TestAUserWithoutLimitsHasThemAllAsZero(t *testing.T) {
	f := start(t, nil)
	_, body := f.send("users", "PUT", "/v1/users/bob", `{}`)
	for _, part := range []string{
		`{"id":1,"name":"bob","group":"","enabled":true,"limits":{"traffic":{"up":0,"down":0,"total":0,"reset":null},"bandwidth":{"up":0,"down":0},"speed":0,`,
		`"connections":0,"ips":0,"multiplier":1,"when_exhausted":"block"},"expires":{"at":null,"after_first_use":null},"devices":[],"state":"unused","source":"store"`,
		`"left":{"up":null,"down":null,"total":null}`, `"first_use":null`, `"ips":[]`,
	} {
		if !strings.Contains(body, part) {
			t.Errorf("%s lacks %s", body, part)
		}
	}
}

func TestAnAnswerMayBeSentBackAndChangesNothing(t *testing.T) {
	f := start(t, nil)
	f.users.AddGroup(user.Group{Name: "staff", Limits: user.Limits{Multiplier: user.Multiplier{Set: true, Millionths: 2_000_000}}})
	for _, spec := range []string{wholeUser, `{"name":"bob","group":"staff","limits":{"when_exhausted":{"outbound":"reject"}}}`} {
		before := want[api.User](f, 201, "users", "POST", "/v1/users", spec)
		_, text := f.ask("users", "GET", "/v1/users/"+before.Name, nil)
		want[api.User](f, 200, "users", "PUT", "/v1/users/"+before.Name, text)
		if _, again := f.ask("users", "GET", "/v1/users/"+before.Name, nil); again != text {
			t.Errorf("before %s\nafter  %s", text, again)
		}
	}
	if got := want[api.User](f, 200, "read", "GET", "/v1/users/bob", "").Limits.Multiplier.Millionths; got != 2_000_000 {
		t.Errorf("the group's multiplier is shown as %d", got)
	}
	f.users.AddGroup(user.Group{Name: "staff", Limits: user.Limits{Multiplier: user.Multiplier{Set: true, Millionths: 3_000_000}}})
	if got := want[api.User](f, 200, "read", "GET", "/v1/users/bob", "").Limits.Multiplier.Millionths; got != 3_000_000 {
		t.Errorf("the group's multiplier is another one, and the user's %d: it was made its own", got)
	}
}

// What happens when the traffic is used up is the group's until the user has its own,
// "block" too; null gives it back to the group.
func TestAUserMaySayBlockInAGroupThatThrottles(t *testing.T) {
	f := start(t, nil)
	f.users.AddGroup(user.Group{Name: "staff", Limits: user.Limits{WhenExhausted: user.Exhausted{Throttle: 1000}}})
	want[api.User](f, 201, "users", "PUT", "/v1/users/bob", `{"group":"staff"}`)
	for _, c := range []struct {
		patch string
		shown uint64
		own   user.Exhausted
	}{
		{`{}`, 1000, user.Exhausted{}},
		{`{"limits":{"when_exhausted":"block"}}`, 0, user.Exhausted{Block: true}},
		{`{"notes":"stays"}`, 0, user.Exhausted{Block: true}},
		{`{"limits":{"when_exhausted":null}}`, 1000, user.Exhausted{}},
		{`{"notes":"stays"}`, 1000, user.Exhausted{}},
	} {
		got := want[api.User](f, 200, "users", "PATCH", "/v1/users/bob", c.patch).Limits.WhenExhausted
		if v, err := f.users.Get("bob"); err != nil || uint64(got.Throttle) != c.shown || got.Block != (c.shown == 0) || v.Limits.WhenExhausted != c.own {
			t.Errorf("%s: it is shown as %+v and is %+v, %v", c.patch, got, v.Limits.WhenExhausted, err)
		}
		_, text := f.ask("users", "GET", "/v1/users/bob", nil)
		want[api.User](f, 200, "users", "PUT", "/v1/users/bob", text)
		if v, _ := f.users.Get("bob"); v.Limits.WhenExhausted != c.own {
			t.Errorf("%s: the answer was sent back, and it is %+v", c.patch, v.Limits.WhenExhausted)
		}
	}
}

// Whoever moves a user to another group by PUT means what he says, also if it held before.
func TestWhatIsPutWithAnotherGroupIsTheUsersOwn(t *testing.T) {
	f := start(t, nil)
	f.users.AddGroup(user.Group{Name: "staff", Limits: user.Limits{WhenExhausted: user.Exhausted{Throttle: 1000}, Multiplier: user.Multiplier{Set: true, Millionths: 2_000_000}}})
	want[api.User](f, 201, "users", "PUT", "/v1/users/bob", `{}`)
	want[api.User](f, 200, "users", "PUT", "/v1/users/bob", `{"group":"staff","limits":{"when_exhausted":"block","multiplier":1}}`)
	if v, err := f.users.Get("bob"); err != nil || !v.Limits.WhenExhausted.Block || !v.Limits.Multiplier.Set {
		t.Errorf("%+v, %v", v.Limits, err)
	}
}

func TestAMergePatchChangesWhatItNamesAndNullRemoves(t *testing.T) {
	f := start(t, nil)
	f.users.AddGroup(user.Group{Name: "staff"})
	want[api.User](f, 201, "users", "POST", "/v1/users", wholeUser)
	before := want[api.User](f, 200, "users", "GET", "/v1/users/alice", "")
	got := want[api.User](f, 200, "users", "PATCH", "/v1/users/alice",
		`{"enabled":true,"group":null,"notes":"","limits":{"traffic":{"total":"9GB","reset":null},"bandwidth":{"up":null}},"devices":["10.0.0.9"]}`)
	expect := before
	expect.Enabled, expect.Group, expect.Notes, expect.State = true, "", "", "unused"
	expect.Limits.Traffic.Total, expect.Limits.Traffic.Reset, expect.Limits.Bandwidth.Up = 9_000_000_000, nil, 0
	expect.Devices, expect.Left.Total = []string{"10.0.0.9"}, new(uint64(9_000_000_000))
	if a, b := asJSON(t, got), asJSON(t, expect); a != b {
		t.Errorf("got  %s\nwant %s", a, b)
	}
	got = want[api.User](f, 200, "users", "PATCH", "/v1/users/alice", `{"limits":{"when_exhausted":{"outbound":"reject","throttle":null}}}`)
	if got.Limits.WhenExhausted.Outbound != "reject" || got.Limits.WhenExhausted.Throttle != 0 {
		t.Errorf("%+v", got.Limits.WhenExhausted)
	}
	if got = want[api.User](f, 200, "users", "PATCH", "/v1/users/alice", `{"limits":null}`); got.Limits.Speed != 0 || got.Limits.Connections != 0 {
		t.Errorf("%+v", got.Limits)
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestABodyThatIsNoUserIsRefusedByField(t *testing.T) {
	f := start(t, nil)
	f.users.Change("alice", func(*user.View) {})
	for body, parts := range map[string][]string{
		``:                                     {"400", "body: want a JSON object: it is empty"},
		`{`:                                    {"400", "body: want a JSON object"},
		`[]`:                                   {"400", "body: want an object"},
		`null`:                                 {"400", "body: want an object"},
		`"alice"`:                              {"400", "body: want an object"},
		`{} {}`:                                {"400", "something follows"},
		`{"nmae":"alice"}`:                     {"400", "nmae: unknown field: known are devices, enabled"},
		`{"enabled":"yes"}`:                    {"400", "enabled: found string, want true or false"},
		`{"devices":"10.0.0.1"}`:               {"400", "devices: found string, want a list"},
		`{"limits":[]}`:                        {"400", "limits: want an object"},
		`{"limits":{"speed":"20M"}}`:           {"400", `limits.speed: rate "20M": want a rate with a unit`},
		`{"limits":{"speed":-1}}`:              {"400", "limits.speed: rate", "must not be negative"},
		`{"limits":{"bandwith":{}}}`:           {"400", "limits.bandwith: unknown field: known are bandwidth"},
		`{"limits":{"connections":-1}}`:        {"400", "limits.connections: found number -1, want a whole number from 0 on"},
		`{"limits":{"multiplier":1.1234567}}`:  {"400", "limits.multiplier: multiplier 1.1234567: want a number from 0 to 1000"},
		`{"limits":{"multiplier":1e2}}`:        {"400", "limits.multiplier"},
		`{"limits":{"when_exhausted":"stop"}}`: {"400", "limits.when_exhausted"},
		`{"limits":{"when_exhausted":{}}}`:     {"400", "limits.when_exhausted", `want "block"`},
		`{"limits":{"traffic":{"total":"1","total":"2"}}}`:                   {"400", "limits.traffic.total: given twice"},
		`{"limits":{"traffic":{"reset":{"every":"year"}}}}`:                  {"422", "limits.traffic.reset.every", "hour, day, week, month"},
		`{"limits":{"traffic":{"reset":{}}}}`:                                {"422", "limits.traffic.reset.every"},
		`{"limits":{"traffic":{"reset":{"every":"day","zone":"Mars/One"}}}}`: {"422", "limits.traffic.reset.zone", "Europe/Berlin"},
		`{"limits":{"traffic":{"reset":{"every":"day","zone":"Local"}}}}`:    {"422", "limits.traffic.reset.zone"},
		`{"expires":{"after_first_use":30}}`:                                 {"400", "expires.after_first_use", "want a duration as text"},
		`{"expires":{"at":"tomorrow"}}`:                                      {"400", "expires.at"},
		`{"limits":{"when_exhausted":{"outbound":"vpm"}}}`:                   {"422", `limits.when_exhausted.outbound: no outbound "vpm": known are direct, reject`},
		`{"group":"nobody"}`:                                                 {"422", "there is no group nobody"},
		`{"nmae":1,"limits":{"sped":1}}`:                                     {"400", "nmae: unknown field", "\nlimits.sped: unknown field"},
		`{"notes":"` + strings.Repeat("x", 70_000) + `"}`:                    {"413", "larger than 65536 bytes"},
	} {
		for _, method := range []string{"PUT", "PATCH"} {
			resp, text := f.send("users", method, "/v1/users/alice", body)
			var p api.Problem
			if err := json.Unmarshal([]byte(text), &p); err != nil {
				t.Fatal(err)
			}
			if status := fmt.Sprint(resp.StatusCode); status != parts[0] {
				t.Errorf("%s %.80s: %s: want %s", method, body, status, parts[0])
			}
			for _, part := range parts[1:] {
				if !strings.Contains(p.Detail, part) {
					t.Errorf("%s %.80s: %s: want %q", method, body, p.Detail, part)
				}
			}
			if lines := strings.Split(p.Detail, "\n"); len(lines) > 1 && !slices.Equal(lines, p.Errors) {
				t.Errorf("%s %.80s: errors %q", method, body, p.Errors)
			}
		}
	}
	if got := want[api.User](f, 200, "users", "GET", "/v1/users/alice", ""); got.Limits.Speed != 0 || !got.Enabled {
		t.Errorf("a refused edit changed %+v", got)
	}
}

func TestEditsAnswerTheStatusesOfTheContract(t *testing.T) {
	f := start(t, nil)
	f.users.Change("fixed", func(v *user.View) { v.Source = user.FromConfig })
	want[api.User](f, 201, "users", "PUT", "/v1/users/alice", `{}`)
	want[api.User](f, 200, "users", "PUT", "/v1/users/alice", `{"name":"alice"}`)
	for _, c := range []struct {
		method, path, body string
		status             int
		detail             string
	}{
		{"POST", "/v1/users", `{"name":"alice"}`, 409, "in use"},
		{"POST", "/v1/users", `{"name":"bob","id":2}`, 409, "in use"},
		{"POST", "/v1/users", `{"name":"12345"}`, 422, "not all digits"},
		{"POST", "/v1/users", `{}`, 422, "not all digits"},
		{"PUT", "/v1/users/fixed", `{}`, 409, "configuration file"},
		{"PATCH", "/v1/users/fixed", `{}`, 409, "configuration file"},
		{"DELETE", "/v1/users/fixed", ``, 409, "configuration file"},
		{"GET", "/v1/users/nobody", ``, 404, "nobody"},
		{"PATCH", "/v1/users/nobody", `{}`, 404, "nobody"},
		{"DELETE", "/v1/users/nobody", ``, 404, "nobody"},
		{"POST", "/v1/users/nobody/reset", ``, 404, "nobody"},
		{"POST", "/v1/users/nobody/usage/take", ``, 404, "nobody"},
		{"GET", "/v1/users/nobody/usage", ``, 404, "nobody"},
		{"GET", "/v1/users?limit=0", ``, 400, "limit"},
		{"GET", "/v1/users?after=", ``, 400, "after"},
		{"GET", "/v1/users?name=alice", ``, 400, "unknown key"},
		{"DELETE", "/v1/groups/none", ``, 404, "none"},
		{"GET", "/v1/groups/none", ``, 404, "none"},
	} {
		resp, body := f.send("users", c.method, c.path, c.body)
		f.wantProblem(resp, body, c.status, c.detail)
	}
	want[struct{}](f, 204, "users", "DELETE", "/v1/users/alice", "")
	resp, body := f.send("users", "DELETE", "/v1/users/alice", "")
	f.wantProblem(resp, body, 404, "alice")
}

func TestAnEditWithAStaleEtagIsRefused(t *testing.T) {
	f := start(t, nil)
	resp, _ := f.send("users", "PUT", "/v1/users/alice", `{}`)
	old := resp.Header.Get("ETag")
	with := func(etag, method, body string) (*http.Response, string) {
		return f.ask("users", method, "/v1/users/alice", func(r *http.Request) {
			r.Header.Set("If-Match", etag)
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		})
	}
	f.users.Change("alice", func(v *user.View) { v.Usage.Up++ }) // usage is not the definition
	if resp, body := with(old, "PATCH", `{"notes":"new"}`); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	for method, body := range map[string]string{"PATCH": `{}`, "PUT": `{}`, "DELETE": ``} {
		resp, text := with(old, method, body)
		f.wantProblem(resp, text, 412, "changed meanwhile")
	}
	if resp, body := with("*", "DELETE", ""); resp.StatusCode != 204 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	resp, text := with("*", "PUT", `{}`)
	f.wantProblem(resp, text, 412, "no such user")
}

func TestUsersAreListedByNameInPages(t *testing.T) {
	f := start(t, nil)
	if _, body := f.ask("read", "GET", "/v1/users", nil); body != "{\"users\":[]}\n" {
		t.Errorf("no users: %s", body)
	}
	for _, name := range []string{"dora", "alice", "carl", "bob", "eve"} {
		f.users.Change(name, func(*user.View) {})
	}
	var got []string
	for after := ""; ; {
		list := want[api.UserList](f, 200, "read", "GET", "/v1/users?limit=2"+after, "")
		if len(list.Users) > 2 {
			t.Fatalf("%d of 2", len(list.Users))
		}
		for _, u := range list.Users {
			got = append(got, u.Name)
		}
		if list.Next == "" {
			break
		}
		after = "&after=" + list.Next
	}
	if !slices.Equal(got, []string{"alice", "bob", "carl", "dora", "eve"}) {
		t.Errorf("%v", got)
	}
}

func TestUsageIsResetToppedUpAndExtended(t *testing.T) {
	f := start(t, nil)
	want[api.User](f, 201, "users", "PUT", "/v1/users/ann", `{"limits":{"traffic":{"total":1000}},"expires":{"at":"2030-01-01T00:00:00Z"}}`)
	f.users.Change("ann", func(v *user.View) { v.Usage.Up, v.Usage.ChargedUp, v.Usage.ChargedDown = 900, 700, 800 })
	got := want[api.User](f, 200, "users", "POST", "/v1/users/ann/topup", `{"bytes":"5kB"}`)
	if *got.Left.Total != 4500 || got.Usage.Extra != 5000 || got.Left.Up != nil {
		t.Errorf("%+v", got.Left)
	}
	got = want[api.User](f, 200, "users", "POST", "/v1/users/ann/extend", `{"for":"30d"}`)
	if got.ExpiresAt.String() != "2030-01-31T00:00:00.000Z" || got.Expires.At.String() != "2030-01-01T00:00:00.000Z" {
		t.Errorf("%v, %v", got.ExpiresAt, got.Expires)
	}
	got = want[api.User](f, 200, "users", "POST", "/v1/users/ann/reset", ``)
	if got.Usage.ChargedUp != 0 || got.Usage.Generation != 1 || *got.Left.Total != 1000 {
		t.Errorf("%+v", got.Usage)
	}
	for path, body := range map[string]string{"topup": `{"bytes":0}`, "extend": `{}`, "usage/ack": `{}`} {
		resp, text := f.send("users", "POST", "/v1/users/ann/"+path, body)
		f.wantProblem(resp, text, 422, "want")
	}
	resp, text := f.send("users", "POST", "/v1/users/ann/topup", `{"total":5}`)
	f.wantProblem(resp, text, 400, "total: unknown field")
}

func TestWhatIsLeftIsNeverBelowZeroNorOverflows(t *testing.T) {
	f := start(t, nil)
	f.users.Change("ann", func(v *user.View) {
		v.Limits.Traffic = user.Traffic{Up: 5, Down: 1<<64 - 1, Total: 5}
		v.Usage = user.Usage{ChargedUp: 9, ChargedDown: 1<<64 - 1, Extra: 1}
	})
	got := want[api.User](f, 200, "read", "GET", "/v1/users/ann", "").Left
	if *got.Up != 0 || *got.Down != 0 || *got.Total != 0 {
		t.Errorf("%d %d %d", *got.Up, *got.Down, *got.Total)
	}
}

func TestATakeIsTheSameUntilItIsAcknowledged(t *testing.T) {
	f := start(t, nil)
	f.users.Change("ann", func(*user.View) {})
	take := func() api.Take { return want[api.Take](f, 200, "users", "POST", "/v1/users/ann/usage/take", "") }
	if none := take(); none.Sequence != 0 || none.To.IsZero() || none.Up != 0 {
		t.Errorf("of nothing: %+v", none)
	}
	f.users.Change("ann", func(v *user.View) { v.Usage.Up, v.Usage.ChargedUp = 100, 200 })
	first := take()
	f.users.Change("ann", func(v *user.View) { v.Usage.Up += 11 })
	if again := take(); again != first || first.Up != 100 || first.ChargedUp != 200 || first.Sequence != 1 {
		t.Errorf("%+v then %+v", first, again)
	}
	resp, body := f.send("users", "POST", "/v1/users/ann/usage/ack", `{"sequence":2}`)
	f.wantProblem(resp, body, 409, "not the last take")
	for range 2 {
		want[struct{}](f, 204, "users", "POST", "/v1/users/ann/usage/ack", `{"sequence":1}`)
	}
	if next := take(); next.Up != 11 || next.Sequence != 2 {
		t.Errorf("%+v", next)
	}
}

func TestGroupsAreWrittenLikeUsers(t *testing.T) {
	f := start(t, nil)
	f.users.AddGroup(user.Group{Name: "fixed", Source: user.FromConfig})
	g := want[api.Group](f, 201, "users", "PUT", "/v1/groups/staff", `{"limits":{"bandwidth":{"down":"50Mbit/s"},"ips":3}}`)
	if g.Limits.Bandwidth.Down != 6_250_000 || g.Source != "store" || g.Name != "staff" {
		t.Errorf("%+v", g)
	}
	want[api.Group](f, 200, "users", "PUT", "/v1/groups/staff", `{"name":"staff"}`)
	if list := want[api.Groups](f, 200, "read", "GET", "/v1/groups", "").Groups; len(list) != 2 || list[0].Source != "config" {
		t.Errorf("%+v", list)
	}
	resp, body := f.send("users", "PUT", "/v1/groups/fixed", `{}`)
	f.wantProblem(resp, body, 409, "configuration file")
	want[api.User](f, 201, "users", "PUT", "/v1/users/ann", `{"group":"staff"}`)
	resp, body = f.send("users", "DELETE", "/v1/groups/staff", ``)
	f.wantProblem(resp, body, 409, `user \"ann\" is a member`)
	want[api.User](f, 200, "users", "PATCH", "/v1/users/ann", `{"group":null}`)
	want[struct{}](f, 204, "users", "DELETE", "/v1/groups/staff", "")
}

func TestAGatewayWithoutUsersSaysSo(t *testing.T) {
	f := start(t, func(o *api.Options) { o.Users, o.Devices, o.Billing = nil, nil, nil })
	for _, path := range []string{"/v1/users", "/v1/users/ann", "/v1/users/ann/usage", "/v1/usage?by=user", "/v1/groups", "/v1/devices", "/v1/me"} {
		resp, body := f.ask("admin", "GET", path, nil)
		f.wantProblem(resp, body, 503, "this gateway k")
	}
	if resp, _ := f.ask("read", "GET", "/metrics", nil); resp.StatusCode != 200 {
		t.Errorf("metrics: %d", resp.StatusCode)
	}
}

func TestUsersAreHiddenByPrivacyFromThoseWhoDoNotAdministerThem(t *testing.T) {
	for _, level := range []string{"full", "addresses", "none"} {
		f := start(t, func(o *api.Options) { o.Privacy, o.PerUser = level, 10 })
		f.users.Change("ann", func(v *user.View) { v.IPs = []netip.Addr{netip.MustParseAddr("10.0.0.2")} })
		f.devices.Add(api.Device{Device: "mac:02:00:00:00:00:01", Host: "annes-phone", User: &api.UserRef{ID: 1, Name: "ann"}, Bound: "host:annes-phone"})
		for _, path := range []string{"/v1/users", "/v1/users/ann", "/v1/users/ann/usage", "/v1/usage?by=user"} {
			if resp, _ := f.ask("read", "GET", path, nil); (resp.StatusCode == 200) != (level == "full") {
				t.Errorf("%s: %s: %d", level, path, resp.StatusCode)
			}
			for _, role := range []string{"users", "admin"} {
				resp, body := f.ask(role, "GET", path, nil)
				if hidden := level == "none" && role == "users"; resp.StatusCode != 200 || hidden && strings.Contains(body, "10.0.0.2") {
					t.Errorf("%s: %s: %s: %d %s", level, role, path, resp.StatusCode, body)
				}
			}
		}
		resp, body := f.ask("read", "GET", "/v1/devices", nil)
		if (resp.StatusCode == 200) != (level != "none") || strings.Contains(body, "ann") != (level == "full") {
			t.Errorf("%s: devices: %d %s", level, resp.StatusCode, body)
		}
		if resp, _ := f.ask("read", "GET", "/v1/usage?by=device", nil); (resp.StatusCode == 200) != (level != "none") {
			t.Errorf("%s: usage of devices: %d", level, resp.StatusCode)
		}
		if _, body := f.ask("read", "GET", "/metrics", nil); strings.Contains(body, `user="ann"`) != (level == "full") {
			t.Errorf("%s: metrics: %s", level, body)
		}
	}
}

// key is a user's number.
func (f *fixture) key(name string) flow.UserKey {
	v, err := f.users.Get(name)
	if err != nil {
		f.Fatal(err)
	}
	return v.ID
}

func TestSeriesAreAskedForByTimeAndStep(t *testing.T) {
	f := start(t, nil)
	points := []user.Point{{Start: time.UnixMilli(3_600_000), Volume: user.Volume{Up: 1, Down: 2, ChargedUp: 3, ChargedDown: 4}}}
	f.billing.Points = map[user.Payer][]user.Point{
		{Kind: user.ForDevice, Name: "10.0.0.9"}: points, {Kind: user.ForOutbound}: points, {Kind: user.ForOutbound, Name: "direct"}: points,
		{Kind: user.ForUser, User: 99}: points, // a user that is gone
	}
	for _, name := range []string{"ann", "bob", "carl"} {
		f.users.Change(name, func(v *user.View) {
			v.Usage.Up = 7
			v.Group = map[string]string{"ann": "staff", "carl": "staff"}[name]
			f.billing.Points[user.Payer{Kind: user.ForUser, User: v.ID}] = points
		})
	}
	_, body := f.ask("read", "GET", "/v1/users/bob/usage?step=day&from=1970-01-01T00:00:00Z&to=1970-01-03T00:00:00Z", nil)
	for _, part := range []string{
		`{"user":{"id":2,"name":"bob"},"usage":{"up":7,`, `"left":{"up":null`, `"step":"1d","from":"1970-01-01T00:00:00.000Z","to":"1970-01-03T00:00:00.000Z"`,
		`"series":[{"start":"1970-01-01T01:00:00.000Z","up":1,"down":2,"charged_up":3,"charged_down":4}]`,
	} {
		if !strings.Contains(body, part) {
			t.Errorf("%s lacks %s", body, part)
		}
	}
	list := want[api.UsageList](f, 200, "read", "GET", "/v1/usage?by=user&limit=2", "")
	if len(list.Series) != 2 || list.Next != "bob" || list.By != "user" || time.Duration(list.Step) != time.Hour || time.Time(list.To).Sub(time.Time(list.From)) != 24*time.Hour {
		t.Errorf("%+v", list)
	}
	if rest := want[api.UsageList](f, 200, "read", "GET", "/v1/usage?by=user&limit=2&after=bob", ""); len(rest.Series) != 1 || rest.Next != "" {
		t.Errorf("%+v", rest)
	}
	for by, names := range map[string][]string{"group": {"staff"}, "device": {"10.0.0.9"}, "outbound": {"direct", "dns"}, "user": {"ann", "bob", "carl"}} {
		var got []string
		for _, s := range want[api.UsageList](f, 200, "read", "GET", "/v1/usage?by="+by, "").Series {
			got = append(got, s.Name)
		}
		if !slices.Equal(got, names) {
			t.Errorf("by %s: %v", by, got)
		}
	}
	for query, detail := range map[string]string{
		"": "want one of user, device, outbound, group", "?by=rule": "want one of", "?by=user&step=week": "want hour, day", "?by=user&step=90m": "whole hours", "?by=user&step=36h": "whole days", "?by=user&from=yesterday": "want a time",
		"?by=user&from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z": "from before to", "?by=user&from=1900-01-01T00:00:00Z": "at most 10000 steps",
	} {
		resp, body := f.ask("read", "GET", "/v1/usage"+query, nil)
		f.wantProblem(resp, body, 400, detail)
	}
}

func TestAPatchMayRenameAUserAndAPutMayNot(t *testing.T) {
	f := start(t, nil)
	before := want[api.User](f, 201, "users", "PUT", "/v1/users/alice", `{"notes":"x"}`)
	resp, body := f.send("users", "PUT", "/v1/users/alice", `{"name":"bob"}`)
	f.wantProblem(resp, body, 422, `name: it is \"alice\" in the path, and \"bob\" in the body`)
	after := want[api.User](f, 200, "users", "PATCH", "/v1/users/1", `{"name":"bob"}`) // by number, which stays
	if after.Name != "bob" || after.ID != before.ID || after.Notes != "x" {
		t.Errorf("%+v", after)
	}
	resp, body = f.send("users", "GET", "/v1/users/alice", "")
	f.wantProblem(resp, body, 404, "alice")
}
