package netstack

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// The way of a connection attempt: the device's reader delivers the SYN to
// gVisor, which finds no endpoint and asks handleSegment, still on the reader.
// It admits the attempt into the pending table and lets the forwarder start a
// goroutine, which runs handleRequest: Handler.HandleTCP dials, then accepts
// (the handshake is completed only now) or refuses.

// acceptTimeout bounds the handshake with the client after a dial succeeded.
const acceptTimeout = 10 * time.Second

// handleSegment sees every TCP segment that belongs to no endpoint.
func (s *Stack) handleSegment(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	h := header.TCP(pkt.TransportHeader().Slice())
	tp := tupleOf(id)
	switch flags := h.Flags(); {
	case flags.Contains(header.TCPFlagRst):
		s.pending.reset(tp, h.SequenceNumber())
		return true // never answered (RFC 9293, 3.10.7.1)
	case flags.Contains(header.TCPFlagSyn | header.TCPFlagFin):
		s.cfg.Drops.Add(flow.DropMalformed, 1)
		return true // no client begins so; Linux is silent too
	case !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck):
		return false // gVisor answers with a reset
	}
	var p *Pending
	result, cause := s.pending.syn(tp, h.SequenceNumber(), time.Now(), func() *Pending {
		p = &Pending{stack: s, tuple: tp, isn: h.SequenceNumber()}
		p.ctx, p.stop = context.WithCancelCause(context.Background())
		p.syn = slices.Concat(pkt.NetworkHeader().Slice(), h)
		return p
	})
	switch result {
	case synRefused:
		s.cfg.Drops.Add(cause, 1)
		return true
	case synRepeated:
		return true
	}
	if !s.forwarder.Load().HandlePacket(id, pkt) {
		s.pending.remove(p)
		s.cfg.Drops.Add(flow.DropMalformed, 1)
	}
	return true
}

// endpoint is gVisor's end of a connection or handshake, nil if there is none.
func (s *Stack) endpoint(tp tuple) *tcp.Endpoint {
	id := stack.TransportEndpointID{
		LocalAddress:  tcpipAddr(tp.dest.Addr()),
		LocalPort:     tp.dest.Port(),
		RemoteAddress: tcpipAddr(tp.client.Addr()),
		RemotePort:    tp.client.Port(),
	}
	proto := header.IPv4ProtocolNumber
	if tp.dest.Addr().Is6() {
		proto = header.IPv6ProtocolNumber
	}
	ep, _ := s.net.FindTransportEndpoint(proto, tcp.ProtocolNumber, id, nicID).(*tcp.Endpoint)
	return ep
}

// acknowledges says whether a segment may reach the endpoint that its acknowledgement
// is for. Most are none of a handshake.
func (s *Stack) acknowledges(head []byte, p *wire.Packet) bool {
	if p.TCPFlags&(wire.SYN|wire.ACK|wire.RST) != wire.ACK {
		return true
	}
	ack := header.TCP(head[p.HeaderLen:]).AckNumber()
	return s.pending.acknowledges(tuple{client: p.Source(), dest: p.Destination()}, ack)
}

// handleRequest runs on the forwarder's goroutine for one admitted SYN.
func (s *Stack) handleRequest(r *tcp.ForwarderRequest) {
	p := s.pending.get(tupleOf(r.ID()))
	if p == nil { // shut down meanwhile
		r.Complete(false)
		return
	}
	p.request = r
	defer func() {
		if p.request != nil { // the handler forgot to decide
			p.Refuse(flow.VerdictReset)
		}
	}()
	s.cfg.Handler.HandleTCP(p)
}

func tupleOf(id stack.TransportEndpointID) tuple {
	return tuple{
		client: netip.AddrPortFrom(addrOf(id.RemoteAddress), id.RemotePort),
		dest:   netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort),
	}
}

