package netstack

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/header"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// Odd beginnings, and what Linux makes of them.

func TestSegmentsThatBelongToNothingAreReset(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		b.tcp = func(p *Pending) { t.Error("became a connection attempt"); p.Refuse(flow.VerdictSilent) }
		for _, c := range []struct {
			name  string
			flags uint8
		}{
			{"null", 0},
			{"FIN", wire.FIN},
			{"xmas", wire.FIN | wire.PSH | wire.URG},
			{"ACK", wire.ACK},
			{"SYN-ACK", wire.SYN | wire.ACK},
			{"FIN-ACK", wire.FIN | wire.ACK},
		} {
			b.put(segment{src: client, dst: dst, seq: 100, ack: 500, flags: c.flags, payload: []byte("data")}.packet(), Offload{})
			p, tcp := b.tcpWritten()
			if p.Source() != dst || p.Destination() != client || tcp.Flags()&header.TCPFlagRst == 0 {
				t.Errorf("%s: answered by %s with %s", c.name, p.Source(), tcp.Flags())
			}
			// RFC 9293, 3.10.7.1: a reset where the ACK says, or one that acknowledges everything.
			if c.flags&wire.ACK != 0 {
				if tcp.SequenceNumber() != 500 || tcp.Flags()&header.TCPFlagAck != 0 {
					t.Errorf("%s: reset at %d, flags %s", c.name, tcp.SequenceNumber(), tcp.Flags())
				}
				continue
			}
			end := uint32(104)
			if c.flags&wire.FIN != 0 {
				end++
			}
			if tcp.SequenceNumber() != 0 || tcp.AckNumber() != end {
				t.Errorf("%s: reset at %d acknowledging %d, want 0 and %d", c.name, tcp.SequenceNumber(), tcp.AckNumber(), end)
			}
		}
	})
}

func TestASYNThatAlsoEndsIsMetWithSilence(t *testing.T) {
	b := newTapBed(t, nil)
	b.tcp = func(p *Pending) { t.Error("became a connection attempt"); p.Refuse(flow.VerdictSilent) }
	for _, extra := range []uint8{wire.FIN, wire.FIN | wire.PSH | wire.URG, wire.RST, wire.RST | wire.FIN} {
		b.hand(client4, dst4).syn(extra)
	}
	b.silent(20 * time.Millisecond)
	b.dropped(flow.DropMalformed, 2) // a reset is nothing that could be dropped
}

// Linux without a cookie of TCP Fast Open takes the SYN and not the data.
func TestDataInASYNIsNotAcknowledgedAndArrivesOnceItIsRepeated(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	b.put(segment{src: h.src, dst: h.dst, seq: h.seq, flags: wire.SYN, options: synOptions, payload: []byte("early")}.packet(), Offload{})
	if tcp := h.answered(); tcp.AckNumber() != h.seq {
		t.Fatalf("the answer acknowledges %d, want %d", tcp.AckNumber(), h.seq)
	}
	c := recv(t, b.conns)
	t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
	h.send(wire.ACK|wire.PSH, []byte("early"))
	if _, tcp := b.tcpWritten(); tcp.AckNumber() != h.seq {
		t.Fatalf("acknowledged %d, want %d", tcp.AckNumber(), h.seq)
	}
}

func TestAResetFromOutOfTheBlueDoesNotCancelADial(t *testing.T) {
	b := newTapBed(t, nil)
	causes := make(chan error, 1)
	b.tcp = waits(causes)
	h := b.hand(client4, dst4)
	h.syn(0)
	for _, seq := range []uint32{h.seq - 1, h.seq + 2, 0} {
		b.put(segment{src: h.src, dst: h.dst, seq: seq, flags: wire.RST}.packet(), Offload{})
	}
	b.silent(20 * time.Millisecond)
	if len(causes) != 0 || b.stack.Pending() != 1 {
		t.Fatal("the dial was cancelled")
	}
	b.put(segment{src: h.src, dst: h.dst, seq: h.seq + 1, flags: wire.RST | wire.ACK}.packet(), Offload{})
	if err := recv(t, causes); err != errGaveUp {
		t.Fatalf("cancelled with %v", err)
	}
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
}

// An acknowledgement before the SYN was answered is of another connection.
func TestAnACKToAPendingAttemptIsResetAndTheDialGoesOn(t *testing.T) {
	b := newTapBed(t, nil)
	causes := make(chan error, 1)
	b.tcp = waits(causes)
	h := b.hand(client4, dst4)
	h.syn(0)
	b.put(segment{src: h.src, dst: h.dst, seq: h.seq + 1, ack: 77, flags: wire.ACK}.packet(), Offload{})
	if _, tcp := b.tcpWritten(); tcp.Flags() != header.TCPFlagRst || tcp.SequenceNumber() != 77 {
		t.Fatalf("answered with %s at %d", tcp.Flags(), tcp.SequenceNumber())
	}
	if len(causes) != 0 {
		t.Fatal("the dial was cancelled")
	}
	b.stack.CancelPending(context.Canceled)
	recv(t, causes)
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
}

