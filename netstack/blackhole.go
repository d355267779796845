package netstack

import (
	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"

	"gatewayd/netstack/wire"
)

// A link before the client may take less than the device and tell nobody: a black
// hole. What is sent again and again without an acknowledgement is then sent in
// smaller pieces, as RFC 4821 (7.7) and RFC 8899 want it and gVisor does not. The
// link suspects, with the endpoint locked; a turn of the relay lowers the size, for
// the rest of the connection. A client that is away for a moment, as in a cellar,
// looks the same: it costs the first step, and no second one ever after, since that
// needs more repetitions of the same segment.

// blackHoleRepeats is after how many repetitions of a segment the size goes down:
// the third leaves 1.4 s after the segment, from the shortest time-out on. After as
// many more in a row, without an acknowledgement between, it goes down again.
const blackHoleRepeats = 3

// safeMTUs are what is tried, in bytes: what every link has that carries IPv6
// (RFC 8200, 5), then what every IPv4 host takes (RFC 791).
var safeMTUs = [...]int{1280, 576}

// safeMTU is the packet to try instead of one of size bytes that was sent again
// repeat times in a row; 0 if there is none, or not now.
func safeMTU(size, repeat int, v4 bool) int {
	steps := safeMTUs[:1]
	if v4 {
		steps = safeMTUs[:]
	}
	i := repeat/blackHoleRepeats - 1
	if repeat%blackHoleRepeats != 0 || i < 0 || i >= len(steps) || steps[i] >= size {
		return 0
	}
	return steps[i]
}

// suspect is told of every packet with payload, of size bytes, by the link.
func (c *Conn) suspect(size, repeat int) {
	if mtu := safeMTU(size, repeat, c.tuple.client.Addr().Is4()); mtu > 0 {
		c.narrow.Store(int32(mtu))
		c.schedule()
	}
}

// shrink has the endpoint send packets of at most mtu bytes from now on.
func (c *Conn) shrink(mtu int) {
	header := wire.IPv4HeaderLen
	if c.tuple.client.Addr().Is6() {
		header = wire.IPv6HeaderLen
	}
	c.ep.HandleError(&tooLarge{mtu: uint32(mtu - header)}, nil) // asks a too-big for nothing but its size
}

// tooLarge is a packet-too-big that nobody sent, with what fits behind the IP header
// in bytes.
type tooLarge struct {
	tcpip.LocalSockError
	mtu uint32
}

// Kind says what it is like.
func (*tooLarge) Kind() stack.TransportErrorKind { return stack.PacketTooBigTransportError }

// Info is the size.
func (t *tooLarge) Info() uint32 { return t.mtu }
