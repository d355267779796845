package user

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"
)

// A slot is an hour since 1970 or a day of the calendar, counted from 1970-01-01. A
// payer's open slot is in its account. Traffic of another slot closes it: it becomes a
// row of the store, committed together with the account that no longer has it. A clock
// that goes back merely makes another row of a slot that had one: rows are added up.
type slots struct{ hour, day int64 }

func (l *Ledger) slots(t time.Time) slots {
	return slots{floorDiv(t.Unix(), 3600), dayOf(t.In(l.opt.Zone))}
}

// dayOf is the number of the calendar day that t shows.
func dayOf(t time.Time) int64 {
	y, m, d := t.Date()
	return floorDiv(time.Date(y, m, d, 0, 0, 0, 0, time.UTC).Unix(), 86400)
}

func floorDiv(n, by int64) int64 {
	q := n / by
	if n < q*by {
		q--
	}
	return q
}

// begins is when a slot begins.
func (l *Ledger) begins(s store.Series, slot int64) time.Time {
	if s == store.Hourly {
		return time.Unix(slot*3600, 0).In(l.opt.Zone)
	}
	y, m, d := time.Unix(slot*86400, 0).UTC().Date()
	return time.Date(y, m, d, 0, 0, 0, 0, l.opt.Zone)
}

// Volume is payload and what was charged for it, in bytes.
type Volume struct {
	Up, Down, ChargedUp, ChargedDown uint64
}

func (v *Volume) add(w Volume) {
	v.Up += w.Up
	v.Down += w.Down
	v.ChargedUp += w.ChargedUp
	v.ChargedDown += w.ChargedDown
}

func (m Moved) volume() Volume { return Volume{m.Up, m.Down, m.ChargedUp, m.ChargedDown} }

type openSlot struct {
	slot int64
	Volume
}

type closedSlot struct {
	payer  Payer
	series store.Series
	openSlot
}

// enter counts what moved in a slot of time.
func (l *Ledger) enter(p Payer, open *openSlot, s store.Series, slot int64, m Moved) {
	if open.slot != slot {
		l.close(p, open, s)
		open.slot = slot
	}
	open.add(m.volume())
}

func (l *Ledger) close(p Payer, open *openSlot, s store.Series) {
	if open.Volume != (Volume{}) {
		l.closed = append(l.closed, closedSlot{p, s, *open})
	}
	*open = openSlot{}
}

// blocksOf sorts closed slots into blocks.
func blocksOf(closed []closedSlot) (blocks []store.Block) {
	slices.SortStableFunc(closed, func(a, b closedSlot) int {
		if a.series != b.series {
			return int(a.series) - int(b.series)
		}
		return int(max(-1, min(1, a.slot-b.slot)))
	})
	for i := range closed {
		c := &closed[i]
		if n := len(blocks); n == 0 || blocks[n-1].Series != c.series || blocks[n-1].Slot != c.slot {
			blocks = append(blocks, store.Block{Series: c.series, Slot: c.slot})
		}
		b := &blocks[len(blocks)-1]
		b.Rows = append(b.Rows, store.Row{Key: c.payer.key(), Value: c.Volume.encode(nil)})
	}
	return blocks
}

// Point is what moved from Start until the next one's, or for one Step.
type Point struct {
	Start time.Time
	Volume
}

// Query asks for series.
type Query struct {
	From, To time.Time                             // the slots that begin in [From, To)
	Step     time.Duration                         // of a point; whole days, or hours below a day
	Label    func(Payer) (series string, use bool) // whose series what a payer moved is added to
}

