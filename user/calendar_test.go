package user

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestPeriodsBeginWhereTheZonesClockSays(t *testing.T) {
	for _, c := range []struct {
		name        string
		reset       Reset
		zone        string
		now         string // UTC
		start, next string // UTC
	}{
		{"a day in UTC", Reset{Every: Daily}, "UTC", "2026-03-05 13:00", "2026-03-05 00:00", "2026-03-06 00:00"},
		{"midnight itself", Reset{Every: Daily}, "UTC", "2026-03-05 00:00", "2026-03-05 00:00", "2026-03-06 00:00"},
		{"a day of 23 hours", Reset{Every: Daily}, "Europe/Berlin", "2026-03-29 12:00", "2026-03-28 23:00", "2026-03-29 22:00"},
		{"a day of 25 hours", Reset{Every: Daily}, "Europe/Berlin", "2026-10-25 12:00", "2026-10-24 22:00", "2026-10-25 23:00"},
		{"a day without midnight", Reset{Every: Daily}, "Africa/Cairo", "2024-04-26 12:00", "2024-04-25 22:00", "2024-04-26 21:00"},
		{"a day with two midnights", Reset{Every: Daily}, "America/Havana", "2024-11-03 12:00", "2024-11-03 04:00", "2024-11-04 05:00"},
		{"a day whose last hour comes twice", Reset{Every: Daily}, "America/Sao_Paulo", "2018-02-18 02:30", "2018-02-17 02:00", "2018-02-18 03:00"},
		{"a clock put back over midnight", Reset{Every: Daily}, "America/St_Johns", "2010-11-07 03:00", "2010-11-07 02:30", "2010-11-08 03:30"},
		{"a day that was left out", Reset{Every: Daily}, "Pacific/Apia", "2011-12-30 09:00", "2011-12-29 10:00", "2011-12-30 10:00"},
		{"a week", Reset{Every: Weekly}, "UTC", "2026-03-08 23:59", "2026-03-02 00:00", "2026-03-09 00:00"},
		{"a Monday", Reset{Every: Weekly}, "UTC", "2026-03-09 00:00", "2026-03-09 00:00", "2026-03-16 00:00"},
		{"a week over new year", Reset{Every: Weekly}, "Asia/Tokyo", "2026-01-01 00:00", "2025-12-28 15:00", "2026-01-04 15:00"},
		{"a month from the 1st", Reset{Every: Monthly, Day: 1}, "UTC", "2026-12-31 23:00", "2026-12-01 00:00", "2027-01-01 00:00"},
		{"the 31st in February", Reset{Every: Monthly, Day: 31}, "UTC", "2026-02-28 00:00", "2026-02-28 00:00", "2026-03-31 00:00"},
		{"before the 31st in February", Reset{Every: Monthly, Day: 31}, "UTC", "2026-02-27 23:59", "2026-01-31 00:00", "2026-02-28 00:00"},
		{"the 30th in a leap year", Reset{Every: Monthly, Day: 30}, "UTC", "2028-02-29 12:00", "2028-02-29 00:00", "2028-03-30 00:00"},
		{"the 15th, early in January", Reset{Every: Monthly, Day: 15}, "UTC", "2026-01-03 00:00", "2025-12-15 00:00", "2026-01-15 00:00"},
		{"the 29th, on a day of 23 hours", Reset{Every: Monthly, Day: 29}, "Europe/Berlin", "2026-03-29 12:00", "2026-03-28 23:00", "2026-04-28 22:00"},
		{"an hour in India", Reset{Every: Hourly}, "Asia/Kolkata", "2026-03-05 13:00", "2026-03-05 12:30", "2026-03-05 13:30"},
		{"the hour that comes twice", Reset{Every: Hourly}, "Europe/Berlin", "2026-10-25 00:30", "2026-10-25 00:00", "2026-10-25 01:00"},
		{"half an hour that is left out", Reset{Every: Hourly}, "Australia/Lord_Howe", "2026-10-03 15:35", "2026-10-03 15:30", "2026-10-03 16:00"},
		{"half an hour that comes twice", Reset{Every: Hourly}, "Australia/Lord_Howe", "2026-04-04 15:10", "2026-04-04 15:00", "2026-04-04 15:30"},
	} {
		c.reset.Zone = zone(t, c.zone)
		now := at(t, time.UTC, c.now)
		if got := c.reset.start(now); !got.Equal(at(t, time.UTC, c.start)) {
			t.Errorf("%s: begins %v, want %s", c.name, got.UTC(), c.start)
		}
		if got := c.reset.next(now); !got.Equal(at(t, time.UTC, c.next)) {
			t.Errorf("%s: ends %v, want %s", c.name, got.UTC(), c.next)
		}
	}
}

