package main

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"

	"gatewayd/internal/api"
)

func userTable(users []api.User) *table {
	t := &table{columns: []column{
		{head: "NAME", shrink: true},
		{head: "GROUP", shrink: true, least: 5},
		{head: "STATE"},
		{head: "UP", right: true},
		{head: "DOWN", right: true},
		{head: "LEFT", right: true},
		{head: "FLOWS", right: true},
		{head: "EXPIRES", shrink: true, least: 10},
	}}
	for i := range users {
		u := &users[i]
		t.add(u.Name, orDash(u.Group), u.State, humanBytes(u.Usage.Up), humanBytes(u.Usage.Down), leftText(&u.Left), strconv.Itoa(u.Usage.Connections), dateText(u.ExpiresAt))
	}
	return t
}

// leftText is the least of what is left, or a dash without a limit.
func leftText(l *api.Left) string {
	var least *uint64
	for _, n := range []*uint64{l.Up, l.Down, l.Total} {
		if n != nil && (least == nil || *n < *least) {
			least = n
		}
	}
	if least == nil {
		return "-"
	}
	return humanBytes(*least)
}

func dateText(t api.Time) string {
	if t.IsZero() {
		return "-"
	}
	return time.Time(t).Local().Format("2006-01-02 15:04")
}

// userText is all there is about a user; what it does not have is left out.
func userText(u *api.User) []byte {
	var b bytes.Buffer
	line := func(name, text string) {
		if text != "" {
			fmt.Fprintf(&b, "%-14s %s\n", name, printable(text))
		}
	}
	line("name", u.Name)
	line("id", strconv.FormatUint(u.ID, 10))
	line("group", u.Group)
	line("state", u.State)
	line("source", u.Source)
	line("notes", u.Notes)
	line("external id", u.ExternalID)
	line("devices", strings.Join(u.Devices, " "))
	for _, l := range limitLines(&u.Limits) {
		line(l[0], l[1])
	}
	line("expires", timeText(u.ExpiresAt))
	if d := u.Expires.AfterFirstUse; d != 0 {
		line("", d.String()+" after the first use")
	}
	line("moved", fmt.Sprintf("up %s, down %s", humanBytes(u.Usage.Up), humanBytes(u.Usage.Down)))
	line("charged", fmt.Sprintf("up %s, down %s", humanBytes(u.Usage.ChargedUp), humanBytes(u.Usage.ChargedDown)))
	if u.Usage.Extra > 0 {
		line("extra", humanBytes(u.Usage.Extra))
	}
	if left := leftText(&u.Left); left != "-" {
		line("left", left)
	}
	line("period", strings.TrimPrefix(timeText(u.Usage.PeriodStart)+" to "+timeText(u.PeriodEnd), " to "))
	line("first use", timeText(u.Usage.FirstUse))
	line("last seen", timeText(u.Usage.LastSeen))
	line("flows", strconv.Itoa(u.Usage.Connections))
	line("addresses", strings.Join(u.Usage.IPs, " "))
	return b.Bytes()
}

func timeText(t api.Time) string {
	if t.IsZero() {
		return ""
	}
	return time.Time(t).Local().Format("2006-01-02 15:04:05")
}

// limitLines are the limits that there are, in words.
func limitLines(l *api.Limits) (lines [][2]string) {
	add := func(name string, n uint64, text string) {
		if n > 0 {
			lines = append(lines, [2]string{name, text})
		}
	}
	t := &l.Traffic
	add("traffic up", uint64(t.Up), humanBytes(uint64(t.Up)))
	add("traffic down", uint64(t.Down), humanBytes(uint64(t.Down)))
	add("traffic", uint64(t.Total), humanBytes(uint64(t.Total)))
	if r := t.Reset; r != nil {
		text := strings.TrimSpace("every " + r.Every + " " + r.Zone)
		if r.Day > 0 {
			text += fmt.Sprintf(", on day %d", r.Day)
		}
		if r.CarryOver {
			text += ", what is left is carried over"
		}
		add("reset", 1, text)
	}
	limited := t.Up|t.Down|t.Total != 0
	switch w := l.WhenExhausted; {
	case w.Block && limited:
		add("exhausted", 1, "everything ends")
	case w.Throttle > 0:
		add("exhausted", 1, "goes on with "+humanRate(uint64(w.Throttle)))
	case w.Outbound != "":
		add("exhausted", 1, "new flows go to "+w.Outbound)
	}
	add("speed", uint64(l.Speed), humanRate(uint64(l.Speed)))
	add("bandwidth up", uint64(l.Bandwidth.Up), humanRate(uint64(l.Bandwidth.Up)))
	add("bandwidth down", uint64(l.Bandwidth.Down), humanRate(uint64(l.Bandwidth.Down)))
	add("connections", uint64(l.Connections), strconv.FormatUint(uint64(l.Connections), 10))
	add("ips", uint64(l.IPs), strconv.FormatUint(uint64(l.IPs), 10))
	if text, err := l.Multiplier.MarshalJSON(); err == nil && string(text) != "1" {
		add("multiplier", 1, string(text))
	}
	return lines
}

func usageTable(u *api.UsageOf) *table {
	t := pointTable("FROM")
	for _, p := range u.Points {
		addPoint(t, dateText(p.Start), &p)
	}
	return t
}

// sumTable has a row for each series, the sum of its points.
func sumTable(l *api.UsageList) *table {
	t := pointTable(strings.ToUpper(l.By))
	for _, s := range l.Series {
		var sum api.UsagePoint
		for _, p := range s.Points {
			sum.Up, sum.Down, sum.ChargedUp, sum.ChargedDown = sum.Up+p.Up, sum.Down+p.Down, sum.ChargedUp+p.ChargedUp, sum.ChargedDown+p.ChargedDown
		}
		addPoint(t, s.Name, &sum)
	}
	return t
}

func pointTable(head string) *table {
	return &table{columns: []column{
		{head: head, shrink: true},
		{head: "UP", right: true},
		{head: "DOWN", right: true},
		{head: "CHARGED UP", right: true},
		{head: "CHARGED DOWN", right: true},
	}}
}

func addPoint(t *table, name string, p *api.UsagePoint) {
	t.add(name, humanBytes(p.Up), humanBytes(p.Down), humanBytes(p.ChargedUp), humanBytes(p.ChargedDown))
}

// takeText has whole numbers: they are billed.
func takeText(t *api.Take) []byte {
	if t.Sequence == 0 {
		return []byte("nothing moved since the last acknowledged take\n")
	}
	from := timeText(t.From)
	if from == "" {
		from = "the beginning"
	}
	return fmt.Appendf(nil, "take %d, from %s to %s\nup %d, down %d, charged up %d, charged down %d, wire rx %d, wire tx %d bytes\n",
		t.Sequence, from, timeText(t.To), t.Up, t.Down, t.ChargedUp, t.ChargedDown, t.WireRx, t.WireTx)
}

func meText(m *api.Me) []byte {
	var b bytes.Buffer
	line := func(name, text string) {
		if text != "" {
			fmt.Fprintf(&b, "%-8s %s\n", name, printable(text))
		}
	}
	line("device", m.Device)
	if m.User != nil {
		line("user", m.User.Name)
	}
	line("state", m.State)
	if m.Usage != nil {
		line("moved", fmt.Sprintf("up %s, down %s", humanBytes(m.Usage.Up), humanBytes(m.Usage.Down)))
	}
	if m.Left != nil {
		line("left", leftText(m.Left))
	}
	line("renewed", timeText(m.PeriodEnd))
	line("expires", timeText(m.ExpiresAt))
	return b.Bytes()
}