// A source that is forged sees no answer, and must not connect by acknowledging it.
func TestAHandshakeIsCompletedByWhoSawItsAnswerAlone(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		h.syn(0)
		_, tcp := b.tcpWritten()
		iss := tcp.SequenceNumber()
		h.seq++
		for i, guess := range []uint32{iss, iss + 2, 0, iss + 1<<31} {
			h.ack = guess
			h.send(wire.ACK|wire.PSH, []byte("forged"))
			h.seq -= 6
			b.dropped(flow.DropHandshake, uint64(i+1))
		}
		b.silent(20 * time.Millisecond)
		if len(b.conns) != 0 || b.stack.Trusted(client.Addr()) {
			t.Fatal("connected by a guess")
		}
		h.ack = iss + 1
		h.send(wire.ACK|wire.PSH, []byte("known"))
		c := recv(t, b.conns)
		t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
		if _, tcp := b.tcpWritten(); tcp.AckNumber() != h.seq {
			t.Errorf("acknowledged %d of %d", tcp.AckNumber(), h.seq)
		}
		if n := b.stack.pending.handshakesOf(tuple{client, dst}).Load(); n != 0 {
			t.Errorf("%d handshakes under way", n)
		}
		h.send(wire.ACK, nil) // nothing is asked any more
		b.dropped(flow.DropHandshake, 4)
	})
}

// Memory becomes short when many connect.
func TestAHandshakeUnderWayOutlivesBuffersThatShrink(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		h.syn(0)
		_, tcp := b.tcpWritten()
		b.stack.SetBuffers(smallest)
		b.silent(20 * time.Millisecond)
		h.seq, h.ack = h.seq+1, tcp.SequenceNumber()+1
		h.send(wire.ACK, nil)
		c := recv(t, b.conns)
		t.Cleanup(func() { c.ep.Abort(); c.ep.Close() })
		if n := c.ep.SocketOptions().GetSendBufferSize(); n > int64(smallest.SendMax) {
			t.Errorf("its send buffer holds %d bytes, more than %d", n, smallest.SendMax)
		}
	})
}

// closedByServer opens a connection and has the gateway's side close it first.
func (h *hand) closedByServer() {
	t := h.b.t
	t.Helper()
	h.syn(0)
	h.answered()
	c := recv(t, h.b.conns)
	c.ep.Shutdown(tcpip.ShutdownRead | tcpip.ShutdownWrite)
	if _, tcp := h.b.tcpWritten(); tcp.Flags()&header.TCPFlagFin == 0 {
		t.Fatalf("the close sent %s", tcp.Flags())
	}
	h.ack++
	h.send(wire.FIN|wire.ACK, nil)
	if _, tcp := h.b.tcpWritten(); tcp.AckNumber() != h.seq {
		t.Fatalf("acknowledged %d of %d", tcp.AckNumber(), h.seq)
	}
	c.ep.Close()
}

func TestThePortsOfAConnectionThatWaitsOutItsEndAreTakenAgainAtOnce(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		h.closedByServer()
		h.seq, h.ack = h.seq+100_000, 0
		h.syn(0)
		var tcp header.TCP
		for tcp == nil || tcp.Flags()&header.TCPFlagRst != 0 { // of the old connection, which a client ignores
			_, tcp = b.tcpWritten()
		}
		if tcp.Flags()&(header.TCPFlagSyn|header.TCPFlagAck) != header.TCPFlagSyn|header.TCPFlagAck || tcp.AckNumber() != h.seq+1 {
			t.Fatalf("answered with %s acknowledging %d, want %d", tcp.Flags(), tcp.AckNumber(), h.seq+1)
		}
		h.seq, h.ack = h.seq+1, tcp.SequenceNumber()+1
		h.send(wire.ACK, nil)
		c := recv(t, b.conns)
		c.ep.Abort()
		c.ep.Close()
	})
}

func TestThePortsOfAConnectionThatWasResetAreTakenAgainAtOnce(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	for range 3 {
		h.open()
		h.send(wire.RST|wire.ACK, nil)
		waitFor(t, func() bool { return b.stack.endpoint(tuple{h.src, h.dst}) == nil })
		h.seq, h.ack = h.seq+100_000, 0
	}
}
