package netstack

import (
	"syscall"

	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
)

// A client that answers nothing while something is sent again and again is gone.
// gVisor asks instead how often a segment was sent, and of the super-packets here
// one segment is up to 64 KiB: a client that takes it piece by piece, since it reads
// slowly or its link loses much, is not silent, and would be reset in the middle.
// The link counts, with the endpoint locked; a turn of the relay gives the client up.

// maxTimeouts of retransmissions in a row, without a segment from the client, are
// 3 min 25 s from the shortest one on: about as long as the default keepalive takes
// with an idle client. Data, a FIN and the probe of a closed window count alike.
const maxTimeouts = 9

// silence counts them. The endpoint's lock guards it.
type silence struct {
	heard    uint64 // segments that came from the client
	timeouts uint64 // gVisor's so far
	before   uint64 // of these, before the client was heard last
}

// note takes the present counts, and returns how many time-outs the client has been
// silent for.
func (s *silence) note(heard, timeouts uint64) uint64 {
	if heard != s.heard {
		s.heard, s.before = heard, s.timeouts
	}
	s.timeouts = timeouts
	return timeouts - s.before
}

// listen is called by the link for every packet that a time-out may have sent.
func (c *Conn) listen() {
	s := c.ep.Stats().(*tcp.Stats)
	if c.silence.note(s.SegmentsReceived.Value(), s.SendErrors.Timeouts.Value()) > maxTimeouts {
		c.set(epSilent)
		c.schedule()
	}
}

// giveUp resets the client, also when the relay is over and only its FIN is left.
func (c *Conn) giveUp() {
	c.clear(epSilent)
	c.fail(syscall.ETIMEDOUT, true, c.up == dirDone)
	c.ep.Abort()
}
