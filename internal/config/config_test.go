package config

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/flow"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// parsed is text parsed without fault.
func parsed(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("gw.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// compare is what differs between two Configs apart from their texts.
func compare(a, b *Config) string {
	return cmp.Diff(a, b, cmpopts.IgnoreUnexported(Config{}), cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}), cmp.Comparer(func(a, b *time.Location) bool { return a.String() == b.String() }))
}

func TestTheDefaultRuns(t *testing.T) {
	c := Default()
	want := []TUN{{Tag: "lan", Device: "gw0", MTU: Auto, Queues: Auto, Offload: "auto"}}
	if !reflect.DeepEqual(c.TUN, want) || c.Route.Default != "direct" || c.Text() != DefaultText() {
		t.Errorf("default is %+v", c)
	}
	if diff := compare(c, parsed(t, "version: 1\ntun: {tag: lan, device: gw0}\n")); diff != "" {
		t.Errorf("the embedded default sets more than its device:\n%s", diff)
	}
}

func TestWhatIsNotWrittenHasItsDefault(t *testing.T) {
	want := &Config{
		Log:      Log{Format: "text"},
		StateDir: "/var/lib/gatewayd", Profile: "auto", Privacy: "full",
		Limits: Limits{Auto, SourceLimits{2048, 256, 512}},
		Timeouts: Timeouts{
			Dial: 10 * time.Second, Grace: 5 * time.Second,
			TCP: TCPTimeouts{Keepalive{2 * time.Minute, 20 * time.Second, 4}, 5 * time.Minute, 124 * time.Minute},
			UDP: UDPTimeouts{time.Minute, 5 * time.Minute, map[uint16]time.Duration{
				53: 10 * time.Second, 123: 10 * time.Second, 3478: 10 * time.Second, 443: 30 * time.Second,
			}},
		},
		Sample: time.Second, Sweep: time.Second,
		API:       API{Listen: []Listener{{"unix", "/run/gatewayd/api.sock"}}},
		Outbounds: []Outbound{{Tag: "direct", Type: "direct", Family: "auto", Filtering: "endpoint-independent", Drain: DrainKeep}},
		Route:     Route{Default: "direct"},
		Ledger:    Ledger{0, 14 * 24 * time.Hour, 400 * 24 * time.Hour},
	}
	if diff := compare(want, parsed(t, "version: 1\n")); diff != "" {
		t.Error(diff)
	}
}

