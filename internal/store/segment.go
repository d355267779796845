package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// A series file holds the blocks of so many slots: hours of a day, and 32 days. Its
// number is the first slot divided by that.
var span = [...]int64{Hourly: 24, Daily: 32}

var seriesNames = [...]string{Hourly: "hourly-", Daily: "daily-"}

func segmentOf(s Series, slot int64) int64 {
	n := slot / span[s]
	if slot < n*span[s] {
		n--
	}
	return n
}

func segmentName(s Series, n int64) string { return seriesNames[s] + strconv.FormatInt(n, 10) }

func parseSegment(name string) (s Series, n int64, ok bool) {
	for s, prefix := range seriesNames {
		if number, ok := strings.CutPrefix(name, prefix); ok {
			n, err := strconv.ParseInt(number, 10, 64)
			return Series(s), n, err == nil
		}
	}
	return 0, 0, false
}

// segmentsOf gives the numbers of a series' files that have slots in [from, to).
func segmentsOf(valid map[string]int64, series Series, from, to int64) iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for name := range valid {
			s, n, ok := parseSegment(name)
			if ok && s == series && segmentOf(s, from) <= n && from < to && n <= segmentOf(s, to-1) && !yield(n) {
				return
			}
		}
	}
}

func decodeLength(b []byte) int64 {
	n, _ := binary.Uvarint(b)
	return int64(n)
}

func (b Block) size() int {
	n := frameHeader
	for _, r := range b.Rows {
		n += len(r.Key) + len(r.Value) + 2
	}
	return n
}

// appendBlock adds a block's frame: slot, then keys and values.
func appendBlock(b []byte, block Block) []byte {
	b, start := beginFrame(b)
	b = binary.AppendVarint(b, block.Slot)
	for _, r := range block.Rows {
		b = appendString(b, r.Key)
		b = append(binary.AppendUvarint(b, uint64(len(r.Value))), r.Value...)
	}
	return endFrame(b, start)
}

// appendSegment writes data behind the valid part of a series file, and returns how long
// that is then. What lies behind it, a crash left.
func appendSegment(path string, valid int64, data []byte) (length int64, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	valid = min(valid, info.Size())
	if err := f.Truncate(valid); err != nil {
		return 0, err
	}
	if _, err := f.WriteAt(data, valid); err != nil {
		return 0, err
	}
	return valid + int64(len(data)), f.Sync()
}

// readSegment calls f for the rows of a file's valid part, up to the first damage.
func readSegment(dir, name string, valid, from, to int64, f func(slot int64, key, value []byte)) error {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: missing", errDamaged)
	}
	if err != nil {
		return err
	}
	short := valid > int64(len(b))
	b = b[:min(valid, int64(len(b)))]
	for len(b) > 0 {
		payload, rest, err := nextFrame(b)
		if err != nil {
			return err
		}
		b = rest
		p := reader{b: payload}
		slot := p.varint()
		for slot >= from && slot < to && len(p.b) > 0 {
			key := p.bytes(p.uvarint())
			value := p.bytes(p.uvarint())
			if p.bad {
				return errDamaged
			}
			f(slot, key, value)
		}
	}
	if short {
		return errDamaged
	}
	return nil
}
