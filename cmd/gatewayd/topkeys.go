package main

import (
	"fmt"
	"slices"
	"strconv"
	"unicode"
	"unicode/utf8"
)

// topState is what was typed so far. It has no lock: it belongs to the loop.
type topState struct {
	view, sort string
	filter     string
	typing     bool // the filter is being typed
	paused     bool
	help       bool
	message    string    // what the last kill did
	asking     *topKill  // to be confirmed
	cursor     topCursor // the chosen row
	first      int       // row at the top
}

// topCursor stays on its row while rows come, go and change places; one whose row is
// gone stays where it was.
type topCursor struct {
	name  string
	index int
	moved bool // somebody chose the row
}

// topKill is a kill to be confirmed: of one flow, or of all of a tag.
type topKill struct {
	id       uint64 // 0: all that the selector picks
	key, tag string // of the selector
	question string
}

// topAction is what the loop has to do after a key.
type topAction struct {
	quit bool
	kill *topKill
}

// window is which row is at the top and which one is chosen when body rows fit.
func (s *topState) window(rows []topRow, body int) (first, cursor int) {
	cursor = s.cursor.index
	if i := slices.IndexFunc(rows, func(r topRow) bool { return r.name == s.cursor.name }); i >= 0 && s.cursor.moved {
		cursor = i
	}
	cursor = max(min(cursor, len(rows)-1), 0)
	first = min(s.first, max(len(rows)-body, 0))
	if cursor < first {
		first = cursor
	}
	if body > 0 && cursor >= first+body {
		first = cursor - body + 1
	}
	return first, cursor
}

// settle takes the window over, after new data or another size.
func (s *topState) settle(rows []topRow, body int) {
	s.first, s.cursor.index = s.window(rows, body)
	if s.cursor.index < len(rows) {
		s.cursor.name = rows[s.cursor.index].name
	}
}

// press takes one key; height is the terminal's.
func (s *topState) press(k key, d *topData, height int) (a topAction) {
	switch {
	case k == keyInterrupt:
		return topAction{quit: true}
	case s.asking != nil:
		if k == "y" || k == "Y" {
			a.kill = s.asking
		}
		s.asking, s.message = nil, ""
	case s.typing:
		s.edit(k)
	default:
		a = s.command(k, d, height)
	}
	s.settle(s.rows(d), topBody(height))
	return a
}

// maxFilter bounds what is typed, in characters.
const maxFilter = 60

func (s *topState) edit(k key) {
	runes := []rune(s.filter)
	switch {
	case k == keyEnter:
		s.typing = false
	case k == keyEscape:
		s.typing, s.filter = false, ""
	case k == keyBackspace && len(runes) > 0:
		s.filter = string(runes[:len(runes)-1])
	case k.printable() && len(runes) < maxFilter:
		s.filter += string(k)
	}
}

func (s *topState) command(k key, d *topData, height int) (a topAction) {
	s.message = ""
	if s.help {
		s.help = false
		return topAction{quit: k == "q"}
	}
	switch k {
	case "q":
		a.quit = true
	case "r":
		s.sortBy("rate")
	case "t":
		s.sortBy("total")
	case "a":
		s.sortBy("age")
	case "v", keyTab:
		s.view = topViews[(slices.Index(topViews, s.view)+1)%len(topViews)]
		s.cursor, s.first = topCursor{}, 0
	case "/":
		s.typing = true
	case keyEscape:
		s.filter = ""
	case "p":
		s.paused = !s.paused
	case "?", "h":
		s.help = true
	case "k":
		s.ask(d, height)
	default:
		s.move(k, d, height)
	}
	return a
}

func (s *topState) sortBy(what string) {
	s.sort, s.cursor, s.first = what, topCursor{}, 0
}

// move moves the cursor, and keeps it on the row that it comes to.
func (s *topState) move(k key, d *topData, height int) {
	rows := s.rows(d)
	body := topBody(height)
	_, i := s.window(rows, body)
	switch k {
	case keyUp:
		i--
	case keyDown:
		i++
	case keyPageUp:
		i -= body
	case keyPageDown:
		i += body
	case keyHome:
		i = 0
	case keyEnd:
		i = len(rows) - 1
	default:
		return
	}
	i = max(min(i, len(rows)-1), 0)
	s.cursor = topCursor{index: i, moved: true}
	if i < len(rows) {
		s.cursor.name = rows[i].name
	}
}

