package config

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

const textSize = maxText / 4 // bytes; what grows with its square is seen here already

// Whatever the text, reading it takes a bounded time; these were chosen to be slow.
func TestHostileTextsAreRefusedSoon(t *testing.T) {
	var bomb strings.Builder
	bomb.WriteString("version: 1\nroute:\n  rules:\n    - any: &a0 [{port: 1}]\n")
	for i := range 12 {
		fmt.Fprintf(&bomb, "    - any: &a%d [%s]\n", i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("{any: *a%d}, ", i), 9), ", "))
	}
	repeat := func(s string) string { return strings.Repeat(s, textSize/len(s)) }
	for name, test := range map[string]struct{ text, want string }{
		"1 MiB and a byte":       {"#" + strings.Repeat("x", maxText), "larger than 1 MiB"},
		"aliases of aliases":     {bomb.String(), "more than 262144 values"},
		"brackets":               {repeat("["), "too deeply nested"},
		"maps in maps":           {repeat("{a: "), "too deeply nested"},
		"dashes":                 {repeat("- "), "too deeply nested"},
		"colons":                 {repeat("a: "), "too deeply nested"},
		"keys in a flow":         {"{" + repeat("a: "), "not YAML"},
		"anchors":                {repeat("&a "), "too deeply nested"},
		"anchors on lines":       {repeat("&a\n"), "too many anchors"},
		"dashes on lines":        {"version: 1\nroute:\n rules:\n" + stairs(" -\n"), ""},
		"keys on lines":          {stairs("a:\n"), ""},
		"tags":                   {repeat("!a "), "YAML tags"},
		"complex keys":           {repeat("? "), "complex keys"},
		"unknown keys":           {"{" + strings.ReplaceAll(repeatNumbered("k%d: 1\n"), "\n", ",") + "}", "unknown key"},
		"unknown references":     {"version: 1\nroute:\n rules:\n" + repeatNumbered(" - outbound: o%d\n"), "no outbound"},
		"outbounds":              {"version: 1\noutbounds:\n" + repeatNumbered(" - {tag: o%d, type: http}\n"), notYet},
		"a chain of outbounds":   {"version: 1\noutbounds:\n" + repeatNumbered(" - {tag: o%d, type: http, via: o%[2]d}\n"), notYet},
		"devices":                {"version: 1\ntun:\n" + repeatNumbered(" - {tag: t%d, device: d%[1]d, address: 10.0.0.1/8}\n"), "64 is the most"},
		"a long list":            {"version: 1\nroute: {rules: {outbound: drop, port: [" + strings.Repeat("1,", maxNodes) + "1]}}", "more than 262144 values"},
		"empty lines":            {repeat("\n"), "version"},
		"a long scalar":          {"version: " + repeat("x"), "version"},
		"a quoted scalar":        {"version: \"" + repeat("x\n") + "\"", "version"},
		"an odd key":             {"\"" + repeat("\\n") + "\": 1", "unknown key"},
		"duplicates":             {repeat("a: 1\n"), "too many keys"},
		"conditions too deep":    {"version: 1\nroute: {rules: {outbound: drop, " + strings.Repeat("not: {", 20) + "port: 1" + strings.Repeat("}", 20) + "}}", "more than 16 deep"},
		"not quite so deep ones": {"version: 1\nroute: {rules: {outbound: drop, " + strings.Repeat("not: {", 16) + "port: 1" + strings.Repeat("}", 16) + "}}", ""},
	} {
		start := time.Now()
		_, err := parseMemory(test.text, nil)
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("%s took %s", name, took)
		} else if testing.Verbose() {
			t.Logf("%s took %s", name, took.Round(time.Millisecond))
		}
		switch {
		case test.want == "" && name == "not quite so deep ones" && err != nil:
			t.Errorf("%s: %v", name, err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: got %.300v, want %s", name, err, test.want)
		case err != nil && len(err.Error()) > 100_000:
			t.Errorf("%s: the error is %d bytes long", name, len(err.Error()))
		}
	}
}

// stairs is lines that are indented ever more.
func stairs(line string) string {
	var b strings.Builder
	for i := 0; b.Len() < textSize; i++ {
		b.WriteString(strings.Repeat(" ", i+1) + line)
	}
	return b.String()
}

func repeatNumbered(format string) string {
	var b strings.Builder
	for i := 0; b.Len() < textSize; i++ {
		line := fmt.Sprintf(format, i, i+1)
		line, _, _ = strings.Cut(line, "%!")
		b.WriteString(strings.TrimSuffix(line, "\n") + "\n")
	}
	return b.String()
}
