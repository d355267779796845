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

	twice uint32 // sequence number after the last byte that was sent twice, or not far behind next
	super bool   // super-packets were sent
}

// begin says which sequence number the first byte has. Without it that is the first one
// that is noted, which may also be that of a probe of a closed window, one before it.
func (s *sentCounter) begin(seq uint32) { s.begun, s.next, s.twice = true, seq, seq }

// known reports whether all n bytes from seq on were sent before.
func (s *sentCounter) known(seq uint32, n int) bool {
	return s.begun && int32(seq+uint32(n)-s.next) <= 0
}

// second says that n bytes that are known were sent again, and returns how many of
// them were sent for the second time: not those that have been sent even more often.
func (s *sentCounter) second(seq uint32, n int) int {
	end := seq + uint32(n)
	d := int32(end - s.twice)
	if d <= 0 {
		return 0
	}
	s.twice = end
	return min(int(d), n)
}

// maxBehind is more than any window, and keeps twice comparable with what is new.
const maxBehind = 1 << 30

// note says that n payload bytes from seq on were sent, or that the device did not
// take them: they will be sent again. It returns how many times in a row these were
// sent again: 0 for new bytes.
func (s *sentCounter) note(seq uint32, n int, sent bool) (repeat int) {
	if !s.begun {
		s.begin(seq)
	}
	if !sent {
		return 0
	}
	end := seq + uint32(n)
	if d := int32(end - s.next); d > 0 {
		s.next = end
		s.total.Add(uint64(d))
		if s.next-s.twice > maxBehind {
			s.twice = s.next - maxBehind
		}
		return 0
	}
	if s.again != seq {
		s.again, s.repeat = seq, 0
	}
	s.repeat++
	return s.repeat
}
