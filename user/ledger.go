package user

import (
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"
)

// Ledger counts what moved, over restarts: for each user its Usage, and for users,
// devices without a user and outbounds series of hours and days. For billing, takes of
// a user's traffic. It never moves a quota: it only hears of usage.
//
// Everything is counted in memory. A commit writes what changed since the last one, in
// one transaction; where the disk takes nothing the store holds it and tries again. So
// a crash loses what moved since the last commit, and nothing is ever counted twice.
//
// The methods that wait for the disk say so; none of the others does.
type Ledger struct {
	opt LedgerOptions

	saving sync.Mutex // from the look at what changed until it is on disk; before mu

	mu     sync.Mutex
	users  map[flow.UserKey]*tally
	named  map[Payer]*tally // devices and outbounds
	dirty  []dirtyTally
	closed []closedSlot // not committed

	pruned int64 // the day on which old series were deleted last; guarded by saving
}

// LedgerOptions are what a Ledger needs.
type LedgerOptions struct {
	Store  *store.Store
	Hourly time.Duration  // how long hours are kept; 0: 14 days
	Daily  time.Duration  // how long days are kept; 0: 400 days
	Zone   *time.Location // of the days; nil: the host's
}

const (
	aDay = 24 * time.Hour

	// maxNamed bounds devices and outbounds: the one that was not seen for longest goes.
	maxNamed = 4096
)

// Payer is who traffic is counted for.
type Payer struct {
	Kind Kind
	User flow.UserKey // of ForUser
	Name string       // of the others: a flow.Device's name, an outbound's tag
}

// Kind is what a Payer is.
type Kind byte

// The kinds; their letters are written to disk.
const (
	ForUser     Kind = 'u'
	ForDevice   Kind = 'd' // without a user
	ForOutbound Kind = 'o'
)

// tally is one payer's account.
type tally struct {
	dirty     bool // it is in Ledger.dirty
	hour, day openSlot
	usage     Usage // of devices and outbounds Up, Down, FirstUse and LastSeen only
	lost      Moved // of usage's lifetime, by somebody who made it fall
	take      *take // nil: there was none yet; guarded by Ledger.saving
}

// moved is everything that was ever counted.
func (t *tally) moved() Moved { return t.lost.plus(t.usage.Lifetime()) }

type dirtyTally struct {
	payer Payer
	*tally
}

// NewLedger makes a ledger with what the store has.
func NewLedger(o LedgerOptions) (*Ledger, error) {
	if o.Hourly == 0 {
		o.Hourly = 14 * aDay
	}
	if o.Daily == 0 {
		o.Daily = 400 * aDay
	}
	if o.Hourly < time.Hour || o.Daily < aDay {
		return nil, fmt.Errorf("ledger: hourly %v, daily %v: at least an hour and a day", o.Hourly, o.Daily)
	}
	if o.Zone == nil {
		o.Zone = time.Local
	}
	l := &Ledger{opt: o, users: make(map[flow.UserKey]*tally), named: make(map[Payer]*tally)}
	var failed []error
	o.Store.Each(store.Usage, func(key string, value []byte) {
		p, ok := payerOf([]byte(key))
		t, err := decodeTally(value)
		if !ok || err != nil {
			failed = append(failed, fmt.Errorf("usage of %q: %w", key, errors.Join(err, errBadRecord)))
			return
		}
		if p.Kind == ForUser {
			l.users[p.User] = t
		} else {
			l.named[p] = t
		}
	})
	o.Store.Each(store.Takes, func(key string, value []byte) {
		p, ok := payerOf([]byte(key))
		t, err := decodeTake(value)
		if !ok || err != nil {
			failed = append(failed, fmt.Errorf("take of %q: %w", key, errors.Join(err, errBadRecord)))
			return
		}
		l.user(p.User).take = &t
	})
	if err := errors.Join(failed...); err != nil {
		return nil, err
	}
	return l, nil
}

// Usage is what a user's usage was when it was observed last, also in an earlier run;
// zero if it never was.
func (l *Ledger) Usage(key flow.UserKey) (Usage, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := l.users[key]; t != nil {
		return t.usage, nil
	}
	return Usage{}, nil
}

// Observe says what usages are now. The usages are read once, during the call.
func (l *Ledger) Observe(usages iter.Seq2[flow.UserKey, Usage], now time.Time) {
	at := l.slots(now)
	for key, u := range usages {
		l.mu.Lock()
		l.observe(key, &u, at)
		l.mu.Unlock()
	}
}

// user is a user's account, a new one if there is none.
func (l *Ledger) user(key flow.UserKey) *tally {
	t := l.users[key]
	if t == nil {
		t = new(tally)
		l.users[key] = t
	}
	return t
}

func (l *Ledger) observe(key flow.UserKey, u *Usage, at slots) {
	t := l.user(key)
	if t.usage == *u {
		return
	}
	old, life := t.usage.Lifetime(), u.Lifetime()
	m := life.since(old)
	if most := old.plus(m); most != life {
		t.lost = t.lost.plus(most.since(life))
	}
	l.count(Payer{Kind: ForUser, User: key}, t, m, at)
	t.usage = *u
}

