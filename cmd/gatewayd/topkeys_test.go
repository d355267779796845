package main

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestKeysAreReadFromWhatTerminalsSend(t *testing.T) {
	for sent, want := range map[string][]key{
		"q":                {"q"},
		"ä/":               {"ä", "/"},
		"\x1b[A\x1bOB":     {keyUp, keyDown},
		"\x1b[5~\x1b[6~":   {keyPageUp, keyPageDown},
		"\x1b[H\x1b[4~":    {keyHome, keyEnd},
		"\x1b[7~\x1bOF":    {keyHome, keyEnd},
		"\r\n\t\x7f\b\x03": {keyEnter, keyEnter, keyTab, keyBackspace, keyBackspace, keyInterrupt},
		"\x1b\x1b[A":       {keyEscape, keyUp},
		"\x1b[1;5Aq":       {keyUnknown, "q"},
		"\x1bxq":           {keyUnknown, "q"},
		"\x00\xffq":        {keyUnknown, keyUnknown, "q"},
	} {
		var d keyDecoder
		if got := d.feed([]byte(sent)); !slices.Equal(got, want) || d.pending() {
			t.Errorf("%q: %q, want %q; %q is held", sent, got, want, d.held)
		}
	}
	for held, want := range map[string]key{"\x1b": keyEscape, "\x1b[": keyUnknown, "\x1b[1": keyUnknown, "\xc3": keyUnknown} {
		var d keyDecoder
		if got := d.feed([]byte(held)); got != nil || !d.pending() {
			t.Errorf("%q: %q at once", held, got)
		}
		if got := d.flush(); len(got) != 1 || got[0] != want || d.pending() {
			t.Errorf("%q: %q once nothing follows, want %q", held, got, want)
		}
	}
}

// However a line cuts it up, the keys are the same; nothing is held for ever.
func TestSequencesMayComeInPieces(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		sent := []byte(strings.Join(rapid.SliceOf(rapid.SampledFrom([]string{
			"q", "ä", "\x1b[A", "\x1bOB", "\x1b[5~", "\r", "\x1b[1;5A", "\x1b[" + strings.Repeat("1", 40), "\xff",
		})).Draw(rt, "sent"), ""))
		var whole, pieces keyDecoder
		want := whole.feed(sent)
		var got []key
		for rest := sent; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(rt, "piece")
			got = append(got, pieces.feed(rest[:n])...)
			rest = rest[n:]
		}
		if !slices.Equal(got, want) || len(pieces.held) > maxEscape || string(pieces.held) != string(whole.held) {
			rt.Fatalf("%q: %q in pieces, %q at once; held %q and %q", sent, got, want, pieces.held, whole.held)
		}
	})
}

// press presses keys one after the other on a terminal of 24 lines.
func press(s *topState, d *topData, keys ...key) (a topAction) {
	for _, k := range keys {
		a = s.press(k, d, 24)
	}
	return a
}

func TestAKillIsAskedForAndOnlyYesKills(t *testing.T) {
	for answer, killed := range map[key]bool{"y": true, "Y": true, "n": false, keyEnter: false, keyEscape: false, "k": false, "q": false} {
		s, d := state(nil), office()
		if a := press(s, d, keyDown, "k"); a != (topAction{}) || s.asking == nil {
			t.Fatalf("k alone did %+v", a)
		}
		if q := s.footer(d); !strings.Contains(q, "kill flow 123456, udp to [2001:db8::5]:443?") {
			t.Errorf("asked %q", q)
		}
		a := press(s, d, answer)
		if (a.kill != nil) != killed || s.asking != nil || a.quit {
			t.Errorf("%s: %+v", answer, a)
		}
		if killed && a.kill.id != 123456 {
			t.Errorf("kills %+v", a.kill)
		}
	}
	s, d := state(nil), office()
	if a := press(s, d, "v", "v", keyDown, "k", "y"); a.kill == nil || a.kill.id != 0 || a.kill.key != "outbound" || a.kill.tag != "" {
		t.Errorf("of the DNS service: %+v", a.kill)
	}
	if press(state(nil), &topData{}, "k"); state(nil).asking != nil {
		t.Error("asks to kill nothing")
	}
}

