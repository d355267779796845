package api_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/api/apitest"
	"gatewayd/internal/client"
	"gatewayd/internal/exitcode"
	"gatewayd/track"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline bounds every wait of these tests.
const deadline = 10 * time.Second

// fakeGateway holds a configuration, and refuses texts that say "bad".
type fakeGateway struct {
	mu      sync.Mutex
	text    string
	epoch   uint64
	reloads int
	log     *api.FlowLog
}

func (g *fakeGateway) Status() api.Status {
	g.mu.Lock()
	defer g.mu.Unlock()
	return api.Status{Epoch: g.epoch, Associations: 3, Ledger: &api.Ledger{LastCommit: api.Time(time.UnixMilli(1500))}, FlowLog: g.log, BlockedSuppressed: 5, Inbounds: []api.Inbound{{Tag: "lan", Type: "tun", Device: "gw0", MTU: 1500}}}
}

func (g *fakeGateway) Outbounds() []api.Outbound {
	return []api.Outbound{{Tag: "direct", Version: 2, Type: "direct", Flows: 1, LastError: "dial direct 203.0.113.5:443: network is unreachable", Draining: []api.Draining{{Version: 1, Flows: 4}}}, {Tag: "reject", Version: 1, Type: "reject"}}
}

func (g *fakeGateway) Rules() []api.Rule {
	first := 0
	return []api.Rule{{Rule: &first, Name: "web", When: "{port: 443}", Outbound: "direct", Hits: 7}, {Outbound: "direct", Hits: 1}}
}

func (g *fakeGateway) etag() string { return "e" + strings.Repeat("x", int(g.epoch)) }

func (g *fakeGateway) Config() (string, string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text, g.etag()
}

func (g *fakeGateway) Check(text string) error {
	switch {
	case strings.Contains(text, "bad"):
		return exitcode.With(exitcode.Config, errors.New("gw.yaml:3:5: route.rules[0].outbound: no outbound \"vpm\"\ngw.yaml:9:1: tnu: unknown key"))
	case strings.Contains(text, "clash"):
		return exitcode.With(exitcode.Collision, errors.New("device gw0 is in use"))
	}
	return nil
}

func (g *fakeGateway) Apply(_ context.Context, text, etag string) error {
	if err := g.Check(text); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if etag != g.etag() {
		return api.ErrStale
	}
	g.text, g.epoch = text, g.epoch+1
	return nil
}

func (g *fakeGateway) Reload(context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reloads++
	return nil
}

// fixture is a server with everything around it.
type fixture struct {
	*testing.T
	tracker *track.Tracker
	gateway *fakeGateway
	users   *apitest.Users
	devices *apitest.Devices
	billing *apitest.Billing
	drops   *flow.Drops
	events  *api.Events
	server  *api.Server
	unix    *client.Client
	tcp     string // base URL of the first TCP listener
	tokens  map[string]string
	stop    func()
}

// options are a server's with every role's token, on a Unix socket and on TCP.
func options(t *testing.T) (api.Options, map[string]string) {
	t.Helper()
	dir := t.TempDir()
	o := api.Options{Version: "1.2.3", Gateway: &fakeGateway{text: "version: 1\n", epoch: 1}, Drops: new(flow.Drops), Events: api.NewEvents()}
	users := apitest.NewUsers()
	o.Users, o.Devices, o.Billing = users, &apitest.Devices{Users: users}, &apitest.Billing{Users: users}
	tokens := map[string]string{}
	for _, role := range []string{"read", "users", "admin"} {
		file := filepath.Join(dir, role)
		tokens[role] = "secret-" + role
		if err := os.WriteFile(file, []byte(" secret-"+role+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		o.Tokens = append(o.Tokens, api.Token{Name: "the " + role, Role: role, File: file})
	}
	tracker, err := track.New(track.Options{Interval: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	o.Tracker = tracker
	o.Listen = []string{"unix:" + filepath.Join(dir, "api.sock"), "tcp:127.0.0.1:0"}
	return o, tokens
}

// start runs a server until the test ends.
func start(t *testing.T, change func(*api.Options)) *fixture {
	t.Helper()
	o, tokens := options(t)
	if change != nil {
		change(&o)
	}
	server, err := api.New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx) }()
	f := &fixture{T: t, tracker: o.Tracker, gateway: o.Gateway.(*fakeGateway), drops: o.Drops, events: o.Events, server: server, tokens: tokens}
	f.users, _ = o.Users.(*apitest.Users)
	f.billing, _ = o.Billing.(*apitest.Billing)
	f.devices, _ = o.Devices.(*apitest.Devices)
	for i, a := range server.Addrs() {
		if a.Network() == "tcp" {
			f.tcp = "http://" + a.String()
		} else if f.unix, err = client.New(client.Options{API: o.Listen[i]}); err != nil {
			t.Fatal(err)
		}
	}
	f.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("serve: %v", err)
			}
		case <-time.After(deadline):
			t.Error("the server does not stop")
		}
		f.unix.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	t.Cleanup(f.stop)
	return f
}

