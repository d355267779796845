package api_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/track"
)

func TestAKilledFlowAnswers204TwiceAnd404OnceItIsGone(t *testing.T) {
	f := start(t, nil)
	fl := f.open(nil)
	for range 2 {
		if err := f.unix.Kill(f.within(), uint64(fl.ID())); err != nil {
			t.Fatal(err)
		}
	}
	got, err := f.unix.Flow(f.within(), uint64(fl.ID()))
	if err != nil || !*got.Killed {
		t.Fatalf("flow after its kill: %+v, %v", got, err)
	}
	fl.Close(nil)
	resp, body := f.ask("admin", "DELETE", "/v1/connections/1", nil)
	f.wantProblem(resp, body, 404, `"no live flow 1"`)
	resp, body = f.ask("read", "GET", "/v1/connections/17", nil)
	f.wantProblem(resp, body, 404, `"no live flow 17"`)
}

func TestOnlyTheNamedFlowIsKilled(t *testing.T) {
	f := start(t, nil)
	a, b := f.open(nil), f.open(nil)
	if err := f.unix.Kill(f.within(), uint64(a.ID())); err != nil {
		t.Fatal(err)
	}
	if a.Cause() != track.ErrKilled || b.Cause() != nil {
		t.Errorf("causes %v and %v", a.Cause(), b.Cause())
	}
}

// zoo opens one flow of each kind that a selector may pick.
func zoo(f *fixture) map[string]*track.Flow {
	return map[string]*track.Flow{
		"plain":  f.open(nil),
		"road":   f.open(func(m *track.Meta) { m.Inbound = "road" }),
		"dns":    f.open(func(m *track.Meta) { m.Outbound, m.Rule = "", -1 }),
		"v2":     f.open(func(m *track.Meta) { m.Outbound, m.Version = "vpn", 2 }),
		"v3":     f.open(func(m *track.Meta) { m.Outbound, m.Version = "vpn", 3 }),
		"alice":  f.open(func(m *track.Meta) { m.User, m.UserName = 1, "alice" }),
		"ghost":  f.open(func(m *track.Meta) { m.UserName = "ghost" }), // anonymous, whatever it says
		"peer":   f.open(func(m *track.Meta) { m.Session = 3 }),
		"phone":  f.open(func(m *track.Meta) { m.Device = "mac:3c:22:fb:aa:bb:cc" }),
		"mapped": f.open(func(m *track.Meta) { m.Source = netip.MustParseAddrPort("[::ffff:10.9.9.9]:1") }),
		"six":    f.open(func(m *track.Meta) { m.Source = netip.MustParseAddrPort("[fd10::2]:1") }),
		"named":  f.open(func(m *track.Meta) { m.Dest.Domain, m.Dest.From = "example.org", flow.FromSNI }),
	}
}

func TestEachSelectorPicksItsFlows(t *testing.T) {
	for query, want := range map[string][]string{
		"inbound=road":                  {"road"},
		"outbound=":                     {"dns"},
		"outbound=vpn":                  {"v2", "v3"},
		"user=alice":                    {"alice"},
		"user=ghost":                    {},
		"session=3":                     {"peer"},
		"device=mac:3c:22:fb:aa:bb:cc":  {"phone"},
		"device=3C:22:FB:AA:BB:CC":      {"phone"},
		"source=10.9.9.9":               {"mapped"},
		"source=::ffff:10.9.9.9":        {"mapped"},
		"source=fd10:0::2":              {"six"},
		"domain=example.org":            {"named"},
		"domain=EXAMPLE.org.":           {"named"},
		"domain=org":                    {},
		"inbound=lan&outbound=vpn":      {"v2", "v3"},
		"inbound=road&outbound=vpn":     {},
		"outbound=direct&domain=nx.org": {},
	} {
		t.Run(query, func(t *testing.T) {
			f := start(t, nil)
			flows := zoo(f)
			q, err := url.ParseQuery(query)
			if err != nil {
				t.Fatal(err)
			}
			list, err := f.unix.Connections(f.within(), q)
			if err != nil || len(list.Flows) != len(want) {
				t.Fatalf("listed %+v, %v: want %v", list.Flows, err, want)
			}
			n, err := f.unix.KillWhere(f.within(), q)
			if err != nil || n != len(want) {
				t.Fatalf("killed %d, %v: want %v", n, err, want)
			}
			for _, name := range want {
				if flows[name].Cause() != track.ErrKilled {
					t.Errorf("%s lives on", name)
				}
			}
			if n, err = f.unix.KillWhere(f.within(), q); n != 0 || err != nil {
				t.Errorf("killed %d the second time, %v", n, err)
			}
		})
	}
}

func TestNoSelectorKillsAll(t *testing.T) {
	f := start(t, nil)
	flows := zoo(f)
	resp, body := f.ask("admin", "DELETE", "/v1/connections", nil)
	if want := `{"closed":` + strconv.Itoa(len(flows)) + "}\n"; resp.StatusCode != 200 || body != want {
		t.Errorf("%d %s: want %s", resp.StatusCode, body, want)
	}
}

