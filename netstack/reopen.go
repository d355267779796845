package netstack

import (
	"context"
	"time"

	"github.com/sagernet/gvisor/pkg/buffer"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"

	"gatewayd/netstack/wire"
)

// A client may use the ports of a connection again that has just ended for it. The
// stack gives a SYN to the endpoint as long as there is one: in TIME_WAIT that would
// ignore it, and where a reset waits to be processed the SYN behind it would be
// answered by a reset. So the endpoint in TIME_WAIT ends, as Linux and RFC 6191 have
// it, and a SYN toward another one waits beside the stack, for a moment: the device's
// reader keeps it in reopens, and the goroutine of reopenAll delivers it once the
// endpoint is gone. An endpoint that stays gets it too, and challenges it (RFC 5961).

const (
	maxReopens = 64                     // SYNs that wait; what is more is delivered at once
	reopenWait = 20 * time.Millisecond  // from the SYN on, at most
	reopenLook = 500 * time.Microsecond // between looks for the endpoint
)

// reopening is a SYN that waits.
type reopening struct {
	tuple   tuple
	version uint8 // of IP
	syn     buffer.Buffer
	until   time.Time
}

// reopens keeps packet i of the batch, a SYN, if it has to wait.
func (s *Stack) reopens(b *Batch, i int, p *wire.Packet) bool {
	r := reopening{tuple: tuple{client: p.Source(), dest: p.Destination()}, version: p.Version, until: time.Now().Add(reopenWait)}
	if !s.occupied(r.tuple) {
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

// occupied reports that a connection is in the way of a new one. One in TIME_WAIT
// gives way.
func (s *Stack) occupied(tp tuple) bool {
	ep := s.endpoint(tp)
	if ep == nil {
		return false
	}
	switch tcp.EndpointState(ep.State()) {
	case tcp.StateTimeWait:
		ep.Abort()
		return false
	case tcp.StateInitial, tcp.StateConnecting, tcp.StateSynRecv: // of this SYN, or one like it
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
	for s.occupied(r.tuple) {
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
