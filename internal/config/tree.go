package config

import (
	"bytes"
	"errors"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Limits of one file. The parser's time grows with the square of the depth, and
// with that of the number of keys of a block map.
const (
	maxText    = 1 << 20 // bytes
	maxDepth   = 48      // maps and lists inside each other
	maxKeys    = 1 << 10 // of one block map
	maxAnchors = 256
)

type kind uint8

const (
	text    kind = iota // a scalar that YAML takes for text, or any that is quoted
	number              // a plain integer or decimal
	boolean             // plain true or false
	null                // nothing, ~ or null
	list
	mapping
)

// String is the kind as an error names it.
func (k kind) String() string {
	return [...]string{"text", "a number", "true or false", "nothing", "a list", "a map"}[k]
}

// node is a value of the file. Aliases share the node of their anchor, so that
// a tree is never larger than its text.
type node struct {
	at   place
	text string  // of a scalar: as written, without quotes
	list []*node // of a list
	keys []key   // of a mapping, in order, duplicates included
	kind kind
}

type key struct {
	at    place
	name  string
	value *node
}

// treeOf parses one file. What is wrong goes into r; then the tree is nil.
func treeOf(file *source, r *report) *node {
	b := bytes.TrimPrefix(file.text, []byte("\ufeff"))
	if !checkText(file, b, r) {
		return nil
	}
	tokens := lexer.Tokenize(string(b))
	file.columns = columnsWithTabs(b, tokens)
	if at, complaint := checkTokens(file, tokens); complaint != "" {
		r.add(at, "", complaint)
		return nil
	}
	parsed, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		at, message := place{file, 1, 1}, err.Error()
		if syntax, ok := errors.AsType[*yaml.SyntaxError](err); ok {
			at, message = placeOf(file, syntax.Token), syntax.Message
		}
		r.add(at, "", "not YAML: "+message)
		return nil
	}
	return documentOf(file, parsed, r)
}

func checkText(file *source, b []byte, r *report) bool {
	whole := place{file: file}
	switch {
	case len(b) > maxText:
		r.add(whole, "", "the file is larger than 1 MiB; divide it with include")
		return false
	case bytes.HasPrefix(b, []byte{0xff, 0xfe}), bytes.HasPrefix(b, []byte{0xfe, 0xff}):
		r.add(whole, "", "the file is in UTF-16; save it as UTF-8")
		return false
	}
	line, column := 1, 1
	for rest := b; len(rest) > 0; column++ {
		c, size := utf8.DecodeRune(rest)
		switch {
		case c == utf8.RuneError && size == 1:
			r.addf(place{file, line, column}, "", "byte 0x%02x is not UTF-8; save the file as UTF-8", rest[0])
			return false
		case c < ' ' && c != '\n' && c != '\r' && c != '\t' || c == 0x7f:
			r.addf(place{file, line, column}, "", "control character %U; remove it", c)
			return false
		case c == '\n':
			line, column = line+1, 0
		}
		rest = rest[size:]
	}
	return true
}

// checkTokens refuses, before anything is built of it, what a configuration
// does not need of YAML and what the parser takes too long for.
func checkTokens(file *source, tokens token.Tokens) (at place, complaint string) {
	open, run, line, anchors := 0, 0, 0, 0 // run: maps and lists opened since the last separator
	var siblings columns
	for i, t := range tokens {
		if open == 0 && t.Position.Line != line {
			run, line = 0, t.Position.Line
		}
		if !strings.ContainsRune(t.Value, '\t') && strings.ContainsRune(strings.TrimSpace(t.Origin), '\t') && isPlain(t.Type) {
			return placeOf(file, t), "a tab inside text, which YAML readers take differently; put the text in quotes, or write a space"
		}
		switch t.Type {
		case token.TagType, token.DirectiveType, token.MappingKeyType, token.MergeKeyType:
			return placeOf(file, t), refusedSyntax(t.Type)
		case token.AnchorType:
			run++
			anchors++
		case token.MappingStartType, token.SequenceStartType:
			run++
			open++
		case token.MappingEndType, token.SequenceEndType:
			open = max(0, open-1)
			run = 0
		case token.CollectEntryType:
			run = 0
		case token.SequenceEntryType:
			run++
			siblings.leave(t.Position.Column)
		case token.MappingValueType:
			run++
			if open == 0 && siblings.key(tokens[max(0, i-1)].Position.Column) > maxKeys {
				return placeOf(file, t), "too many keys in one map"
			}
		}
		if max(open, run) > maxDepth || anchors > maxAnchors {
			return placeOf(file, t), "too deeply nested, or too many anchors"
		}
	}
	return place{}, ""
}

// isPlain reports whether a token is a scalar without quotes.
func isPlain(t token.Type) bool {
	return t != token.DoubleQuoteType && t != token.SingleQuoteType && t != token.CommentType
}

// columns counts the keys of the block maps that are open, the outermost first.
type columns []struct{ column, keys int }

// leave closes the maps that are indented more than column.
func (c *columns) leave(column int) {
	for len(*c) > 0 && (*c)[len(*c)-1].column > column {
		*c = (*c)[:len(*c)-1]
	}
}

