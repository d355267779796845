package api_test

import (
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/client"
	"gatewayd/track"
)

func TestEachCallNeedsItsRoleAndAHigherOneDoes(t *testing.T) {
	f := start(t, nil)
	ranks := map[string]int{"": 0, "none": 0, "read": 1, "users": 2, "admin": 3}
	for call, need := range f.server.RouteTable() {
		method, path, _ := strings.Cut(call, " ")
		if strings.HasSuffix(path, "events") {
			path += "?refused=1" // a stream would not end; 400 comes after the role
		}
		path = strings.NewReplacer("{flow}", "9", "{name}", "ann", "{device}", "10.0.0.9", "{bits}", "32").Replace(path)
		if path == "/v1/traffic" {
			path += "?once"
		}
		for _, role := range []string{"", "read", "users", "admin"} {
			resp, body := f.ask(role, method, path, nil)
			denied := resp.StatusCode == 401 || resp.StatusCode == 403
			if allowed := ranks[role] >= ranks[need]; allowed == denied {
				t.Errorf("%s as %q: %d %s: needs %s", call, role, resp.StatusCode, body, need)
			}
			if want := map[bool]int{true: 401, false: 403}[role == ""]; denied && resp.StatusCode != want {
				t.Errorf("%s as %q: %d: want %d", call, role, resp.StatusCode, want)
			}
		}
	}
}

func TestAWrongTokenIsUnauthorized(t *testing.T) {
	f := start(t, nil)
	for _, header := range []string{"", "Bearer", "Bearer ", "Bearer secret-rea", "Bearer secret-readx", "Bearer SECRET-READ", "Basic secret-read", "secret-read"} {
		resp, body := f.ask("", "GET", "/v1/status", func(r *http.Request) { r.Header.Set("Authorization", header) })
		f.wantProblem(resp, body, 401, "bearer token")
		if resp.Header.Get("WWW-Authenticate") == "" {
			t.Errorf("%q: no WWW-Authenticate", header)
		}
	}
	resp, _ := f.ask("", "GET", "/v1/status", func(r *http.Request) { r.Header.Set("Authorization", "bearer secret-read") })
	if resp.StatusCode != 200 {
		t.Errorf("the scheme's case matters: %d", resp.StatusCode)
	}
}

func TestUnknownPathsAndMethodsAreProblems(t *testing.T) {
	f := start(t, nil)
	resp, body := f.ask("read", "GET", "/v2/flows", nil)
	f.wantProblem(resp, body, 404, "no call /v2/flows")
	resp, body = f.ask("", "GET", "/v2/flows", nil)
	f.wantProblem(resp, body, 401, "bearer token")
	resp, body = f.ask("read", "PUT", "/v1/status", nil)
	f.wantProblem(resp, body, 405, "GET, HEAD")
	if resp.Header.Get("Allow") != "GET, HEAD" {
		t.Errorf("Allow: %q", resp.Header.Get("Allow"))
	}
	resp, body = f.ask("read", "GET", "/v1/status?verbose=1", nil)
	f.wantProblem(resp, body, 400, "this call takes none")
}

func TestOnlyKnownHostNamesAreServedOverTCP(t *testing.T) {
	f := start(t, func(o *api.Options) { o.Hosts = []string{"GW.example.net"} })
	for host, want := range map[string]int{
		"localhost": 200, "LOCALHOST:8690": 200, "127.0.0.1": 200, "[::1]:8690": 200, "gw.example.net": 200, "gw.example.net.:443": 200,
		"evil.example": 403, "gw.example.net.evil.example": 403, "192.0.2.1": 403, "localhost.evil.example": 403,
	} {
		resp, body := f.ask("read", "GET", "/v1/status", func(r *http.Request) { r.Host = host })
		if resp.StatusCode != want {
			t.Errorf("Host %s: %d %s", host, resp.StatusCode, body)
		}
		resp, _ = f.ask("", "GET", "/healthz", func(r *http.Request) { r.Host = host })
		if resp.StatusCode != want {
			t.Errorf("healthz with Host %s: %d", host, resp.StatusCode)
		}
	}
}

func TestNoPageOfAnotherOriginIsLetIn(t *testing.T) {
	f := start(t, nil)
	resp, _ := f.ask("read", "OPTIONS", "/v1/connections", func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") })
	if resp.StatusCode != 405 || resp.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
}

func TestPeerCredentialsDecideOnTheUnixSocket(t *testing.T) {
	group := uint32(50)
	for _, c := range []struct {
		uid    uint32
		groups []uint32
		group  *uint32
		role   string
	}{
		{0, nil, nil, "admin"},
		{7, nil, nil, "admin"}, // the gateway's own
		{1000, []uint32{1000, 50}, &group, "admin"},
		{1000, []uint32{1000}, &group, "none"},
		{1000, []uint32{50}, nil, "none"},
		{1000, []uint32{0}, nil, "none"},
	} {
		role, denied := api.Judge(c.uid, c.groups, 7, c.group, "gatewayd")
		if role != c.role || (denied == "") != (role == "admin") {
			t.Errorf("%+v: %s, %q", c, role, denied)
		}
	}
}

// askAs runs a client as another user and returns its output.
func askAs(t *testing.T, socket string, uid, gid uint32, groups []uint32) string {
	t.Helper()
	if os.Geteuid() != 0 {
		unavailable(t, "root, to become another user")
	}
	binary := filepath.Join(filepath.Dir(socket), "child") // where others may run it
	if b, err := os.ReadFile(os.Args[0]); err != nil {
		t.Fatal(err)
	} else if err := os.WriteFile(binary, b, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "-test.run=^TestAskAsChild$", "-test.v")
	cmd.Env = []string{"API_SOCKET=" + socket}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid, Groups: groups}}
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// unavailable skips for a named reason, but not where everything has to run.
func unavailable(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("missing: %s", what)
	}
	t.Skipf("missing: %s", what)
}

