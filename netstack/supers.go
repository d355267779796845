package netstack

import (
	"sync"
	"sync/atomic"

	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"

	"gatewayd/netstack/wire"
)

// SuperPackets are what became of the TCP super-packets that a Stack sent: whether
// whoever cuts them, behind the device, does. Numbers only grow.
type SuperPackets struct {
	Sent   uint64 // payload bytes in super-packets, each once
	Lost   uint64 // payload bytes of their flows that had to be sent again, each once
	Losses uint64 // packets that these were sent in
}

// SuperPackets tells the present numbers.
func (s *Stack) SuperPackets() SuperPackets {
	c := &s.link.supers
	return SuperPackets{Sent: c.sent.Load(), Lost: c.lost.Load(), Losses: c.losses.Load()}
}

// superCounter is SuperPackets as they are counted.
type superCounter struct{ sent, lost, losses atomic.Uint64 }

// again counts n bytes that were sent for the second time in a packet.
func (s *superCounter) again(n int) {
	if n > 0 {
		s.lost.Add(uint64(n))
		s.losses.Add(1)
	}
}

// send writes a packet of c, if it is one of a relay's, whole or cut. Connections
// keep what the device could do when they began, so that it may have to be done
// here. What is sent again is cut, too: where super-packets get lost, and there are
// drivers that lose every one, the second try arrives.
func (l *link) send(pkt *stack.PacketBuffer, bufs [][]byte, c *Conn) error {
	o := offloadOf(pkt)
	if o.Flags != 0 && !l.dev.CanGSO() {
		return l.cut(pkt, bufs)
	}
	if o.GSO != GSONone && c != nil {
		n := pkt.Data().Size()
		if c.sent.known(header.TCP(pkt.TransportHeader().Slice()).SequenceNumber(), n) {
			return l.cut(pkt, bufs)
		}
		l.supers.sent.Add(uint64(n))
		c.sent.super = true
	}
	return l.dev.Write(pkt.Hash, bufs, o)
}

var cutters = sync.Pool{New: func() any { return new(wire.Cutter) }}

// cut writes a TCP packet as packets that leave nothing to be done. It goes on
// after an error, and returns the first one.
func (l *link) cut(pkt *stack.PacketBuffer, bufs [][]byte) (first error) {
	ip := len(pkt.NetworkHeader().Slice())
	c := cutters.Get().(*wire.Cutter)
	c.Begin(bufs, ip, ip+len(pkt.TransportHeader().Slice()), int(pkt.GSOOptions.MSS))
	for p := c.Next(); p != nil; p = c.Next() {
		if err := l.dev.Write(pkt.Hash, p, Offload{}); err != nil && first == nil {
			first = err
		}
	}
	cutters.Put(c)
	return first
}