// key counts a key at column and returns how many its map has.
func (c *columns) key(column int) int {
	c.leave(column)
	if last := len(*c) - 1; last < 0 || (*c)[last].column < column {
		*c = append(*c, struct{ column, keys int }{column, 0})
	}
	last := len(*c) - 1
	(*c)[last].keys++
	return (*c)[last].keys
}

func refusedSyntax(t token.Type) string {
	switch t {
	case token.TagType:
		return "YAML tags (!name) have no use here; remove it"
	case token.DirectiveType:
		return "YAML directives (%NAME) have no use here; remove it"
	case token.MergeKeyType:
		return "merge keys (<<) are not supported; write the keys out"
	}
	return "complex keys (? key) are not supported; write key: value"
}

func placeOf(file *source, t *token.Token) place {
	if t == nil || t.Position == nil {
		return place{file, 1, 1}
	}
	column, corrected := file.columns[t]
	if !corrected {
		column = t.Position.Column
	}
	return place{file, max(1, t.Position.Line), max(1, column)}
}

// columnsWithTabs are the columns of tokens on lines with tabs, of which the
// lexer does not count all. A token is further right than the lexer says, behind
// the one before it, and begins with its first letter.
func columnsWithTabs(b []byte, tokens token.Tokens) map[*token.Token]int {
	if bytes.IndexByte(b, '\t') < 0 {
		return nil
	}
	columns := make(map[*token.Token]int)
	lines := strings.Split(string(b), "\n")
	var line []rune
	number, end := 0, 0 // of the line; where its last token ended at least
	for _, t := range tokens {
		if t.Position == nil || t.Position.Line < 1 || t.Position.Line > len(lines) {
			continue
		}
		if t.Position.Line != number {
			number, end = t.Position.Line, 0
			line = nil
			if strings.ContainsRune(lines[number-1], '\t') {
				line = []rune(lines[number-1])
			}
		}
		begin := lexeme(t)
		for at := max(t.Position.Column-1, end, 0); at < len(line) && begin != 0; at++ {
			if line[at] == begin {
				columns[t] = at + 1
				end = at + max(1, utf8.RuneCountInString(t.Value))
				break
			}
		}
	}
	return columns
}

// lexeme is the letter that a token begins with in the text, 0 if there is none.
func lexeme(t *token.Token) rune {
	switch t.Type {
	case token.DoubleQuoteType:
		return '"'
	case token.SingleQuoteType:
		return '\''
	}
	for _, c := range t.Value {
		return c
	}
	return 0
}

// documentOf is the file's one document; an empty file is an empty map.
func documentOf(file *source, parsed *ast.File, r *report) *node {
	c := &converter{file: file, report: r, anchors: make(map[string]*node)}
	var root *node
	for _, d := range parsed.Docs {
		switch {
		case d.Body == nil:
		case root != nil:
			r.add(placeOf(file, d.Body.GetToken()), "", "a second document; a file is one (remove ---)")
			return nil
		default:
			root = c.convert(d.Body, 0)
		}
	}
	if c.failed {
		return nil
	}
	if root == nil {
		root = &node{at: place{file, 1, 1}, kind: mapping}
	}
	return root
}

// converter makes nodes of a syntax tree.
type converter struct {
	file    *source
	report  *report
	anchors map[string]*node
	failed  bool
}

func (c *converter) fail(t *token.Token, complaint string) *node {
	c.failed = true
	at := placeOf(c.file, t)
	c.report.add(at, "", complaint)
	return &node{at: at, kind: null}
}

func (c *converter) convert(n ast.Node, depth int) *node {
	if n == nil {
		return c.fail(nil, "not YAML: a value is missing")
	}
	if depth > maxDepth {
		return c.fail(n.GetToken(), "too deeply nested")
	}
	made := &node{at: placeOf(c.file, n.GetToken()), text: n.GetToken().Value}
	switch n := n.(type) {
	case *ast.MappingNode:
		return c.mapping(n.Values, made, depth)
	case *ast.MappingValueNode:
		return c.mapping([]*ast.MappingValueNode{n}, made, depth)
	case *ast.SequenceNode:
		made.kind = list
		for _, v := range n.Values {
			made.list = append(made.list, c.convert(v, depth+1))
		}
	case *ast.AnchorNode:
		// Registered after its value is complete: an alias inside it is unknown.
		made = c.convert(n.Value, depth+1)
		c.anchors[n.Name.GetToken().Value] = made
	case *ast.AliasNode:
		name := n.Value.GetToken().Value
		if made = c.anchors[name]; made == nil {
			return c.fail(n.GetToken(), "no anchor &"+shown(name)+" before this alias")
		}
	case *ast.LiteralNode:
		made.text = n.Value.Value
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		made.kind = number
	case *ast.BoolNode:
		made.kind = boolean
	case *ast.NullNode:
		made.kind = null
	case *ast.StringNode:
		made.kind = text
	default:
		return c.fail(n.GetToken(), "not YAML that a configuration can use")
	}
	return made
}

func (c *converter) mapping(values []*ast.MappingValueNode, made *node, depth int) *node {
	made.kind = mapping
	for i, v := range values {
		t := v.Key.GetToken()
		k := key{at: placeOf(c.file, t), name: t.Value, value: c.convert(v.Value, depth+1)}
		// A block map's own token is its first colon: it begins at its first key.
		if i == 0 && made.text != "{" {
			made.at = k.at
		}
		made.keys = append(made.keys, k)
	}
	return made
}
