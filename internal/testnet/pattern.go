package testnet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// The pattern: byte i of a stream depends on i alone and repeats after 2^67
// bytes, so that bytes lost, doubled or moved are found.

const patternChunk = 64 << 10 // bytes; a multiple of 8

// fillPattern fills b with the pattern from offset, a multiple of 8.
func fillPattern(b []byte, offset int64) {
	word := uint64(offset / 8)
	for ; len(b) >= 8; b, word = b[8:], word+1 {
		binary.LittleEndian.PutUint64(b, patternWord(word))
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], patternWord(word))
	copy(b, last[:])
}

// patternWord mixes i; it is a bijection.
func patternWord(i uint64) uint64 {
	i *= 0x9e3779b97f4a7c15
	i = (i ^ i>>30) * 0xbf58476d1ce4e5b9
	return i ^ i>>27
}

// WritePattern writes size bytes of the pattern, or without end if size is
// negative, and returns how many were written.
func WritePattern(w io.Writer, size int64) (int64, error) {
	buf := make([]byte, patternChunk)
	var done int64
	for size < 0 || done < size {
		chunk := buf
		if size >= 0 {
			chunk = buf[:min(patternChunk, size-done)]
		}
		fillPattern(chunk, done)
		n, err := w.Write(chunk)
		done += int64(n)
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// ReadPattern reads to the end and returns how many bytes came that follow the
// pattern; a byte that doesn't is an error, as is what r returns except io.EOF.
func ReadPattern(r io.Reader) (int64, error) {
	buf, want := make([]byte, patternChunk), make([]byte, patternChunk)
	var done int64
	for {
		n, err := io.ReadFull(r, buf)
		fillPattern(want[:n], done)
		if !bytes.Equal(buf[:n], want[:n]) {
			return done, fmt.Errorf("pattern: wrong byte between offsets %d and %d", done, done+int64(n))
		}
		done += int64(n)
		switch err {
		case nil:
		case io.EOF, io.ErrUnexpectedEOF:
			return done, nil
		default:
			return done, err
		}
	}
}