// boundaries finds, minute by minute, where a clock of the zone first shows a date that
// begins a period, as somebody would who looks at it all the time.
func boundaries(r *Reset, from, to time.Time) (found []time.Time) {
	begins := func(t time.Time) bool {
		switch r.Every {
		case Weekly:
			return t.Weekday() == time.Monday
		case Monthly:
			last := t.AddDate(0, 0, 1-t.Day()).AddDate(0, 1, -1).Day()
			return t.Day() == min(r.Day, last)
		}
		return true
	}
	var latest int // the latest date that was seen, as 20260305
	for t := from.In(r.zone()); t.Before(to); t = t.Add(time.Minute) {
		date := t.Year()*10_000 + int(t.Month())*100 + t.Day()
		if date > latest {
			if latest != 0 && begins(t) {
				found = append(found, t)
			}
			latest = date
		}
	}
	return found
}

func TestPeriodsAreThoseOfALookAtEveryMinute(t *testing.T) {
	zones := []string{
		"UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/Sao_Paulo", "Africa/Cairo", "Asia/Kathmandu", "Australia/Lord_Howe",
		"Asia/Beirut", "America/Santiago", "Pacific/Chatham", "America/St_Johns", "Africa/Casablanca",
	}
	rapid.Check(t, func(rt *rapid.T) {
		r := Reset{Zone: zone(t, rapid.SampledFrom(zones).Draw(rt, "zone")), Every: rapid.SampledFrom([]Period{Daily, Weekly, Monthly}).Draw(rt, "every")}
		if r.Every == Monthly {
			r.Day = rapid.IntRange(1, 31).Draw(rt, "day")
		}
		begin := time.Unix(rapid.Int64Range(1_000_000_000, 2_000_000_000).Draw(rt, "from")/60*60, 0)
		end := begin.AddDate(0, 0, 70)
		want := boundaries(&r, begin, end)
		for i := 1; i < len(want); i++ {
			inside := want[i-1].Add(time.Duration(rapid.Int64Range(0, int64(want[i].Sub(want[i-1])-1)).Draw(rt, "inside")))
			if got := r.start(inside); !got.Equal(want[i-1]) {
				rt.Fatalf("%v: the period of %v begins %v, want %v", r, inside, got, want[i-1])
			}
			if got := r.next(inside); !got.Equal(want[i]) {
				rt.Fatalf("%v: the period of %v ends %v, want %v", r, inside, got, want[i])
			}
		}
	})
}

// Hours that a clock is moved within are cut there.
func TestHoursFollowEachOtherWithoutAGap(t *testing.T) {
	zones := []string{"UTC", "Asia/Kolkata", "Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns", "Pacific/Apia"}
	rapid.Check(t, func(rt *rapid.T) {
		r := Reset{Every: Hourly, Zone: zone(t, rapid.SampledFrom(zones).Draw(rt, "zone"))}
		now := time.Unix(rapid.Int64Range(1_000_000_000, 2_000_000_000).Draw(rt, "now"), 0)
		for range 100 {
			start, next := r.start(now), r.next(now)
			if start.After(now) || !next.After(now) || next.Sub(start) > time.Hour {
				rt.Fatalf("%v is in the hour from %v to %v", now, start, next)
			}
			if !r.start(next).Equal(next) || !r.start(next.Add(-1)).Equal(start) {
				rt.Fatalf("the hour %v does not follow %v", r.start(next), start)
			}
			now = next.Add(time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(rt, "on")))
		}
	})
}

