package main

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"gatewayd/internal/api"
)

// What top shows is a pure function of what it last heard of the gateway (topData),
// of what was typed (topState) and of the terminal's size.

// topData is one look at a gateway.
type topData struct {
	at      time.Time
	status  api.Status
	traffic api.Traffic
	flows   []topFlow
	more    bool   // there are flows beyond these
	err     string // why there is nothing newer
}

// topFlow is a flow with its bytes/s since the look before.
type topFlow struct {
	api.Flow
	UpRate   uint64 `json:"up_rate"`
	DownRate uint64 `json:"down_rate"`
}

// rated gives flows the rates that their counters have grown by since the look
// before; without one the rates are zero.
func rated(flows []api.Flow, at time.Time, before *topData) []topFlow {
	out := make([]topFlow, len(flows))
	for i := range flows {
		out[i].Flow = flows[i]
	}
	if before == nil || !at.After(before.at) {
		return out
	}
	old := make(map[uint64]*topFlow, len(before.flows))
	for i := range before.flows {
		old[before.flows[i].ID] = &before.flows[i]
	}
	since := at.Sub(before.at).Seconds()
	for i := range out {
		f := &out[i]
		var up, down uint64
		if o := old[f.ID]; o != nil {
			up, down = value(o.Up), value(o.Down)
		}
		f.UpRate = perSecond(value(f.Up), up, since)
		f.DownRate = perSecond(value(f.Down), down, since)
	}
	return out
}

func perSecond(now, before uint64, seconds float64) uint64 {
	if now <= before {
		return 0
	}
	return uint64(min(math.Round(float64(now-before)/seconds), math.MaxInt64))
}

// The views, and what their rows are sorted by.
var (
	topViews = []string{"flows", "inbounds", "outbounds"}
	topSorts = []string{"rate", "total", "age"}
)

// topRow is one row: of a flow, or of a tag.
type topRow struct {
	name        string // what the cursor stays on: id or tag
	text        string // what a filter looks at
	rate, total uint64
	order       uint64 // by which rows of equal rank are sorted: the older first
	cells       []string
}

// rows are the view's rows, filtered and sorted.
func (s *topState) rows(d *topData) []topRow {
	var rows []topRow
	switch s.view {
	case "inbounds":
		types := map[string]string{}
		for _, i := range d.status.Inbounds {
			types[i.Tag] = i.Type
		}
		rows = tagRows(d.traffic.Inbounds, types)
	case "outbounds":
		types := map[string]string{"": "dns"}
		for _, o := range d.status.Outbounds {
			types[o.Tag] = o.Type
		}
		rows = tagRows(d.traffic.Outbounds, types)
	default:
		rows = flowRows(d)
	}
	if want := strings.ToLower(s.filter); want != "" {
		rows = slices.DeleteFunc(rows, func(r topRow) bool { return !strings.Contains(r.text, want) })
	}
	slices.SortStableFunc(rows, func(a, b topRow) int {
		rank := 0
		switch s.sort {
		case "rate":
			rank = cmp.Compare(b.rate, a.rate)
		case "total":
			rank = cmp.Compare(b.total, a.total)
		}
		return cmp.Or(rank, cmp.Compare(a.order, b.order))
	})
	return rows
}

func flowRows(d *topData) []topRow {
	rows := make([]topRow, len(d.flows))
	for i := range d.flows {
		f := &d.flows[i]
		age := "-"
		if !f.Started.IsZero() {
			age = humanAge(d.at.Sub(time.Time(f.Started)))
		}
		id, dest, out := strconv.FormatUint(f.ID, 10), printable(shownDestination(&f.Flow)), shownOutbound(&f.Flow)
		total := value(f.Up) + value(f.Down)
		rows[i] = topRow{
			name: id, order: f.ID, rate: f.UpRate + f.DownRate, total: total,
			text: strings.ToLower(strings.Join([]string{f.Network, f.Source, f.Destination, dest, f.Inbound, out, f.RuleName, userName(f.User)}, " ")),
			cells: []string{
				id, f.Network, f.Source, dest, printable(out), printable(shownRule(&f.Flow)),
				shortBytes(f.UpRate), shortBytes(f.DownRate), shortBytes(total), age,
			},
		}
	}
	return rows
}