func TestTheQuestionIsAboutTheRowThatWasChosenWhateverMovesMeanwhile(t *testing.T) {
	s, d := state(nil), office()
	press(s, d, keyDown, keyDown) // flow 99
	d.flows[1].UpRate = 1 << 40   // becomes the first row
	s.settle(s.rows(d), 19)
	a := press(s, d, "k", "y")
	if a.kill == nil || a.kill.id != 99 {
		t.Errorf("kills %+v", a.kill)
	}
	s, d = state(nil), office()
	press(s, d, "k") // flow 17, which nobody chose before
	d.flows[1].UpRate = 1 << 40
	rows := s.rows(d)
	if _, i := s.window(rows, 19); rows[i].name != "17" {
		t.Errorf("asked of flow 17, and flow %s is marked", rows[i].name)
	}
}

func TestUntouchedTheCursorStaysAtTheTop(t *testing.T) {
	s, d := state(nil), office()
	s.settle(s.rows(d), 19)
	d.flows[1].UpRate = 1 << 40
	s.settle(s.rows(d), 19)
	if _, i := s.window(s.rows(d), 19); i != 0 {
		t.Errorf("the cursor went to row %d with what was first", i)
	}
}

func TestAFilterIsTypedKeptAndDropped(t *testing.T) {
	s, d := state(nil), office()
	press(s, d, "/", "4", "4", "q", keyBackspace, "3")
	if s.filter != "443" || !s.typing || len(s.rows(d)) != 3 {
		t.Errorf("filter %q shows %d rows", s.filter, len(s.rows(d)))
	}
	press(s, d, keyEnter)
	if a := press(s, d, "q"); !a.quit || s.typing {
		t.Errorf("after Enter q did %+v", a)
	}
	if press(s, d, keyEscape); s.filter != "" {
		t.Errorf("after Escape the filter is %q", s.filter)
	}
	press(s, d, "/")
	for range 200 {
		press(s, d, "x")
	}
	if len(s.filter) != maxFilter {
		t.Errorf("%d characters are taken", len(s.filter))
	}
	if press(s, d, keyEscape); s.filter != "" || s.typing {
		t.Error("Escape keeps what was typed")
	}
}

func TestEachKeyDoesWhatTheHelpSays(t *testing.T) {
	s, d := state(nil), office()
	for _, c := range []struct {
		keys  []key
		holds func() bool
	}{
		{[]key{"t"}, func() bool { return s.sort == "total" && s.rows(d)[0].name == "17" }},
		{[]key{"a"}, func() bool { return s.sort == "age" && s.rows(d)[4].name == "123458" }},
		{[]key{"r"}, func() bool { return s.sort == "rate" && s.rows(d)[1].name == "123456" }},
		{[]key{"v"}, func() bool { return s.view == "inbounds" }},
		{[]key{keyTab}, func() bool { return s.view == "outbounds" && s.rows(d)[0].name == "wan" }},
		{[]key{"v"}, func() bool { return s.view == "flows" }},
		{[]key{"p"}, func() bool { return s.paused }},
		{[]key{"p"}, func() bool { return !s.paused }},
		{[]key{"?"}, func() bool { return s.help }},
		{[]key{"x"}, func() bool { return !s.help }},
		{[]key{keyEnd}, func() bool { return s.cursor.index == 4 }},
		{[]key{keyDown}, func() bool { return s.cursor.index == 4 }},
		{[]key{keyUp, keyUp}, func() bool { return s.cursor.index == 2 }},
		{[]key{keyHome, keyUp}, func() bool { return s.cursor.index == 0 }},
		{[]key{keyPageDown}, func() bool { return s.cursor.index == 4 }},
		{[]key{keyPageUp}, func() bool { return s.cursor.index == 0 }},
	} {
		if press(s, d, c.keys...); !c.holds() {
			t.Errorf("%q: %+v", c.keys, s)
		}
	}
	for _, k := range []key{"q", keyInterrupt} {
		if a := press(state(nil), d, k); !a.quit {
			t.Errorf("%s does not quit", k)
		}
	}
	if a := press(state(func(s *topState) { s.typing = true }), d, keyInterrupt); !a.quit {
		t.Error("Ctrl-C does not quit while a filter is typed")
	}
}
