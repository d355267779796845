package config

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes. In JSON it is written as an integer and read as an
// integer or as text, as in "50GB".
type Size uint64

// Rate is a number of bytes per second. In JSON it is written as an integer and
// read as an integer or as text, as in "20Mbit/s".
type Rate uint64

type unit struct {
	name string
	bits uint64
}

func sizeUnits() []unit {
	return []unit{
		{"B", 8},
		{"kB", 8e3},
		{"KB", 8e3},
		{"MB", 8e6},
		{"GB", 8e9},
		{"TB", 8e12},
		{"KiB", 8 << 10},
		{"MiB", 8 << 20},
		{"GiB", 8 << 30},
		{"TiB", 8 << 40},
	}
}

func bitUnits() []unit {
	return []unit{{"bit", 1}, {"kbit", 1e3}, {"Kbit", 1e3}, {"Mbit", 1e6}, {"Gbit", 1e9}}
}

const (
	sizeWant = "want bytes with a unit, as in 50GB or 4MiB; units are B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
	rateWant = "want a rate with a unit, as in 20Mbit/s or 2500kB/s; units are bit/s, kbit/s, Mbit/s, Gbit/s, B/s, kB/s, MB/s, GB/s, KiB/s, MiB/s, GiB/s"
)

// ParseSize reads bytes: an integer, or a decimal number with a unit. KB, MB, GB
// and TB are powers of 1,000, KiB, MiB, GiB and TiB of 1,024. A fraction of a
// byte is cut off.
func ParseSize(s string) (Size, error) {
	n, ok := parseQuantity(s, sizeUnits())
	if !ok {
		return 0, fmt.Errorf("size %s: %s", quote(s), notNegative(s, sizeWant))
	}
	return Size(n), nil
}

// ParseRate reads bytes per second: an integer, or a decimal number with a unit
// of bits (20Mbit/s) or bytes (2500kB/s). 0 means unlimited wherever a rate is
// a limit, so a rate above 0 and below one byte per second is an error.
func ParseRate(s string) (Rate, error) {
	body, perSecond := strings.CutSuffix(s, "/s")
	if !perSecond && !isDigits(s) {
		return 0, fmt.Errorf("rate %s: %s", quote(s), notNegative(s, rateWant))
	}
	n, ok := parseQuantity(body, append(bitUnits(), sizeUnits()...))
	if !ok || perSecond && isDigits(body) {
		return 0, fmt.Errorf("rate %s: %s", quote(s), notNegative(s, rateWant))
	}
	if n == 0 && strings.ContainsAny(body, "123456789") {
		return 0, fmt.Errorf("rate %s: below 1 byte per second; 0 would mean unlimited", quote(s))
	}
	return Rate(n), nil
}

// parseQuantity reads bytes from a number and one of units, or from an integer.
func parseQuantity(s string, units []unit) (uint64, bool) {
	number := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	name := s[len(number):]
	if name == "" {
		n, err := strconv.ParseUint(s, 10, 64)
		return n, err == nil && isDigits(s)
	}
	number = strings.TrimSuffix(number, " ")
	for _, u := range units {
		if u.name == name {
			return scale(number, u.bits)
		}
	}
	return 0, false
}

// scale is number × bits / 8, exactly, cut to whole bytes.
func scale(number string, bits uint64) (uint64, bool) {
	whole, fraction, dotted := strings.Cut(number, ".")
	if !isDigits(whole) || dotted && !isDigits(fraction) || len(number) > 40 {
		return 0, false
	}
	n, _ := new(big.Int).SetString(whole+fraction, 10)
	n.Mul(n, new(big.Int).SetUint64(bits))
	ten := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(len(fraction))), nil)
	n.Quo(n, ten.Mul(ten, big.NewInt(8)))
	return n.Uint64(), n.IsUint64()
}

func notNegative(s, want string) string {
	if strings.HasPrefix(s, "-") {
		return "must not be negative"
	}
	return want
}

func isDigits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// UnmarshalText is ParseSize.
func (s *Size) UnmarshalText(b []byte) (err error) {
	*s, err = ParseSize(string(b))
	return err
}

// UnmarshalJSON reads an integer of bytes, or text as ParseSize does.
func (s *Size) UnmarshalJSON(b []byte) error { return s.UnmarshalText(unquoted(b)) }

// UnmarshalText is ParseRate.
func (r *Rate) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRate(string(b))
	return err
}

// UnmarshalJSON reads an integer of bytes per second, or text as ParseRate does.
func (r *Rate) UnmarshalJSON(b []byte) error { return r.UnmarshalText(unquoted(b)) }

// unquoted takes the quotes off a JSON string; no unit needs an escape.
func unquoted(b []byte) []byte {
	if len(b) >= 2 && b[0] == '"' && b[len(b)-1] == '"' {
		return b[1 : len(b)-1]
	}
	return b
}

const durationWant = "want a duration with a unit, as in 10s, 1h30m, 7d or 2w"

// ParseDuration reads Go's durations and the units d (24 hours) and w (7 days),
// as in 1d12h. Negative durations are errors.
func ParseDuration(s string) (time.Duration, error) {
	bad := func() (time.Duration, error) {
		return 0, fmt.Errorf("duration %s: %s", quote(s), notNegative(s, durationWant))
	}
	var sum time.Duration
	rest := s
	for rest != "" {
		number := len(rest) - len(strings.TrimLeft(rest, "0123456789."))
		length := number + strings.IndexAny(rest[number:]+"0", "0123456789.")
		d, err := parseStep(rest[:number], rest[number:length])
		if err != nil || d > math.MaxInt64-sum {
			return bad()
		}
		sum, rest = sum+d, rest[length:]
	}
	if s == "" {
		return bad()
	}
	return sum, nil
}

func parseStep(number, name string) (time.Duration, error) {
	hours := time.Duration(0)
	switch name {
	case "d":
		hours = 24
	case "w":
		hours = 7 * 24
	default:
		d, err := time.ParseDuration(number + name)
		if number == "" || name == "" {
			return 0, strconv.ErrSyntax
		}
		return d, err
	}
	d, err := time.ParseDuration(number + "h")
	if err == nil && d > math.MaxInt64/hours {
		err = strconv.ErrRange
	}
	return d * hours, err
}
