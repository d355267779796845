package config

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"gatewayd/flow"
	"gatewayd/user"
)

// userName is the name of a user or group. It stands in lines and in paths of the
// API, where a user may also be told by its number.
type userName string

func (n *userName) UnmarshalText(b []byte) error {
	s, wrong := string(b), ""
	switch {
	case s == "" || len(s) > user.MaxName:
		wrong = fmt.Sprintf("want a name of 1 to %d bytes", user.MaxName)
	case isDigits(s):
		wrong = "want a name that is not all digits, which would be taken for an id"
	case strings.TrimSpace(s) != s || strings.ContainsFunc(s, unicode.IsControl):
		wrong = "want a name without control characters, and without blanks around it"
	case strings.Contains(s, "/") || s == "." || s == "..":
		wrong = "want a name that a path can hold, without /, and not . or .."
	}
	if wrong != "" {
		return fmt.Errorf("%s: %s", quote(s), wrong)
	}
	*n = userName(s)
	return nil
}

func (*userName) wants() string { return wantText }

func (*userName) schema() map[string]any {
	return map[string]any{"type": "string", "minLength": 1, "maxLength": user.MaxName, "pattern": "[^0-9]"}
}

// userID is a user's durable number.
type userID uint64

func (id *userID) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil || !isDigits(string(b)) || b[0] == '0' || n > user.MaxID {
		return fmt.Errorf("id %s: %s", quote(string(b)), id.wants())
	}
	*id = userID(n)
	return nil
}

func (*userID) wants() string { return fmt.Sprintf("want a number from 1 to %d", uint64(user.MaxID)) }

func (*userID) schema() map[string]any {
	return map[string]any{"type": "integer", "minimum": 1, "maximum": uint64(user.MaxID)}
}

// multiplier is the factor of what is charged.
type multiplier user.Multiplier

const multiplierWant = "want a number from 0 to 1000 with at most six decimals, as in 0.5"

// ParseMultiplier reads a decimal number, exactly.
func ParseMultiplier(s string) (user.Multiplier, error) {
	const decimals = 6
	whole, fraction, dotted := strings.Cut(s, ".")
	if !isDigits(whole) || len(whole) > 1 && whole[0] == '0' || dotted && !isDigits(fraction) || len(fraction) > decimals {
		return user.Multiplier{}, fmt.Errorf("multiplier %s: %s", quote(s), notNegative(s, multiplierWant))
	}
	n, err := strconv.ParseUint(whole+fraction+strings.Repeat("0", decimals-len(fraction)), 10, 64)
	if err != nil || n > user.MaxMultiplier {
		return user.Multiplier{}, fmt.Errorf("multiplier %s: %s", quote(s), multiplierWant)
	}
	return user.Multiplier{Set: true, Millionths: n}, nil
}

func (m *multiplier) UnmarshalText(b []byte) error {
	parsed, err := ParseMultiplier(string(b))
	*m = multiplier(parsed)
	return err
}

func (*multiplier) wants() string { return multiplierWant }

func (*multiplier) schema() map[string]any {
	return map[string]any{"type": "number", "minimum": 0, "maximum": 1000}
}

// instant is a point in time.
type instant time.Time

func (at *instant) UnmarshalText(b []byte) error {
	var t time.Time
	if err := t.UnmarshalText(b); err != nil || t.Unix() <= 0 {
		return fmt.Errorf("time %s: %s", quote(string(b)), at.wants())
	}
	*at = instant(t.UTC())
	return nil
}

func (*instant) wants() string {
	return "want a time after 1970 with its offset (RFC 3339), as in 2027-01-31T00:00:00+01:00 or 2027-01-30T23:00:00Z"
}

func (*instant) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": `^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$`}
}

// deviceSet is the devices that a rule or a user names.
type deviceSet flow.DeviceSet

func (d *deviceSet) UnmarshalText(b []byte) error {
	s, err := flow.ParseDeviceSet(string(b))
	if err != nil {
		return fmt.Errorf("device %s: %w", quote(string(b)), err)
	}
	*d = deviceSet(s)
	return nil
}

func (*deviceSet) wants() string { return flow.DeviceSetWant }

func (*deviceSet) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^(mac:.+|host:.+|[0-9a-fA-F:.]+(/[0-9]{1,3})?)$"}
}

// webURL is an absolute URL that is posted to.
type webURL string

func (u *webURL) UnmarshalText(b []byte) error {
	parsed, err := url.Parse(string(b))
	if err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Hostname() == "" || parsed.User != nil || parsed.Fragment != "" {
		return fmt.Errorf("URL %s: %s", quote(string(b)), u.wants())
	}
	*u = webURL(b)
	return nil
}

func (*webURL) wants() string {
	return "want http:// or https:// and a host, without user and fragment"
}

func (*webURL) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"}
}

// eventName is a kind of events, as in user, or a single one, as in user.near.
type eventName string

var (
	eventKinds  = []string{"flow", "session", "user", "device", "outbound", "config", "warning"}
	eventRegexp = regexp.MustCompile(`^[a-z]+(\.[a-z_]+)?$`)
)

func (n *eventName) UnmarshalText(b []byte) error {
	kind, _, _ := strings.Cut(string(b), ".")
	if !slices.Contains(eventKinds, kind) || !eventRegexp.Match(b) {
		return fmt.Errorf("event %s: %s; %s", quote(string(b)), n.wants(), meant(kind, eventKinds))
	}
	*n = eventName(b)
	return nil
}

func (*eventName) wants() string { return "want a kind, or one of it as in user.exhausted" }

func (*eventName) schema() map[string]any {
	return map[string]any{"type": "string", "pattern": `^(` + strings.Join(eventKinds, "|") + `)(\.[a-z_]+)?$`}
}
