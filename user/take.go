package user

import (
	"errors"
	"fmt"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"
)

// Taken is what a user moved since the take that was acknowledged last.
type Taken struct {
	User     flow.UserKey
	Sequence uint64    // to be acknowledged; 0: nothing moved, and there is nothing to acknowledge
	From, To time.Time // of the commits that it lies between; From is zero for the first
	Moved
}

// ErrSequence is the error of an acknowledgement that is not of the last take.
var ErrSequence = errors.New("not the last take")

// take is a user's state in billing. Its states:
//
//	open   a take was given out under seq and not acknowledged: it is given out again
//	else   the take seq was acknowledged, or there was none yet
//
// A take becomes open, and acknowledged, on disk before anybody is told. Times are in ms
// since 1970, 0 is none.
type take struct {
	seq   uint64
	open  bool
	acked Moved // of all that ever moved, what acknowledged takes told
	from  int64
	to    int64 // of the open one
	moved Moved
}

// acknowledged is what it is once the open one was acknowledged.
func (t *take) acknowledged() take {
	return take{seq: t.seq, acked: t.acked.plus(t.moved), from: t.to}
}

// Take gives out, for each of the users that the ledger knows, what it moved since the
// last acknowledged take; while that of the last call is not acknowledged the same
// again. What it gives out survives a crash; an error wraps store.ErrNotDurable then,
// and nothing was given out. Quotas don't see it. It waits for the disk.
func (l *Ledger) Take(now time.Time, keys ...flow.UserKey) ([]Taken, error) {
	l.saving.Lock()
	defer l.saving.Unlock()
	taken, opened, changes := l.openTakes(now, keys)
	if err := l.commit(now, changes); err != nil {
		for _, t := range opened {
			t.open = false
			t.seq--
		}
		return nil, err
	}
	return taken, nil
}

// openTakes is what all are given, and of those that get a new take what it is and how
// it is kept.
func (l *Ledger) openTakes(now time.Time, keys []flow.UserKey) (taken []Taken, opened []*take, changes store.Changes) {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken, opened, changes = make([]Taken, 0, len(keys)), make([]*take, 0, len(keys)), make(store.Changes, 0, takeSize*len(keys))
	var buf []byte
	for _, key := range keys {
		t := l.users[key]
		if t == nil {
			continue
		}
		if t.take == nil {
			t.take = new(take)
		}
		s := t.take
		if moved := t.moved().since(s.acked); !s.open && moved != (Moved{}) {
			s.seq++
			s.open, s.to, s.moved = true, now.UnixMilli(), moved
			opened = append(opened, s)
			buf = s.encode(buf[:0])
			changes.Set(store.Takes, Payer{Kind: ForUser, User: key}.key(), buf)
		}
		if s.open {
			taken = append(taken, Taken{key, s.seq, millis(s.from), millis(s.to), s.moved})
		} else {
			taken = append(taken, Taken{User: key, From: millis(s.from), To: now})
		}
	}
	return taken, opened, changes
}

// Ack acknowledges the last take of a user: the next one begins where it ended. To
// acknowledge it again does nothing; ErrSequence for any other. It is on disk when Ack
// returns nil. It waits for the disk.
func (l *Ledger) Ack(key flow.UserKey, sequence uint64, now time.Time) error {
	return l.AckAll([]Taken{{User: key, Sequence: sequence}}, now)
}

// AckAll acknowledges takes, by User and Sequence, all or none of them.
func (l *Ledger) AckAll(taken []Taken, now time.Time) error {
	l.saving.Lock()
	defer l.saving.Unlock()
	open, changes := make([]*take, 0, len(taken)), make(store.Changes, 0, takeSize*len(taken))
	var buf []byte
	l.mu.Lock()
	for _, k := range taken {
		var t *take
		var last uint64
		if of := l.users[k.User]; of != nil && of.take != nil {
			t, last = of.take, of.take.seq
		}
		if k.Sequence == 0 || k.Sequence != last {
			l.mu.Unlock()
			return fmt.Errorf("take %d of user %d: %w, which is %d", k.Sequence, k.User, ErrSequence, last)
		}
		if t.open {
			next := t.acknowledged()
			open = append(open, t)
			buf = next.encode(buf[:0])
			changes.Set(store.Takes, Payer{Kind: ForUser, User: k.User}.key(), buf)
		}
	}
	l.mu.Unlock()
	if len(open) == 0 {
		return nil
	}
	if err := l.opt.Store.Write(store.Batch{Changes: changes}, now); err != nil {
		return err
	}
	for _, t := range open {
		if t.open { // it is in the list once more
			*t = t.acknowledged()
		}
	}
	return nil
}
