package store

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"slices"
	"time"
)

// A frame is its payload's length and CRC-32C, 4 bytes each, little endian, and the
// payload. Numbers in payloads are varints, strings have their length before them.
const frameHeader = 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// The first byte of a journal's payload.
const (
	snapshotFrame byte = 1 // every record; the first frame, and no other
	changesFrame  byte = 2
)

var errDamaged = errors.New("damaged")

// beginFrame leaves room for the header that endFrame fills.
func beginFrame(b []byte) (_ []byte, start int) {
	return append(b, make([]byte, frameHeader)...), len(b)
}

func endFrame(b []byte, start int) []byte {
	payload := b[start+frameHeader:]
	binary.LittleEndian.PutUint32(b[start:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(b[start+4:], crc32.Checksum(payload, castagnoli))
	return b
}

// nextFrame cuts the first frame off b. It fails if b does not begin with a whole one.
func nextFrame(b []byte) (payload, rest []byte, err error) {
	if len(b) < frameHeader {
		return nil, b, errDamaged
	}
	n, sum := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	if n == 0 || uint64(n) > uint64(len(b)-frameHeader) {
		return nil, b, errDamaged
	}
	payload = b[frameHeader : frameHeader+int(n)]
	if crc32.Checksum(payload, castagnoli) != sum {
		return nil, b, errDamaged
	}
	return payload, b[frameHeader+int(n):], nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendRecord(b []byte, bucket Bucket, key string, value []byte) []byte {
	b = appendString(append(b, byte(bucket)), key)
	if value == nil {
		return binary.AppendUvarint(b, 0)
	}
	return append(binary.AppendUvarint(b, uint64(len(value))+1), value...)
}

// appendChanges adds the frame of one commit.
func appendChanges(b []byte, at time.Time, changes ...Changes) []byte {
	n := frameHeader + 1 + binary.MaxVarintLen64
	for _, c := range changes {
		n += len(c)
	}
	b, start := beginFrame(slices.Grow(b, n))
	b = binary.AppendVarint(append(b, changesFrame), at.UnixMilli())
	for _, c := range changes {
		b = append(b, c...)
	}
	return endFrame(b, start)
}

// appendSnapshot adds the frame of all records.
func appendSnapshot(b []byte, at time.Time, r records) []byte {
	b, start := beginFrame(b)
	b = binary.AppendVarint(append(b, snapshotFrame), at.UnixMilli())
	for bucket, m := range r {
		for key, value := range m {
			b = appendRecord(b, Bucket(bucket), key, *value)
		}
	}
	return endFrame(b, start)
}

// reader takes a payload apart. Once it ran over the end everything it gives is zero.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	r.skip(n)
	return v
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	r.skip(n)
	return v
}

func (r *reader) skip(n int) {
	if n <= 0 {
		r.bad, r.b = true, nil
		return
	}
	r.b = r.b[n:]
}

func (r *reader) byte() byte {
	if len(r.b) == 0 {
		r.bad = true
		return 0
	}
	c := r.b[0]
	r.b = r.b[1:]
	return c
}

// bytes gives the next n bytes, which are the payload's.
func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.bad, r.b = true, nil
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// change gives the next change, key and value of which are the payload's; a nil value
// deletes the record.
func (r *reader) change() (b Bucket, key, value []byte) {
	b, key = Bucket(r.byte()), r.bytes(r.uvarint())
	if n := r.uvarint(); n > 0 {
		value = r.bytes(n - 1)
	}
	return b, key, value
}

// replay makes the changes of a journal's payload, up to the first that is damaged.
func (r records) replay(payload []byte) (kind byte, at time.Time, err error) {
	p := reader{b: payload}
	kind, at = p.byte(), time.UnixMilli(p.varint()).UTC()
	r.apply(&p)
	if p.bad {
		return kind, at, errDamaged
	}
	return kind, at, nil
}

// apply makes the changes that p has left.
func (r records) apply(p *reader) {
	for len(p.b) > 0 {
		if b, key, value := p.change(); !p.bad {
			r.set(b, key, value)
		}
	}
}
