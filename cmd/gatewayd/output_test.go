package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/exitcode"
	"gatewayd/track"
	"gatewayd/user"
)

func TestBytesAreShownInThreeDigits(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 B", 999: "999 B", 1000: "1.0 kB", 1234567: "1.2 MB", 999_949: "999.9 kB", 999_950: "1.0 MB", 5e9: "5.0 GB", 1<<64 - 1: "18.4 EB",
	} {
		if got := humanBytes(n); got != want {
			t.Errorf("%d: %s: want %s", n, got, want)
		}
	}
}

func TestAgesAreShownInTwoUnits(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m01s", 2*time.Hour + 3*time.Minute: "2h03m", 50 * time.Hour: "2d02h",
	} {
		if got := humanAge(d); got != want {
			t.Errorf("%v: %s: want %s", d, got, want)
		}
	}
}

func TestTheFlowTableFitsEightyColumnsAndKeepsPorts(t *testing.T) {
	up := uint64(123456789)
	flows := []api.Flow{{
		ID: 1234567, Network: "tcp", Source: "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:1]:51234", Destination: "[2001:db8:1111:2222:3333:4444:5555:6]:443",
		Outbound: "direct", Up: &up, Down: &up,
		Started: api.Time(time.Now().Add(-time.Hour)), Reason: "killed",
	}, {ID: 2, Network: "udp", Source: "10.0.0.2:5", Destination: "203.0.113.5:443", Domain: "example.org"}}
	text := string(flowTable(flows, true, time.Now()).render(80))
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	for _, want := range []string{":51234 ", ":443 ", " dns "} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	whole := string(flowTable(flows, true, time.Now()).render(0))
	if !strings.Contains(whole, flows[0].Source) || !strings.Contains(whole, " example.org:443 ") {
		t.Errorf("cut though nothing is narrow:\n%s", whole)
	}
}

func TestWhatOthersNamedCannotSteerTheTerminal(t *testing.T) {
	f := api.Flow{ID: 1, Network: "tcp", Destination: "203.0.113.5:443", Domain: "\x1b[2Jevil\n"}
	for _, text := range []string{string(flowTable([]api.Flow{f}, false, time.Now()).render(0)), flowLine("opened", &f, 0), flowLine("opened", &f, 40)} {
		if strings.ContainsAny(text, "\x1b") || strings.Contains(text, "evil\n") {
			t.Errorf("%q", text)
		}
	}
}

func TestALineOfWatchFitsTheTerminalWhereItCan(t *testing.T) {
	n := uint64(123_400_000)
	at := time.Date(2026, 3, 4, 12, 0, 0, 0, time.Local)
	f := api.Flow{
		ID: 1234567, Network: "tcp", Source: "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:1]:51234", Destination: "203.0.113.5:443", Domain: "very-long-name.of-a-host.example.org",
		Outbound: "direct", Up: &n, Down: &n, Started: api.Time(at.Add(-time.Hour)), Ended: api.Time(at), Reason: "killed",
	}
	for width, want := range map[int]string{
		0:  "12:00:00.000  closed   #1234567 tcp [2001:db8:aaaa:bbbb:cccc:dddd:eeee:1]:51234 > very-long-name.of-a-host.example.org:443 via direct  killed  up 123.4 MB, down 123.4 MB, 1h00m",
		80: "12:00:00 closed #1234567 tcp […:51234 > v…rg:443 via direct  killed  up 123.4 MB, down 123.4 MB, 1h00m",
	} {
		if got := flowLine("closed", &f, width); got != want {
			t.Errorf("in %d columns: %s\nwant %s", width, got, want)
		}
	}
	f = api.Flow{Network: "udp", Source: f.Source, Destination: "203.0.113.5:443", Outbound: "reject", RuleName: "no-udp", Started: api.Time(at)}
	if got, want := flowLine("blocked", &f, 80), "12:00:00 blocked udp [2001:db…1]:51234 > 203.0.113.5:443 via reject  rule no-udp"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// lockedBuffer is read while a command writes it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// watching runs a watch command until its output has every one of want. do makes
// something to see; it is called again and again, for the watcher may not be there yet.
func watching(t *testing.T, do func(*track.Tracker, *api.Events), want []string, args ...string) {
	t.Helper()
	tracker, err := track.New(track.Options{Interval: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "api.sock")
	events := api.NewEvents()
	server, err := api.New(api.Options{Listen: []string{"unix:" + socket}, Tracker: tracker, Gateway: &scripted{}, Drops: new(flow.Drops), Events: events})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = server.Serve(ctx) })
	watch, interrupt := context.WithCancel(ctx)
	out := &lockedBuffer{}
	root := newRoot(&app{stdout: out, stderr: out, getenv: func(string) string { return "" }})
	root.SetArgs(append(args, "--api", "unix:"+socket))
	ended := make(chan error, 1)
	running.Go(func() { ended <- root.ExecuteContext(watch) })
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for missing := true; missing; {
		do(tracker, events)
		text := out.String()
		missing = false
		for _, w := range want {
			missing = missing || !strings.Contains(text, w)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%v not in %s", want, text)
		}
	}
	interrupt()
	if err := <-ended; err != nil {
		t.Errorf("interrupted: %v", err)
	}
}

