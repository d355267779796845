package config

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // the default and the reference
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"time"

	"github.com/goccy/go-yaml/token"
)

// Limits of all files together.
const (
	maxFiles     = 64
	maxTotalText = 4 << 20 // bytes
)

//go:embed default.yaml
var defaultText string

//go:embed reference.yaml
var referenceText string

// DefaultText is the configuration that a gateway without a file runs on.
func DefaultText() string { return defaultText }

// ReferenceText is a configuration with every key that is available, commented.
func ReferenceText() string { return referenceText }

// Default is DefaultText, parsed.
func Default() *Config {
	c, err := Parse("default.yaml", []byte(defaultText))
	if err != nil {
		panic(fmt.Sprintf("embedded default: %v", err))
	}
	return c
}

// Load reads a file and those that it includes. Every error is a *Problems with
// exitcode.Config. It blocks on the file system alone.
func Load(path string) (*Config, error) {
	r := &report{}
	b, err := readLimited(path, 0)
	if err != nil {
		r.add(place{file: &source{name: path}}, "", "can not be read: "+reason(err))
		return nil, r.err()
	}
	return parse(path, b, disk())
}

// Parse reads text as the file of that name: what it includes is relative to the
// name's directory. Every error is a *Problems with exitcode.Config.
func Parse(name string, text []byte) (*Config, error) {
	return parse(name, bytes.Clone(text), disk())
}

// source is one file.
type source struct {
	name    string
	text    []byte
	parent  *source              // which included it
	columns map[*token.Token]int // where the lexer's columns are wrong
}

// files is where included files come from.
type files struct {
	glob func(pattern string) ([]string, error)
	read func(path string) ([]byte, error) // at most maxText+1 bytes
	same func(path string) string          // one name for one file, whatever path leads to it
}

func disk() files {
	return files{
		glob: filepath.Glob,
		read: func(path string) ([]byte, error) {
			if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
				return nil, errors.New("not a regular file")
			}
			return readLimited(path, syscall.O_NONBLOCK)
		},
		same: func(path string) string {
			if real, err := filepath.EvalSymlinks(path); err == nil {
				path = real
			}
			if abs, err := filepath.Abs(path); err == nil {
				path = abs
			}
			return path
		},
	}
}

func readLimited(path string, flags int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxText+4)) // a byte order mark and one byte too many
}

// reason is err without the path, which the problem names already.
func reason(err error) string {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err.Error()
	}
	return err.Error()
}

// loader reads a file and what it includes into raw structs.
type loader struct {
	*decoder
	from  files
	main  *source
	read  []*source
	known map[string]*source // by the name that same gives
	total int                // bytes read
	raw   rawFile
	zones map[string]*time.Location

	broken bool // a file is missing: what refers to it can not be checked
}

func parse(name string, text []byte, from files) (*Config, error) {
	l := newLoader(&source{name: name, text: text}, from)
	c := l.load()
	if err := l.report.err(); err != nil {
		return nil, err
	}
	return c, nil
}

func newLoader(main *source, from files) *loader {
	l := &loader{decoder: newDecoder(&report{}), from: from, main: main, known: make(map[string]*source), zones: make(map[string]*time.Location)}
	l.start(main)
	return l
}

// load gives a Config that is whole only if nothing was reported.
func (l *loader) load() *Config {
	l.file(l.main)
	if l.broken || l.nodes > maxNodes {
		return nil
	}
	l.finish()
	c := l.build()
	c.files = l.read
	return c
}

// start fills in the defaults. Those of lists are left to build, since a list
// that is written replaces them.
func (l *loader) start(main *source) {
	l.spots[""] = spot{value: place{main, 1, 1}}
	l.maps = []filled{{"", reflect.TypeFor[rawFile]()}}
	l.defaults(reflect.ValueOf(&l.raw).Elem())
	l.raw.Timeouts.UDP.Ports = map[port]time.Duration{
		53: 10 * time.Second, 123: 10 * time.Second, 3478: 10 * time.Second, 443: 30 * time.Second,
	}
}

// file decodes one file, then those it includes.
func (l *loader) file(f *source) {
	l.known[l.from.same(f.name)] = f
	l.read = append(l.read, f)
	if l.total += len(f.text); l.total > maxTotalText {
		l.report.add(place{file: f}, "", "the files together are larger than 4 MiB")
		l.broken = true
		return
	}
	tree := treeOf(f, l.report)
	if tree == nil {
		l.broken = true
		return
	}
	first := len(l.raw.Include)
	l.decodeFile(f, tree)
	for i := first; i < len(l.raw.Include); i++ {
		if path := element("include", i); l.sound(path) && l.at(path).file == f {
			l.include(f, path, l.raw.Include[i])
		}
	}
}

// decodeFile decodes a file's tree into the raw structs. The main file has to say
// its version; an included one may.
func (l *loader) decodeFile(f *source, tree *node) {
	version, said := l.spots["version"]
	delete(l.spots, "version")
	l.structure("", spot{value: tree.at}, tree, &field{}, reflect.ValueOf(&l.raw).Elem())
	switch {
	case said:
		l.spots["version"] = version
	case f != l.main:
		delete(l.spots, "version")
	}
}

// include reads the files that one pattern names.
func (l *loader) include(from *source, path, pattern string) {
	if !filepath.IsAbs(pattern) {
		pattern = filepath.Join(filepath.Dir(from.name), pattern)
	}
	names := []string{pattern}
	if strings.ContainsAny(pattern, `*?[\`) {
		var err error
		if names, err = l.from.glob(pattern); err != nil {
			l.problem(path, "pattern %s: want * ? and [a-z] as in a shell", quote(pattern))
			return
		}
	}
	for _, name := range names {
		l.includeFile(from, path, name)
	}
}

func (l *loader) includeFile(from *source, path, name string) {
	if first := l.known[l.from.same(name)]; first != nil {
		if chain := cycle(from, first); chain != "" {
			l.problem(path, "includes itself: %s", chain)
			return
		}
		l.problem(path, "%s is included already, by %s", name, first.parent.name)
		return
	}
	if len(l.read) == maxFiles {
		l.problem(path, "more than %d files", maxFiles)
		return
	}
	text, err := l.from.read(name)
	if err != nil {
		l.broken = true
		l.problem(path, "%s can not be read: %s", name, reason(err))
		return
	}
	l.file(&source{name: name, text: text, parent: from})
}

// cycle is "a → b → a" if first is from or one that led to it, else "".
func cycle(from, first *source) string {
	chain := first.name
	for f := from; f != nil; f = f.parent {
		chain = f.name + " → " + chain
		if f == first {
			return chain
		}
	}
	return ""
}

// ETag is a strong entity tag over the texts of all files, quotes included.
func (c *Config) ETag() string {
	h := sha256.New()
	for _, f := range c.files {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(f.text))))
		h.Write(f.text)
	}
	const length = 16
	return `"` + hex.EncodeToString(h.Sum(nil)[:length]) + `"`
}