func userName(u *api.UserRef) string {
	if u == nil {
		return ""
	}
	return u.Name
}

// tagRows are in the order of the tags where nothing else decides.
func tagRows(byTag map[string]api.Stats, types map[string]string) []topRow {
	var rows []topRow
	for tag, st := range byTag {
		shown := cmp.Or(tag, "dns")
		rows = append(rows, topRow{
			name: tag, text: strings.ToLower(shown), rate: st.UpRate + st.DownRate, total: st.Up + st.Down,
			cells: []string{printable(shown), types[tag], strconv.Itoa(st.Flows), humanRate(st.UpRate), humanRate(st.DownRate), humanBytes(st.Up), humanBytes(st.Down)},
		})
	}
	slices.SortFunc(rows, func(a, b topRow) int { return cmp.Compare(a.name, b.name) })
	return rows
}

// shortBytes is n in four characters.
func shortBytes(n uint64) string {
	if n < 1000 {
		return strconv.FormatUint(n, 10)
	}
	v, unit := float64(n), ' '
	for _, unit = range "kMGTPE" {
		if v /= 1000; v < 999.5 {
			break
		}
	}
	if v < 9.95 {
		return fmt.Sprintf("%.1f%c", v, unit)
	}
	return fmt.Sprintf("%.0f%c", v, unit)
}

// topColumn has a width of its own and a share of what is left.
type topColumn struct {
	head  string
	width int
	share int
	right bool
	wide  int // terminal width from which it is shown
	fit   func(s string, width int) string
}

var topFlowColumns = []topColumn{
	{head: "ID", width: 6, right: true},
	{head: "NET", width: 4},
	{head: "SOURCE", width: 15, share: 3, fit: fitSource},
	{head: "DESTINATION", width: 16, share: 4},
	{head: "OUTBOUND", width: 8, share: 1},
	{head: "RULE", width: 8, share: 1, wide: 100},
	{head: "UP/s", width: 5, right: true},
	{head: "DOWN/s", width: 6, right: true},
	{head: "TOTAL", width: 5, right: true},
	{head: "AGE", width: 6, right: true},
}

func topTagColumns(head string) []topColumn {
	return []topColumn{
		{head: head, width: 16, share: 1},
		{head: "TYPE", width: 8},
		{head: "FLOWS", width: 6, right: true},
		{head: "UP/s", width: 10, right: true},
		{head: "DOWN/s", width: 10, right: true},
		{head: "UP", width: 9, right: true},
		{head: "DOWN", width: 9, right: true},
	}
}

// fitSource leaves the port out before anything else.
func fitSource(s string, width int) string {
	if utf8.RuneCountInString(s) > width {
		if host, _, err := net.SplitHostPort(s); err == nil {
			s = host
		}
	}
	return elide(s, width)
}

// topLine is one row of cells, a space between columns.
func topLine(columns []topColumn, cells []string, width int) string {
	shares, left := 0, width+1
	for _, c := range columns {
		if width >= c.wide {
			shares += c.share
			left -= c.width + 1
		}
	}
	var b strings.Builder
	for i, c := range columns {
		if width < c.wide {
			continue
		}
		w := c.width
		if left > 0 && c.share > 0 {
			more := left * c.share / shares
			w, left, shares = w+more, left-more, shares-c.share
		}
		fit := c.fit
		if fit == nil {
			fit = elide
		}
		text := fit(cells[i], w)
		pad := strings.Repeat(" ", w-utf8.RuneCountInString(text))
		if c.right {
			text, pad = pad+text, ""
		}
		b.WriteString(text + pad + " ")
	}
	return b.String()
}

// screenLine is one line of the terminal.
type screenLine struct {
	text    string
	reverse bool
}

const (
	topHead = 4 // lines above the rows
	topFoot = 1 // lines below them
)

// topBody is how many rows fit a terminal of so many lines; at least one, for keys that
// move by as many.
func topBody(height int) int { return max(height-topHead-topFoot, 1) }