func reference(t *testing.T) *Config {
	t.Helper()
	l := newLoader(&source{name: "reference.yaml", text: []byte(referenceText)}, memory(nil))
	c := l.load()
	if err := l.report.err(); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTheReferenceParses(t *testing.T) {
	c := reference(t)
	lte := Outbound{
		Tag: "lte", Type: "direct", Interface: "wwan0", Source4: netip.MustParseAddr("192.0.2.2"),
		Source6: netip.MustParseAddr("2001:db8::2"), Mark: 0x100, Family: "auto", Filtering: "endpoint-independent", Drain: DrainKeep,
	}
	if len(c.Outbounds) != 2 || c.Outbounds[1] != lte {
		t.Errorf("outbounds %+v", c.Outbounds)
	}
	calls := Match{Any: []Match{
		{Network: []flow.Network{flow.UDP}, Port: []PortRange{{3478, 3478}}},
		{All: []Match{{Network: []flow.Network{flow.UDP}}, {Not: &Match{Port: []PortRange{{53, 53}, {443, 443}}}}}},
	}}
	if rule := c.Route.Rules[1]; !reflect.DeepEqual(rule.Match, calls) || !rule.Pin || rule.Name != "calls" {
		t.Errorf("rule %+v", rule)
	}
	if rule := c.Route.Rules[2]; rule.Outbound != "" || !rule.Record {
		t.Errorf("rule %+v", rule)
	}
	if got := c.TUN[0].Address; len(got) != 2 || got[0] != netip.MustParsePrefix("10.64.0.1/24") {
		t.Errorf("addresses %v", got)
	}
}

// The reference promises that its scalars are defaults unless it says otherwise.
func TestTheReferenceShowsTheDefaults(t *testing.T) {
	got, want := reference(t), parsed(t, "version: 1\n")
	if log := (FlowLog{"/var/log/gatewayd/flows.jsonl", 64 << 20, 14}); got.FlowLog != log || parsed(t, "version: 1\nevents: {flow_log: {file: "+log.File+"}}\n").FlowLog != log {
		t.Errorf("flow log %+v", got.FlowLog)
	}
	want.API, want.TUN, want.Outbounds, want.Route, want.FlowLog = got.API, got.TUN, got.Outbounds, got.Route, got.FlowLog
	want.Groups, want.Users, want.Webhooks = got.Groups, got.Users, got.Webhooks
	if want.Ledger.Commit = 30 * time.Second; parsed(t, "version: 1\nledger: {commit: 30s}\n").Ledger.Commit != want.Ledger.Commit {
		t.Error("a commit interval that is written is not known from none")
	}
	if diff := compare(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTheReferenceHasEveryKeyThatIsAvailable(t *testing.T) {
	l := newLoader(&source{name: "reference.yaml", text: []byte(referenceText)}, memory(nil))
	l.load()
	written := make(map[string]bool) // paths without indices
	for path := range l.spots {
		written[oneOfLimits(withoutIndices(path))] = true
	}
	written["route.rules.all"] = written["route.rules.any.all"]
	written["route.rules.not"] = written["route.rules.any.all.not"]
	eachKey("", reflect.TypeFor[rawFile](), func(path string, f field) {
		if !written[oneOfLimits(path)] {
			t.Errorf("%s is not in the reference", path)
		}
	})
}

// oneOfLimits is path with a group's limits as a user's, which have the same keys.
func oneOfLimits(path string) string {
	if inner, ok := strings.CutPrefix(path, "groups.limits."); ok {
		return "users.limits." + inner
	}
	return path
}

func withoutIndices(path string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(path, "[") {
		_, rest, found := strings.Cut(part, "]")
		if !found {
			rest = part
		}
		b.WriteString(rest)
	}
	return b.String()
}

// eachKey calls f for every key that is available, but for those inside not, any and all.
func eachKey(path string, t reflect.Type, f func(path string, key field)) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if _, scalar := codecOf(t); scalar || t.Kind() != reflect.Struct || t == reflect.TypeFor[rawMatch]() {
		return
	}
	for _, key := range fieldsOf(t) {
		if key.soon || key.types != nil && !slices.Contains(key.types, "direct") {
			continue
		}
		at := join(path, key.key)
		f(at, key)
		eachKey(at, key.typ, f)
	}
}

func TestWhatALaterVersionBringsIsRefusedByName(t *testing.T) {
	text, err := os.ReadFile("testdata/later.yaml")
	if err != nil {
		t.Fatal(err)
	}
	l := newLoader(&source{name: "later.yaml", text: text}, memory(nil))
	l.load()
	refused := make(map[string]int) // path to line
	for _, p := range l.report.problems {
		if !strings.HasSuffix(p.Text, "not yet available") {
			t.Errorf("unexpected: %s", p)
		}
		refused[p.Path] = p.Line
	}
	marked := 0
	lines := bufio.NewScanner(strings.NewReader(string(text)))
	for line := 1; lines.Scan(); line++ {
		if _, path, ok := strings.Cut(lines.Text(), "# later "); ok {
			marked++
			if refused[path] != line {
				t.Errorf("line %d: %s is not refused there", line, path)
			}
		}
	}
	if marked != len(refused) || marked < 15 {
		t.Errorf("%d keys are marked, %d are refused", marked, len(refused))
	}
	everySoonKey(t, l)
}

// everySoonKey checks that no key is left out of what was read.
func everySoonKey(t *testing.T, l *loader) {
	t.Helper()
	written := make(map[string]bool)
	for path := range l.spots {
		written[path[strings.LastIndex(path, ".")+1:]] = true
	}
	for _, s := range []reflect.Type{reflect.TypeFor[rawFile](), reflect.TypeFor[rawTUN](), reflect.TypeFor[rawOutbound](), reflect.TypeFor[rawRoute](), reflect.TypeFor[rawMatch]()} {
		for _, f := range fieldsOf(s) {
			if f.soon && !written[f.key] {
				t.Errorf("%s is not in testdata/later.yaml", f.key)
			}
		}
	}
}

func TestWhatALaterVersionBringsIsTypeChecked(t *testing.T) {
	for text, want := range map[string]string{
		"wireguard: {tag: a, listen: 70000}":     "wireguard.listen: port \"70000\"",
		"sets: [{tag: a, max: 3, x: 1}]":         "sets[0].x: unknown key",
		"sets: {tag: a, max: -3MB}":              "must not be negative",
		"dns: {servers: [{tag: a}]}":             "dns.servers[0].address: missing",
		"dns: {fake_ip: {v4: 198.18.0.1/16}}":    "write 198.18.0.0/16",
		"route: {rules: {time: {days: monday}}}": "want mon, tue, wed, thu, fri, sat or sun",
	} {
		_, err := Parse("gw.yaml", []byte("version: 1\n"+text))
		p := problems(t, err)
		if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "not yet available") {
			t.Errorf("%s: %d problems:\n%v\nwant %s", text, len(p.List), err, want)
		}
	}
}

func TestAScalarIsAcceptedWhereAListIs(t *testing.T) {
	one := parsed(t, "version: 1\ntun: {tag: lan, device: gw0}\nroute: {rules: {network: tcp, port: 80, outbound: drop}}\n")
	list := parsed(t, "version: 1\ntun: [{tag: lan, device: gw0}]\nroute: {rules: [{network: [tcp], port: [\"80\"], outbound: drop}]}\n")
	if diff := compare(one, list); diff != "" {
		t.Error(diff)
	}
}

func TestJSONIsYAML(t *testing.T) {
	block := parsed(t, "version: 1\r\nsample: 2s\r\nroute:\r\n  rules:\r\n    - ip: [10.0.0.0/8]\r\n      pin: true\r\n      outbound: drop\r\n")
	json := parsed(t, "{\"version\":1,\"sample\":\"2s\",\n\t\"route\":{\"rules\":[{\"ip\":[\"10.0.0.0/8\"],\"pin\":true,\"outbound\":\"drop\"}]}}")
	if diff := compare(block, json); diff != "" {
		t.Error(diff)
	}
}

func TestAByteOrderMarkIsSkipped(t *testing.T) {
	parsed(t, "\ufeffversion: 1\n")
	_, err := Parse("gw.yaml", []byte("\ufeffversion: 2\n"))
	if p := problems(t, err); p.List[0].Column != 10 {
		t.Errorf("the mark counts as a column: %v", err)
	}
	_, err = Parse("gw.yaml", []byte("\xff\xfev\x00"))
	if problems(t, err); !strings.Contains(err.Error(), "UTF-16") {
		t.Error(err)
	}
}

func TestDirectMayBeRedefined(t *testing.T) {
	c := parsed(t, "version: 1\noutbounds: {tag: direct, type: direct, mark: 256, drain: 10m}\n")
	if len(c.Outbounds) != 1 || c.Outbounds[0].Mark != 256 || c.Outbounds[0].Drain != Drain(10*time.Minute) {
		t.Errorf("outbounds %+v", c.Outbounds)
	}
}

func TestPortsOfUDPTimeoutsAreAddedToTheDefaults(t *testing.T) {
	ports := parsed(t, "version: 1\ntimeouts: {udp: {ports: {53: 3s, 5060: 10m}}}\n").Timeouts.UDP.Ports
	if ports[53] != 3*time.Second || ports[5060] != 10*time.Minute || ports[443] != 30*time.Second || len(ports) != 5 {
		t.Errorf("ports %v", ports)
	}
}

func TestAListThatIsWrittenReplacesTheDefault(t *testing.T) {
	if c := parsed(t, "version: 1\napi: {listen: []}\n"); len(c.API.Listen) != 0 {
		t.Errorf("listeners %v", c.API.Listen)
	}
}

func TestAnAnchorMayBeRepeated(t *testing.T) {
	c := parsed(t, "version: 1\nroute:\n  rules:\n    - {ip: &lans [10.0.0.0/8, \"fd00::/8\"], outbound: drop}\n    - {source: *lans, outbound: reject}\n")
	if !slices.Equal(c.Route.Rules[0].Match.IP, c.Route.Rules[1].Match.Source) {
		t.Errorf("rules %+v", c.Route.Rules)
	}
}

func TestOnlyTwentyProblemsAreListed(t *testing.T) {
	_, err := Parse("gw.yaml", []byte("version: 1\nroute:\n  rules:\n"+strings.Repeat("    - {port: 0, outbound: direct}\n", 33)))
	p := problems(t, err)
	if len(p.List) != 20 || p.More != 13 || !strings.HasSuffix(err.Error(), "\nand 13 more problems") {
		t.Errorf("%d listed, %d more:\n%v", len(p.List), p.More, err)
	}
	if !slices.IsSortedFunc(p.List, func(a, b Problem) int { return a.Line - b.Line }) {
		t.Errorf("not in order:\n%v", err)
	}
}

func TestAFileThatCanNotBeReadIsNamed(t *testing.T) {
	for path, want := range map[string]string{
		filepath.Join(t.TempDir(), "none.yaml"): "no such file or directory",
		t.TempDir():                             "is a directory",
	} {
		_, err := Load(path)
		problems(t, err)
		if got := err.Error(); got != path+": can not be read: "+want {
			t.Errorf("got %s, want … %s", got, want)
		}
	}
}

func TestTheTagOfAConfigIsThatOfItsTexts(t *testing.T) {
	a, b := parsed(t, "version: 1\n"), parsed(t, "version: 1\n\n")
	if a.ETag() == b.ETag() || a.ETag() != parsed(t, "version: 1\n").ETag() || !strings.HasPrefix(a.ETag(), `"`) {
		t.Errorf("tags %s and %s", a.ETag(), b.ETag())
	}
	text := []byte("version: 1\n")
	c, _ := Parse("gw.yaml", text)
	text[0] = 'x'
	if c.Text() != "version: 1\n" {
		t.Error("the text is not its own")
	}
}

func TestEveryDefaultOfTheSchemaParses(t *testing.T) {
	for _, s := range rawStructs() {
		v := reflect.New(s).Elem()
		newDecoder(&report{}).defaults(v) // it panics if one does not
	}
}

// rawStructs are all structs of the schema.
func rawStructs() []reflect.Type {
	var all []reflect.Type
	var walk func(t reflect.Type)
	walk = func(t reflect.Type) {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if _, scalar := codecOf(t); scalar || t.Kind() != reflect.Struct || slices.Contains(all, t) {
			return
		}
		all = append(all, t)
		for _, f := range fieldsOf(t) {
			walk(f.typ)
		}
	}
	walk(reflect.TypeFor[rawFile]())
	return all
}

func TestEveryKeyOfTheSchemaIsDocumented(t *testing.T) {
	for _, s := range rawStructs() {
		for _, f := range fieldsOf(s) {
			if f.key == "" || f.doc == "" {
				t.Errorf("%s.%s has no description", s, fmt.Sprint(f.index))
			}
		}
	}
}
