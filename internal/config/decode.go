package config

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// maxNodes bounds what all files together decode to, aliases expanded.
const maxNodes = 1 << 18

// decoder fills raw structs from trees and remembers where each path was
// written. Several trees may be decoded into the same value, one after the
// other: lists grow, and a scalar that an earlier file set is a problem.
type decoder struct {
	report *report
	spots  map[string]spot
	bad    map[string]bool // paths whose value was refused
	nodes  int
	maps   []filled // maps that were written, each once
	known  map[reflect.Type]*shape
}

// shape is what a decoder has to know of a type, looked up once.
type shape struct {
	codec   codec
	scalar  bool
	fields  []field       // of a struct
	initial reflect.Value // of a struct: with what its tags say
}

type filled struct {
	path string
	typ  reflect.Type
}

// spot is where a path was written.
type spot struct {
	key, value place
	path       string // as the file's author sees it: no [0] if no list was written
}

func newDecoder(r *report) *decoder {
	return &decoder{report: r, spots: make(map[string]spot), bad: make(map[string]bool), known: make(map[reflect.Type]*shape)}
}

func (d *decoder) shapeOf(t reflect.Type) *shape {
	if s, ok := d.known[t]; ok {
		return s
	}
	s := &shape{}
	d.known[t] = s
	if s.codec, s.scalar = codecOf(t); !s.scalar && t.Kind() == reflect.Struct {
		s.fields = fieldsOf(t)
		s.initial = d.initial(t, s.fields)
	}
	return s
}

func (d *decoder) fieldsOf(t reflect.Type) []field { return d.shapeOf(t).fields }

// at is where path was written; if it was not, where what holds it was.
func (d *decoder) at(path string) place { return d.spotOf(path).value }

func (d *decoder) spotOf(path string) spot {
	holder := path
	for holder != "" && !d.set(holder) {
		holder = holder[:max(0, strings.LastIndexAny(holder, ".["))]
	}
	s := d.spots[holder]
	if holder != path {
		s.path = strings.TrimPrefix(s.path+path[len(holder):], ".")
	}
	return s
}

// set reports whether path was written.
func (d *decoder) set(path string) bool { _, ok := d.spots[path]; return ok }

// sound reports whether path was written and its value could be read.
func (d *decoder) sound(path string) bool { return d.set(path) && !d.bad[path] }

// problem reports what is wrong with the value at path.
func (d *decoder) problem(path, format string, args ...any) {
	s := d.spotOf(path)
	d.report.addf(s.value, s.path, format, args...)
}

func (d *decoder) refuse(s spot, path, format string, args ...any) {
	d.bad[path] = true
	d.report.addf(s.value, s.path, format, args...)
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// shown is a key as a path shows it.
func shown(key string) string {
	for _, c := range key {
		if c != '_' && c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			return quote(key)
		}
	}
	if key == "" || len(key) > 60 {
		return quote(key)
	}
	return key
}

func element(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// decode reads n, written at s, into v. f is the key that holds it.
func (d *decoder) decode(path string, s spot, n *node, f *field, v reflect.Value) {
	if d.nodes++; d.nodes > maxNodes {
		if d.nodes == maxNodes+1 {
			d.refuse(s, path, "more than %d values; the files are too large, or aliases repeat too much", maxNodes)
		}
		return
	}
	if n.kind == null {
		d.spots[path] = s
		d.refuse(spot{s.key, s.key, s.path}, path, "empty; give it a value or remove the key")
		return
	}
	switch sh := d.shapeOf(v.Type()); {
	case sh.scalar:
		d.scalar(path, s, n, f, v, &sh.codec)
	case v.Kind() == reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
			d.defaults(v.Elem())
		}
		d.decode(path, s, n, f, v.Elem())
	case v.Kind() == reflect.Slice:
		d.list(path, s, n, f, v)
	case v.Kind() == reflect.Map:
		d.dictionary(path, s, n, f, v)
	default:
		d.structure(path, s, n, f, v)
	}
}

// note remembers that path was written at s. It reports false, and a problem,
// if an earlier file wrote it too.
func (d *decoder) note(path string, s spot) bool {
	if first, again := d.spots[path]; again {
		d.refuse(s, path, "set before at %s; a value may be set in one file only", first.value)
		return false
	}
	d.spots[path] = s
	return true
}

func (d *decoder) scalar(path string, s spot, n *node, f *field, v reflect.Value, c *codec) {
	if !d.note(path, s) {
		return
	}
	if n.kind == list || n.kind == mapping {
		d.refuse(s, path, "found %s, %s", n.kind, c.want)
		return
	}
	if !slices.Contains(c.kinds, n.kind) {
		if slices.Contains(c.kinds, text) {
			d.refuse(s, path, "%s is %s, %s", quote(n.text), n.kind, c.inText(n.text))
			return
		}
		d.refuse(s, path, "%s is %s, %s", quote(n.text), n.kind, c.want)
		return
	}
	if err := d.assign(n.text, f, v, c); err != nil {
		d.refuse(s, path, "%v", err)
	}
}

// assign parses a scalar and checks it against the key's words and range.
func (d *decoder) assign(s string, f *field, v reflect.Value, c *codec) error {
	if f.enum != nil && !slices.Contains(f.enum, s) {
		return fmt.Errorf("%s: want %s", quote(s), alternatives(f.enum))
	}
	if err := c.parse(s, v); err != nil {
		return err
	}
	if f.bounded && v.CanInt() && (v.Int() < f.min || v.Int() > f.max) && v.Int() != Auto {
		return fmt.Errorf("%d: want %d to %d", v.Int(), f.min, f.max)
	}
	return nil
}

