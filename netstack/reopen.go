package netstack

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/sagernet/gvisor/pkg/buffer"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"

	"gatewayd/netstack/wire"
)

// A client may use the ports of a connection again that has just ended for it. The
// stack gives a SYN to the endpoint as long as there is one: in TIME_WAIT that would
// ignore it, and where a reset waits to be processed the SYN behind it would be
// answered by a reset. So the endpoint in TIME_WAIT ends, as Linux and RFC 6191 have
// it, and a SYN toward another one waits beside the stack, for a moment, and so does
// one that follows the reset of an attempt whose dial is just ending: the device's
// reader keeps it in reopened, and the goroutine of reopenAll delivers it once the
// way is free. An endpoint that stays gets it too, and challenges it (RFC 5961).

const (
	maxReopens = 64                     // SYNs that wait; what is more is delivered at once
	reopenWait = 20 * time.Millisecond  // from the SYN on, at most
	reopenLook = 500 * time.Microsecond // between looks for the endpoint
)

// reopening is a SYN that waits.
type reopening struct {
	tuple   tuple
	isn     uint32
	version uint8 // of IP
	syn     buffer.Buffer
	until   time.Time
}

// reopens keeps packet i of the batch, a SYN, if it has to wait.
func (s *Stack) reopens(b *Batch, i int, p *wire.Packet) bool {
	head, _, _ := b.Packet(i)
	r := reopening{
		tuple:   tuple{client: p.Source(), dest: p.Destination()},
		isn:     binary.BigEndian.Uint32(head[p.HeaderLen+4:]),
		version: p.Version,
		until:   time.Now().Add(reopenWait),
	}
	if !s.occupied(r.tuple, r.isn) {
		return false
	}
	r.syn = b.take(i, p.Length)
	select {
	case s.reopened <- r:
	default:
		s.deliverIP(r.version, r.syn)
	}
	return true
}

// occupied reports that a connection, or an attempt with another initial sequence
// number, is in the way of a new one. A connection in TIME_WAIT gives way.
func (s *Stack) occupied(tp tuple, isn uint32) bool {
	ep := s.endpoint(tp)
	if ep == nil {
		p := s.pending.get(tp)
		return p != nil && p.isn != isn
	}
	if tcp.EndpointState(ep.State()) == tcp.StateTimeWait {
		ep.Abort()
		return false
	}
	return true
}

// reopenAll delivers the SYNs that wait, until ctx ends.
func (s *Stack) reopenAll(ctx context.Context) {
	for {
		select {
		case r := <-s.reopened:
			s.await(ctx, &r)
			s.deliverIP(r.version, r.syn)
		case <-ctx.Done():
			return
		}
	}
}

// await waits until the tuple is free, or a SYN's time is over.
func (s *Stack) await(ctx context.Context, r *reopening) {
	look := time.NewTicker(reopenLook)
	defer look.Stop()
	for s.occupied(r.tuple, r.isn) {
		select {
		case now := <-look.C:
			if now.After(r.until) {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}
