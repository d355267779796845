package netstack

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip/header"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/netstack/wire"
)

func TestB04_ASYNWithECNBitsConnects(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		h.syn(wire.ECE | wire.CWR)
		h.answered()
		c := recv(t, b.conns)
		if c.Client() != client || c.Dest() != dst {
			t.Errorf("the connection is from %s to %s", c.Client(), c.Dest())
		}
		c.Abort()
		c.ep.Close()
	})
}

func TestAnAttemptTellsItsFlow(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		flows := make(chan flow.Flow, 1)
		b.tcp = func(p *Pending) { flows <- p.Flow(); p.Refuse(flow.VerdictSilent) }
		b.hand(client, dst).syn(0)
		want := flow.Flow{Inbound: "lan", Network: flow.TCP, Source: client, Dest: flow.Destination{Addr: dst}}
		if got := recv(t, flows); got != want {
			t.Fatalf("%+v", got)
		}
	})
}

func TestRefusalsAreSeenAsOnADirectPath(t *testing.T) {
	type message struct{ type4, code4, type6, code6 uint8 }
	for _, c := range []struct {
		name    string
		verdict flow.Verdict
		icmp    message
	}{
		{"net unreachable", flow.VerdictNetUnreachable, message{3, 0, 1, 0}},
		{"host unreachable", flow.VerdictHostUnreachable, message{3, 1, 1, 3}},
		{"prohibited", flow.VerdictProhibited, message{3, 13, 1, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
				b := newTapBed(t, nil)
				b.tcp = func(p *Pending) { p.Refuse(c.verdict) }
				b.hand(client, dst).syn(0)
				kind, code, router := c.icmp.type4, c.icmp.code4, gateway4
				if dst.Addr().Is6() {
					kind, code, router = c.icmp.type6, c.icmp.code6, gateway6
				}
				w := b.written()
				p := b.parsed(w)
				if p.ICMPType != kind || p.ICMPCode != code || p.Src != router || p.Dst != client.Addr() {
					t.Fatalf("%s tells %s with type %d code %d, want %d %d", p.Src, p.Dst, p.ICMPType, p.ICMPCode, kind, code)
				}
				syn := segment{src: client, dst: dst, seq: 1000, flags: wire.SYN, options: synOptions}.packet()
				if quote := w.b[p.PayloadOffset:]; !bytes.Equal(quote, syn) {
					t.Fatalf("quotes\n% x, want\n% x", quote, syn)
				}
				waitFor(t, func() bool { return b.stack.Pending() == 0 })
				b.silent(50 * time.Millisecond)
			})
		})
	}
}

func TestARefusedAttemptIsResetOrMetWithSilence(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		verdicts := make(chan flow.Verdict, 1)
		b.tcp = func(p *Pending) { p.Refuse(<-verdicts) }
		h := b.hand(client, dst)
		verdicts <- flow.VerdictReset
		h.syn(0)
		p, tcp := b.tcpWritten()
		if f := tcp.Flags(); f != header.TCPFlagRst|header.TCPFlagAck || tcp.AckNumber() != h.seq+1 || p.Source() != dst {
			t.Fatalf("%s answers with flags %s acknowledging %d", p.Source(), f, tcp.AckNumber())
		}
		verdicts <- flow.VerdictSilent
		waitFor(t, func() bool { return b.stack.Pending() == 0 })
		h.syn(0)
		waitFor(t, func() bool { return len(verdicts) == 0 && b.stack.Pending() == 0 })
		b.silent(50 * time.Millisecond)
	})
}

func TestAHandlerThatForgetsToDecideMeansAReset(t *testing.T) {
	b := newTapBed(t, nil)
	b.tcp = func(*Pending) {}
	b.hand(client4, dst4).syn(0)
	b.wantReset("a forgotten attempt")
}

// waits is a handler whose dials last until their context ends, and which then
// tells why.
func waits(causes chan<- error) func(p *Pending) {
	return func(p *Pending) {
		<-p.Context().Done()
		causes <- context.Cause(p.Context())
		p.Refuse(flow.VerdictSilent)
	}
}

func TestRepeatedSYNsMakeOneDial(t *testing.T) {
	b := newTapBed(t, nil)
	var dials atomic.Int64
	causes := make(chan error, 1)
	wait := waits(causes)
	b.tcp = func(p *Pending) { dials.Add(1); wait(p) }
	h := b.hand(client4, dst4)
	for range 20 {
		h.syn(0)
	}
	b.silent(50 * time.Millisecond)
	b.stack.CancelPending(flow.ErrShutdown)
	if err := recv(t, causes); err != flow.ErrShutdown {
		t.Fatalf("cancelled with %v", err)
	}
	if n := dials.Load(); n != 1 {
		t.Fatalf("%d dials", n)
	}
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
}