// alternatives is "a, b or c".
func alternatives(words []string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

func (d *decoder) list(path string, s spot, n *node, f *field, v reflect.Value) {
	if _, again := d.spots[path]; !again {
		d.spots[path] = s
	}
	if n.kind != list {
		d.element(path, s, n, f, v)
		return
	}
	for i, each := range n.list {
		d.element(path, spot{each.at, each.at, element(s.path, v.Len())}, n.list[i], f, v)
	}
}

// element appends n to the list v.
func (d *decoder) element(path string, s spot, n *node, f *field, v reflect.Value) {
	i := v.Len()
	v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
	d.defaults(v.Index(i))
	d.decode(element(path, i), s, n, f, v.Index(i))
	if d.bad[element(path, i)] {
		d.bad[path] = true
	}
}

// dictionary reads a map whose keys are scalars, such as ports.
func (d *decoder) dictionary(path string, s spot, n *node, f *field, v reflect.Value) {
	d.spots[path] = s
	if n.kind != mapping {
		d.refuse(s, path, "found %s, want a map of %s", n.kind, f.doc)
		return
	}
	if v.IsNil() {
		v.Set(reflect.MakeMap(v.Type()))
	}
	keyCodec := d.shapeOf(v.Type().Key()).codec
	seen := make(map[string]place)
	for _, k := range n.keys {
		at := spot{k.at, k.value.at, join(s.path, shown(k.name))}
		name, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		if err := keyCodec.parse(k.name, name); err != nil {
			d.report.addf(k.at, at.path, "%v", err)
			continue
		}
		if d.duplicate(seen, k, at.path) {
			continue
		}
		d.decode(join(path, k.name), at, k.value, &field{}, value)
		v.SetMapIndex(name, value)
	}
}

// duplicate reports a key that its map has already.
func (d *decoder) duplicate(seen map[string]place, k key, path string) bool {
	first, again := seen[k.name]
	if again {
		d.report.addf(k.at, path, "duplicate key; the first is at %s", first)
	}
	seen[k.name] = k.at
	return again
}

func (d *decoder) structure(path string, s spot, n *node, f *field, v reflect.Value) {
	_, again := d.spots[path]
	if !again {
		d.spots[path] = s
	}
	if n.kind != mapping {
		if slices.Contains(f.words, n.text) && n.kind == text {
			return
		}
		d.refuse(s, path, "found %s, want a map%s", n.kind, orWords(f.words))
		return
	}
	fields := d.fieldsOf(v.Type())
	seen := make(map[string]place)
	for _, k := range n.keys {
		at := spot{k.at, k.value.at, join(s.path, shown(k.name))}
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == k.name })
		if i < 0 {
			d.unknown(path, at.path, k, fields)
			continue
		}
		if d.duplicate(seen, k, at.path) {
			continue
		}
		if fields[i].soon {
			d.report.add(k.at, at.path, notYet)
		}
		d.decode(join(path, k.name), at, k.value, &fields[i], v.FieldByIndex(fields[i].index))
	}
	if !again {
		d.maps = append(d.maps, filled{path, v.Type()})
	}
}

// unknown reports a key that the map at path can not have. The key that was
// probably meant is then not missing.
func (d *decoder) unknown(path, seen string, k key, fields []field) {
	if d.report.full() {
		d.report.add(k.at, seen, "unknown key")
		return
	}
	keys := keysOf(fields)
	if near := nearest(k.name, keys); near != "" {
		d.bad[join(path, near)] = true
	}
	d.report.addf(k.at, seen, "unknown key; %s", meant(k.name, keys))
}

const notYet = "not yet available"

func orWords(words []string) string {
	if len(words) == 0 {
		return ""
	}
	return " or " + alternatives(words)
}

func keysOf(fields []field) []string {
	keys := make([]string, len(fields))
	for i, f := range fields {
		keys[i] = f.key
	}
	return keys
}

// finish reports, after the last file, the keys that maps lack.
func (d *decoder) finish() {
	for _, m := range d.maps {
		for _, f := range d.fieldsOf(m.typ) {
			path := join(m.path, f.key)
			if f.need != "" && !d.set(path) && !d.bad[path] && !d.bad[m.path] {
				d.problem(path, "missing; write %s", f.need)
				d.bad[path] = true
			}
		}
	}
}

// defaults gives a new struct what its tags say.
func (d *decoder) defaults(v reflect.Value) {
	if s := d.shapeOf(v.Type()); s.initial.IsValid() {
		v.Set(s.initial)
	}
}

// initial is a struct with what its tags say. A default that does not parse is a
// mistake in this package, which a test finds.
func (d *decoder) initial(t reflect.Type, fields []field) reflect.Value {
	v := reflect.New(t).Elem()
	for i := range fields {
		f := &fields[i]
		inner := v.FieldByIndex(f.index)
		s := d.shapeOf(f.typ)
		if s.scalar && f.def != "" {
			if err := d.assign(f.def, f, inner, &s.codec); err != nil {
				panic(fmt.Sprintf("default of %s: %v", f.key, err))
			}
			continue
		}
		d.defaults(inner)
	}
	return v
}