// Series gives for each label that was seen its points in the order of time, without
// those in which nothing moved. Damaged files are left out, and told in the error
// beside the rest. It reads the disk, and waits for a commit that is under way.
func (l *Ledger) Series(q Query, now time.Time) (map[string][]Point, error) {
	series, slot, keep := store.Hourly, time.Hour, l.opt.Hourly
	if q.Step >= aDay {
		series, slot, keep = store.Daily, aDay, l.opt.Daily
	}
	if q.Step < slot || q.Step%slot != 0 {
		return nil, fmt.Errorf("step %v: want whole hours below a day, or whole days", q.Step)
	}
	if oldest := now.Add(-keep); q.From.Before(oldest) {
		q.From = oldest
	}
	s := sums{label: q.Label, from: l.slotFrom(series, q.From), per: int64(q.Step / slot)}
	s.payers, s.points = make(map[string]map[int64]*Volume), make(map[string]map[int64]*Volume)
	to := l.slotFrom(series, q.To)

	l.saving.Lock() // so that nothing is in the store and open too
	defer l.saving.Unlock()
	for _, c := range l.open(series, s.from, to) {
		s.add(c.slot, []byte(c.payer.key()), c.Volume)
	}
	err := l.opt.Store.Rows(series, s.from, to, func(at int64, key, value []byte) { s.add(at, key, decodeVolume(value)) })

	points := make(map[string][]Point, len(s.points))
	for label, of := range s.points {
		for _, n := range slices.Sorted(maps.Keys(of)) {
			points[label] = append(points[label], Point{l.begins(series, s.from+n*s.per), *of[n]})
		}
	}
	return points, err
}

// sums adds rows up.
type sums struct {
	label     func(Payer) (string, bool)
	from, per int64                        // the first slot, and how many are a point
	payers    map[string]map[int64]*Volume // by key: which of points; nil if it is not asked for
	points    map[string]map[int64]*Volume // by label and number
}

func (s *sums) add(slot int64, key []byte, v Volume) {
	of, seen := s.payers[string(key)]
	if !seen {
		if p, ok := payerOf(key); ok {
			if label, use := s.label(p); use {
				if of = s.points[label]; of == nil {
					of = make(map[int64]*Volume)
					s.points[label] = of
				}
			}
		}
		s.payers[string(key)] = of
	}
	if of == nil {
		return
	}
	n := (slot - s.from) / s.per
	if of[n] == nil {
		of[n] = new(Volume)
	}
	of[n].add(v)
}

// slotFrom is the first slot that does not begin before t.
func (l *Ledger) slotFrom(s store.Series, t time.Time) int64 {
	at := l.slots(t)
	slot := at.hour
	if s == store.Daily {
		slot = at.day
	}
	if l.begins(s, slot).Before(t) {
		slot++
	}
	return slot
}

// open is what of the slots in [from, to) is not in the store yet.
func (l *Ledger) open(s store.Series, from, to int64) (found []closedSlot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	add := func(p Payer, t *tally) {
		o := t.hour
		if s == store.Daily {
			o = t.day
		}
		if o.Volume != (Volume{}) && o.slot >= from && o.slot < to {
			found = append(found, closedSlot{p, s, o})
		}
	}
	for key, t := range l.users {
		add(Payer{Kind: ForUser, User: key}, t)
	}
	for p, t := range l.named {
		add(p, t)
	}
	for _, c := range l.closed {
		if c.series == s && c.slot >= from && c.slot < to {
			found = append(found, c)
		}
	}
	return found
}

// key is how a payer is called in the store.
func (p Payer) key() string {
	b := make([]byte, 0, 1+binary.MaxVarintLen64)
	b = append(b, byte(p.Kind))
	if p.Kind == ForUser {
		return string(binary.AppendUvarint(b, uint64(p.User)))
	}
	return string(append(b, p.Name...))
}

func payerOf(key []byte) (p Payer, ok bool) {
	if len(key) == 0 {
		return p, false
	}
	p.Kind = Kind(key[0])
	if p.Kind == ForUser {
		id, n := binary.Uvarint(key[1:])
		p.User = flow.UserKey(id)
		return p, n > 0
	}
	p.Name = string(key[1:])
	return p, p.Kind == ForDevice || p.Kind == ForOutbound
}