// Add counts payload bytes of a device without a user or of an outbound.
func (l *Ledger) Add(kind Kind, name string, up, down uint64, now time.Time) {
	if up|down == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	p := Payer{Kind: kind, Name: name}
	t := l.named[p]
	if t == nil {
		l.makeRoom()
		t = new(tally)
		t.usage.FirstUse = now
		l.named[p] = t
	}
	l.count(p, t, Moved{Up: up, Down: down}, l.slots(now))
	t.usage.Up += up
	t.usage.Down += down
	t.usage.LastSeen = now
}

// count adds what moved to a payer's account and marks that.
func (l *Ledger) count(p Payer, t *tally, m Moved, at slots) {
	l.enter(p, &t.hour, store.Hourly, at.hour, m)
	l.enter(p, &t.day, store.Daily, at.day, m)
	if !t.dirty {
		t.dirty = true
		l.dirty = append(l.dirty, dirtyTally{p, t})
	}
}

// makeRoom lets the device or outbound go that was not seen for longest, if there are too many.
func (l *Ledger) makeRoom() {
	if len(l.named) < maxNamed {
		return
	}
	var oldest Payer
	var seen time.Time
	for p, t := range l.named {
		if oldest == (Payer{}) || t.usage.LastSeen.Before(seen) {
			oldest, seen = p, t.usage.LastSeen
		}
	}
	l.drop(oldest, l.named[oldest])
}

// drop takes a payer out of the ledger; its past stays in the series.
func (l *Ledger) drop(p Payer, t *tally) {
	if t == nil {
		return
	}
	l.close(p, &t.hour, store.Hourly)
	l.close(p, &t.day, store.Daily)
	if p.Kind == ForUser {
		delete(l.users, p.User)
	} else {
		delete(l.named, p)
	}
	l.dirty = append(l.dirty, dirtyTally{payer: p})
}

// Forget drops a user's usage and takes; its series stay until they are old. It is on
// disk with the next commit. It waits for the one that is under way.
func (l *Ledger) Forget(key flow.UserKey) {
	l.saving.Lock() // so that no take of it is
	defer l.saving.Unlock()
	l.forget(key)
}

func (l *Ledger) forget(key flow.UserKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(Payer{Kind: ForUser, User: key}, l.users[key])
}

// Flush commits what changed since the last commit. An error, which wraps
// store.ErrNotDurable, says that it is in memory only, to be tried again with a later
// call. It waits for the disk.
func (l *Ledger) Flush(now time.Time) error {
	l.saving.Lock()
	defer l.saving.Unlock()
	return l.flush(now)
}

func (l *Ledger) flush(now time.Time) error {
	err := l.commit(now, nil)
	if today := l.slots(now).day; err == nil && today != l.pruned {
		l.pruned = today
		err = l.prune(now)
	}
	return err
}

// commit commits what changed, and takes with it: these are on disk if it returns nil,
// and else nowhere. So after a crash the accounts are not behind the takes.
func (l *Ledger) commit(now time.Time, takes store.Changes) error {
	l.mu.Lock()
	b := l.changes()
	l.mu.Unlock()
	if len(takes) == 0 {
		return l.opt.Store.Keep(b, now)
	}
	accounts := len(b.Changes)
	b.Changes = append(b.Changes, takes...) // behind what may delete older ones
	err := l.opt.Store.Write(b, now)
	if err != nil {
		b.Changes = b.Changes[:accounts]
		_ = l.opt.Store.Keep(b, now) // in memory
	}
	return err
}

// changes are what has to be committed, which counts as committed then.
func (l *Ledger) changes() (b store.Batch) {
	b.Changes = make(store.Changes, 0, accountSize*len(l.dirty))
	var buf []byte
	for _, d := range l.dirty {
		key := d.payer.key()
		if d.tally == nil {
			b.Changes.Set(store.Usage, key, nil)
			if d.payer.Kind == ForUser {
				b.Changes.Set(store.Takes, key, nil)
			}
			continue
		}
		d.dirty = false
		buf = d.encode(buf[:0])
		b.Changes.Set(store.Usage, key, buf)
	}
	b.Blocks = blocksOf(l.closed)
	l.closed = nil
	if n := len(l.dirty); cap(l.dirty) > max(1024, 4*n) {
		l.dirty = nil // after a rush
	}
	clear(l.dirty)
	l.dirty = l.dirty[:0]
	return b
}

// prune deletes series that are old, and devices and outbounds that were not seen since.
func (l *Ledger) prune(now time.Time) error {
	l.mu.Lock()
	for p, t := range l.named {
		if t.usage.LastSeen.Before(now.Add(-l.opt.Daily)) {
			l.drop(p, t)
		}
	}
	l.mu.Unlock()
	return errors.Join(
		l.opt.Store.Forget(store.Hourly, l.slots(now.Add(-l.opt.Hourly)).hour, now),
		l.opt.Store.Forget(store.Daily, l.slots(now.Add(-l.opt.Daily)).day, now),
	)
}
