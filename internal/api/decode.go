package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
)

// maxRecord is the largest record of a request in bytes.
const maxRecord = 64 << 10

// record reads the request's body, a JSON object of at most 64 KiB, into v.
// Whatever is not as v's type has it is the caller's mistake (400).
func record(w http.ResponseWriter, r *http.Request, v any) error {
	text, err := body(w, r, maxRecord)
	if err != nil {
		return err
	}
	return decodeRecord([]byte(text), v)
}

func decodeRecord(b []byte, v any) error {
	err := decodeStrict(b, v)
	if err == nil {
		return nil
	}
	p := fail(http.StatusBadRequest, "%v", err)
	if all := strings.Split(err.Error(), "\n"); len(all) > 1 {
		p.Errors = all
	}
	return p
}

// decodeStrict reads JSON into the struct that v points to. Unknown and repeated
// fields are errors, and all errors name their fields, a line each. null is as if
// the field were missing.
func decodeStrict(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	var raw json.RawMessage
	if err := dec.Decode(&raw); err != nil {
		return fmt.Errorf("body: want a JSON object: %w", syntax(err))
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("body: something follows the JSON object")
	}
	return errors.Join(decodeInto("", raw, reflect.ValueOf(v).Elem())...)
}

func syntax(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("it is empty")
	}
	return err
}

// decodeInto reads raw, which is valid JSON, into v at path.
func decodeInto(path string, raw json.RawMessage, v reflect.Value) []error {
	if string(raw) == "null" && path != "" {
		return nil
	}
	if _, own := v.Addr().Interface().(json.Unmarshaler); own || v.Kind() != reflect.Struct && v.Kind() != reflect.Pointer {
		if err := json.Unmarshal(raw, v.Addr().Interface()); err != nil {
			return []error{at(path, wanted(err))}
		}
		return nil
	}
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		return decodeInto(path, raw, v.Elem())
	}
	return decodeObject(path, raw, v)
}

func decodeObject(path string, raw json.RawMessage, v reflect.Value) (errs []error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if first, _ := dec.Token(); first != json.Delim('{') {
		return []error{at(path, errors.New("want an object"))}
	}
	seen := map[string]bool{}
	for dec.More() {
		key, _ := dec.Token() // valid, as the whole is
		name := key.(string)
		var value json.RawMessage
		_ = dec.Decode(&value)
		full := strings.TrimPrefix(path+"."+name, ".")
		field, known := fieldNamed(v, name)
		switch {
		case !known:
			errs = append(errs, at(full, fmt.Errorf("unknown field: known are %s", strings.Join(fieldNames(v.Type()), ", "))))
		case seen[name]:
			errs = append(errs, at(full, errors.New("given twice")))
		default:
			errs = append(errs, decodeInto(full, value, field)...)
		}
		seen[name] = true
	}
	return errs
}

func at(path string, err error) error {
	if path == "" {
		path = "body"
	}
	return fmt.Errorf("%s: %w", path, err)
}

// wanted says what a value should have been, without the names of Go.
func wanted(err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		kinds := map[reflect.Kind]string{reflect.String: "text", reflect.Bool: "true or false", reflect.Slice: "a list"}
		want, named := kinds[wrong.Type.Kind()]
		if !named {
			want = "a whole number from 0 on"
		}
		return fmt.Errorf("found %s, want %s", wrong.Value, want)
	}
	return err
}

// fieldNamed is the field of v whose JSON name is name, embedded structs' included.
func fieldNamed(v reflect.Value, name string) (reflect.Value, bool) {
	for _, f := range reflect.VisibleFields(v.Type()) {
		if !f.Anonymous && jsonName(f) == name {
			return v.FieldByIndex(f.Index), true
		}
	}
	return reflect.Value{}, false
}

func fieldNames(t reflect.Type) (names []string) {
	for _, f := range reflect.VisibleFields(t) {
		if !f.Anonymous {
			names = append(names, jsonName(f))
		}
	}
	slices.Sort(names)
	return names
}

func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// mergePatch is target with patch applied (RFC 7386): null removes, an object is
// merged, anything else replaces.
func mergePatch(target, patch any) any {
	changes, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	merged, ok := target.(map[string]any)
	if !ok {
		merged = map[string]any{}
	}
	for key, change := range changes {
		if change == nil {
			delete(merged, key)
			continue
		}
		merged[key] = mergePatch(merged[key], change)
	}
	return merged
}

// patched is the JSON of v with the merge patch, which is a JSON object, applied.
// Numbers stay as they are written.
func patched(v any, patch []byte) ([]byte, error) {
	now, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("patch: %w", err)
	}
	var trees [2]any
	for i, text := range [][]byte{now, patch} {
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.UseNumber()
		if err := dec.Decode(&trees[i]); err != nil {
			return nil, fmt.Errorf("patch: %w", err)
		}
	}
	out, err := json.Marshal(mergePatch(trees[0], trees[1]))
	if err != nil {
		return nil, fmt.Errorf("patch: %w", err)
	}
	return out, nil
}
