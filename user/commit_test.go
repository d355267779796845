package user

import (
	"context"
	"iter"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// clockOfCommits is a Keeper that notes when usage was committed.
type clockOfCommits struct {
	memory
	at []time.Time
}

// Commit notes the time.
func (c *clockOfCommits) Commit(_ time.Time, usages iter.Seq2[flow.UserKey, Usage]) error {
	for range usages {
		c.at = append(c.at, time.Now())
	}
	return nil
}

func TestUsageIsCommittedInTheIntervalWheneverTheSweepIs(t *testing.T) {
	const interval = time.Second
	for _, sweep := range []time.Duration{time.Second, 700 * time.Millisecond, 10 * time.Second} {
		t.Run(sweep.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				keeper := new(clockOfCommits)
				u := newUsers(t, Options{Keeper: keeper, Sweep: sweep, Commit: interval})
				f := admit(t, u, put(t, u, Spec{Name: "ann"}))
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- u.Run(ctx) }()
				last := time.Now()
				for range 200 {
					f.move(100)
					time.Sleep(50 * time.Millisecond)
				}
				cancel()
				<-done
				for _, at := range keeper.at {
					if gap := at.Sub(last); gap > interval+10*time.Millisecond {
						t.Errorf("%v between two commits", gap)
					}
					last = at
				}
				if n := len(keeper.at); n < 9 {
					t.Errorf("%d commits in ten seconds", n)
				}
			})
		})
	}
}
