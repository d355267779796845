package track

import (
	"sync"
	"sync/atomic"
)

// bell wakes everyone who waits for something to change, for who strikes it at the
// cost of waking one: the first who waits, who then wakes the rest. Striking takes no
// lock and costs a load while nobody waits. The zero value is ready.
type bell struct {
	first atomic.Pointer[chan struct{}] // closed by a strike; set under mu, nil: nobody waits
	mu    sync.Mutex                    // of those who wait
	rest  chan struct{}                 // guarded by mu; closed by who was first
}

// strike is called after the change.
func (b *bell) strike() {
	if b.first.Load() == nil {
		return
	}
	if first := b.first.Swap(nil); first != nil {
		close(*first)
	}
}

// wait returns after a strike, when done or over is closed, or now if changed tells that
// there is no need to wait. It may return early: look again, and wait again.
func (b *bell) wait(done, over <-chan struct{}, changed func() bool) {
	struck, first := b.join()
	if !changed() { // asked after joining: a strike that came before is not missed
		select {
		case <-struck:
		case <-done:
		case <-over:
		}
	}
	if first != nil {
		b.leave(first)
	}
}

// join returns what to wait for, and what to leave with if it is the first who waits.
func (b *bell) join() (struck <-chan struct{}, first *chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.first.Load() == nil {
		mine := make(chan struct{})
		b.first.Store(&mine)
		return mine, &mine
	}
	if b.rest == nil {
		b.rest = make(chan struct{})
	}
	return b.rest, nil
}

// leave is of the first who waited, whatever ended that: the rest looks for itself then,
// and one of them is the first next time.
func (b *bell) leave(first *chan struct{}) {
	b.first.CompareAndSwap(first, nil)
	b.mu.Lock()
	rest := b.rest
	b.rest = nil
	b.mu.Unlock()
	if rest != nil {
		close(rest)
	}
}
