package user

import (
	"container/heap"
	"sync"
	"sync/atomic"
)

// alarms tell what is due, so that a sweep costs what there is to do and not what
// there is.
type alarms struct {
	mu    sync.Mutex
	queue alarmQueue
}

// alarm is when its owner wants to be looked at.
type alarm struct {
	owner any          // *entry or *promotion
	at    atomic.Int64 // UnixNano; alarms.mu to write it
	place int          // in the queue; -1: it is not. alarms.mu
}

func (a *alarm) init(owner any) {
	a.owner, a.place = owner, -1
	a.at.Store(never)
}

// set moves the alarm; never takes it out.
func (as *alarms) set(a *alarm, at int64) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a.at.Store(at)
	switch {
	case at == never && a.place >= 0:
		heap.Remove(&as.queue, a.place)
	case at == never:
	case a.place >= 0:
		heap.Fix(&as.queue, a.place)
	default:
		heap.Push(&as.queue, a)
	}
}

// due takes up to len(owners) of those out that are due.
func (as *alarms) due(now int64, owners []any) int {
	as.mu.Lock()
	defer as.mu.Unlock()
	for n := range owners {
		if len(as.queue) == 0 || as.queue[0].at.Load() > now {
			return n
		}
		a := heap.Pop(&as.queue).(*alarm)
		a.at.Store(never)
		owners[n] = a.owner
	}
	return len(owners)
}

// next is when the first of them is due.
func (as *alarms) next() int64 {
	as.mu.Lock()
	defer as.mu.Unlock()
	if len(as.queue) == 0 {
		return never
	}
	return as.queue[0].at.Load()
}

// alarmQueue is a heap, the earliest first.
type alarmQueue []*alarm

func (q alarmQueue) Len() int           { return len(q) }
func (q alarmQueue) Less(i, j int) bool { return q[i].at.Load() < q[j].at.Load() }

func (q alarmQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

func (q *alarmQueue) Push(x any) {
	a := x.(*alarm)
	a.place = len(*q)
	*q = append(*q, a)
}

func (q *alarmQueue) Pop() any {
	last := len(*q) - 1
	a := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	a.place = -1
	return a
}
