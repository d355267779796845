package netstack

import (
	"net/netip"
	"testing"

	"github.com/sagernet/gvisor/pkg/tcpip/header"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// again sends, in one batch, the last segment of a connection and the SYN of the
// next one on the same ports, and takes the SYN-ACK; no reset may come before it,
// unless it is of the old connection.
func (h *hand) again(last uint8, seq uint32, old bool) {
	h.b.t.Helper()
	for _, s := range []segment{
		{src: h.src, dst: h.dst, seq: h.seq, ack: h.ack, flags: last},
		{src: h.src, dst: h.dst, seq: seq, flags: wire.SYN, options: synOptions},
	} {
		add(h.b.batch, wirePacket{s.packet(), Offload{}})
	}
	h.b.batch.Deliver()
	for {
		_, tcp := h.b.tcpWritten()
		f := tcp.Flags()
		if f.Contains(header.TCPFlagSyn|header.TCPFlagAck) && tcp.AckNumber() == seq+1 {
			h.seq, h.ack = seq+1, tcp.SequenceNumber()+1
			h.send(wire.ACK, nil)
			return
		}
		if !old || f.Contains(header.TCPFlagRst) && tcp.AckNumber() == seq+1 {
			h.b.t.Fatalf("the SYN behind flags %#x is answered by %s", last, f)
		}
	}
}

func TestPortsAreUsedAgainRightBehindAReset(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		h.open()
		for round := range uint32(50) {
			h.again(wire.RST, 1e6*(round+1), false)
			c := recv(t, b.conns)
			t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
		}
		b.dropped(0, 0)
	})
}

func TestPortsAreUsedAgainRightBehindTheLastFIN(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		c := h.open()
		for round := range uint32(20) {
			c.ep.Close() // the far side ended first: the client's FIN is followed by TIME_WAIT
			if _, tcp := b.tcpWritten(); !tcp.Flags().Contains(header.TCPFlagFin) {
				t.Fatalf("flags %s, want a FIN", tcp.Flags())
			}
			h.ack++
			h.again(wire.FIN|wire.ACK, 1e6*(round+1), true)
			c = recv(t, b.conns)
			t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
		}
	})
}

// A reset may also follow the end of the handshake at once, when nobody knows of
// the connection yet, or the SYN itself, while its dial is under way.
func TestPortsAreUsedAgainRightBehindTheResetOfAnAttempt(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		t.Run("answered", func(t *testing.T) {
			b := newTapBed(t, nil)
			h := b.hand(client, dst)
			h.syn(0)
			_, tcp := b.tcpWritten()
			h.seq, h.ack = h.seq+1, tcp.SequenceNumber()+1
			add(b.batch, wirePacket{segment{src: client, dst: dst, seq: h.seq, ack: h.ack, flags: wire.ACK}.packet(), Offload{}})
			h.again(wire.RST, 1e6, false)
			b.end()
		})
		t.Run("dialling", func(t *testing.T) {
			b := newTapBed(t, nil)
			accept, dialling := b.tcp, make(chan struct{})
			b.tcp = func(p *Pending) {
				if p.isn == 1000 {
					close(dialling)
					<-p.Context().Done()
					p.Refuse(flow.VerdictSilent)
					return
				}
				accept(p)
			}
			h := b.hand(client, dst)
			h.syn(0)
			<-dialling
			h.seq++
			h.again(wire.RST, 1e6, false)
			b.end()
		})
	})
}

// end waits until the last attempt is accepted, and ends what was accepted.
func (b *tapBed) end() {
	waitFor(b.t, func() bool { return b.stack.Pending() == 0 && len(b.conns) > 0 })
	for len(b.conns) > 0 {
		c := recv(b.t, b.conns)
		c.ep.Abort()
		c.ep.Close()
	}
}

// However many SYNs come for a connection that lives: it stays, and none is kept.
func TestSYNsTowardALiveConnectionAreChallenged(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	for n := range uint32(3 * maxReopens) {
		b.put(segment{src: h.src, dst: h.dst, seq: h.seq + 1e6 + n, flags: wire.SYN}.packet(), Offload{})
	}
	_, tcp := b.tcpWritten()
	if f := tcp.Flags(); f != header.TCPFlagAck || tcp.AckNumber() != h.seq {
		t.Fatalf("answered with flags %s, ack %d", f, tcp.AckNumber()-h.seq)
	}
	waitFor(t, func() bool { return len(b.stack.reopened) == 0 })
	if b.stack.endpoint(c.tuple) != c.ep || b.stack.Pending() != 0 {
		t.Fatal("the connection is gone")
	}
}
