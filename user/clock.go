package user

import (
	"sync/atomic"
	"time"
)

// A router without a battery starts with a clock of years ago, and may be told a
// wrong time later. So dates are compared with the later of the clock and of the
// last commit of usage, and where the clock can't be right nobody expires.

// floor is before any clock that is right.
var floor = time.Date(2024, time.January, 1, 0, 0, 0, 0, time.UTC)

// behind is how much earlier than the last commit a clock may be that is merely a
// little wrong, as after a start without network.
const behind = 24 * time.Hour

// clock tells the time that dates are compared with. It is safe for concurrent use.
type clock struct {
	now       func() time.Time
	committed atomic.Int64 // UnixNano of the last commit; 0: none
}

// wall is the later of the clock and of the last commit, and whether the clock is
// plausible. It has no monotonic reading.
func (c *clock) wall() (t time.Time, plausible bool) {
	return wall(c.now().Round(0), time.Unix(0, c.committed.Load()))
}

func wall(now, committed time.Time) (t time.Time, plausible bool) {
	plausible = !now.Before(floor) && !now.Before(committed.Add(-behind))
	if now.Before(committed) {
		return committed, plausible
	}
	return now, plausible
}

// commit keeps the time of a commit, unless there was a later one.
func (c *clock) commit(t time.Time) {
	for n := t.UnixNano(); ; {
		old := c.committed.Load()
		if n <= old || c.committed.CompareAndSwap(old, n) {
			return
		}
	}
}

// dated is the usage with stamps of a clock that was not set yet moved to now, the
// first moment at which it is: what was begun then began just
// now. A user of whom nothing is known has no period yet.
func dated(u Usage, now time.Time) Usage {
	if !u.FirstUse.IsZero() && u.FirstUse.Before(floor) {
		u.FirstUse = now
	}
	if u.PeriodStart.Before(floor) && u != (Usage{}) {
		u.PeriodStart = now
	}
	return u
}
