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
// A take becomes open, and acknowledged, on disk before anybody is told.
type take struct {
	seq   uint64
	acked Moved // of all that ever moved, what acknowledged takes told
	from  time.Time
	open  bool
	to    time.Time // of the open one
	moved Moved
}

// Take gives out, for each of the users that the ledger knows, what it moved since the
// last acknowledged take; while that of the last call is not acknowledged the same
// again. What it gives out survives a crash; an error wraps store.ErrNotDurable then,
// and nothing was given out. Quotas don't see it. It waits for the disk.
func (l *Ledger) Take(now time.Time, keys ...flow.UserKey) ([]Taken, error) {
	l.saving.Lock()
	defer l.saving.Unlock()
	next, taken := l.nextTakes(now, keys)
	// First what was moved, so that after a crash the accounts are not behind the take.
	if err := l.flush(now); err != nil {
		return nil, err
	}
	if err := l.saveTakes(next, now); err != nil {
		return nil, err
	}
	return taken, nil
}

// nextTakes are the takes as they are to be, of those users that get a new one, and
// what all are given.
func (l *Ledger) nextTakes(now time.Time, keys []flow.UserKey) (next map[flow.UserKey]take, taken []Taken) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, taken = make(map[flow.UserKey]take), make([]Taken, 0, len(keys))
	for _, key := range keys {
		t := l.users[key]
		if t == nil {
			continue
		}
		s := l.takes[key]
		if moved := t.moved().since(s.acked); !s.open && moved != (Moved{}) {
			s.seq++
			s.open, s.to, s.moved = true, now.Truncate(time.Millisecond).UTC(), moved
			next[key] = s
		}
		if s.open {
			taken = append(taken, Taken{key, s.seq, s.from, s.to, s.moved})
		} else {
			taken = append(taken, Taken{User: key, From: s.from, To: now})
		}
	}
	return next, taken
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
	next := make(map[flow.UserKey]take, len(taken))
	l.mu.Lock()
	for _, k := range taken {
		s := l.takes[k.User]
		if k.Sequence == 0 || k.Sequence != s.seq {
			l.mu.Unlock()
			return fmt.Errorf("take %d of user %d: %w, which is %d", k.Sequence, k.User, ErrSequence, s.seq)
		}
		if s.open {
			next[k.User] = take{seq: s.seq, acked: s.acked.plus(s.moved), from: s.to}
		}
	}
	l.mu.Unlock()
	return l.saveTakes(next, now)
}

// saveTakes makes takes hold, on disk and then in memory.
func (l *Ledger) saveTakes(next map[flow.UserKey]take, now time.Time) error {
	if len(next) == 0 {
		return nil
	}
	b := store.Batch{Changes: make([]store.Change, 0, len(next))}
	for key, t := range next {
		b.Changes = append(b.Changes, store.Change{Bucket: store.Takes, Key: Payer{Kind: ForUser, User: key}.key(), Value: t.encode(nil)})
	}
	if err := l.opt.Store.Write(b, now); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, t := range next {
		l.takes[key] = t
	}
	return nil
}
