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
	defer s.Release()
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
		s.dequeued(s.early.down)
		s.early.down = nil
	}
	s.dropDownLocked()
	s.ready.Store(true)
}

// passUp sends what waited, and lets later datagrams go straight to the link.
func (s *Sub) passUp() {
	s.a.mu.Lock()
	op, q := s.opening, s.up
	s.dequeued(q)
	s.up, s.opening, s.open = nil, nil, true
	if !s.over() {
		q = q[s.sendLocked(q, s.a.t.now()):]
	}
	s.a.mu.Unlock()
	if len(q) > 0 {
		s.divert(op, q, *s.cause.Load(), nil)
	}
}

// divert carries what waited in vain where its destinations lead by now, if it was
// the drain of its outbound's version that ended the opening: whoever opens reads
// its decision later than who decided. Anything else is dropped, and the client is
// told. A datagram is diverted once for each generation of decisions.
func (s *Sub) divert(op *opening, q []flow.Train, cause, told error) {
	t := s.a.t
	again := flow.ReasonOf(cause) == flow.Drained && t.cfg.Gen() != op.target.Gen
	f := op.f
	f.AllowHost = false
	if again && s.a.handle(&f, q, t.now()) {
		return
	}
	for _, tr := range q {
		s.a.refuse(tr, told)
		t.cfg.Drops.Add(flow.DropOf(cause, flow.DropOpenFailed), tr.Count())
	}
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
	op, q := s.unqueue()
	s.divert(op, q, err, told)
	s.dropDown()
}

// unqueue takes what waited for an opening that failed.
func (s *Sub) unqueue() (*opening, []flow.Train) {
	s.a.mu.Lock()
	defer s.a.mu.Unlock()
	s.a.detachLocked(s)
	op, q := s.opening, s.up
	s.dequeued(q)
	s.up, s.opening = nil, nil
	return op, q
}

func (s *Sub) dropDown() {
	s.early.Lock()
	defer s.early.Unlock()
	s.dropDownLocked()
}

func (s *Sub) dropDownLocked() {
	for i := range s.early.down {
		s.a.t.cfg.Drops.Add(flow.DropOpenFailed, s.early.down[i].Count())
	}
	s.dequeued(s.early.down)
	s.early.down = nil
}
