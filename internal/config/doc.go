// Package config turns a configuration file into a validated, typed Config, or
// into errors that name the file, line, column and key path and say the fix.
//
// Stages: text → tokens and syntax tree, bounded (tree.go) → raw structs that
// hold the whole schema, with a place for every path (decode.go, raw*.go) →
// references, ranges and overlaps (build*.go) → Config. Included files pass the
// first two stages one after the other into the same raw structs. The schema
// that editors read (schema.go) comes from the same raw structs.
package config