func TestAskAsChild(t *testing.T) {
	socket := os.Getenv("API_SOCKET")
	if socket == "" {
		return // the parent is TestAStrangerIsRefusedAndAGroupMemberServed
	}
	c, err := client.New(client.Options{API: "unix:" + socket})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Status(t.Context())
	t.Logf("answer: %d %v", statusOf(err), err)
}

func TestAStrangerIsRefusedAndAGroupMemberServed(t *testing.T) {
	dir := reachableDir(t)
	socket := filepath.Join(dir, "api.sock")
	f := start(t, func(o *api.Options) { o.Listen[0], o.SocketGroup = "unix:"+socket, "daemon" })
	_ = f
	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o660 {
		t.Fatalf("socket %v, %v", info, err)
	}
	const daemon, nobody = 1, 65534
	if out := askAs(t, socket, nobody, nobody, []uint32{nobody}); !strings.Contains(out, "no permission") {
		t.Errorf("the file lets a stranger in: %s", out)
	}
	if out := askAs(t, socket, nobody, nobody, []uint32{nobody, daemon}); !strings.Contains(out, "answer: 0 <nil>") {
		t.Errorf("a member is refused: %s", out)
	}
	if err := os.Chmod(socket, 0o666); err != nil { // somebody opens the file: the credentials still hold
		t.Fatal(err)
	}
	if out := askAs(t, socket, nobody, nobody, []uint32{nobody}); !strings.Contains(out, "answer: 403 uid 65534 may not use the API: be root or join the group daemon") {
		t.Errorf("a stranger is served: %s", out)
	}
}

// reachableDir is a directory that other users may enter.
func reachableDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "gatewayd-api-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPrivacyHidesDomainsUsersAndAddressesFromOthersThanAdministrators(t *testing.T) {
	secrets := map[string][]string{
		"full":      {},
		"addresses": {"example.org", "alice", "sni"},
		"none":      {"example.org", "alice", "sni", "10.0.0.2", "203.0.113.5", "192.0.2.2", "3c:22"},
	}
	for level, hidden := range secrets {
		t.Run(level, func(t *testing.T) {
			f := start(t, func(o *api.Options) { o.Privacy = level })
			change := func(m *track.Meta) {
				m.User, m.UserName, m.Device = 1, "alice", "mac:3c:22:fb:aa:bb:cc"
				m.Dest.Domain, m.Dest.From = "example.org", flow.FromClient
			}
			f.open(change)
			f.open(change).Close(nil)
			f.tracker.Final()
			for _, path := range []string{"/v1/connections", "/v1/connections/1", "/v1/connections/closed", "/v1/traffic?once"} {
				_, shown := f.ask("read", "GET", path, nil)
				_, whole := f.ask("admin", "GET", path, nil)
				for _, secret := range hidden {
					if strings.Contains(shown, secret) {
						t.Errorf("%s shows %s: %s", path, secret, shown)
					}
				}
				if path == "/v1/connections/closed" {
					if whole != shown {
						t.Errorf("the closed ring shows administrators more: %s", whole)
					}
				} else if !strings.Contains(whole, "alice") {
					t.Errorf("%s hides from administrators: %s", path, whole)
				}
			}
			for _, path := range []string{"/v1/outbounds", "/v1/status"} { // the last error names a destination
				_, shown := f.ask("read", "GET", path, nil)
				_, whole := f.ask("admin", "GET", path, nil)
				if strings.Contains(shown, "203.0.113.5") != (level == "full") || !strings.Contains(whole, "203.0.113.5") {
					t.Errorf("%s shows %s, and administrators %s", path, shown, whole)
				}
			}
			resp, body := f.ask("read", "GET", "/v1/connections?user=alice", nil)
			if level == "full" {
				if resp.StatusCode != 200 {
					t.Errorf("full: %d", resp.StatusCode)
				}
			} else {
				f.wantProblem(resp, body, 403, "hidden by privacy: "+level)
			}
		})
	}
}

func TestABodyLargerThanAMebibyteIsRefused(t *testing.T) {
	f := start(t, nil)
	resp, body := f.ask("admin", "POST", "/v1/config/check", func(r *http.Request) {
		r.Body = io.NopCloser(io.LimitReader(zeros{}, 1<<20+1))
	})
	f.wantProblem(resp, body, 413, "1048576 bytes")
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestAfterTheStopRequestsGet503(t *testing.T) {
	o, _ := options(t)
	s, err := api.New(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", "/healthz", nil)
	rec := newRecorder()
	s.Handler().ServeHTTP(rec, req)
	if rec.status != 503 || !strings.Contains(rec.body.String(), "shutting down") {
		t.Errorf("%d %s", rec.status, rec.body.String())
	}
}

// recorder is the least that a handler writes to.
type recorder struct {
	header http.Header
	status int
	body   strings.Builder
}

func newRecorder() *recorder { return &recorder{header: http.Header{}, status: 200} }

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }
