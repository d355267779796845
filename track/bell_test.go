package track

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestOneStrikeWakesEveryoneAndTheStrikerWakesOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bell
		var struck atomic.Int32
		var woken sync.WaitGroup
		for range 1000 {
			woken.Go(func() {
				for struck.Load() == 0 {
					b.wait(nil, nil, func() bool { return struck.Load() > 0 })
				}
			})
		}
		synctest.Wait()
		b.mu.Lock() // a strike takes no lock of those who wait
		struck.Add(1)
		b.strike()
		if b.first.Load() != nil || b.rest == nil {
			t.Error("the striker woke more than the first, or not that one")
		}
		b.mu.Unlock()
		woken.Wait()
		b.strike() // nobody waits
	})
}

func TestWhoLeavesFirstLeavesNobodyAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bell
		var struck atomic.Bool
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		left := make(chan struct{})
		go func() {
			b.wait(ctx.Done(), nil, struck.Load)
			close(left)
		}()
		synctest.Wait()
		var woken sync.WaitGroup
		for range 3 {
			woken.Go(func() {
				for !struck.Load() {
					b.wait(nil, nil, struck.Load)
				}
			})
		}
		<-left
		synctest.Wait()
		struck.Store(true)
		b.strike()
		woken.Wait()
	})
}

func TestAStrikeBeforeTheWaitIsNotMissed(t *testing.T) {
	var b bell
	var struck, heard atomic.Uint64
	const strikes = 20_000
	var sides sync.WaitGroup
	for range 3 {
		ctx := soon(t)
		sides.Go(func() {
			for seen := uint64(0); seen < strikes; seen = struck.Load() {
				b.wait(ctx.Done(), nil, func() bool { return struck.Load() != seen })
				heard.Add(1)
				if ctx.Err() != nil {
					t.Error("a strike was missed")
					return
				}
			}
		})
	}
	sides.Go(func() {
		for range strikes {
			struck.Add(1)
			b.strike()
		}
	})
	sides.Wait()
	t.Logf("%d strikes, %d waits", strikes, heard.Load())
}
