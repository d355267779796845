package wire

import (
	"encoding/binary"
	"math/bits"
)

const (
	maxTCPHeader = 60
	flagsAt      = 13 // in the TCP header
	flagCWR      = 0x80
)

// A Cutter cuts a TCP packet that is too large for its way into packets whose
// checksums are complete, as a network card does that offloads segmentation. The
// zero value is ready; one that is used again allocates nothing.
type Cutter struct {
	header [IPv6HeaderLen + maxTCPHeader]byte
	ip     int // bytes of the IP header
	size   int // bytes of both headers
	mss    int // payload bytes of each packet, at most
	flags  uint8
	bufs   [][]byte // what is left of the packet is bufs[at:]
	at     int
	parts  [][]byte
	begun  bool
	last   int // payload bytes of the packet before the next one
}

// Begin takes the packet that bufs hold one after the other: an IP header without
// IPv6 extensions, of ip bytes, and a TCP header, size bytes together. The bytes in
// bufs must stay as they are until the last Next.
func (c *Cutter) Begin(bufs [][]byte, ip, size, mss int) {
	c.bufs, c.at, c.parts = c.bufs[:0], 0, c.parts[:0]
	for _, b := range bufs {
		if len(b) > 0 {
			c.bufs = append(c.bufs, b)
		}
	}
	c.ip, c.size, c.mss = ip, min(size, len(c.header)), max(mss, 1)
	c.take(c.size)
	n := 0
	for _, b := range c.parts {
		n += copy(c.header[n:], b)
	}
	c.flags, c.last, c.begun = c.header[ip+flagsAt], 0, false
}

// take moves the next n bytes of the packet to parts, fewer at its end.
func (c *Cutter) take(n int) (taken int) {
	for taken < n && c.at < len(c.bufs) {
		b := c.bufs[c.at]
		if room := n - taken; len(b) > room {
			c.bufs[c.at] = b[room:]
			b = b[:room]
		} else {
			c.at++
		}
		taken += len(b)
		c.parts = append(c.parts, b)
	}
	return taken
}

// Next is the next packet, valid until the call after it; nil after the last one,
// and the packet is forgotten.
func (c *Cutter) Next() [][]byte {
	c.parts = append(c.parts[:0], c.header[:c.size])
	n := c.take(c.mss)
	if n == 0 && c.begun {
		clear(c.bufs)
		clear(c.parts[:cap(c.parts)])
		return nil
	}
	tcp := c.header[c.ip:c.size]
	if c.begun {
		c.advance()
	}
	c.begun, c.last = true, n
	tcp[flagsAt] = c.flags
	if c.at < len(c.bufs) {
		tcp[flagsAt] &^= FIN | PSH
	}
	c.flags &^= flagCWR // of the first one only (RFC 3168, 6.1.2)
	c.sums(n)
	return c.parts
}

// advance makes the header that of the packet after the last one.
func (c *Cutter) advance() {
	seq := c.header[c.ip+4:]
	binary.BigEndian.PutUint32(seq, binary.BigEndian.Uint32(seq)+uint32(c.last))
	if c.header[0]>>4 == 4 {
		id := c.header[4:]
		binary.BigEndian.PutUint16(id, binary.BigEndian.Uint16(id)+1)
	}
}

// sums fills in the lengths and checksums of a packet of n payload bytes.
func (c *Cutter) sums(n int) {
	h, length := c.header[:c.size], c.size-c.ip+n
	addresses := h[8:IPv6HeaderLen]
	if h[0]>>4 == 4 {
		binary.BigEndian.PutUint16(h[2:], uint16(c.ip+length))
		binary.BigEndian.PutUint16(h[10:], 0)
		binary.BigEndian.PutUint16(h[10:], ^Sum(h[:c.ip], 0))
		addresses = h[12:IPv4HeaderLen]
	} else {
		binary.BigEndian.PutUint16(h[4:], uint16(length))
	}
	tcp := h[c.ip:]
	binary.BigEndian.PutUint16(tcp[16:], 0)
	sum, odd := Sum(addresses, add(ProtoTCP, uint16(length))), false
	sum = add(sum, Sum(tcp, 0)) // a multiple of 4 bytes
	for _, b := range c.parts[1:] {
		s := Sum(b, 0)
		if odd {
			s = bits.ReverseBytes16(s) // its bytes are in the other halves (RFC 1071, 2B)
		}
		sum, odd = add(sum, s), odd != (len(b)%2 != 0)
	}
	binary.BigEndian.PutUint16(tcp[16:], ^sum)
}
