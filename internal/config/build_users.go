package config

import (
	"errors"
	"strconv"
	"time"
	_ "time/tzdata" // routers have no zone files

	"gatewayd/flow"
	"gatewayd/user"
)

// validate reports what package user refuses of definitions that could be read.
func (l *loader) validate(c *Config) {
	if len(l.report.problems) > 0 {
		return
	}
	if invalid, ok := errors.AsType[*user.Invalid](user.Validate(c.Groups, c.Users)); ok {
		for _, p := range invalid.Problems {
			l.problem(p.Path, "%s", p.Text)
		}
	}
}

func (l *loader) groups(known tags) []user.Group {
	var made []user.Group
	for i := range l.raw.Groups {
		raw := &l.raw.Groups[i]
		made = append(made, user.Group{Name: string(raw.Name), Limits: l.userLimits(element("groups", i)+".limits", &raw.Limits, known)})
	}
	return made
}

// users makes those of the file. A device may be named once only; of prefixes
// within each other the longest holds.
func (l *loader) users(known tags) []user.Spec {
	var made []user.Spec
	taken, ids, devices := make(names), make(names), make(names)
	for i := range l.raw.Users {
		raw, path := &l.raw.Users[i], element("users", i)
		taken.add(l, path+".name", string(raw.Name))
		ids.add(l, path+".id", strconv.FormatUint(uint64(raw.ID), 10))
		l.refer(path+".group", "group", string(raw.Group), known.groups)
		if at := path + ".expires.after_first_use"; l.sound(at) && raw.Expires.AfterFirstUse == 0 {
			l.problem(at, "0: want more than that; remove it for a user that never expires")
		}
		spec := user.Spec{
			Name: string(raw.Name), ID: flow.UserKey(raw.ID), Group: string(raw.Group), Disabled: !raw.Enabled,
			Notes: raw.Notes, ExternalID: raw.ExternalID,
			Limits:  l.userLimits(path+".limits", &raw.Limits, known),
			Expires: user.Expires{At: time.Time(raw.Expires.At), AfterFirstUse: raw.Expires.AfterFirstUse},
		}
		for j, d := range raw.Devices {
			name := flow.DeviceSet(d).String()
			devices.add(l, element(path+".devices", j), name)
			spec.Devices = append(spec.Devices, name)
		}
		made = append(made, spec)
	}
	return made
}

func (l *loader) userLimits(path string, raw *rawUserLimits, known tags) user.Limits {
	return user.Limits{
		Traffic: user.Traffic{
			Up: uint64(raw.Traffic.Up), Down: uint64(raw.Traffic.Down), Total: uint64(raw.Traffic.Total),
			Reset: l.reset(path+".traffic.reset", &raw.Traffic.Reset),
		},
		Multiplier:    user.Multiplier(raw.Multiplier),
		Speed:         uint64(raw.Speed),
		Bandwidth:     user.Bandwidth{Up: uint64(raw.Bandwidth.Up), Down: uint64(raw.Bandwidth.Down)},
		Connections:   raw.Connections,
		IPs:           raw.IPs,
		WhenExhausted: l.exhausted(path+".when_exhausted", raw.WhenExhausted, known),
	}
}

var periods = map[string]user.Period{"hour": user.Hourly, "day": user.Daily, "week": user.Weekly, "month": user.Monthly}

func (l *loader) reset(path string, raw *rawReset) user.Reset {
	if !l.set(path) {
		return user.Reset{}
	}
	made := user.Reset{Every: periods[raw.Every], Zone: time.UTC, CarryOver: raw.CarryOver}
	if l.sound(path + ".zone") {
		made.Zone = l.zone(path+".zone", raw.Zone)
	}
	if raw.Every == "month" || l.set(path+".day") {
		made.Day = raw.Day
	}
	return made
}

// zone is a zone of the IANA database, the same pointer for the same name.
func (l *loader) zone(path, name string) *time.Location {
	z, known := l.zones[name]
	if !known {
		if name != "Local" { // would be the environment's
			z, _ = time.LoadLocation(name)
		}
		l.zones[name] = z
	}
	if z == nil {
		l.problem(path, "no time zone %s; want a name of the IANA database, as in Europe/Berlin or UTC", quote(name))
	}
	return z
}

func (l *loader) exhausted(path string, raw *rawExhausted, known tags) user.Exhausted {
	if raw == nil {
		return user.Exhausted{}
	}
	l.reference(path+".outbound", string(raw.Outbound), known)
	if at := path + ".throttle"; l.sound(at) && raw.Throttle == 0 {
		l.problem(at, "0: want more than that; when_exhausted: block lets nothing through")
	}
	made := user.Exhausted{Throttle: uint64(raw.Throttle), Outbound: string(raw.Outbound)}
	made.Block = made == user.Exhausted{} // the word
	return made
}

func (l *loader) ledger() Ledger {
	made := Ledger(l.raw.Ledger)
	const day = 24 * time.Hour
	l.within("ledger.commit", made.Commit, time.Second, time.Hour)
	l.within("ledger.hourly", made.Hourly, time.Hour, 100*day)
	l.within("ledger.daily", made.Daily, day, 4000*day)
	if !l.set("ledger.commit") {
		made.Commit = 0
	}
	return made
}

const maxWebhooks = 16 // each has a queue of its own

func (l *loader) webhooks() []Webhook {
	var made []Webhook
	raw := l.raw.Events.Webhooks
	if len(raw) > maxWebhooks {
		l.problem("events.webhooks", "%d webhooks; %d is the most", len(raw), maxWebhooks)
		return nil
	}
	for i, w := range raw {
		if at := element("events.webhooks", i) + ".on"; l.sound(at) && len(w.On) == 0 {
			l.problem(at, "an empty list posts nothing; remove the webhook, or list events")
		}
		made = append(made, Webhook{string(w.URL), stringsOf(w.On), string(w.SecretFile)})
	}
	return made
}