// render is the screen: at most height lines of at most width characters. live is
// whether there is a cursor, and keys to press.
func (s *topState) render(d *topData, width, height int, live bool) []screenLine {
	rows := s.rows(d)
	columns := topFlowColumns
	switch s.view {
	case "inbounds":
		columns = topTagColumns("INBOUND")
	case "outbounds":
		columns = topTagColumns("OUTBOUND")
	}
	heads := make([]string, len(columns))
	for i, c := range columns {
		heads[i] = c.head
	}
	body := max(height-topHead-topFoot, 0)
	first, cursor := s.window(rows, body)
	last := min(first+body, len(rows))
	lines := []screenLine{
		{text: spread(topTitle(d), d.at.Local().Format("15:04:05"), width)},
		{text: topTotals(d)},
		{text: spread(s.headline(d), topRange(first, last, len(rows)), width)},
		{text: topLine(columns, heads, width), reverse: live},
	}
	if s.help && live {
		lines = append(lines, topHelp...)
	} else {
		for i := first; i < last; i++ {
			lines = append(lines, screenLine{topLine(columns, rows[i].cells, width), live && i == cursor})
		}
	}
	if live {
		lines = lines[:min(len(lines), max(height-topFoot, 0))]
		for len(lines) < height-topFoot {
			lines = append(lines, screenLine{})
		}
		lines = append(lines, screenLine{text: s.footer(d)})
	}
	lines = lines[:min(len(lines), height)]
	for i := range lines {
		lines[i].text = clip(lines[i].text, width)
	}
	return lines
}

func topTitle(d *topData) string {
	st := &d.status
	return fmt.Sprintf("gatewayd %s  running %s  %s  %s  %s", printable(st.Version),
		humanAge(time.Duration(st.UptimeS*float64(time.Second))), counted(st.Flows, "flow"), counted(st.Associations, "association"), humanBytes(st.Memory.RSS))
}

func topTotals(d *topData) string {
	t := &d.traffic.Total
	return fmt.Sprintf("up %s  down %s  in all up %s  down %s", humanRate(t.UpRate), humanRate(t.DownRate), humanBytes(t.Up), humanBytes(t.Down))
}

// headline says what the rows are.
func (s *topState) headline(d *topData) string {
	text := s.view + " by " + s.sort
	if s.view != "flows" && s.sort == "age" {
		text = s.view + " by name"
	}
	if d.more && s.view == "flows" {
		text += fmt.Sprintf(", the oldest %d only", len(d.flows))
	}
	if s.filter != "" {
		text += ", filter " + printable(s.filter)
	}
	if s.paused {
		text += ", paused"
	}
	return text
}

func topRange(first, last, all int) string {
	if all == 0 {
		return "none"
	}
	return fmt.Sprintf("%d-%d of %d", first+1, last, all)
}

// spread puts right at the right edge, if there is room.
func spread(left, right string, width int) string {
	pad := width - utf8.RuneCountInString(left) - utf8.RuneCountInString(right)
	if pad < 2 {
		return left
	}
	return left + strings.Repeat(" ", pad) + right
}

func clip(s string, width int) string {
	s = strings.TrimRight(s, " ")
	if r := []rune(s); len(r) > width {
		return string(r[:max(width, 0)])
	}
	return s
}

var topHelp = []screenLine{
	{text: ""},
	{text: "  arrows, PgUp, PgDn, Home, End   choose a row"},
	{text: "  r  t  a                         sort by rate, total, age"},
	{text: "  v or Tab                        flows, inbounds, outbounds"},
	{text: "  /                               only rows with a text: address, name, tag…"},
	{text: "  Esc                             no filter"},
	{text: "  k                               kill the flow, or all of the tag; asks first"},
	{text: "  p                               pause, go on"},
	{text: "  q or Ctrl-C                     quit"},
}

// footer is the last line: a question, what is typed, what was done, or the keys.
func (s *topState) footer(d *topData) string {
	switch {
	case s.asking != nil:
		return s.asking.question + " y/N"
	case s.typing:
		return "filter: " + printable(s.filter) + "_   Enter keeps it, Esc drops it"
	case s.message != "":
		return printable(s.message)
	case d.err != "":
		return printable(d.err)
	}
	return "q quit  / filter  r t a sort  v view  k kill  p pause  ? help"
}
