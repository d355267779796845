package user

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"gatewayd/flow"
)

// The bounds of a definition.
const (
	MaxName    = 64        // bytes
	MaxNotes   = 4096      // bytes
	MaxDevices = 256       // of one user
	MaxID      = 1<<53 - 1 // what a JSON number carries
	maxAfter   = 100 * 366 * 24 * time.Hour
)

// Validate tells all that is wrong with a list of groups and users as they stand in a
// configuration file, as an *Invalid with paths as "users[3].limits.ips".
func Validate(groups []Group, specs []Spec) error {
	return newValidator(len(specs)).all(groups, specs)
}

func (v *validator) all(groups []Group, specs []Spec) error {
	for i := range groups {
		v.group(i, &groups[i])
	}
	for i := range specs {
		v.user(i, &specs[i])
	}
	return v.problems.err()
}

// validator remembers whose a name, number or device is.
type validator struct {
	problems Invalid
	groups   map[string]bool // nil: any
	names    map[string]bool
	ids      map[flow.UserKey]string
	devices  map[flow.DeviceSet]string
}

func newValidator(users int) *validator {
	return &validator{
		groups: make(map[string]bool), names: make(map[string]bool, users),
		ids: make(map[flow.UserKey]string), devices: make(map[flow.DeviceSet]string),
	}
}

// field keeps problems of one definition: the i-th of users or groups.
type field struct {
	v          *validator
	kind, name string
	i          int
}

func (f field) wrong(field, format string, args ...any) {
	f.v.problems.add(fmt.Sprintf("%ss[%d]", f.kind, f.i), fmt.Sprintf("%s %q", f.kind, f.name), field, format, args...)
}

func (v *validator) group(i int, g *Group) {
	f := field{v, "group", g.Name, i}
	f.named(g.Name)
	if v.groups[g.Name] {
		f.wrong("name", "there are two groups of that name; rename one")
	}
	if v.groups != nil {
		v.groups[g.Name] = true
	}
	f.limits(&g.Limits)
}

func (v *validator) user(i int, s *Spec) {
	f := field{v, "user", s.Name, i}
	f.named(s.Name)
	if v.names[s.Name] {
		f.wrong("name", "there are two users of that name; rename one")
	}
	v.names[s.Name] = true
	if s.ID > MaxID {
		f.wrong("id", "%d is more than %d; choose a smaller one or leave it out", s.ID, uint64(MaxID))
	}
	if other, taken := v.ids[s.ID]; taken && s.ID != 0 {
		f.wrong("id", "%d is that of user %q, too; leave one out and it is assigned", s.ID, other)
	}
	if s.ID != 0 {
		v.ids[s.ID] = s.Name
	}
	if s.Group != "" && v.groups != nil && !v.groups[s.Group] {
		f.wrong("group", "there is no group %q; define it or leave it out", s.Group)
	}
	f.text("notes", s.Notes)
	f.text("external_id", s.ExternalID)
	f.limits(&s.Limits)
	f.expires(&s.Expires)
	f.devices(s)
}

// named: the name stands in paths of the API and lines of logs, and where a user may also be
// told by its number.
func (f field) named(s string) {
	control := func(r rune) bool { return unicode.IsControl(r) || r == utf8.RuneError }
	switch {
	case s == "":
		f.wrong("name", "is empty; give one")
	case len(s) > MaxName:
		f.wrong("name", "has %d bytes; at most %d", len(s), MaxName)
	case strings.Trim(s, "0123456789") == "":
		f.wrong("name", "is all digits, as a number is; add a letter")
	case strings.ContainsFunc(s, control):
		f.wrong("name", "has a control character, or is not UTF-8; remove it")
	case strings.Contains(s, "/"), s == ".", s == "..":
		f.wrong("name", `is part of URLs; it can't have "/" in it or be "." or ".."`)
	case strings.TrimSpace(s) != s:
		f.wrong("name", "begins or ends with a space; remove it")
	}
}

func (f field) text(name, s string) {
	if len(s) > MaxNotes {
		f.wrong(name, "has %d bytes; at most %d", len(s), MaxNotes)
	}
	if !utf8.ValidString(s) {
		f.wrong(name, "is not UTF-8")
	}
}

func (f field) limits(l *Limits) {
	if l.Multiplier.Millionths > MaxMultiplier {
		f.wrong("limits.multiplier", "is more than %d; at most that", MaxMultiplier/one)
	}
	if !l.Multiplier.Set && l.Multiplier.Millionths != 0 {
		f.wrong("limits.multiplier", "has a value and is not set; set it")
	}
	f.reset(&l.Traffic.Reset)
	if l.Connections < 0 {
		f.wrong("limits.connections", "is negative; 0 is no limit")
	}
	if l.IPs < 0 {
		f.wrong("limits.ips", "is negative; 0 is no limit")
	}
	switch w := l.WhenExhausted; {
	case w.Throttle != 0 && w.Outbound != "":
		f.wrong("limits.when_exhausted", "has a throttle and an outbound, which exclude each other; remove one")
	case w.Block && (w.Throttle != 0 || w.Outbound != ""):
		f.wrong("limits.when_exhausted", "blocks and goes on, which exclude each other; remove one")
	}
}

func (f field) reset(r *Reset) {
	switch {
	case r.Every > Monthly:
		f.wrong("limits.traffic.reset.every", "is no period; want hour, day, week or month")
	case r.Every == Never && r.CarryOver:
		f.wrong("limits.traffic.reset.carry_over", "has no next period without every; add it")
	}
	switch {
	case r.Day == 0:
	case r.Every != Monthly:
		f.wrong("limits.traffic.reset.day", "goes with every: month only; leave it out")
	case r.Day < 0 || r.Day > 31:
		f.wrong("limits.traffic.reset.day", "%d is no day of a month; want 1 to 31", r.Day)
	}
}

func (f field) expires(e *Expires) {
	if e.AfterFirstUse < 0 || e.AfterFirstUse > maxAfter {
		f.wrong("expires.after_first_use", "%v is not within a hundred years; leave it out for never", e.AfterFirstUse)
	}
	if !e.At.IsZero() && (e.At.Year() < 1970 || e.At.Year() > 2200) {
		f.wrong("expires.at", "%d is no year from 1970 to 2200; leave it out for never", e.At.Year())
	}
}

func (f field) devices(s *Spec) {
	if len(s.Devices) > MaxDevices {
		f.wrong("devices", "are %d; at most %d, or name a prefix", len(s.Devices), MaxDevices)
		return
	}
	for i, text := range s.Devices {
		d, err := flow.ParseDeviceSet(text)
		if err != nil {
			f.wrong(fmt.Sprintf("devices[%d]", i), "%q: %v", text, err)
			continue
		}
		if other, taken := f.v.devices[d]; taken {
			f.wrong(fmt.Sprintf("devices[%d]", i), "%s is claimed by user %q, too; remove it from one", d, other)
		}
		f.v.devices[d] = s.Name
	}
}
