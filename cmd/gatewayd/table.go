package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// least is what a column that may shrink keeps, its head at any rate.
const least = 8

// column is one column of a table.
type column struct {
	head   string
	right  bool // numbers
	shrink bool // may lose its middle where the terminal is narrow
	least  int  // what it keeps then; 0: least
}

// table aligns rows of text under a head.
type table struct {
	columns []column
	rows    [][]string
	gap     int // between columns, once they are fitted: 2, or 1 where two do not fit
}

func (t *table) add(cells ...string) {
	for i := range cells {
		cells[i] = printable(cells[i])
	}
	t.rows = append(t.rows, cells)
}

// printable keeps what others named from steering the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// render is the table in at most width columns of a terminal, 0 for any number.
func (t *table) render(width int) []byte {
	widths := t.fit(width)
	var b bytes.Buffer
	head := make([]string, len(t.columns))
	for i, c := range t.columns {
		head[i] = c.head
	}
	for _, row := range append([][]string{head}, t.rows...) {
		t.line(&b, row, widths)
	}
	return b.Bytes()
}

// fit takes from the widest column that may shrink, until the table fits or none may,
// and then from the gaps.
func (t *table) fit(width int) []int {
	t.gap = 2
	widths := make([]int, len(t.columns))
	for i, c := range t.columns {
		widths[i] = utf8.RuneCountInString(c.head)
		for _, row := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	for width > 0 && t.total(widths) > width {
		widest := -1
		for i, c := range t.columns {
			if c.shrink && widths[i] > cmp.Or(c.least, least) && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		switch {
		case widest >= 0:
			widths[widest]--
		case t.gap > 1:
			t.gap--
		default:
			return widths
		}
	}
	return widths
}

func (t *table) total(widths []int) int {
	sum := -t.gap
	for _, w := range widths {
		sum += w + t.gap
	}
	return sum
}

func (t *table) line(b *bytes.Buffer, row []string, widths []int) {
	var line strings.Builder
	for i, cell := range row {
		cell = elide(cell, widths[i])
		pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
		if t.columns[i].right {
			cell, pad = pad+cell, ""
		}
		line.WriteString(cell + pad + strings.Repeat(" ", t.gap))
	}
	fmt.Fprintln(b, strings.TrimRight(line.String(), " "))
}

// elide cuts the middle out of s, so that an address keeps its port.
func elide(s string, width int) string {
	runes := []rune(s)
	if len(runes) <= width {
		return s
	}
	back := max(width/2, min(len(":65535"), width-2))
	front := width - 1 - back
	return string(runes[:front]) + "…" + string(runes[len(runes)-back:])
}

// wrap breaks s between words into lines of at most width characters; all but the
// first are indented. A word that is longer stays whole.
func wrap(s string, width, indent int) string {
	var b strings.Builder
	for {
		line := []rune(s)
		if len(line) <= width {
			return b.String() + s
		}
		end := strings.LastIndexByte(string(line[:width+1]), ' ')
		if end <= indent {
			if end = strings.IndexByte(s[indent:], ' ') + indent; end < indent {
				return b.String() + s
			}
		}
		b.WriteString(strings.TrimRight(s[:end], " ") + "\n")
		s = strings.Repeat(" ", indent) + strings.TrimLeft(s[end:], " ")
	}
}

// width is the terminal's, 0 if standard output is none: then nothing is cut.
func (a *app) width() int {
	f, ok := a.stdout.(*os.File)
	if !ok {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}
