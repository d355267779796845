package api

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/config"
	"gatewayd/user"
)

// periods are the words of reset.every by user.Period.
var periods = [...]string{user.Never: "", user.Hourly: "hour", user.Daily: "day", user.Weekly: "week", user.Monthly: "month"}

// specOf is the definition that a request wrote.
func specOf(u *UserSpec) (user.Spec, error) {
	limits, err := limitsOf(&u.Limits)
	return user.Spec{
		Name: u.Name, ID: flow.UserKey(u.ID), Group: u.Group, Disabled: !u.Enabled, Notes: u.Notes, ExternalID: u.ExternalID, Limits: limits,
		Expires: user.Expires{At: time.Time(u.Expires.At), AfterFirstUse: time.Duration(u.Expires.AfterFirstUse)},
		Devices: u.Devices, Source: user.FromStore,
	}, err
}

func limitsOf(l *Limits) (user.Limits, error) {
	reset, err := resetOf(l.Traffic.Reset)
	return user.Limits{
		Traffic:    user.Traffic{Up: uint64(l.Traffic.Up), Down: uint64(l.Traffic.Down), Total: uint64(l.Traffic.Total), Reset: reset},
		Multiplier: user.Multiplier(l.Multiplier), Speed: uint64(l.Speed),
		Bandwidth:   user.Bandwidth{Up: uint64(l.Bandwidth.Up), Down: uint64(l.Bandwidth.Down)},
		Connections: count(l.Connections), IPs: count(l.IPs),
		WhenExhausted: user.Exhausted{Block: l.WhenExhausted.Block, Throttle: uint64(l.WhenExhausted.Throttle), Outbound: l.WhenExhausted.Outbound},
	}, err
}

// count is n as an int, also where that has 32 bits.
func count(n uint32) int { return int(min(n, math.MaxInt32)) }

func resetOf(r *Reset) (user.Reset, error) {
	if r == nil {
		return user.Reset{}, nil
	}
	every := slices.Index(periods[1:], r.Every) + 1
	if every == 0 {
		return user.Reset{}, invalid("limits.traffic.reset.every %q: want %s", r.Every, strings.Join(periods[1:], ", "))
	}
	zone, err := zoneOf(r.Zone)
	return user.Reset{Every: user.Period(every), Day: count(r.Day), Zone: zone, CarryOver: r.CarryOver}, err
}

// zoneOf is a time zone, nil for UTC. "Local" would mean another one on another host.
func zoneOf(name string) (*time.Location, error) {
	if name == "" {
		return nil, nil
	}
	zone, err := time.LoadLocation(name)
	if err != nil || name == "Local" {
		return nil, invalid("limits.traffic.reset.zone %q: want a time zone, as in Europe/Berlin or UTC", name)
	}
	return zone, nil
}

func invalid(format string, args ...any) error {
	return &user.Invalid{Problems: []user.Problem{{Text: fmt.Sprintf(format, args...)}}}
}

// specShape is the definition as it was written.
func specShape(s *user.Spec) UserSpec {
	return UserSpec{
		ID: uint64(s.ID), Name: s.Name, Group: s.Group, Enabled: !s.Disabled, Notes: s.Notes, ExternalID: s.ExternalID, Limits: limitsShape(&s.Limits),
		Expires: Expires{Time(s.Expires.At), Duration(s.Expires.AfterFirstUse)}, Devices: orEmpty(s.Devices),
	}
}

func limitsShape(l *user.Limits) Limits {
	return Limits{
		Traffic: TrafficLimit{
			Up: config.Size(l.Traffic.Up), Down: config.Size(l.Traffic.Down), Total: config.Size(l.Traffic.Total), Reset: resetShape(&l.Traffic.Reset),
		},
		Bandwidth: Bandwidth{config.Rate(l.Bandwidth.Up), config.Rate(l.Bandwidth.Down)}, Speed: config.Rate(l.Speed),
		Connections: uint32(l.Connections), IPs: uint32(l.IPs), Multiplier: Multiplier(l.Multiplier),
		WhenExhausted: exhaustedShape(l.WhenExhausted),
	}
}

func resetShape(r *user.Reset) *Reset {
	if r.Every == user.Never {
		return nil
	}
	out := &Reset{Every: periods[r.Every], Day: uint32(r.Day), CarryOver: r.CarryOver}
	if r.Zone != nil {
		out.Zone = r.Zone.String()
	}
	return out
}

// userShape is the user as the API shows it under p.
func userShape(v *user.View, p privacy) User {
	u := User{
		UserSpec: specShape(&v.Spec), State: v.State.String(), Source: v.Source.String(), Left: leftOf(v),
		ExpiresAt: Time(v.ExpiresAt), PeriodEnd: Time(v.PeriodEnd), Usage: usageShape(v, p),
	}
	u.Limits.Multiplier, u.Limits.WhenExhausted = factorOf(v), exhaustedOf(v)
	return u
}

func exhaustedShape(e user.Exhausted) Exhausted {
	return Exhausted{e.Block, config.Rate(e.Throttle), e.Outbound}
}

// exhaustedOf is what happens to the user, which an answer tells like the factor.
func exhaustedOf(v *user.View) Exhausted {
	return exhaustedShape(v.Effective.WhenExhausted).shown()
}

// factorOf is the factor that holds: an answer shows no user without one, and means
// the same when it is sent back.
func factorOf(v *user.View) Multiplier {
	m := Multiplier(v.Effective.Multiplier)
	if !m.Set {
		m = Multiplier{Set: true, Millionths: 1_000_000}
	}
	return m
}

func usageShape(v *user.View, p privacy) UserUsage {
	u := &v.Usage
	out := UserUsage{
		Up: u.Up, Down: u.Down, ChargedUp: u.ChargedUp, ChargedDown: u.ChargedDown, WireRx: u.WireRx, WireTx: u.WireTx, Extra: u.Extra,
		FirstUse: Time(u.FirstUse), LastSeen: Time(u.LastSeen), PeriodStart: Time(u.PeriodStart), Generation: u.Generation,
		Connections: v.Connections, IPs: []string{},
	}
	if p < privacyNone {
		for _, a := range v.IPs {
			out.IPs = append(out.IPs, a.String())
		}
	}
	return out
}

// leftOf is what the user may still move in this period.
func leftOf(v *user.View) Left {
	t, u := &v.Effective.Traffic, &v.Usage
	return Left{
		Up: left(t.Up, u.Extra, u.ChargedUp), Down: left(t.Down, u.Extra, u.ChargedDown),
		Total: left(t.Total, u.Extra, sum(u.ChargedUp, u.ChargedDown)),
	}
}

// left is nil where there is no limit.
func left(limit, extra, charged uint64) *uint64 {
	if limit == 0 {
		return nil
	}
	all := sum(limit, extra)
	rest := all - min(charged, all)
	return &rest
}

// sum saturates.
func sum(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}