// within is a context that ends with the test's patience.
func (f *fixture) within() context.Context {
	ctx, cancel := context.WithTimeout(f.Context(), deadline)
	f.Cleanup(cancel)
	return ctx
}

// open registers a flow; change says what is special about it.
func (f *fixture) open(change func(*track.Meta)) *track.Flow {
	m := sample()
	if change != nil {
		change(&m)
	}
	return f.tracker.Open(m, func(error) {})
}

func sample() track.Meta {
	return track.Meta{
		Inbound: "lan", Network: flow.TCP, Source: netip.MustParseAddrPort("10.0.0.2:51234"),
		Dest:     flow.Destination{Addr: netip.MustParseAddrPort("203.0.113.5:443")},
		Outbound: "direct", Version: 1, Egress: netip.MustParseAddrPort("192.0.2.2:40112"), Rule: 0, Epoch: 1,
	}
}

// ask makes one request over TCP with a role's token and returns status and body.
func (f *fixture) ask(role, method, path string, change func(*http.Request)) (*http.Response, string) {
	f.Helper()
	req, err := http.NewRequestWithContext(f.within(), method, f.tcp+path, nil)
	if err != nil {
		f.Fatal(err)
	}
	if role != "" {
		req.Header.Set("Authorization", "Bearer "+f.tokens[role])
	}
	if change != nil {
		change(req)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		f.Fatal(err)
	}
	return resp, string(body)
}

// wantProblem checks status, media type and a part of the detail.
func (f *fixture) wantProblem(resp *http.Response, body string, status int, detail string) {
	f.Helper()
	if resp.StatusCode != status || !strings.Contains(body, detail) {
		f.Errorf("%s %s: %d %s: want %d with %q", resp.Request.Method, resp.Request.URL, resp.StatusCode, body, status, detail)
	}
	if ct := resp.Header.Get("Content-Type"); ct != "application/problem+json" {
		f.Errorf("%s: content type %q", resp.Request.URL, ct)
	}
	for _, field := range []string{`"type":"about:blank"`, `"title":`, `"status":`, `"detail":`} {
		if !strings.Contains(body, field) {
			f.Errorf("problem %s lacks %s", body, field)
		}
	}
}

// statusOf is the status of a client's error, 0 for none.
func statusOf(err error) int {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return p.Status
	}
	return 0
}

// events follows a stream in the background; the channel closes at its end.
func (f *fixture) follow(path string, query url.Values, lastID string) <-chan client.Event {
	f.Helper()
	out := make(chan client.Event, 4096)
	before := f.server.OpenStreams()
	ctx, cancel := context.WithCancel(f.within())
	var done sync.WaitGroup
	done.Go(func() {
		defer close(out)
		for ev, err := range f.unix.Stream(ctx, path, query, lastID) {
			if err != nil {
				return
			}
			ev.Data = bytes.Clone(ev.Data)
			out <- ev
		}
	})
	f.Cleanup(func() { cancel(); done.Wait() })
	f.await("the stream opens", func() bool { return f.server.OpenStreams() > before })
	return out
}

// next is the next event of a stream.
func (f *fixture) next(events <-chan client.Event) client.Event {
	f.Helper()
	select {
	case ev, ok := <-events:
		if !ok {
			f.Fatal("the stream ended")
		}
		return ev
	case <-time.After(deadline):
		f.Fatal("no event came")
	}
	return client.Event{}
}

// await polls a condition that nothing announces.
func (f *fixture) await(what string, holds func() bool) {
	f.Helper()
	end := time.After(deadline)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-end:
			f.Fatalf("in vain: %s", what)
		}
	}
}
