package main

import (
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"gatewayd/internal/api"
)

var update = flag.Bool("update", false, "write the golden files anew")

var noon = time.Date(2026, 3, 4, 12, 0, 0, 0, time.Local)

// office is a gateway with some of everything.
func office() *topData {
	n := func(v uint64) *uint64 { return &v }
	rule := 3
	d := &topData{at: noon, status: api.Status{
		Version: "1.2.3", UptimeS: 7384, Flows: 5, Associations: 2, Memory: api.Memory{RSS: 21_400_000},
		Inbounds:  []api.Inbound{{Tag: "lan", Type: "tun"}},
		Outbounds: []api.Outbound{{Tag: "wan", Type: "direct"}, {Tag: "reject", Type: "reject"}},
	}}
	d.traffic = api.Traffic{
		Tick: 7384, Total: api.Stats{Up: 1.2e9, Down: 45.6e9, UpRate: 123_456, DownRate: 87_654_321, Flows: 5},
		Inbounds: map[string]api.Stats{"lan": {Up: 1.2e9, Down: 45.6e9, UpRate: 123_456, DownRate: 87_654_321, Flows: 5}},
		Outbounds: map[string]api.Stats{
			"wan": {Up: 1.1e9, Down: 45.6e9, UpRate: 123_000, DownRate: 87_654_000, Flows: 4}, "": {Up: 9000, Down: 70_000, UpRate: 456, DownRate: 321, Flows: 1},
		},
	}
	f := func(id uint64, network, source, dest, out, rule string, up, down, upRate, downRate uint64, age time.Duration) {
		d.flows = append(d.flows, topFlow{api.Flow{
			ID: id, Inbound: "lan", Network: network, Source: source, Destination: dest, Outbound: out, RuleName: rule,
			Started: api.Time(noon.Add(-age)), Up: n(up), Down: n(down),
		}, upRate, downRate})
	}
	f(17, "tcp", "10.0.0.2:51234", "203.0.113.5:443", "wan", "", 81_000, 4_560_000_000, 12_300, 81_000_000, 3*time.Minute)
	f(99, "tcp", "192.168.100.200:51234", "198.51.100.200:8443", "wan", "office-hours", 1_100_000_000, 99_999, 110_000, 0, 26*time.Hour)
	f(123456, "udp", "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:1]:51234", "[2001:db8::5]:443", "wan", "", 1234, 6_600_000, 120, 6_600_000, 12*time.Second)
	f(123457, "udp", "10.0.0.3:5353", "203.0.113.53:53", "", "", 64, 128, 64, 128, 0)
	f(123458, "icmp", "10.0.0.3:7", "203.0.113.9:0", "wan", "", 56, 56, 0, 0, 61*time.Minute)
	d.flows[0].Domain = "video.example.org"
	d.flows[2].Rule = &rule
	d.flows[4].User = &api.UserRef{ID: 1, Name: "alice"}
	return d
}

func draw(lines []screenLine) string {
	var b strings.Builder
	for _, l := range lines {
		mark := " "
		if l.reverse {
			mark = ">"
		}
		fmt.Fprintln(&b, strings.TrimRight(mark+l.text, " "))
	}
	return b.String()
}

// state is what top starts with.
func state(change func(*topState)) *topState {
	s := &topState{view: "flows", sort: "rate"}
	if change != nil {
		change(s)
	}
	return s
}

