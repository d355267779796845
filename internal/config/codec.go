package config

import (
	"encoding"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"gatewayd/flow"
)

// Auto stands for a number that the gateway chooses by itself.
const Auto = -1

// codec is how a scalar type is written.
type codec struct {
	want   string // what to write, for errors: "want a number"
	kinds  []kind // what YAML may take it for
	parse  func(s string, v reflect.Value) error
	schema map[string]any
}

// inText is want, with the fix for text that YAML takes for something else.
func (c codec) inText(written string) string {
	if c.want == wantText {
		return fmt.Sprintf("%s: put it in quotes, as in %q", c.want, written)
	}
	return c.want
}

const wantText = "want text"

// written is a scalar type of this package's own.
type written interface {
	encoding.TextUnmarshaler
	wants() string
	schema() map[string]any
}

// codecOf is the codec of a scalar type, and false for maps, lists and structs.
func codecOf(t reflect.Type) (codec, bool) {
	if own, ok := reflect.New(t).Interface().(written); ok {
		schema := own.schema()
		return codec{own.wants(), kindsOf(schema), parseWritten, schema}, true
	}
	switch t {
	case reflect.TypeFor[time.Duration]():
		return codec{durationWant, []kind{text, number}, parseDuration, map[string]any{"type": "string", "pattern": `^([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h|d|w))+$`}}, true
	case reflect.TypeFor[flow.Network]():
		return codec{"want tcp, udp or icmp", []kind{text}, parseNetwork, map[string]any{"enum": []string{"tcp", "udp", "icmp"}}}, true
	}
	switch t.Kind() {
	case reflect.String:
		return codec{wantText, []kind{text}, parseString, map[string]any{"type": "string"}}, true
	case reflect.Bool:
		return codec{"want true or false", []kind{boolean}, parseBool, map[string]any{"type": "boolean"}}, true
	case reflect.Int:
		return codec{"want a number", []kind{number}, parseInt, map[string]any{"type": "integer"}}, true
	}
	return codec{}, false
}

// kindsOf tells from a schema what YAML may take the scalar for.
func kindsOf(schema map[string]any) []kind {
	switch schema["type"] {
	case "integer", "number":
		return []kind{number}
	case "string":
		return []kind{text}
	}
	return []kind{text, number}
}

func parseWritten(s string, v reflect.Value) error {
	return v.Addr().Interface().(written).UnmarshalText([]byte(s))
}

func parseDuration(s string, v reflect.Value) error {
	d, err := ParseDuration(s)
	v.SetInt(int64(d))
	return err
}

func parseNetwork(s string, v reflect.Value) error {
	return v.Addr().Interface().(*flow.Network).UnmarshalText([]byte(s))
}

func parseString(s string, v reflect.Value) error {
	if s == "" {
		return fmt.Errorf("empty; give it a value or remove the key")
	}
	v.SetString(s)
	return nil
}

func parseBool(s string, v reflect.Value) error {
	v.SetBool(strings.EqualFold(s, "true"))
	return nil
}

func parseInt(s string, v reflect.Value) error {
	n, err := wholeNumber(s)
	if err != nil {
		return fmt.Errorf("%s: want a whole number from 0", quote(s))
	}
	v.SetInt(n)
	return nil
}

// wholeNumber reads decimal digits. Leading zeros are refused: YAML takes such
// a number for octal.
func wholeNumber(s string) (int64, error) {
	if !isDigits(s) || len(s) > 1 && s[0] == '0' {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseInt(s, 10, 32)
}
