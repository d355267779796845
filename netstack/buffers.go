package netstack

import (
	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
)

// Buffers are how many bytes a TCP endpoint toward a client holds, each way. They
// grow from Recv and Send to their maxima while the traffic needs it.
type Buffers struct {
	Recv, RecvMax int
	Send, SendMax int
}

// DefaultBuffers are those of a Config without any. A window is half of its buffer, and
// with 0.5 % lost at 20 ms has to be several times what moves within that: what came
// after a lost segment takes room until the segment came again. With 2 MiB to receive
// such an upload had 0.31 of kernel forwarding, with 8 MiB 0.76 and 0.88.
var DefaultBuffers = Buffers{Recv: 128 << 10, RecvMax: 8 << 20, Send: 256 << 10, SendMax: 2 << 20}

const (
	// MinBuffer is the least that an endpoint may hold, in bytes.
	MinBuffer = 4 << 10
	// minWindow is the least that Within leaves of a receive buffer: a window of
	// half of it is some segments.
	minWindow = 16 << 10
	minChunk  = 16 << 10
)

// Within is b with maxima of a part of its own, and beginnings of twice that part:
// what a connection begins with is all that a slow reader ever uses. No send buffer
// is under least, no receive buffer under 16 KiB.
func (b Buffers) Within(part, least int) Buffers {
	w := Buffers{RecvMax: max(b.RecvMax/part, minWindow), SendMax: max(b.SendMax/part, least, MinBuffer)}
	w.Recv = min(b.Recv, max(2*b.Recv/part, minWindow), w.RecvMax)
	w.Send = min(b.Send, max(2*b.Send/part, least, MinBuffer), w.SendMax)
	return w
}

// SetBuffers has b hold for new connections and for those that live: what is
// larger shrinks, though it gives memory back only as its bytes move on; what is
// smaller may grow to the new maximum. A receive buffer shrinks as its client
// sends (see concede). It blocks for as long as it takes to look at each endpoint,
// and is not to be called twice at once.
func (s *Stack) SetBuffers(b Buffers) {
	s.setBuffers(b)
	for _, e := range s.net.RegisteredEndpoints() {
		if ep, ok := e.(*tcp.Endpoint); ok {
			// Locked, or an acknowledgement under way may set the size that it worked out
			// from the old maximum. With a size over the maximum gVisor tells of room only
			// if one acknowledgement makes all of it, so that what was not told is told now.
			ep.LockUser()
			if o := ep.SocketOptions(); o.GetSendBufferSize() > int64(b.SendMax) {
				o.SetSendBufferSize(int64(b.SendMax), false) // as an order of its user's gVisor would stop tuning it
			}
			ep.UnlockUser()
			switch ep.EndpointState() {
			case tcp.StateEstablished, tcp.StateCloseWait: // nobody writes before, and Accept would take it for the end of its handshake
				ep.WakeupWriters()
			}
		}
	}
}

// setBuffers has b hold for new connections, and its maxima for all.
func (s *Stack) setBuffers(b Buffers) {
	recv := tcpip.TCPReceiveBufferSizeRangeOption{Min: MinBuffer, Default: b.Recv, Max: b.RecvMax}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: MinBuffer, Default: b.Send, Max: b.SendMax}
	s.net.SetTransportProtocolOption(tcp.ProtocolNumber, &recv) //nolint:errcheck // fails for no range like these
	s.net.SetTransportProtocolOption(tcp.ProtocolNumber, &send) //nolint:errcheck
	s.recvMax.Store(int64(b.RecvMax))
	s.chunk.Store(int32(min(max(b.Send/2, minChunk), chunkBytes)))
	// A forwarder has the first receive window of its endpoints. How many dials
	// there may be is limited by the pending table.
	s.forwarder.Store(tcp.NewForwarder(s.net, b.Recv, 1<<30, s.handleRequest))
}

// concede takes the room of n bytes that are being read from a receive buffer over
// its maximum, and what their window cost. So its client's window closes from the
// left alone: what a client was told it may send has its room (RFC 9293, 3.8.6).
// Without it gVisor drops that, and repeated too: such a client gets along by its
// time-outs, if what came out of order does not take all of the room for good.
func (s *Stack) concede(o *tcpip.SocketOptions, n int) {
	if size, most := o.GetReceiveBufferSize(), s.recvMax.Load(); size > most {
		o.SetReceiveBufferSize(max(size-2*int64(n), most), false) // a window is half of its buffer
	}
}
