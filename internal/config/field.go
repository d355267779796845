package config

import (
	"reflect"
	"strconv"
	"strings"
)

// field is one key of a raw struct. The struct's tags are the schema:
//
//	yaml     the key; ",inline" takes over the keys of an embedded struct
//	doc      its description
//	default  what it is if it is not written
//	enum     the words that it may be, divided by |
//	min, max the range of an integer
//	word     the words that may stand in place of a map, divided by |
//	need     the key has to be written; the tag says how
//	soon     a later version brings it: its value is checked, then refused
//	types    the outbound types that it belongs to, divided by |
type field struct {
	key, doc    string
	def         string
	enum, words []string
	types       []string
	min, max    int64
	bounded     bool
	need        string
	soon        bool
	index       []int
	typ         reflect.Type
}

// fieldsOf lists the keys of a raw struct in the order of its fields.
func fieldsOf(t reflect.Type) []field {
	var fields []field
	for i := range t.NumField() {
		f := t.Field(i)
		name, inline := strings.CutSuffix(f.Tag.Get("yaml"), ",inline")
		if !inline {
			fields = append(fields, fieldOf(f, name))
			continue
		}
		for _, inner := range fieldsOf(f.Type) {
			inner.index = append([]int{i}, inner.index...)
			fields = append(fields, inner)
		}
	}
	return fields
}

func fieldOf(f reflect.StructField, name string) field {
	made := field{
		key:   name,
		doc:   f.Tag.Get("doc"),
		def:   f.Tag.Get("default"),
		enum:  words(f.Tag.Get("enum")),
		words: words(f.Tag.Get("word")),
		types: words(f.Tag.Get("types")),
		need:  f.Tag.Get("need"),
		soon:  f.Tag.Get("soon") != "",
		index: f.Index,
		typ:   f.Type,
	}
	if low, high := f.Tag.Get("min"), f.Tag.Get("max"); low != "" {
		made.bounded = true
		made.min, _ = strconv.ParseInt(low, 10, 64)
		made.max, _ = strconv.ParseInt(high, 10, 64)
	}
	return made
}

func words(tag string) []string {
	if tag == "" {
		return nil
	}
	return strings.Split(tag, "|")
}

// list reports whether the key holds a list.
func (f *field) list() bool { return f.typ.Kind() == reflect.Slice }