func openAndClose(tr *track.Tracker, _ *api.Events) {
	tr.Open(track.Meta{Inbound: "lan", Network: flow.UDP, Source: netip.MustParseAddrPort("10.0.0.2:5"), Rule: -1}, nil).Close(nil)
}

func TestWatchFlowsPrintsALineForEachEventUntilInterrupted(t *testing.T) {
	watching(t, openAndClose, []string{"  opened   #", "  closed   #", " udp 10.0.0.2:5 > ", " via dns", "  eof  up 0 B, down 0 B, 0s"}, "watch", "flows")
	watching(t, openAndClose, []string{`{"data":{"id":`, `"event":"opened"}`, `"event":"closed"}`}, "watch", "flows", "--json")
}

func TestWatchTrafficPrintsALineForEachTickUntilInterrupted(t *testing.T) {
	tick := func(tr *track.Tracker, _ *api.Events) { tr.Final() }
	watching(t, tick, []string{"TICK", "0 B/s"}, "watch", "traffic")
	watching(t, tick, []string{`{"tick":`, `"total":{"up":0,`}, "watch", "traffic", "--json")
}

func TestWatchUsersPrintsALineForEachEventUntilInterrupted(t *testing.T) {
	happen := func(_ *track.Tracker, e *api.Events) {
		e.Publish("config.applied", "not about users")
		e.Publish("user.near", api.UserEventOf(user.Event{User: 1, Name: "ann", State: "active"}))
		e.Publish("device.demoted", api.UserEventOf(user.Event{User: 1, Name: "ann", State: "active", Device: "10.0.0.7", Why: "idle"}))
	}
	watching(t, happen, []string{"  user.near        ann is active\n", "  device.demoted   ann is active  10.0.0.7 (idle)\n"}, "watch", "users")
	watching(t, happen, []string{`{"data":{"user":{"id":1,"name":"ann"},"state":"active"},"event":"user.near"}`}, "watch", "users", "--json")
}

