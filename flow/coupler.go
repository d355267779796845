package flow

// MaxSegments is how many datagrams are sent as one at most: what a UDP_SEGMENT message
// holds before Linux 6.9 (UDP_MAX_SEGMENTS).
const MaxSegments = 64

// Coupler tells which trains can go end to end as one: equal datagrams, of which
// only the last one is shorter, and none is empty. That they have one peer and one
// way of being sent is the caller's to see. The zero value is ready for the first.
type Coupler struct {
	Segment int // bytes of each datagram but the last one
	Count   int // datagrams
	Bytes   int // of all datagrams
}

// Couple adds the datagrams of payload, which are segment bytes each but perhaps
// the last one (0: payload is one datagram), and reports whether it did: not if the
// whole were no train, or of more than MaxSegments datagrams or maxBytes.
func (c *Coupler) Couple(payload []byte, segment, maxBytes int) bool {
	t := Train{Payload: payload, Segment: segment}
	n, size := t.Count(), len(payload)
	if n > 1 {
		size = segment
	}
	switch {
	case c.Count == 0:
		c.Segment = size
	case size == 0, c.Bytes != c.Count*c.Segment, c.Segment == 0: // an empty one, or a short one came last
		return false
	case size != c.Segment && (n > 1 || size > c.Segment):
		return false
	case c.Count+n > MaxSegments || c.Bytes+len(payload) > maxBytes:
		return false
	}
	c.Count += n
	c.Bytes += len(payload)
	return true
}

// SameWay reports that two trains have one peer and are sent alike.
func (t *Train) SameWay(other *Train) bool {
	return t.TClass == other.TClass && t.DontFragment == other.DontFragment && t.Peer == other.Peer
}