func TestMalformedSelectorsAreRefusedAndKillNothing(t *testing.T) {
	f := start(t, nil)
	fl := f.open(nil)
	for query, detail := range map[string]string{
		"inbund=lan":             "unknown key",
		"limit=3":                "unknown key",
		"inbound=":               "empty value",
		"user=":                  "empty value",
		"user=42":                "all digits",
		"session=":               "empty value",
		"session=x":              "want a number",
		"session=0":              "want a number",
		"session=-1":             "want a number",
		"device=":                "empty value",
		"device=printer":         "want a MAC",
		"source=":                "empty value",
		"source=10.0.0.2:80":     "want an IP address",
		"source=10.0.0.0/24":     "want an IP address",
		"source=fe80::1%25eth0":  "want an IP address",
		"domain=":                "empty value",
		"domain=a%20b":           "domain name",
		"domain=.":               "domain name",
		"inbound=lan&inbound=x":  "given twice",
		"inbound=%zz":            "query",
		"inbound=lan;outbound=x": "query",
	} {
		resp, body := f.ask("admin", "DELETE", "/v1/connections?"+query, nil)
		f.wantProblem(resp, body, 400, detail)
		if query != "limit=3" {
			resp, body = f.ask("read", "GET", "/v1/connections?"+query, nil)
			f.wantProblem(resp, body, 400, detail)
		}
	}
	for _, id := range []string{"0", "x", "-1", "1.5", "99999999999999999999"} {
		resp, body := f.ask("admin", "DELETE", "/v1/connections/"+id, nil)
		f.wantProblem(resp, body, 400, "flow id")
	}
	if fl.Cause() != nil {
		t.Error("a refused call killed a flow")
	}
}

func TestPagesJoinToTheWholeListInOrder(t *testing.T) {
	f := start(t, nil)
	for range 25 {
		f.open(nil)
	}
	f.tracker.Kill(3) // still registered, still listed
	var ids []uint64
	q := url.Values{"limit": {"10"}}
	for pages := 1; ; pages++ {
		list, err := f.unix.Connections(f.within(), q)
		if err != nil {
			t.Fatal(err)
		}
		for _, fl := range list.Flows {
			ids = append(ids, fl.ID)
		}
		if list.Next == 0 {
			if pages != 3 {
				t.Errorf("%d pages", pages)
			}
			break
		}
		q.Set("after", strconv.FormatUint(list.Next, 10))
	}
	for i, id := range ids {
		if id != uint64(i+1) {
			t.Fatalf("ids %v", ids)
		}
	}
	if len(ids) != 25 {
		t.Errorf("%d flows in all", len(ids))
	}
	for _, bad := range []string{"limit=0", "limit=x", "limit=-3", "limit=100001", "after=x", "after=-1", "limit="} {
		resp, body := f.ask("read", "GET", "/v1/connections?"+bad, nil)
		f.wantProblem(resp, body, 400, "want")
	}
}

func TestClosedFlowsPageInTheOrderOfTheirEnds(t *testing.T) {
	f := start(t, nil)
	flows := []*track.Flow{f.open(nil), f.open(nil), f.open(nil)}
	for _, i := range []int{2, 0, 1} {
		flows[i].Close(nil)
	}
	first, err := f.unix.ClosedFlows(f.within(), url.Values{"limit": {"2"}})
	if err != nil || len(first.Flows) != 2 || first.Flows[0].ID != 3 || first.Flows[1].ID != 1 || first.Next != 1 {
		t.Fatalf("first page %+v, %v", first, err)
	}
	rest, err := f.unix.ClosedFlows(f.within(), url.Values{"after": {"1"}})
	if err != nil || len(rest.Flows) != 1 || rest.Flows[0].ID != 2 || rest.Next != 0 {
		t.Fatalf("second page %+v, %v", rest, err)
	}
	if got := first.Flows[0]; got.Reason != "eof" || got.Ended.IsZero() {
		t.Errorf("closed record %+v", got)
	}
}

