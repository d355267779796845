package route

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/flow"
)

// The model of a version: what it lives through, one flow at a time.
type modelVersion struct {
	v       *Version
	tag     string
	print   int
	drain   Drain
	flows   int
	current bool
	expired bool
	closed  bool
}

type model struct {
	o        *Outbounds
	versions []*modelVersion // all there ever were
	numbers  map[string]int
}

func (m *model) of(v *Version) *modelVersion {
	i := slices.IndexFunc(m.versions, func(w *modelVersion) bool { return w.v == v })
	return m.versions[i]
}

func (m *model) settle(w *modelVersion) { w.closed = w.closed || (!w.current && w.flows == 0) }

// apply is what an apply does, in words: by tag, keep or replace; what is not
// kept drains as the newest definition of its tag says.
func (m *model) apply(t *rapid.T, c *Change, defs map[string]Definition, prints map[string]int) {
	for _, w := range m.versions {
		d, defined := defs[w.tag]
		if !w.current {
			continue
		}
		if defined {
			w.drain = d.Drain
		}
		w.current = defined && w.print == prints[w.tag]
		if w.current {
			continue
		}
		m.settle(w)
		w.expired = w.closed || !w.drain.Keep
	}
	for tag, d := range defs {
		v, _ := c.Version(tag)
		if i := slices.IndexFunc(m.versions, func(w *modelVersion) bool { return w.current && w.tag == tag }); i >= 0 {
			if m.versions[i].v != v {
				t.Fatalf("%s: %v in place of %v", tag, v, m.versions[i].v)
			}
			continue
		}
		m.numbers[tag]++
		if v.N() != m.numbers[tag] {
			t.Fatalf("%v, want number %d", v, m.numbers[tag])
		}
		m.versions = append(m.versions, &modelVersion{v: v, tag: tag, print: prints[tag], drain: d.Drain, current: true})
	}
}

func (m *model) draw(t *rapid.T) (list []Definition, defs map[string]Definition, prints map[string]int) {
	defs, prints = map[string]Definition{}, map[string]int{}
	for _, tag := range []string{"a", "b", "c"} {
		if prints[tag] = rapid.IntRange(0, 2).Draw(t, tag); prints[tag] > 0 {
			defs[tag] = def(tag, prints[tag], Drain{Keep: rapid.Bool().Draw(t, "keep")})
		}
	}
	for _, tag := range slices.Sorted(maps.Keys(defs)) {
		list = append(list, defs[tag])
	}
	return list, defs, prints
}

func (m *model) Check(t *rapid.T) {
	var current, draining []*Version
	for _, w := range m.versions {
		switch {
		case w.current:
			current = append(current, w.v)
		case !w.closed:
			draining = append(draining, w.v)
		}
		closed := 0
		if w.closed {
			closed = 1
		}
		if closes(w.v) != closed || w.v.Flows() != w.flows || w.v.Draining() != (!w.current && !w.closed) {
			t.Fatalf("%v: closed %d times, %d flows, draining %v; want %+v", w.v, closes(w.v), w.v.Flows(), w.v.Draining(), w)
		}
	}
	for _, pair := range [][2][]*Version{{m.o.Current(), current}, {m.o.Draining(), draining}} {
		got, want := strings.Fields(names(pair[0])), strings.Fields(names(pair[1]))
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("versions %v, want %v", got, want)
		}
	}
}

func TestVersionsFollowTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{numbers: map[string]int{}}
		m.o = NewOutbounds(func(v *Version) {
			if w := m.of(v); w.current {
				t.Fatalf("%v expired while it is current", v)
			}
		})
		pick := func(t *rapid.T) *modelVersion {
			if len(m.versions) == 0 {
				t.Skip("no version")
			}
			return m.versions[rapid.IntRange(0, len(m.versions)-1).Draw(t, "version")]
		}
		t.Repeat(map[string]func(*rapid.T){
			"apply": func(t *rapid.T) {
				list, defs, prints := m.draw(t)
				c, err := m.o.Prepare(list)
				if err != nil {
					t.Fatal(err)
				}
				m.apply(t, c, defs, prints)
				c.Commit()
			},
			"discard": func(t *rapid.T) {
				list, _, _ := m.draw(t)
				c, err := m.o.Prepare(list)
				if err != nil {
					t.Fatal(err)
				}
				c.Discard()
			},
			"fail": func(t *rapid.T) {
				list, _, _ := m.draw(t)
				list = append(list, Definition{Tag: "bad", New: func() (flow.Outbound, error) { return nil, syscall.EIO }})
				if _, err := m.o.Prepare(list); !errors.Is(err, syscall.EIO) {
					t.Fatalf("error %v", err)
				}
			},
			"acquire": func(t *rapid.T) {
				w := pick(t)
				if got, want := w.v.Acquire(), !w.closed && !w.expired; got != want {
					t.Fatalf("acquire %v: %v, want %v", w.v, got, want)
				} else if got {
					w.flows++
				}
			},
			"release": func(t *rapid.T) {
				w := pick(t)
				if w.flows == 0 {
					t.Skip("no flow")
				}
				w.flows--
				m.settle(w)
				w.v.Release()
			},
			"": m.Check,
		})
		if err := m.o.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
