package config

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// checker validates against the part of JSON Schema that Schema writes.
type checker struct {
	root map[string]any
}

func newChecker(t testing.TB) *checker {
	t.Helper()
	b, err := Schema()
	if err != nil {
		t.Fatal(err)
	}
	c := &checker{}
	if err := json.Unmarshal(b, &c.root); err != nil {
		t.Fatal(err)
	}
	return c
}

// check says what is wrong with n, "" for nothing. It panics at a keyword that it does not know.
func (c *checker) check(schema map[string]any, path string, n *node) string {
	for word, arg := range schema {
		if complaint := c.keyword(word, arg, schema, path, n); complaint != "" {
			return complaint
		}
	}
	return ""
}

func (c *checker) keyword(word string, arg any, schema map[string]any, path string, n *node) string {
	value, isNumber := 0.0, n.kind == number
	if isNumber {
		parsed, err := strconv.ParseInt(n.text, 0, 64)
		if value = float64(parsed); err != nil {
			value, _ = strconv.ParseFloat(n.text, 64)
		}
	}
	bad := func(b bool) string {
		if b {
			return fmt.Sprintf("%s: %q is against %s %v", path, n.text, word, arg)
		}
		return ""
	}
	switch word {
	case "$schema", "$defs", "title", "description", "default":
	case "$ref":
		name := strings.TrimPrefix(arg.(string), "#/$defs/")
		return c.check(c.root["$defs"].(map[string]any)[name].(map[string]any), path, n)
	case "type":
		return bad(!slices.ContainsFunc(asList(arg), func(t any) bool { return hasType(n, t.(string)) }))
	case "enum":
		return bad(n.kind != text || !slices.Contains(asList(arg), any(n.text)))
	case "const":
		return bad(!isNumber || value != arg.(float64))
	case "minimum":
		return bad(isNumber && value < arg.(float64))
	case "maximum":
		return bad(isNumber && value > arg.(float64))
	case "minLength":
		return bad(n.kind == text && utf8.RuneCountInString(n.text) < int(arg.(float64)))
	case "maxLength":
		return bad(n.kind == text && utf8.RuneCountInString(n.text) > int(arg.(float64)))
	case "pattern":
		return bad(n.kind == text && !regexp.MustCompile(arg.(string)).MatchString(n.text))
	case "anyOf":
		return bad(!slices.ContainsFunc(asList(arg), func(s any) bool { return c.check(s.(map[string]any), path, n) == "" }))
	case "items":
		for i, each := range n.list {
			if complaint := c.check(arg.(map[string]any), element(path, i), each); complaint != "" {
				return complaint
			}
		}
	case "required":
		return bad(slices.ContainsFunc(asList(arg), func(name any) bool {
			return !slices.ContainsFunc(n.keys, func(k key) bool { return k.name == name })
		}))
	case "properties", "additionalProperties", "propertyNames":
		return c.keys(word, arg, schema, path, n)
	default:
		panic("keyword " + word)
	}
	return ""
}

func (c *checker) keys(word string, arg any, schema map[string]any, path string, n *node) string {
	properties, _ := schema["properties"].(map[string]any)
	for _, k := range n.keys {
		known, isKnown := properties[k.name].(map[string]any)
		complaint := ""
		switch extra, isSchema := arg.(map[string]any); {
		case word == "properties" && isKnown:
			complaint = c.check(known, join(path, k.name), k.value)
		case word == "propertyNames":
			complaint = c.check(extra, join(path, k.name), &node{text: k.name})
		case word == "additionalProperties" && !isKnown && isSchema:
			complaint = c.check(extra, join(path, k.name), k.value)
		case word == "additionalProperties" && !isKnown && arg == false:
			complaint = join(path, k.name) + " is not a key"
		}
		if complaint != "" {
			return complaint
		}
	}
	return ""
}

func asList(v any) []any {
	if l, ok := v.([]any); ok {
		return l
	}
	return []any{v}
}

func hasType(n *node, name string) bool {
	switch name {
	case "integer":
		_, err := strconv.ParseInt(n.text, 0, 64)
		return n.kind == number && err == nil
	case "number":
		return n.kind == number
	}
	return name == map[kind]string{text: "string", boolean: "boolean", list: "array", mapping: "object"}[n.kind]
}

// tree is text's, without fault.
func tree(t testing.TB, text string) *node {
	t.Helper()
	r := &report{}
	n := treeOf(&source{name: "gw.yaml", text: []byte(text)}, r)
	if err := r.err(); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestTheSchemaAcceptsWhatIsAccepted(t *testing.T) {
	c := newChecker(t)
	later, err := os.ReadFile("testdata/later.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"default": defaultText, "reference": referenceText, "later": string(later)} {
		if complaint := c.check(c.root, "", tree(t, text)); complaint != "" {
			t.Errorf("%s: %s", name, complaint)
		}
	}
}

// What only the parser can see, such as references, is about half of the bad files.
func TestTheSchemaRefusesWhatItCanSee(t *testing.T) {
	c := newChecker(t)
	seen := 0
	for _, bad := range badFiles {
		n := treeOf(&source{name: "gw.yaml", text: []byte(bad.text)}, &report{})
		if n != nil && c.check(c.root, "", n) != "" {
			seen++
		}
	}
	if seen < 45 {
		t.Errorf("the schema sees %d of %d bad files", seen, len(badFiles))
	}
	for _, text := range []string{
		"logs: {}", "privacy: secret", "sample: 10", "tun: [{tag: lan}]", "route: {rules: [{port: 70000}]}", "tun: {tag: a, device: b, mtu: 1}",
		"timeouts: {udp: {ports: {dns: 1s}}}", "route: {rules: {not: {not: {prot: tcp}}}}",
	} {
		if c.check(c.root, "", tree(t, text)) == "" {
			t.Errorf("%s is accepted", text)
		}
	}
}

func TestTheSchemaDescribesEveryKey(t *testing.T) {
	c := newChecker(t)
	for name, def := range c.root["$defs"].(map[string]any) {
		for key, property := range def.(map[string]any)["properties"].(map[string]any) {
			if property.(map[string]any)["description"] == "" {
				t.Errorf("%s.%s has no description", name, key)
			}
		}
	}
	wireguard := c.root["properties"].(map[string]any)["wireguard"].(map[string]any)
	if !strings.HasPrefix(wireguard["description"].(string), "Not yet available.") {
		t.Errorf("wireguard is described as %v", wireguard["description"])
	}
	if got := len(c.root["$defs"].(map[string]any)) + 1; got != len(rawStructs()) {
		t.Errorf("%d definitions for %d structs", got, len(rawStructs()))
	}
}