func TestEmptyListsAreListsAndNotNull(t *testing.T) {
	f := start(t, nil)
	for path, want := range map[string]string{
		"/v1/connections":        `{"sessions":[],"flows":[]}`,
		"/v1/connections/closed": `{"flows":[]}`,
	} {
		resp, body := f.ask("read", "GET", path, nil)
		if resp.StatusCode != http.StatusOK || body != want+"\n" {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
}

func TestAFlowHasTheFieldsOfTheContract(t *testing.T) {
	f := start(t, nil)
	fl := f.open(func(m *track.Meta) {
		m.Session, m.Device, m.RuleName, m.User, m.UserName = 3, "mac:3c:22:fb:aa:bb:cc", "web", 1, "alice"
		m.Recorded = true
		m.Dest.Domain, m.Dest.From = "example.org", flow.FromSNI
	})
	fl.Moved(flow.Up, 123)
	for range 1 << 17 {
		fl.Moved(flow.Down, 1<<30)
	}
	fl.Moved(flow.Down, 1)
	_, body := f.ask("admin", "GET", "/v1/connections/1", nil)
	var got map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	var started time.Time
	if err := json.Unmarshal(got["started"], &started); err != nil || len(got["started"]) != len(`"2026-01-02T03:04:05.678Z"`) {
		t.Errorf("started %s, %v", got["started"], err)
	}
	for field, want := range map[string]string{
		"id": "1", "session": "3", "inbound": `"lan"`, "network": `"tcp"`, "source": `"10.0.0.2:51234"`,
		"device": `"mac:3c:22:fb:aa:bb:cc"`, "destination": `"203.0.113.5:443"`, "domain": `"example.org"`, "domain_from": `"sni"`,
		"outbound": `"direct"`, "outbound_version": "1", "egress": `"192.0.2.2:40112"`, "rule": "0", "rule_name": `"web"`, "recorded": "true",
		"epoch": "1", "user": `{"id":1,"name":"alice"}`, "up": "123", "down": "140737488355329", "killed": "false",
	} {
		if string(got[field]) != want {
			t.Errorf("%s is %s: want %s", field, got[field], want)
		}
		delete(got, field)
	}
	delete(got, "started")
	if len(got) != 0 {
		t.Errorf("fields beyond the contract: %v", got)
	}
}

func TestWhatAFlowDoesNotHaveIsAbsent(t *testing.T) {
	f := start(t, nil)
	f.open(func(m *track.Meta) {
		m.Rule, m.Outbound, m.Version, m.Egress = -1, "", 0, netip.AddrPort{}
		m.Dest.Domain, m.Dest.From = "printer.lan", flow.FromClient
	})
	_, body := f.ask("admin", "GET", "/v1/connections/1", nil)
	var got map[string]any
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"session", "device", "egress", "rule", "rule_name", "recorded", "user", "ended", "reason"} {
		if v, there := got[field]; there {
			t.Errorf("%s is %v", field, v)
		}
	}
	if got["destination"] != "printer.lan:443" || got["outbound"] != "" {
		t.Errorf("destination %v, outbound %v", got["destination"], got["outbound"])
	}
}

func TestTimesSurviveTheirJSON(t *testing.T) {
	want := api.Time(time.Date(2026, 3, 4, 5, 6, 7, 8_000_000, time.FixedZone("", 3600)))
	b, err := json.Marshal(want)
	if err != nil || string(b) != `"2026-03-04T04:06:07.008Z"` {
		t.Fatalf("%s, %v", b, err)
	}
	var got api.Time
	if err := json.Unmarshal(b, &got); err != nil || !time.Time(got).Equal(time.Time(want)) {
		t.Errorf("%v, %v", got, err)
	}
	if b, err = json.Marshal(api.Time{}); err != nil || string(b) != "null" {
		t.Errorf("zero time: %s, %v", b, err)
	}
	if err := json.Unmarshal([]byte("null"), &got); err != nil || !got.IsZero() {
		t.Errorf("null time: %v, %v", got, err)
	}
}

func TestListsThatNobodyTakesAreFew(t *testing.T) {
	said := make(chan slog.Record, 1)
	f := start(t, func(o *api.Options) { o.Log = slog.New(warnings{slog.DiscardHandler, said}) })
	for range 20_000 { // more than the buffers of two sockets take
		f.open(nil)
	}
	stuck := make([]net.Conn, api.MaxLists)
	for i := range stuck {
		stuck[i], _ = f.raw("/v1/connections")
		defer stuck[i].Close()
	}
	resp, body := f.ask("read", "GET", "/v1/connections?limit=1", nil)
	f.wantProblem(resp, body, 503, "at most 8")
	if resp, body = f.ask("admin", "GET", "/v1/connections?limit=1", nil); resp.StatusCode != 200 {
		t.Errorf("administrators get %d: %s", resp.StatusCode, body)
	}
	for _, c := range stuck {
		c.Close() //nolint:errcheck
	}
	f.await("lists are written again", func() bool {
		resp, _ := f.ask("read", "GET", "/v1/connections?limit=1", nil)
		return resp.StatusCode == 200
	})
	f.stop()
	if len(said) > 0 { // readers may leave
		t.Errorf("logged: %v", <-said)
	}
}

// warnings is a log that keeps the first line that is no mere information.
type warnings struct {
	slog.Handler
	first chan slog.Record
}

// Enabled tells which lines Handle gets.
func (warnings) Enabled(_ context.Context, level slog.Level) bool { return level > slog.LevelInfo }

// Handle keeps a line.
func (w warnings) Handle(_ context.Context, r slog.Record) error {
	select {
	case w.first <- r:
	default:
	}
	return nil
}
