package user

import (
	"container/heap"
	"sync"
	"sync/atomic"
)

// alarms tell what is due, so that a sweep costs what there is to do and not what
// there is.
type alarms[T timed] struct {
	mu    sync.Mutex
	queue alarmQueue[T]
}

// timed is what has an alarm.
type timed interface{ alarmOf() *alarm }

// alarm is when its owner wants to be looked at.
type alarm struct {
	at    atomic.Int64 // never: it does not
	place int          // in the queue, from 1; 0: it is in none. Guarded by alarms.mu
}

// set moves the owner's alarm; never takes it out.
func (as *alarms[T]) set(owner T, at int64) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a := owner.alarmOf()
	a.at.Store(at)
	switch {
	case at == never && a.place > 0:
		heap.Remove(&as.queue, a.place-1)
	case at == never:
	case a.place > 0:
		heap.Fix(&as.queue, a.place-1)
	default:
		heap.Push(&as.queue, owner)
	}
}

// due takes up to len(owners) of those out that are due.
func (as *alarms[T]) due(now int64, owners []T) int {
	as.mu.Lock()
	defer as.mu.Unlock()
	for n := range owners {
		if len(as.queue) == 0 || as.queue[0].alarmOf().at.Load() > now {
			return n
		}
		owners[n] = heap.Pop(&as.queue).(T)
		owners[n].alarmOf().at.Store(never)
	}
	return len(owners)
}

// next is when the first of them is due.
func (as *alarms[T]) next() int64 {
	as.mu.Lock()
	defer as.mu.Unlock()
	if len(as.queue) == 0 {
		return never
	}
	return as.queue[0].alarmOf().at.Load()
}

// alarmQueue is a heap, the earliest first.
type alarmQueue[T timed] []T

func (q alarmQueue[T]) Len() int { return len(q) }

func (q alarmQueue[T]) Less(i, j int) bool {
	return q[i].alarmOf().at.Load() < q[j].alarmOf().at.Load()
}

func (q alarmQueue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].alarmOf().place, q[j].alarmOf().place = i+1, j+1
}

func (q *alarmQueue[T]) Push(x any) {
	*q = append(*q, x.(T))
	x.(T).alarmOf().place = len(*q)
}

func (q *alarmQueue[T]) Pop() any {
	var none T
	last := len(*q) - 1
	owner := (*q)[last]
	(*q)[last] = none
	*q = (*q)[:last]
	owner.alarmOf().place = 0
	return owner
}