// Pending is a client's connection attempt that waits for a verdict. It belongs
// to the goroutine that HandleTCP runs on.
type Pending struct {
	stack   *Stack
	tuple   tuple
	isn     uint32
	syn     []byte // its IP and TCP headers, quoted by ICMP errors
	ctx     context.Context
	stop    context.CancelCauseFunc
	request *tcp.ForwarderRequest // nil once decided

	seen time.Time     // last SYN; guarded by the table
	gap  time.Duration // between the last two; guarded by the table

	accepting bool   // Accept was called; guarded by the table
	answered  bool   // the answer to the SYN is about to leave; guarded by the table
	iss       uint32 // its sequence number; guarded by the table

	trusted   bool // never displaced; written before it is in the table
	displaced bool // lost its place to another; guarded by the table
}

// Flow is what the client asks for.
func (p *Pending) Flow() flow.Flow {
	return flow.Flow{
		Inbound: p.stack.cfg.Tag,
		Network: flow.TCP,
		Source:  p.tuple.client,
		Dest:    flow.Destination{Addr: p.tuple.dest},
	}
}

// Context ends when the client resets, begins anew with another sequence number,
// or stops repeating its SYN; and when the stack stops.
func (p *Pending) Context() context.Context { return p.ctx }

func (p *Pending) cancel(cause error) { p.stop(cause) }

// Accept completes the client's handshake. It blocks until the client answered,
// ctx ended (its cause is the error), or 10 s went by; on an error the client gets
// a reset, unless it sent one.
func (p *Pending) Accept(ctx context.Context) (*Conn, error) {
	p.stack.pending.accepting(p)
	c := &Conn{stack: p.stack, tuple: p.tuple}
	ctx, cancel := context.WithTimeout(ctx, acceptTimeout)
	defer cancel()
	answered := make(chan struct{})
	unwatch := context.AfterFunc(ctx, func() { p.abort(answered) })
	ep, terr := p.request.CreateEndpoint(&c.queue)
	close(answered)
	stopped := !unwatch()
	if terr == nil {
		p.stack.pending.proved(p, time.Now())
	}
	p.decided(terr != nil && !wasReset(terr))
	if p.answered { // nobody else has p any more; the table may have lost it before
		c.sent.begin(p.iss + 1)
	}
	switch {
	case stopped:
		if terr == nil {
			ep.Abort()
		}
		return nil, fmt.Errorf("accept %s from %s: %w", p.tuple.dest, p.tuple.client, context.Cause(ctx))
	case terr != nil:
		return nil, fmt.Errorf("accept %s from %s: %w", p.tuple.dest, p.tuple.client, errorOf(terr))
	}
	c.ep = ep.(*tcp.Endpoint)
	c.setOptions(p.stack.cfg.Keepalive)
	return c, nil
}

// wasReset reports that the client ended the handshake: a reset is not answered by
// another one.
func wasReset(err tcpip.Error) bool {
	switch err.(type) {
	case *tcpip.ErrConnectionReset, *tcpip.ErrConnectionRefused: // once it was established, and before
		return true
	}
	return false
}

// abortRetry is how long the stack takes, at most, to know an endpoint that is
// being created.
const abortRetry = 5 * time.Millisecond

// abort ends a handshake that waits for its client, until it is answered. The
// context may have ended before the stack knew of the endpoint.
func (p *Pending) abort(answered <-chan struct{}) {
	for {
		if ep := p.stack.endpoint(p.tuple); ep != nil {
			ep.Abort()
			return
		}
		select {
		case <-answered:
			return
		case <-time.After(abortRetry):
		}
	}
}

// Refuse answers the client as v says, and ends the attempt.
func (p *Pending) Refuse(v flow.Verdict) {
	p.decided(v == flow.VerdictReset)
	if v != flow.VerdictReset && v != flow.VerdictSilent {
		p.stack.sendUnreachable(v, p.syn)
	}
}

func (p *Pending) decided(reset bool) {
	p.request.Complete(reset)
	p.request = nil
	p.stack.pending.remove(p)
	p.stop(nil)
}