func TestTheScreenIsWhatTheGoldenFilesShow(t *testing.T) {
	nothing := &topData{at: noon}
	troubled := office()
	troubled.err = "cannot reach gatewayd at unix:/run/gatewayd/api.sock"
	many := office()
	for i := range 100 {
		f := many.flows[4]
		f.ID = uint64(200_000 + i)
		many.flows = append(many.flows, f)
	}
	many.more = true
	for name, c := range map[string]struct {
		data          *topData
		state         *topState
		width, height int
		live          bool
	}{
		"80x24":         {office(), state(nil), 80, 24, true},
		"132x30":        {office(), state(nil), 132, 30, true},
		"40x10":         {office(), state(nil), 40, 10, true},
		"20x5":          {office(), state(nil), 20, 5, true},
		"once":          {office(), state(nil), 80, 24, false},
		"by-age":        {office(), state(func(s *topState) { s.sort = "age"; s.cursor = topCursor{"123456", 0, true} }), 80, 12, true},
		"filtered":      {office(), state(func(s *topState) { s.filter = "Alice" }), 80, 10, true},
		"typing":        {office(), state(func(s *topState) { s.typing, s.filter = true, "443" }), 80, 10, true},
		"asking":        {office(), state(func(s *topState) { s.asking = &topKill{id: 17, question: "kill flow 17?"} }), 80, 10, true},
		"paused":        {office(), state(func(s *topState) { s.paused, s.message = true, "killed flow 17" }), 80, 10, true},
		"help":          {office(), state(func(s *topState) { s.help = true }), 80, 16, true},
		"outbounds":     {office(), state(func(s *topState) { s.view = "outbounds" }), 80, 10, true},
		"inbounds":      {office(), state(func(s *topState) { s.view, s.sort = "inbounds", "age" }), 80, 10, true},
		"nothing":       {nothing, state(nil), 80, 10, true},
		"troubled":      {troubled, state(nil), 80, 10, true},
		"many-scrolled": {many, state(func(s *topState) { s.sort, s.first, s.cursor.index = "age", 50, 55 }), 80, 12, true},
	} {
		t.Run(name, func(t *testing.T) {
			got := draw(c.state.render(c.data, c.width, c.height, c.live))
			file := filepath.Join("testdata/top", name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// Whatever there is to show, and whatever is pressed, it fits the terminal.
func TestTheScreenNeverExceedsTheTerminal(t *testing.T) {
	keys := rapid.SampledFrom([]key{
		keyUp, keyDown, keyPageUp, keyPageDown, keyHome, keyEnd, keyEnter, keyTab, keyBackspace, keyEscape, keyUnknown,
		"r", "t", "a", "v", "/", "k", "y", "p", "?", "4", "ä",
	})
	rapid.Check(t, func(rt *rapid.T) {
		d, s := office(), state(nil)
		for range 30 {
			width, height := rapid.IntRange(1, 200).Draw(rt, "width"), rapid.IntRange(1, 60).Draw(rt, "height")
			if rapid.Bool().Draw(rt, "gone") {
				d = &topData{at: noon, flows: d.flows[min(1, len(d.flows)):]}
				s.settle(s.rows(d), topBody(height))
			}
			s.press(keys.Draw(rt, "key"), d, height)
			lines := s.render(d, width, height, rapid.Bool().Draw(rt, "live"))
			if len(lines) > height {
				rt.Fatalf("%d lines of %d", len(lines), height)
			}
			for _, l := range lines {
				if utf8.RuneCountInString(l.text) > width || strings.ContainsFunc(l.text, func(r rune) bool { return r < ' ' }) {
					rt.Fatalf("%d columns: %q", width, l.text)
				}
			}
		}
	})
}

func TestRatesAreWhatCountersGrewByBetweenTwoLooks(t *testing.T) {
	n := func(v uint64) *uint64 { return &v }
	flows := func(up, down uint64) []api.Flow { return []api.Flow{{ID: 1, Up: n(up), Down: n(down)}} }
	before := &topData{at: noon, flows: rated(flows(1000, 5000), noon, nil)}
	if f := before.flows[0]; f.UpRate != 0 || f.DownRate != 0 {
		t.Errorf("rates of one look: %d, %d", f.UpRate, f.DownRate)
	}
	later := noon.Add(2 * time.Second)
	got := rated(append(flows(3000, 5000), api.Flow{ID: 2, Up: n(10), Down: n(math.MaxUint64)}), later, before)
	if got[0].UpRate != 1000 || got[0].DownRate != 0 {
		t.Errorf("rates %d, %d; want 1000, 0", got[0].UpRate, got[0].DownRate)
	}
	if got[1].UpRate != 5 || got[1].DownRate < 1<<62 {
		t.Errorf("rates of a flow that is new: %d, %d", got[1].UpRate, got[1].DownRate)
	}
	if got = rated(flows(9000, 0), noon, before); got[0].UpRate != 0 {
		t.Errorf("rate over no time: %d", got[0].UpRate)
	}
}

func TestShortBytesHaveFourCharactersAtMost(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0", 999: "999", 1000: "1.0k", 9949: "9.9k", 9950: "10k", 999_499: "999k", 999_500: "1.0M", 1e15: "1.0P", math.MaxUint64: "18E",
	} {
		if got := shortBytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
