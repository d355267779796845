package config

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// FuzzParse looks for text that panics, takes long, is placed outside of itself,
// or is accepted while the schema or a second reading refuses it.
func FuzzParse(f *testing.F) {
	for _, bad := range badFiles {
		f.Add([]byte(bad.text), []byte("log: {level: warn}\n"))
	}
	f.Add([]byte(defaultText), []byte{})
	f.Add([]byte(referenceText), []byte("outbounds: {tag: a, type: direct}\n"))
	f.Add([]byte("version: 1\ninclude: conf.d/a.yaml\ngroups: {name: g}\nusers: {name: a, group: g, limits: {multiplier: 0.5}}\n"),
		[]byte("users: [{name: b, group: g, devices: \"mac:3C-22-FB-AA-BB-CC\", limits: {when_exhausted: block, traffic: {reset: {every: week, zone: Asia/Tokyo}}}}]\n"))
	schema := newChecker(f)
	f.Fuzz(func(t *testing.T, main, included []byte) {
		texts := map[string]string{"/etc/conf.d/a.yaml": string(included)}
		start := time.Now()
		l := newLoader(&source{name: "/etc/gw.yaml", text: main}, memory(texts))
		c := l.load()
		placed(t, l)
		err := l.report.err()
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("took %s", took)
		}
		if err != nil {
			inside(t, err, main, included)
			return
		}
		again, err := parse("/etc/gw.yaml", []byte(c.Text()), memory(texts))
		if err != nil {
			t.Fatalf("a second reading: %v", err)
		}
		if diff := compare(c, again); diff != "" || c.ETag() != again.ETag() {
			t.Errorf("a second reading differs:\n%s", diff)
		}
		if complaint := schema.check(schema.root, "", tree(t, c.Text())); complaint != "" {
			t.Errorf("the schema refuses it: %s", complaint)
		}
	})
}

// placed checks that the keys of the main file are where the decoder says.
func placed(t *testing.T, l *loader) {
	t.Helper()
	lines := bytes.Split(bytes.TrimPrefix(l.main.text, []byte("\ufeff")), []byte("\n"))
	for path, s := range l.spots {
		name := path[strings.LastIndex(path, ".")+1:]
		if s.key.file != l.main || strings.HasSuffix(name, "]") || bytes.ContainsRune(l.main.text, '\r') {
			continue
		}
		line := []rune(string(lines[s.key.line-1]))
		if rest := string(line[s.key.column-1:]); !strings.HasPrefix(rest, name) && !strings.HasPrefix(rest, `"`) && !strings.HasPrefix(rest, "'") {
			t.Errorf("%s is not at %s, where there is %q", path, s.key, rest)
		}
	}
}

// inside checks that problems are placed within their file.
func inside(t *testing.T, err error, main, included []byte) {
	t.Helper()
	for _, p := range problems(t, err).List {
		file := main
		if p.File != "/etc/gw.yaml" {
			file = included
		}
		lines := bytes.Count(file, []byte("\n")) + bytes.Count(file, []byte("\r")) + 1
		if p.Line > lines || p.Column > utf8.RuneCount(file)+2 || p.Text == "" || p.Line < 0 || !utf8.ValidString(p.String()) ||
			len(p.String()) > 8192 || strings.Contains(p.String(), "\n") {
			t.Errorf("%q: of a file of %d lines", p, lines)
		}
	}
}
