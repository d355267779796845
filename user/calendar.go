package user

import (
	"math"
	"time"
)

// The periods of a Reset are what lies between boundaries that follow each other on
// the zone's clock: the beginnings of hours, days, Mondays or days of the month. A
// day's beginning is the first moment at which the clock shows it, so that a day
// has 23 or 25 hours where the clock is moved and starts at one where there is no
// midnight; a day that a zone left out has no period of its own.

// zone is where the boundaries are.
func (r *Reset) zone() *time.Location {
	if r.Zone == nil {
		return time.UTC
	}
	return r.Zone
}

// start is the latest boundary that is not after t; zero without periods.
func (r *Reset) start(t time.Time) time.Time {
	switch r.Every {
	case Never:
		return time.Time{}
	case Hourly:
		from, _ := hourOf(t.In(r.zone()))
		return from
	}
	for i := 1; ; i-- { // 1: where a clock is put back over midnight, the date is yesterday's again
		if b := r.boundary(t, i); !b.After(t) {
			return b
		}
	}
}

// next is the earliest boundary after t; zero without periods.
func (r *Reset) next(t time.Time) time.Time {
	switch r.Every {
	case Never:
		return time.Time{}
	case Hourly:
		_, to := hourOf(t.In(r.zone()))
		return to
	}
	for i := 0; ; i++ {
		if b := r.boundary(t, i); b.After(t) {
			return b
		}
	}
}

// boundary is where the i-th period after the one of t's date begins.
func (r *Reset) boundary(t time.Time, i int) time.Time {
	y, m, d := t.In(r.zone()).Date()
	switch r.Every {
	case Daily:
		d += i
	case Weekly:
		sinceMonday := (int(t.In(r.zone()).Weekday()) + 6) % 7
		d += 7*i - sinceMonday
	default:
		m += time.Month(i)
		d = min(max(r.Day, 1), daysIn(y, m))
	}
	return firstMoment(y, m, d, r.zone())
}

// daysIn is how many days the month has; m may be out of range, as for time.Date.
func daysIn(y int, m time.Month) int { return time.Date(y, m+1, 0, 0, 0, 0, 0, time.UTC).Day() }

// firstMoment is when a clock of the zone first shows the date or a later one.
// time.Date alone does not say which of two midnights it takes, nor which side of
// one that there is not.
func firstMoment(y int, m time.Month, d int, zone *time.Location) time.Time {
	const anyOffset = 26 * time.Hour // from UTC, and some more
	midnight := time.Date(y, m, d, 0, 0, 0, 0, time.UTC)
	for t := midnight.Add(-anyOffset).In(zone); ; {
		_, offset := t.Zone()
		_, end := t.ZoneBounds()
		first := midnight.Add(-time.Duration(offset) * time.Second).In(zone)
		if first.Before(t) {
			first = t // the clock was put over midnight
		}
		if end.IsZero() || first.Before(end) {
			return first
		}
		t = end
	}
}

// hourOf is the hour of the zone's clock that t is in, cut where the clock is moved.
func hourOf(t time.Time) (from, to time.Time) {
	into := time.Duration(t.Minute())*time.Minute + time.Duration(t.Second())*time.Second + time.Duration(t.Nanosecond())
	from = t.Add(-into)
	to = from.Add(time.Hour)
	begin, end := t.ZoneBounds()
	if !begin.IsZero() && from.Before(begin) {
		from = begin
	}
	if !end.IsZero() && end.Before(to) {
		to = end
	}
	return from, to
}

// carried is what is left at the end of a period, for the next one: at most one
// allowance, so that nothing is carried twice. idle: a whole period without traffic
// lies between. Of several limits the smallest left-over counts.
func carried(t *Traffic, u *Usage, idle bool) uint64 {
	if !t.Reset.CarryOver {
		return 0
	}
	left := uint64(math.MaxUint64)
	for _, c := range []struct{ limit, charged uint64 }{
		{t.Up, u.ChargedUp},
		{t.Down, u.ChargedDown},
		{t.Total, saturate(u.ChargedUp, u.ChargedDown)},
	} {
		switch all := saturate(c.limit, u.Extra); {
		case c.limit == 0:
		case idle:
			left = min(left, c.limit)
		case c.charged >= all:
			left = 0
		default:
			left = min(left, c.limit, all-c.charged)
		}
	}
	if left == math.MaxUint64 {
		return 0 // no limit
	}
	return left
}

// renew is the usage in the period that now lies in: the counters begin anew if that
// is another one than the usage's.
func renew(t *Traffic, u Usage, now time.Time) Usage {
	end := periodEnd(&t.Reset, &u)
	if end.IsZero() || now.Before(end) {
		return u
	}
	idle := !now.Before(t.Reset.next(end))
	return cleared(u, t.Reset.start(now), carried(t, &u, idle))
}

// periodEnd is when the usage's period is over; zero for never, and before it began.
func periodEnd(r *Reset, u *Usage) time.Time {
	if u.PeriodStart.IsZero() {
		return time.Time{}
	}
	return r.next(u.PeriodStart)
}

// cleared is the usage after a reset: what is not of the period stays, fractions of a
// byte that are still to be charged, too.
func cleared(u Usage, start time.Time, extra uint64) Usage {
	return Usage{
		CarryUp: u.CarryUp, CarryDown: u.CarryDown, Extra: extra, Extended: u.Extended, FirstUse: u.FirstUse, LastSeen: u.LastSeen,
		PeriodStart: start, Generation: u.Generation + 1, Earlier: u.Lifetime(),
	}
}

// expiry is when the user's time is up, zero for never: the earlier of the two, and
// by how much it was extended later.
func expiry(e *Expires, u *Usage) time.Time {
	at := e.At
	if e.AfterFirstUse > 0 && !u.FirstUse.IsZero() {
		if after := u.FirstUse.Add(e.AfterFirstUse); at.IsZero() || after.Before(at) {
			at = after
		}
	}
	if at.IsZero() {
		return at
	}
	return at.Add(u.Extended)
}
