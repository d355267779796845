package netstack

import (
	"context"
	"sync"
	"sync/atomic"
)

// A task is something that a worker runs in turns: a relay.
//
// Its state says whether a turn is due. Whoever wants one calls schedule; the
// goroutine that holds it in taskRunning is the only one inside turn.
//
//	state        schedule        begin (worker, poller)  end of turn
//	taskIdle     → taskQueued    → taskRunning           –
//	taskQueued   stays           → taskRunning           –
//	taskRunning  → taskAgain     refused                 → taskIdle
//	taskAgain    stays           refused                 → taskQueued
//
// Whoever sets up what turns need may hold a new task, as if it were in one.
type task struct {
	state atomic.Uint32
	next  *task // in the run queue; guarded by its worker's lock
	home  *worker
	turn  func()
}

const (
	taskIdle = iota
	taskQueued
	taskRunning
	taskAgain
)

// schedule asks for a turn. It takes no lock but the run queue's, so it may be
// called from a callback of gVisor.
func (t *task) schedule() {
	for {
		switch s := t.state.Load(); s {
		case taskIdle:
			if t.state.CompareAndSwap(s, taskQueued) {
				t.home.push(t)
				return
			}
		case taskRunning:
			if t.state.CompareAndSwap(s, taskAgain) {
				return
			}
		default:
			return
		}
	}
}

// hold keeps turns of a task that nobody has asked for from beginning until release.
func (t *task) hold() { t.state.Store(taskRunning) }

// release ends hold, and asks for a turn.
func (t *task) release() {
	t.state.Store(taskQueued)
	t.home.push(t)
}

// runNow runs a turn on the caller's goroutine if none is due or under way, and
// otherwise leaves it to whoever has it.
func (t *task) runNow() {
	if t.state.CompareAndSwap(taskIdle, taskRunning) {
		t.run()
		return
	}
	t.schedule()
}

// run makes one turn; the caller has put the task into taskRunning.
func (t *task) run() {
	t.turn()
	if !t.state.CompareAndSwap(taskRunning, taskIdle) { // asked again meanwhile
		t.release()
	}
}

// A worker runs the tasks that call it home, first come first served.
type worker struct {
	wake chan struct{} // capacity 1

	mu         sync.Mutex // guards the queue
	head, tail *task
}

func newWorkers(n int) []*worker {
	ws := make([]*worker, n)
	for i := range ws {
		ws[i] = &worker{wake: make(chan struct{}, 1)}
	}
	return ws
}

func (w *worker) push(t *task) {
	w.mu.Lock()
	empty := w.head == nil
	if empty {
		w.head = t
	} else {
		w.tail.next = t
	}
	w.tail = t
	w.mu.Unlock()
	if empty {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

func (w *worker) pop() *task {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.head
	if t != nil {
		w.head, t.next = t.next, nil
	}
	return t
}

func (w *worker) run(ctx context.Context) {
	for {
		for t := w.pop(); t != nil; t = w.pop() {
			t.state.Store(taskRunning) // from taskQueued: nobody else leaves that state
			t.run()
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return
		}
	}
}