// ask asks whether the chosen row is to be killed.
func (s *topState) ask(d *topData, height int) {
	rows := s.rows(d)
	if len(rows) == 0 {
		return
	}
	_, i := s.window(rows, topBody(height))
	r := &rows[i]
	s.cursor = topCursor{r.name, i, true} // it is this one, whatever moves meanwhile
	if s.view == "flows" {
		id, err := strconv.ParseUint(r.name, 10, 64)
		if err == nil {
			s.asking = &topKill{id: id, question: fmt.Sprintf("kill flow %d, %s to %s?", id, r.cells[1], r.cells[3])}
		}
		return
	}
	key := s.view[:len(s.view)-1]
	s.asking = &topKill{key: key, tag: r.name, question: fmt.Sprintf("kill all %s flows of %s %s?", r.cells[2], key, r.cells[0])}
}

// key is a character that was typed, or one of the names below.
type key string

// Keys that are no characters.
const (
	keyUp        key = "<up>"
	keyDown      key = "<down>"
	keyPageUp    key = "<page up>"
	keyPageDown  key = "<page down>"
	keyHome      key = "<home>"
	keyEnd       key = "<end>"
	keyEnter     key = "<enter>"
	keyTab       key = "<tab>"
	keyBackspace key = "<backspace>"
	keyEscape    key = "<escape>"
	keyInterrupt key = "<interrupt>"
	keyUnknown   key = "<unknown>"
)

func (k key) printable() bool {
	r, size := utf8.DecodeRuneInString(string(k))
	return size == len(k) && unicode.IsPrint(r)
}

var controlKeys = map[byte]key{
	0x03: keyInterrupt, 0x08: keyBackspace, 0x09: keyTab, 0x0a: keyEnter, 0x0d: keyEnter, 0x7f: keyBackspace,
}

// escapes are what follows ESC [ or ESC O, in the forms of xterm, the Linux console
// and rxvt.
var escapes = map[string]key{
	"A": keyUp, "B": keyDown, "H": keyHome, "F": keyEnd,
	"1~": keyHome, "4~": keyEnd, "5~": keyPageUp, "6~": keyPageDown, "7~": keyHome, "8~": keyEnd,
}

// maxEscape bounds a sequence in bytes.
const maxEscape = 16

// keyDecoder makes keys of what a terminal sends. A sequence may come in pieces.
type keyDecoder struct{ held []byte }

// feed takes what was read and returns the keys that are whole.
func (d *keyDecoder) feed(b []byte) (keys []key) {
	d.held = append(d.held, b...)
	for len(d.held) > 0 {
		k, n := decodeKey(d.held)
		if n == 0 {
			break
		}
		d.held = d.held[n:]
		keys = append(keys, k)
	}
	return keys
}

// pending is whether a part of a key waits for the rest.
func (d *keyDecoder) pending() bool { return len(d.held) > 0 }

// flush gives up waiting: what is held is a lone escape, or nothing known.
func (d *keyDecoder) flush() []key {
	held := d.held
	d.held = nil
	switch {
	case len(held) == 0:
		return nil
	case len(held) == 1 && held[0] == 0x1b:
		return []key{keyEscape}
	}
	return []key{keyUnknown}
}

// decodeKey is the first key of b and its length; 0 if more has to come.
func decodeKey(b []byte) (key, int) {
	switch {
	case b[0] == 0x1b:
		return decodeEscape(b)
	case b[0] < ' ' || b[0] == 0x7f:
		if k, ok := controlKeys[b[0]]; ok {
			return k, 1
		}
		return keyUnknown, 1
	case !utf8.FullRune(b):
		return "", 0
	}
	r, size := utf8.DecodeRune(b)
	if r == utf8.RuneError {
		return keyUnknown, size
	}
	return key(b[:size]), size
}

// decodeEscape reads a control sequence as ECMA-48, 5.4 has it: parameters, then a
// final byte.
func decodeEscape(b []byte) (key, int) {
	switch {
	case len(b) == 1:
		return "", 0
	case b[1] == 0x1b: // Escape, and then the beginning of another
		return keyEscape, 1
	case b[1] != '[' && b[1] != 'O':
		return keyUnknown, 2
	}
	for i := 2; i < len(b); i++ {
		if b[i] >= 0x40 && b[i] <= 0x7e {
			if k, ok := escapes[string(b[2:i+1])]; ok {
				return k, i + 1
			}
			return keyUnknown, i + 1
		}
		if i == maxEscape {
			return keyUnknown, i
		}
	}
	return "", 0
}
