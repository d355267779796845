package fanout

import (
	"context"
	"sync"

	"gatewayd/flow"
)

const (
	maxOpeners  = 256  // goroutines that open
	maxOpenings = 4096 // sub-links that wait for one of them
)

// openers are the goroutines that open sub-links: started when there is work,
// gone when there is none.
type openers struct {
	wg sync.WaitGroup

	mu struct {
		sync.Mutex
		running     int
		waiting     int
		first, last *Sub // waiting, oldest first
	}
}

// open begins to open s in the background. It returns false when too much is
// being opened or closed already.
func (t *Table) open(s *Sub) bool {
	if t.dying.Load() >= maxDying {
		return false
	}
	o := &t.openers
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.waiting == maxOpenings {
		return false
	}
	t.live.Add(1)
	s.opening.ctx, s.opening.cancel = context.WithCancelCause(context.Background())
	if o.mu.running < maxOpeners {
		o.mu.running++
		o.wg.Go(func() { t.openAll(s) })
		return true
	}
	if o.mu.last == nil {
		o.mu.first = s
	} else {
		o.mu.last.opening.next = s
	}
	o.mu.last = s
	o.mu.waiting++
	return true
}

// openAll opens s and then what waits.
func (t *Table) openAll(s *Sub) {
	for s != nil {
		t.openOne(s)
		s = t.openers.next()
	}
}

func (o *openers) next() *Sub {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.mu.first
	if s == nil {
		o.mu.running--
		return nil
	}
	if o.mu.first = s.opening.next; o.mu.first == nil {
		o.mu.last = nil
	}
	o.mu.waiting--
	return s
}

// openOne opens s, then lets through what waited for it, first what came back.
func (t *Table) openOne(s *Sub) {
	defer s.release()
	op := s.opening
	defer op.cancel(nil)
	var opened Opened
	err := context.Cause(op.ctx)
	if err == nil {
		opened, err = t.cfg.Open(op.ctx, op.f, op.target, s)
	}
	if err != nil {
		s.fail(err)
		return
	}
	if opened.Receiver == nil {
		opened.Receiver = s.Down()
	}
	s.opened = opened
	s.seen.Store(t.now())
	s.passDown()
	s.passUp()
}

// passDown delivers what was received before the flow was registered.
func (s *Sub) passDown() {
	s.early.Lock()
	defer s.early.Unlock()
	if len(s.early.down) > 0 && !s.over() {
		s.opened.Receiver.Receive(s.early.down)
	}
	s.dequeued(s.early.down)
	s.early.down = nil
	s.ready.Store(true)
}

// passUp sends what waited, and lets later datagrams go straight to the link.
func (s *Sub) passUp() {
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	now := s.a.t.now()
	for _, tr := range s.up {
		if s.over() {
			s.a.t.cfg.Drops.Add(flow.DropOpenFailed, tr.Count())
		} else {
			s.sendLocked(tr, now)
		}
	}
	s.dequeued(s.up)
	s.up, s.opening, s.open = nil, nil, true
}

// fail drops what waited for an opening that failed, and tells the client unless
// the opening was ended. Nothing was registered.
func (s *Sub) fail(err error) {
	told := err
	if s.over() {
		told = nil
	}
	s.debug("opening ", " failed: ", err)
	s.End(err)
	s.dropUp(told)
	s.dropDown()
}

func (s *Sub) dropUp(told error) {
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	s.a.detachLocked(s)
	for _, tr := range s.up {
		s.a.refuse(tr, told)
	}
	s.dropped(s.up)
	s.up, s.opening = nil, nil
}

func (s *Sub) dropDown() {
	s.early.Lock()
	defer s.early.Unlock()
	s.dropped(s.early.down)
	s.early.down = nil
}

func (s *Sub) dropped(q []flow.Train) {
	for i := range q {
		s.a.t.cfg.Drops.Add(flow.DropOpenFailed, q[i].Count())
	}
	s.dequeued(q)
}
