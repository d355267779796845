package user

import (
	"encoding/binary"
	"errors"
	"time"
)

// How accounts, takes and rows are written: a byte with the version, then numbers as
// varints, most of which are small or 0. A time is in milliseconds since 1970; 0 is the
// zero time. What a later version adds comes at the end and is 0 where it is missing.
const recordVersion = 1

// About how long a record is, with its key.
const (
	accountSize = 128
	takeSize    = 64
)

var errBadRecord = errors.New("damaged record")

func appendMillis(b []byte, t time.Time) []byte {
	if t.IsZero() {
		return binary.AppendVarint(b, 0)
	}
	return binary.AppendVarint(b, t.UnixMilli())
}

func appendUints(b []byte, ns ...uint64) []byte {
	for _, n := range ns {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func (m Moved) encode(b []byte) []byte {
	return appendUints(b, m.Up, m.Down, m.ChargedUp, m.ChargedDown, m.WireRx, m.WireTx)
}

// encode leaves zeros at the end out.
func (v Volume) encode(b []byte) []byte {
	if v.ChargedUp|v.ChargedDown == 0 {
		return appendUints(b, v.Up, v.Down)
	}
	return appendUints(b, v.Up, v.Down, v.ChargedUp, v.ChargedDown)
}

func (t *tally) encode(b []byte) []byte {
	u := &t.usage
	b = appendUints(append(b, recordVersion), u.Up, u.Down, u.ChargedUp, u.ChargedDown, u.CarryUp, u.CarryDown, u.WireRx, u.WireTx, u.Extra)
	b = binary.AppendVarint(b, int64(u.Extended))
	b = appendMillis(appendMillis(appendMillis(b, u.FirstUse), u.LastSeen), u.PeriodStart)
	b = u.Earlier.encode(binary.AppendUvarint(b, u.Generation))
	for _, o := range []openSlot{t.hour, t.day} {
		b = appendUints(binary.AppendVarint(b, o.slot), o.Up, o.Down, o.ChargedUp, o.ChargedDown)
	}
	return t.lost.encode(b)
}

func (t *take) encode(b []byte) []byte {
	b = t.acked.encode(binary.AppendUvarint(append(b, recordVersion), t.seq))
	b = binary.AppendVarint(b, t.from)
	if t.open {
		b = t.moved.encode(binary.AppendVarint(b, t.to))
	}
	return b
}

// numbers reads varints one after the other, zeros where there are no more.
type numbers struct {
	b   []byte
	bad bool
}

func (n *numbers) uint() uint64 {
	if len(n.b) == 0 {
		return 0
	}
	v, size := binary.Uvarint(n.b)
	n.skip(size)
	return v
}

func (n *numbers) int() int64 {
	if len(n.b) == 0 {
		return 0
	}
	v, size := binary.Varint(n.b)
	n.skip(size)
	return v
}

func (n *numbers) skip(size int) {
	if size <= 0 {
		n.b, n.bad = nil, true
		return
	}
	n.b = n.b[size:]
}

func (n *numbers) millis() time.Time { return millis(n.int()) }

func millis(ms int64) time.Time {
	if ms != 0 {
		return time.UnixMilli(ms).UTC()
	}
	return time.Time{}
}

func (n *numbers) moved() Moved {
	return Moved{n.uint(), n.uint(), n.uint(), n.uint(), n.uint(), n.uint()}
}

func (n *numbers) volume() Volume {
	return Volume{n.uint(), n.uint(), n.uint(), n.uint()}
}

// versioned begins to read a record.
func versioned(b []byte) (*numbers, error) {
	if len(b) == 0 || b[0] != recordVersion {
		return nil, errBadRecord
	}
	return &numbers{b: b[1:]}, nil
}

func decodeTally(b []byte) (*tally, error) {
	n, err := versioned(b)
	if err != nil {
		return nil, err
	}
	t := new(tally)
	u := &t.usage
	for _, field := range []*uint64{&u.Up, &u.Down, &u.ChargedUp, &u.ChargedDown, &u.CarryUp, &u.CarryDown, &u.WireRx, &u.WireTx, &u.Extra} {
		*field = n.uint()
	}
	u.Extended = time.Duration(n.int())
	u.FirstUse, u.LastSeen, u.PeriodStart = n.millis(), n.millis(), n.millis()
	u.Generation = n.uint()
	u.Earlier = n.moved()
	t.hour = openSlot{n.int(), n.volume()}
	t.day = openSlot{n.int(), n.volume()}
	t.lost = n.moved()
	if n.bad {
		return nil, errBadRecord
	}
	return t, nil
}

func decodeTake(b []byte) (t take, err error) {
	n, err := versioned(b)
	if err != nil {
		return t, err
	}
	t = take{seq: n.uint(), acked: n.moved(), from: n.int()}
	if t.open = len(n.b) > 0; t.open {
		t.to, t.moved = n.int(), n.moved()
	}
	if n.bad {
		return take{}, errBadRecord
	}
	return t, nil
}

func decodeVolume(b []byte) Volume {
	n := numbers{b: b}
	return n.volume()
}