func TestAClientThatGivesUpCancelsItsDial(t *testing.T) {
	for _, c := range []struct {
		name   string
		giveUp func(h *hand)
	}{
		{"by a reset", func(h *hand) { h.seq++; h.send(wire.RST, nil) }},
		{"by another attempt from the same port", func(h *hand) { h.seq += 5000; h.syn(0) }},
		{"by silence", func(*hand) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTapBed(t, nil)
			causes := make(chan error, 1)
			b.tcp = waits(causes)
			h := b.hand(client4, dst4)
			h.syn(0)
			waitFor(t, func() bool { return b.stack.Pending() == 1 })
			c.giveUp(h)
			if err := recv(t, causes); err != errGaveUp {
				t.Fatalf("cancelled with %v", err)
			}
			waitFor(t, func() bool { return b.stack.Pending() == 0 })
			b.silent(50 * time.Millisecond)
		})
	}
}

func TestASYNFloodIsCountedAndItsSlotsComeBack(t *testing.T) {
	b := newTapBed(t, func(c *Config, _ *tap) { c.Dials = admit.Shares{Max: 20, Per: 4} })
	causes := make(chan error, 100)
	b.tcp = waits(causes)
	flood := func(src netip.Addr) {
		for i := range 50 {
			b.hand(netip.AddrPortFrom(src, uint16(1000+i)), dst4).syn(0)
		}
	}
	flood(clientIP4)
	if n := b.stack.Pending(); n != 4 {
		t.Fatalf("%d dials of one source, want 4", n)
	}
	b.dropped(flow.DropSYNLimit, 46)
	flood(netip.MustParseAddr("10.0.0.3"))
	if n := b.stack.Pending(); n != 8 {
		t.Fatalf("%d dials, want 8", n)
	}
	b.dropped(flow.DropSYNLimit, 92)
	b.stack.CancelPending(flow.ErrShutdown)
	for range 8 {
		recv(t, causes)
	}
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
	b.silent(20 * time.Millisecond)
	flood(clientIP4)
	if n := b.stack.Pending(); n != 4 {
		t.Fatalf("%d dials after the flood, want 4", n)
	}
	b.stack.CancelPending(flow.ErrShutdown)
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
}

// The context may end before gVisor knows the endpoint that has to be aborted.
func TestAcceptWithAnEndedContextReturnsAtOnce(t *testing.T) {
	b := newTapBed(t, nil)
	errs := make(chan error, 100)
	killed := errors.New("killed")
	b.tcp = func(p *Pending) {
		ctx, cancel := context.WithCancelCause(p.Context())
		cancel(killed)
		_, err := p.Accept(ctx)
		errs <- err
	}
	begun := time.Now()
	for i := range 100 {
		b.hand(netip.AddrPortFrom(clientIP4, uint16(1000+i)), dst4).syn(0)
	}
	for range 100 {
		if err := recv(t, errs); !errors.Is(err, killed) {
			t.Fatalf("accept says %v", err)
		}
	}
	if d := time.Since(begun); d > 5*time.Second {
		t.Fatalf("took %s", d)
	}
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
}

// A hand-made SYN with an option list that goes nowhere must not reach a handler
// as something else, nor break the stack.
func TestSYNsWithGarbageOptionsAreAnsweredOrDropped(t *testing.T) {
	for _, c := range []struct {
		name    string
		options []byte
	}{
		{"length 0", []byte{2, 0, 0, 0}},
		{"length beyond the header", []byte{2, 200, 0, 0}},
		{"a window scale of 255", []byte{3, 3, 255, 0}},
		{"an unknown option", []byte{254, 4, 0xde, 0xad}},
		{"an MSS of 0", []byte{2, 4, 0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTapBed(t, nil)
			b.tcp = func(p *Pending) { p.Refuse(flow.VerdictReset) }
			b.put(segment{src: client4, dst: dst4, seq: 1, flags: wire.SYN, options: c.options}.packet(), Offload{})
			waitFor(t, func() bool { return b.stack.Pending() == 0 })
			b.drain()
			h := b.hand(netip.AddrPortFrom(clientIP4, 9), dst4)
			h.syn(0)
			b.wantReset("the next SYN")
		})
	}
}

func TestAnICMPErrorOfADeviceThatTakesNothingIsCounted(t *testing.T) {
	b := newTapBed(t, func(_ *Config, d *tap) { d.fails.Store(true) })
	b.tcp = func(p *Pending) { p.Refuse(flow.VerdictProhibited) }
	b.hand(client4, dst4).syn(0)
	waitFor(t, func() bool { return b.stack.Pending() == 0 })
	waitFor(t, func() bool { return b.drops[flow.DropDeviceWrite].Load() == 1 })
	b.dropped(flow.DropDeviceWrite, 1)
}