func TestWhatIsLeftIsCarriedOverOnce(t *testing.T) {
	day := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	traffic := Traffic{Total: 100, Reset: Reset{Every: Daily, CarryOver: true}}
	u := Usage{PeriodStart: day}
	use := func(n uint64, days int, want uint64) {
		t.Helper()
		u.ChargedDown = n
		day = day.AddDate(0, 0, days)
		if u = renew(&traffic, u, day); u.Extra != want {
			t.Errorf("%d used: %d more in the period from %v, want %d", n, u.Extra, day, want)
		}
	}
	use(30, 1, 70)
	use(0, 1, 100)  // 170 are left, 100 of them of this period
	use(150, 1, 50) // first what was carried
	use(150, 1, 0)
	use(0, 1, 100)
	use(170, 3, 100) // away for two whole periods
	if u.Generation != 6 {
		t.Errorf("generation %d after 6 resets", u.Generation)
	}
}

func TestOfSeveralLimitsTheSmallestLeftOverIsCarried(t *testing.T) {
	for _, c := range []struct {
		traffic Traffic
		usage   Usage
		want    uint64
	}{
		{Traffic{Up: 100, Down: 1000}, Usage{ChargedUp: 40, ChargedDown: 10}, 60},
		{Traffic{Up: 100, Total: 100}, Usage{ChargedDown: 90}, 10},
		{Traffic{Total: 100}, Usage{ChargedDown: 200}, 0},
		{Traffic{}, Usage{ChargedDown: 200}, 0},
	} {
		c.traffic.Reset = Reset{Every: Daily, CarryOver: true}
		if got := carried(&c.traffic, &c.usage, false); got != c.want {
			t.Errorf("%+v of %+v: %d are carried, want %d", c.usage, c.traffic, got, c.want)
		}
	}
}

func TestAResetKeepsWhatIsNotOfThePeriod(t *testing.T) {
	now := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	before := Usage{
		Up: 1, Down: 2, ChargedUp: 3, ChargedDown: 4, CarryUp: 5, WireRx: 6, WireTx: 7, Extra: 8, Extended: 9,
		FirstUse: now.Add(-time.Hour), LastSeen: now.Add(-time.Minute), Generation: 10,
	}
	after := cleared(before, now, 0)
	if after.Lifetime() != before.Lifetime() {
		t.Errorf("in all %+v became %+v", before.Lifetime(), after.Lifetime())
	}
	want := Usage{CarryUp: 5, Extended: 9, FirstUse: before.FirstUse, LastSeen: before.LastSeen, PeriodStart: now, Generation: 11, Earlier: before.Lifetime()}
	if after != want {
		t.Errorf("got %+v, want %+v", after, want)
	}
}

func TestTheEarlierEndOfTimeHolds(t *testing.T) {
	day := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	const h = time.Hour
	for _, c := range []struct {
		e    Expires
		u    Usage
		want time.Time
	}{
		{Expires{}, Usage{FirstUse: day, Extended: h}, time.Time{}},
		{Expires{At: day}, Usage{}, day},
		{Expires{AfterFirstUse: h}, Usage{}, time.Time{}},
		{Expires{AfterFirstUse: h}, Usage{FirstUse: day}, day.Add(h)},
		{Expires{At: day, AfterFirstUse: h}, Usage{FirstUse: day.Add(-2 * h)}, day.Add(-h)},
		{Expires{At: day, AfterFirstUse: h}, Usage{FirstUse: day}, day},
		{Expires{At: day}, Usage{Extended: 3 * h}, day.Add(3 * h)},
	} {
		if got := expiry(&c.e, &c.u); !got.Equal(c.want) {
			t.Errorf("%+v with %+v: %v, want %v", c.e, c.u, got, c.want)
		}
	}
}

func TestDatesAreComparedWithTheLaterOfClockAndCommit(t *testing.T) {
	right := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	zero := time.Unix(0, 0)
	for _, c := range []struct {
		name           string
		now, committed time.Time
		want           time.Time
		plausible      bool
	}{
		{"never committed", right, zero, right, true},
		{"ahead of the commit", right, right.Add(-time.Hour), right, true},
		{"a little behind", right, right.Add(time.Hour), right.Add(time.Hour), true},
		{"far behind", right, right.Add(100 * time.Hour), right.Add(100 * time.Hour), false},
		{"never set", time.Unix(100, 0), zero, time.Unix(100, 0), false},
		{"never set, and committed", time.Unix(100, 0), right, right, false},
	} {
		got, plausible := wall(c.now, c.committed)
		if !got.Equal(c.want) || plausible != c.plausible {
			t.Errorf("%s: %v, plausible %v; want %v, %v", c.name, got, plausible, c.want, c.plausible)
		}
	}
}
