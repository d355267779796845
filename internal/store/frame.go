package store

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
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

func appendRecord(b []byte, c Change) []byte {
	b = appendString(append(b, byte(c.Bucket)), c.Key)
	if c.Value == nil {
		return binary.AppendUvarint(b, 0)
	}
	return append(binary.AppendUvarint(b, uint64(len(c.Value))+1), c.Value...)
}

// sizeOf is at least how long the frame of changes is.
func sizeOf(changes []Change) int {
	n := frameHeader + 1 + binary.MaxVarintLen64
	for i := range changes {
		n += 1 + len(changes[i].Key) + len(changes[i].Value) + 2*binary.MaxVarintLen32
	}
	return n
}

// appendChanges adds the frame of one commit.
func appendChanges(b []byte, at time.Time, changes []Change) []byte {
	b, start := beginFrame(b)
	b = binary.AppendVarint(append(b, changesFrame), at.UnixMilli())
	for _, c := range changes {
		b = appendRecord(b, c)
	}
	return endFrame(b, start)
}

// appendSnapshot adds the frame of all records.
func appendSnapshot(b []byte, at time.Time, r records) []byte {
	b, start := beginFrame(b)
	b = binary.AppendVarint(append(b, snapshotFrame), at.UnixMilli())
	for bucket, m := range r {
		for key, value := range m {
			b = appendRecord(b, Change{Bucket(bucket), key, value})
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

// apply makes the changes of a journal's payload.
func (r records) apply(payload []byte) (kind byte, at time.Time, err error) {
	p := reader{b: payload}
	kind, at = p.byte(), time.UnixMilli(p.varint()).UTC()
	for len(p.b) > 0 {
		bucket := Bucket(p.byte())
		key := string(p.bytes(p.uvarint()))
		n := p.uvarint()
		if p.bad {
			break
		}
		if n == 0 {
			r.set(bucket, key, nil)
			continue
		}
		value := append([]byte{}, p.bytes(n-1)...)
		if !p.bad {
			r.set(bucket, key, value)
		}
	}
	if p.bad {
		return kind, at, errDamaged
	}
	return kind, at, nil
}
