package netstack

import "sync/atomic"

// sentCounter follows how many payload bytes of an endpoint have left as
// packets, by the sequence numbers that the link sees. A retransmission counts
// once. The endpoint's lock makes its callers one at a time; anyone may load.
type sentCounter struct {
	total atomic.Uint64
	next  uint32 // sequence number after the last new byte
	begun bool

	again  uint32 // sequence number that was last sent again
	repeat int    // how many times in a row
}

// note says that n payload bytes from seq on were sent, or that the device did not
// take them: they will be sent again. It returns how many times in a row these were
// sent again: 0 for new bytes.
func (s *sentCounter) note(seq uint32, n int, sent bool) (repeat int) {
	if !s.begun {
		s.begun, s.next = true, seq
	}
	if !sent {
		return 0
	}
	end := seq + uint32(n)
	if d := int32(end - s.next); d > 0 {
		s.next = end
		s.total.Add(uint64(d))
		return 0
	}
	if s.again != seq {
		s.again, s.repeat = seq, 0
	}
	s.repeat++
	return s.repeat
}