// hostRoot is a made-up host.
func hostRoot(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

var goodHost = map[string]string{
	"dev/net/tun":      "",
	"proc/self/status": "Name:\tx\nCapEff:\t000001ffffffffff\n",
	"proc/sys/net/ipv6/conf/all/disable_ipv6": "0\n",
	"proc/sys/net/ipv4/ip_forward":            "1\n",
	"proc/sys/net/ipv6/conf/all/forwarding":   "1\n",
	"proc/sys/net/ipv4/conf/all/rp_filter":    "2\n",
	"proc/sys/net/ipv4/ping_group_range":      "0\t2147483647\n",
}

func TestTheDoctorFindsNothingOnAGoodHost(t *testing.T) {
	findings := examine(hostRoot(t, goodHost))
	for _, f := range findings {
		if f.Result != resultOK || f.Fix != "" {
			t.Errorf("%+v", f)
		}
	}
	if err := verdict(findings); err != nil {
		t.Error(err)
	}
}

func TestTheDoctorNamesEachMissingPieceWithItsFix(t *testing.T) {
	for _, c := range []struct{ file, text, result, fix string }{
		{"dev/net/tun", "gone", resultMissing, "modprobe tun"},
		{"proc/self/status", "CapEff:\t0000000000002000\n", resultMissing, "CAP_NET_ADMIN"},
		{"proc/sys/net/ipv6/conf/all/disable_ipv6", "1\n", resultNote, "disable_ipv6=0"},
		{"proc/sys/net/ipv4/ip_forward", "0\n", resultNote, "ip_forward=1"},
		{"proc/sys/net/ipv4/conf/all/rp_filter", "1\n", resultNote, "rp_filter=2"},
		{"proc/sys/net/ipv4/ping_group_range", "1\t0\n", resultNote, "ping_group_range"},
	} {
		files := map[string]string{}
		for name, text := range goodHost {
			files[name] = text
		}
		files[c.file] = c.text
		if c.text == "gone" {
			delete(files, c.file)
		}
		findings := examine(hostRoot(t, files))
		var bad []finding
		for _, f := range findings {
			if f.Result != resultOK {
				bad = append(bad, f)
			}
		}
		if len(bad) != 1 || bad[0].Result != c.result || !strings.Contains(bad[0].Fix, c.fix) {
			t.Errorf("%s: %+v", c.file, bad)
		}
		if got, want := exitcode.Of(verdict(findings)), map[string]int{resultMissing: exitcode.Missing, resultNote: exitcode.OK}[c.result]; got != want {
			t.Errorf("%s: exit code %d: want %d", c.file, got, want)
		}
	}
}

func TestFindingsArePrintedALineEachAndAsJSON(t *testing.T) {
	findings := []finding{{"x", resultOK, "fine", ""}, {"y", resultMissing, "gone", "modprobe y"}}
	var out bytes.Buffer
	a := &app{stdout: &out}
	if err := a.printFindings(findings); err != nil || strings.Count(out.String(), "\n") != 2 || !strings.Contains(out.String(), "gone: modprobe y") {
		t.Errorf("%s, %v", out.String(), err)
	}
	out.Reset()
	a.json = true
	var got map[string][]finding
	if err := a.printFindings(findings); err != nil || json.Unmarshal(out.Bytes(), &got) != nil || len(got["findings"]) != 2 {
		t.Errorf("%s, %v", out.String(), err)
	}
}

func TestTheDoctorKeepsToEightyColumnsAndToEveryWord(t *testing.T) {
	bad := hostRoot(t, map[string]string{"proc/self/status": "CapEff:\t0\n", "proc/sys/net/ipv4/ping_group_range": "1\t0\n", "proc/sys/net/ipv4/conf/all/rp_filter": "1\n"})
	findings := append(examine(bad), finding{"x", resultMissing, strings.Repeat("y", 100), "a fix"})
	var out bytes.Buffer
	if err := (&app{stdout: &out}).printFindings(findings); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 && !strings.Contains(line, "yyyy") {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	words := strings.Join(strings.Fields(out.String()), " ")
	for _, f := range findings {
		if !strings.Contains(words, strings.Join(strings.Fields(f.Fix), " ")) {
			t.Errorf("%q is not in %s", f.Fix, words)
		}
	}
}

func TestADeviceThatIsThereIsToldAndKept(t *testing.T) {
	sys := hostRoot(t, map[string]string{"gw0/tun_flags": "0x5001\n", "eth0/mtu": "1500\n"})
	for name, want := range map[string]string{"gw0": "ip link delete gw0", "eth0": "no TUN device", "gw1": ""} {
		r := inspectDevice(sys, name)
		if (r.Result == "none") != (want == "") || !strings.Contains(r.Note, want) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// longest is the number of columns of the longest line.
func longest(text []byte) (n int) {
	for line := range strings.Lines(string(text)) {
		n = max(n, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")))
	}
	return n
}

func TestTablesOfUsersAndDevicesFitEightyColumns(t *testing.T) {
	left := uint64(999_900_000_000)
	long := strings.Repeat("name", 16)
	u := api.User{UserSpec: api.UserSpec{Name: long, Group: long}, State: "exhausted", Left: api.Left{Total: &left}, ExpiresAt: api.Time(time.Now())}
	u.Usage.Up, u.Usage.Down, u.Usage.Connections = left, left, 12345
	d := api.Device{Device: "mac:3c:22:fb:aa:bb:cc", Host: long, Addresses: []string{"192.168.100.100", "2001:db8:aaaa:bbbb:cccc:dddd:eeee:1"}, User: &api.UserRef{Name: long}, Bound: "host:" + long}
	p := api.UsagePoint{Up: left, Down: left, ChargedUp: left, ChargedDown: left}
	for name, text := range map[string][]byte{
		"users": userTable([]api.User{u}).render(80), "devices": deviceTable([]api.Device{d}).render(80),
		"usage": sumTable(&api.UsageList{By: "user", Series: []api.Series{{Name: long, Points: []api.UsagePoint{p}}}}).render(80),
	} {
		if n := longest(text); n > 80 {
			t.Errorf("%s: %d columns:\n%s", name, n, text)
		}
	}
}

func TestWhatIsLeftIsTheLeastOfTheLimits(t *testing.T) {
	n := func(n uint64) *uint64 { return &n }
	for want, l := range map[string]api.Left{"-": {}, "3 B": {Up: n(9), Down: n(3), Total: n(5)}, "5 B": {Total: n(5)}, "0 B": {Up: n(0), Total: n(5)}} {
		if got := leftText(&l); got != want {
			t.Errorf("%s: want %s", got, want)
		}
	}
}

func TestMyDeviceIsShownWithWhatItHasLeft(t *testing.T) {
	left := uint64(5000)
	m := api.Me{Device: "10.0.0.2", User: &api.UserRef{Name: "ann"}, State: "active", Left: &api.Left{Total: &left}, Usage: &api.MyUsage{Up: 10, Down: 20}}
	const want = "device   10.0.0.2\nuser     ann\nstate    active\nmoved    up 10 B, down 20 B\nleft     5.0 kB\n"
	if got := string(meText(&m)); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if got := string(meText(&api.Me{Device: "10.0.0.2", State: "anonymous"})); got != "device   10.0.0.2\nstate    anonymous\n" {
		t.Errorf("got\n%s", got)
	}
}
