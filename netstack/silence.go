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

// maxTimeouts are how many time-outs in a row, without a segment from the client, lead to
// one more repetition. The next one gives it up, 3 min 25 s after the first transmission
// from the shortest time-out on: about as long as the default keepalive takes with an
// idle client. Data, a FIN and the probe of a closed window count alike.
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

// giveUp has the client be reset: at once when the relay is over and only its FIN is
// left, else when what it sent was passed on.
func (c *Conn) giveUp() {
	c.clear(epSilent)
	if c.over {
		c.ep.Abort()
		return
	}
	c.fail(syscall.ETIMEDOUT, true, c.up == dirDone)
	c.set(epReadable)
}
