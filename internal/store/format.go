package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// format is how records are written: a version, and for each version before it a
// function that makes its records the next one's. Frames are the same in all versions.
type format struct {
	version uint64
	migrate map[uint64]func(records) error
}

// current is version 1, the first.
var current = format{version: 1}

// magic begins a journal. A frame with the version follows, then the snapshot.
const magic = "gwstate\n"

// content is what a journal says.
type content struct {
	records  records
	at       time.Time // of the last commit
	version  uint64    // that it was written in
	size     int64     // of header and whole frames
	snapshot int64     // of header and snapshot
	whole    bool      // nothing follows, or nothing but a hole
}

func (f format) header(b []byte) []byte {
	b, start := beginFrame(append(b, magic...))
	return endFrame(binary.AppendUvarint(b, f.version), start)
}

// read takes a journal apart, up to the first damage behind the snapshot. The error wraps
// ErrNewer, or errDamaged where not even the snapshot can be read.
func (f format) read(b []byte) (c content, err error) {
	total := int64(len(b))
	if len(b) < len(magic) || string(b[:len(magic)]) != magic {
		return c, errDamaged
	}
	header, b, err := nextFrame(b[len(magic):])
	if err != nil {
		return c, err
	}
	if c.version, _ = binary.Uvarint(header); c.version > f.version {
		return c, fmt.Errorf("%w: format %d, this one knows %d", ErrNewer, c.version, f.version)
	}
	payload, b, err := nextFrame(b)
	if err != nil {
		return c, err
	}
	c.records = newRecords()
	kind, at, err := c.records.replay(payload)
	if err != nil || kind != snapshotFrame {
		return c, errDamaged
	}
	c.at, c.snapshot = at, total-int64(len(b))
	for len(b) > 0 {
		payload, rest, err := nextFrame(b)
		if err != nil || payload[0] != changesFrame {
			break
		}
		if _, c.at, err = c.records.replay(payload); err != nil {
			return c, err
		}
		b = rest
	}
	c.size, c.whole = total-int64(len(b)), hole(b)
	for v := c.version; v < f.version; v++ {
		if err := f.migrate[v](c.records); err != nil {
			return c, fmt.Errorf("from format %d: %w", v, errors.Join(errDamaged, err))
		}
	}
	return c, nil
}

// hole says whether b is what a file system shows for bytes that never reached the disk.
func hole(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
