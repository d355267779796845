package netstack

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// On one goroutine, in any order of calls: a task that was asked for is either in
// the queue exactly once or has run since, and state and queue agree.
func TestATaskThatWasAskedForGetsItsTurn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorkers(1)[0]
		type job struct {
			task
			due   bool
			again int // schedules itself this many more times
		}
		jobs := make([]*job, 4)
		for i := range jobs {
			j := &job{}
			j.home = w
			j.turn = func() {
				j.due = false
				if j.again > 0 {
					j.again--
					j.due = true
					j.schedule() // from within: another turn is due after this one
				}
			}
			jobs[i] = j
		}
		pick := func(t *rapid.T) *job { return rapid.SampledFrom(jobs).Draw(t, "job") }
		t.Repeat(map[string]func(*rapid.T){
			"schedule": func(t *rapid.T) { j := pick(t); j.due = true; j.schedule() },
			"run now":  func(t *rapid.T) { j := pick(t); j.due = true; j.runNow() },
			"again":    func(t *rapid.T) { pick(t).again++ },
			"work": func(*rapid.T) {
				if k := w.pop(); k != nil {
					k.state.Store(taskRunning)
					k.run()
				}
			},
			"": func(t *rapid.T) {
				queued := map[*task]int{}
				for k := w.head; k != nil; k = k.next {
					queued[k]++
				}
				for i, j := range jobs {
					if n := queued[&j.task]; n != b2i(j.due) {
						t.Fatalf("job %d: due %v, in the queue %d times", i, j.due, n)
					}
					if s := j.state.Load(); (s == taskQueued) != j.due || s == taskRunning || s == taskAgain {
						t.Fatalf("job %d: due %v, state %d", i, j.due, s)
					}
				}
			},
		})
	})
}

// Under any race: turns of one task never overlap, and each schedule is followed
// by a turn that begins after it.
func TestTurnsNeverOverlapAndNoneIsLost(t *testing.T) {
	const workers, tasks, askers, asks = 4, 8, 4, 5000
	ws := newWorkers(workers)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var running, asking sync.WaitGroup
	for _, w := range ws {
		running.Go(func() { w.run(ctx) })
	}
	type job struct {
		task
		asked  atomic.Int64
		seen   atomic.Int64
		inside atomic.Int32
		turns  int // plain: the race detector sees turns that overlap
	}
	jobs := make([]*job, tasks)
	for i := range jobs {
		j := &job{}
		j.home = ws[i%workers]
		j.turn = func() {
			if j.inside.Add(1) != 1 {
				t.Error("two turns of one task at a time")
			}
			j.turns++
			j.seen.Store(j.asked.Load())
			j.inside.Add(-1)
		}
		jobs[i] = j
	}
	for a := range askers {
		asking.Go(func() {
			for i := range asks {
				j := jobs[(a+i)%tasks]
				j.asked.Add(1)
				if a%2 == 0 {
					j.schedule()
				} else {
					j.runNow()
				}
			}
		})
	}
	asking.Wait()
	for i, j := range jobs {
		waitFor(t, func() bool { return j.seen.Load() == j.asked.Load() })
		if j.asked.Load() != askers*asks/tasks {
			t.Errorf("job %d was asked for %d times", i, j.asked.Load())
		}
	}
	cancel()
	running.Wait()
}

// A worker takes turns in the order in which they were asked for, so that none of
// its relays starves.
func TestAWorkerIsFirstComeFirstServed(t *testing.T) {
	w := newWorkers(1)[0]
	var order []int
	tasks := make([]task, 5)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for i := range tasks {
		k := &tasks[i]
		k.home = w
		left := 2
		k.turn = func() {
			order = append(order, i)
			if left--; left > 0 {
				k.schedule()
			} else if i == len(tasks)-1 {
				cancel()
			}
		}
		k.schedule()
	}
	w.run(ctx)
	for n, i := range order {
		if i != n%len(tasks) {
			t.Fatalf("turns were taken in the order %v", order)
		}
	}
	if len(order) != 2*len(tasks) {
		t.Fatalf("%d turns", len(order))
	}
}
