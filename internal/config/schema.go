package config

import (
	"encoding/json"
	"reflect"
	"strings"
)

// Schema is a JSON Schema (draft 2020-12) of the file, for editors. It accepts
// every file that Parse accepts; of what it accepts Parse refuses more:
// references, overlaps, and keys that are not available yet, which say so.
func Schema() ([]byte, error) {
	s := &schema{defs: make(map[string]any)}
	root := s.object(reflect.TypeFor[rawFile]())
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["title"] = "gatewayd configuration"
	root["$defs"] = s.defs
	b, err := json.MarshalIndent(root, "", "  ")
	return append(b, '\n'), err
}

// schema gathers the definitions of structs, each once.
type schema struct {
	defs map[string]any
}

// object is the schema of a struct's map.
func (s *schema) object(t reflect.Type) map[string]any {
	properties := make(map[string]any)
	var required []string
	for _, f := range fieldsOf(t) {
		properties[f.key] = s.property(&f)
		if f.need != "" && f.key != "version" { // an included file needs no version
			required = append(required, f.key)
		}
	}
	made := map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	if required != nil {
		made["required"] = required
	}
	return made
}

// property is the schema of a key.
func (s *schema) property(f *field) map[string]any {
	made := s.value(f, f.typ)
	made["description"] = describe(f)
	switch {
	case isDigits(f.def), f.typ.Kind() == reflect.Bool && f.def != "":
		made["default"] = json.RawMessage(f.def)
	case f.def != "":
		made["default"] = f.def
	}
	return made
}

func describe(f *field) string {
	doc := f.doc
	if f.types != nil {
		doc += " Of type " + alternatives(f.types) + "."
	}
	if f.soon {
		doc = "Not yet available. " + doc
	}
	return doc
}

// value is the schema of what a key of type t may hold.
func (s *schema) value(f *field, t reflect.Type) map[string]any {
	if c, scalar := codecOf(t); scalar {
		return scalarSchema(f, c)
	}
	switch t.Kind() {
	case reflect.Pointer:
		return s.value(f, t.Elem())
	case reflect.Slice:
		item := s.value(f, t.Elem())
		return map[string]any{"anyOf": []any{item, map[string]any{"type": "array", "items": item}}}
	case reflect.Map:
		c, _ := codecOf(t.Elem())
		return map[string]any{"type": "object", "propertyNames": map[string]any{"pattern": "^[1-9][0-9]*$"}, "additionalProperties": scalarSchema(&field{}, c)}
	}
	if f.words != nil {
		return map[string]any{"anyOf": []any{map[string]any{"enum": f.words}, s.reference(t)}}
	}
	return s.reference(t)
}

// reference names the definition of a struct, and makes it the first time.
func (s *schema) reference(t reflect.Type) map[string]any {
	name := strings.TrimPrefix(t.Name(), "raw")
	if s.defs[name] == nil {
		s.defs[name] = true // before what is inside it, which may be itself
		s.defs[name] = s.object(t)
	}
	return map[string]any{"$ref": "#/$defs/" + name}
}

// scalarSchema is the codec's schema with the key's words and range.
func scalarSchema(f *field, c codec) map[string]any {
	if f.enum != nil {
		return map[string]any{"enum": f.enum}
	}
	made := make(map[string]any, len(c.schema)+2)
	for k, v := range c.schema {
		made[k] = v
	}
	if f.bounded {
		made["minimum"], made["maximum"] = f.min, f.max
	}
	return made
}
