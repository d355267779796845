package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"gatewayd/internal/exitcode"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	File   string
	Line   int    // from 1; 0: the file as a whole
	Column int    // in characters, from 1
	Path   string // of keys, as in route.rules[3].outbound; empty: the file as a whole
	Text   string // what is wrong and the fix
}

// String is the problem in one line, FILE:LINE:COL: PATH: TEXT.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		b.WriteString(":" + strconv.Itoa(p.Line) + ":" + strconv.Itoa(p.Column))
	}
	if p.Path != "" {
		b.WriteString(": " + p.Path)
	}
	b.WriteString(": " + p.Text)
	return b.String()
}

// maxProblems is how many problems an error lists; the rest is a number.
const maxProblems = 20

// Problems is the error that Load and Parse return, wrapped with the exit code:
// at most 20 problems, by file and place.
type Problems struct {
	List []Problem
	More int // how many were found beyond List
}

// Error is one line for each problem.
func (p *Problems) Error() string {
	lines := make([]string, 0, len(p.List)+1)
	for _, problem := range p.List {
		lines = append(lines, problem.String())
	}
	switch {
	case p.More == 1:
		lines = append(lines, "and 1 more problem")
	case p.More > 1:
		lines = append(lines, fmt.Sprintf("and %d more problems", p.More))
	}
	return strings.Join(lines, "\n")
}

// place is where something was written.
type place struct {
	file         *source
	line, column int
}

func (p place) String() string {
	return p.file.name + ":" + strconv.Itoa(p.line) + ":" + strconv.Itoa(p.column)
}

// report gathers problems. What is beyond its bound is only counted.
type report struct {
	problems []Problem
	order    map[string]int // file name to its turn
	more     int
}

const maxGathered = 50 * maxProblems

// full reports that further problems are only counted.
func (r *report) full() bool { return len(r.problems) >= maxGathered }

func (r *report) add(at place, path, text string) {
	if r.full() {
		r.more++
		return
	}
	if r.order == nil {
		r.order = make(map[string]int)
	}
	if _, known := r.order[at.file.name]; !known {
		r.order[at.file.name] = len(r.order)
	}
	r.problems = append(r.problems, Problem{at.file.name, at.line, at.column, path, oneLine(text)})
}

// oneLine is text without what would break the line or make it endless.
func oneLine(text string) string {
	const longest = 4096 // bytes
	if len(text) > longest {
		text = strings.ToValidUTF8(text[:longest], "") + "…"
	}
	return strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return ' '
		}
		return c
	}, text)
}

func (r *report) addf(at place, path, format string, args ...any) {
	r.add(at, path, fmt.Sprintf(format, args...))
}

// err is nil, or the Problems in the order of the files and places.
func (r *report) err() error {
	if len(r.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(r.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(r.order[a.File], r.order[b.File]), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	r.problems = slices.CompactFunc(r.problems, func(a, b Problem) bool { return a == b })
	shown := min(len(r.problems), maxProblems)
	return exitcode.With(exitcode.Config, &Problems{r.problems[:shown], r.more + len(r.problems) - shown})
}

// quote is s as an error shows it: quoted, and cut to a length that a line bears.
func quote(s string) string {
	const longest = 60
	if utf8.RuneCountInString(s) > longest {
		s = string([]rune(s)[:longest]) + "…"
	}
	return strconv.Quote(s)
}

// nearest is the candidate that s was probably meant to be, or "".
func nearest(s string, candidates []string) string {
	best, least := "", 1+min(2, len(s)/2)
	if len(s) > 40 {
		return ""
	}
	for _, c := range candidates {
		if d := distance(s, c); d < least {
			best, least = c, d
		}
	}
	return best
}

// distance is the number of letters to insert, remove, replace, or swap with
// their neighbour, that makes a into b (optimal string alignment).
func distance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}

// meant is the end of an error about an unknown word: the nearest one, or all.
func meant(s string, known []string) string {
	if near := nearest(s, known); near != "" {
		return "did you mean " + near + "?"
	}
	return listed(slices.Sorted(slices.Values(known)))
}

// listed is "known are a, b, c", cut to a length that a line bears.
func listed(known []string) string {
	const most = 40
	if len(known) > most {
		return fmt.Sprintf("known are %s and %d more", strings.Join(known[:most], ", "), len(known)-most)
	}
	return "known are " + strings.Join(known, ", ")
}
