package netstack

import (
	"context"
	"encoding/binary"
	"io"
	"math"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sagernet/gvisor/pkg/buffer"
	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/network/ipv4"
	"github.com/sagernet/gvisor/pkg/tcpip/network/ipv6"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"
	"github.com/sagernet/gvisor/pkg/tcpip/stack/gro"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
	"github.com/sagernet/gvisor/pkg/waiter"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// Each test here names a fact about gVisor that this package stands on. When one
// fails after an update of gVisor, what leans on it has to be thought through again.

// Fact 1: what the device coalesced goes through gVisor as one segment, whose
// checksum may be partial.
func TestFact1ASuperPacketReachesTheEndpointAsOneSegment(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		h := b.hand(client, dst)
		c := h.open()
		stats := c.ep.Stats().(*tcp.Stats)
		before := stats.SegmentsReceived.Value()
		h.sendSuper(60_000)
		_, ack := b.tcpWritten()
		if ack.AckNumber() != h.seq {
			t.Fatalf("acknowledged up to %d, want %d", ack.AckNumber(), h.seq)
		}
		if n := stats.SegmentsReceived.Value() - before; n != 1 {
			t.Fatalf("the endpoint received %d segments, want 1", n)
		}
		var n counted
		c.ep.Read(&n, tcpip.ReadOptions{})
		if n != 60_000 {
			t.Fatalf("read %d bytes", n)
		}
	})
}

// sendSuper sends n bytes as the kernel would: one packet, its checksum partial.
func (h *hand) sendSuper(n int) {
	s := segment{src: h.src, dst: h.dst, seq: h.seq, ack: h.ack, flags: wire.ACK, payload: make([]byte, n)}
	packet := s.packet()
	head := len(packet) - n
	size := 20 + n
	binary.BigEndian.PutUint16(packet[head-4:], wire.PseudoSum(s.src.Addr(), s.dst.Addr(), wire.ProtoTCP, size))
	o := Offload{Flags: OffloadNeedsCsum, GSO: GSOTCPv4, GSOSize: 1460, HdrLen: uint16(head), CsumStart: uint16(head - 20), CsumOffset: 16}
	if s.dst.Addr().Is6() {
		o.GSO, o.GSOSize = GSOTCPv6, 1440
	}
	h.b.put(packet, o)
	h.seq += uint32(n)
}

// counted is a writer that counts.
type counted int

func (c *counted) Write(b []byte) (int, error) {
	*c += counted(len(b))
	return len(b), nil
}

// hidden embeds an interface, as every ready-made wrapper of gVisor does.
type hidden struct{ stack.LinkEndpoint }

// Fact 2: gVisor asks the outermost type of a link for GSO. One that embeds an
// interface hides it, and everything leaves in MSS-sized packets.
func TestFact2AnEmbeddedInterfaceHidesGSO(t *testing.T) {
	if _, ok := any(hidden{&link{}}).(stack.GSOEndpoint); ok {
		t.Fatal("an embedded interface shows GSO: wrappers are harmless now")
	}
	upload := func(t *testing.T, wrap func(stack.LinkEndpoint) stack.LinkEndpoint) (largest int64) {
		b := newBed(t, true, func(c *Config) { c.Device.(*pipe).wrapClient = wrap })
		sessions := b.relayTo(serve(t, swallow))
		c := b.mustDial(dst4)
		if _, err := io.Copy(c, newPattern(4<<20)); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if err := recv(t, sessions).wait(t); err != nil {
			t.Fatalf("ended with %v", err)
		}
		return b.dev.largestUp.Load()
	}
	t.Run("seen", func(t *testing.T) {
		if n := upload(t, nil); n < 32<<10 {
			t.Fatalf("the largest packet of our link has %d bytes", n)
		}
	})
	t.Run("hidden", func(t *testing.T) {
		n := upload(t, func(l stack.LinkEndpoint) stack.LinkEndpoint { return hidden{l} })
		if n > 1500 {
			t.Fatalf("the largest packet of a hidden link has %d bytes", n)
		}
	})
}

// Fact 3: with the receive checksum capability gVisor trusts every packet. That
// is why deliver verifies what the device does not vouch for.
func TestFact3GVisorTrustsChecksumsAndDeliverDoesNot(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		b.tcp = func(p *Pending) { p.Refuse(flow.VerdictReset) }
		wrong := spoilt(segment{src: client, dst: dst, seq: 1, flags: wire.SYN, options: synOptions}.packet())

		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(wrong)})
		b.stack.link.dispatcher.DeliverNetworkPacket(protocolOf(dst.Addr()), pkt)
		pkt.DecRef()
		b.wantReset("straight to gVisor")

		b.put(wrong, Offload{})
		b.silent(100 * time.Millisecond)
		b.dropped(flow.DropChecksum, 1)

		b.put(wrong, Offload{Flags: OffloadNeedsCsum})
		b.wantReset("NEEDS_CSUM")
		b.put(wrong, Offload{Flags: OffloadDataValid})
		b.wantReset("DATA_VALID")
		b.dropped(flow.DropChecksum, 1)
	})
}

// wantReset takes the answer to a segment that nobody wants.
func (b *tapBed) wantReset(what string) {
	b.t.Helper()
	_, h := b.tcpWritten()
	if !h.Flags().Contains(header.TCPFlagRst) {
		b.t.Fatalf("%s: answered with flags %s, want a reset", what, h.Flags())
	}
	waitFor(b.t, func() bool { return b.stack.Pending() == 0 })
}

// Fact 3, the other way: with transmit checksums offloaded, packets without GSO
// options would leave with none. Ours leave complete, with and without GSO.
func TestFact3SynAckAndResetLeaveWithRightChecksums(t *testing.T) {
	for _, gso := range []bool{true, false} {
		forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
			b := newTapBed(t, func(_ *Config, d *tap) { d.gso = gso })
			if c := b.stack.link.Capabilities(); c&stack.CapabilityTXChecksumOffload != 0 {
				t.Fatal("the link offers to complete checksums")
			}
			h := b.hand(client, dst)
			h.open() // tcpWritten checks the sum of the SYN-ACK
			h.src = netip.AddrPortFrom(client.Addr(), 5)
			h.send(wire.ACK, nil)
			b.wantReset("a segment of no connection")
		})
	}
}

// Fact 4: New set what the relay was measured with.
func TestFact4TheStackHasItsOptions(t *testing.T) {
	b := newTapBed(t, nil)
	var (
		sack     tcpip.TCPSACKEnabled
		recovery tcpip.TCPRecovery
		control  tcpip.CongestionControlOption
		delay    tcpip.TCPDelayEnabled
		moderate tcpip.TCPModerateReceiveBufferOption
		wait     tcpip.TCPTimeWaitTimeoutOption
		retries  tcpip.TCPMaxRetriesOption
		rcv      tcpip.TCPReceiveBufferSizeRangeOption
		snd      tcpip.TCPSendBufferSizeRangeOption
	)
	for _, o := range []tcpip.GettableTransportProtocolOption{&sack, &recovery, &control, &delay, &moderate, &wait, &retries, &rcv, &snd} {
		if err := b.stack.net.TransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			t.Fatalf("%T: %s", o, err)
		}
	}
	if !bool(sack) || recovery != 0 || control != "reno" || bool(delay) || !bool(moderate) {
		t.Errorf("sack %v, recovery %d, congestion control %q, delay %v, moderate %v", sack, recovery, control, delay, moderate)
	}
	if retries != math.MaxUint32 {
		t.Errorf("%d retries", retries)
	}
	got := Buffers{Recv: rcv.Default, RecvMax: rcv.Max, Send: snd.Default, SendMax: snd.Max}
	if time.Duration(wait) != timeWait || got != DefaultBuffers {
		t.Errorf("time wait %s, buffers %+v and %+v", time.Duration(wait), rcv, snd)
	}
}

// plainStack is a gVisor stack on a tap whose SYNs go to a forwarder as they are.
func plainStack(t *testing.T, window int, handle func(r *tcp.ForwarderRequest)) (*tapBed, *stack.Stack) {
	t.Helper()
	b := newTapBed(t, nil)
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	plain := &Stack{cfg: b.stack.cfg, net: s, link: &link{dev: b.dev, drops: b.drops, pending: new(pendingTable)}}
	if err := plain.setNIC(); err != nil {
		t.Fatal(err)
	}
	fw := tcp.NewForwarder(s, window, 16, handle)
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, fw.HandlePacket)
	b.batch = NewBatch(plain.deliver)
	t.Cleanup(func() { s.Close(); s.Wait() })
	return b, s
}

// Fact 5: the forwarder's window replaces the default receive buffer; 0 is 1 MiB.
func TestFact5TheForwardersWindowReplacesTheDefault(t *testing.T) {
	for _, c := range []struct {
		name         string
		window, want int
	}{{"given", 20_000, 20_000}, {"zero", 0, 1 << 20}} {
		t.Run(c.name, func(t *testing.T) {
			sizes := make(chan int64, 1)
			b, s := plainStack(t, c.window, func(r *tcp.ForwarderRequest) {
				var queue waiter.Queue
				ep, err := r.CreateEndpoint(&queue)
				r.Complete(err != nil)
				if err == nil {
					sizes <- ep.SocketOptions().GetReceiveBufferSize()
					ep.Abort()
					ep.Close()
				}
			})
			buffers := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: 300_000, Max: 2 << 20}
			s.SetTransportProtocolOption(tcp.ProtocolNumber, &buffers)
			h := b.hand(client4, dst4)
			h.syn(0)
			h.answered()
			if got := recv(t, sizes); got != int64(c.want) {
				t.Errorf("the endpoint has a receive buffer of %d bytes, want %d", got, c.want)
			}
		})
	}
}

// Fact 5: CreateEndpoint waits for the client; aborting the endpoint that the
// stack knows by then ends it.
func TestFact5CreateEndpointBlocksUntilItIsAborted(t *testing.T) {
	returned := make(chan tcpip.Error, 1)
	b, s := plainStack(t, 0, func(r *tcp.ForwarderRequest) {
		var queue waiter.Queue
		_, err := r.CreateEndpoint(&queue)
		r.Complete(false)
		returned <- err
	})
	b.hand(client4, dst4).syn(0)
	b.tcpWritten() // the SYN-ACK, never answered
	select {
	case err := <-returned:
		t.Fatalf("returned %v before the client answered", err)
	case <-time.After(200 * time.Millisecond):
	}
	id := stack.TransportEndpointID{
		LocalAddress: tcpip.AddrFromSlice(serverIP4.AsSlice()), LocalPort: dst4.Port(),
		RemoteAddress: tcpip.AddrFromSlice(clientIP4.AsSlice()), RemotePort: client4.Port(),
	}
	ep := s.FindTransportEndpoint(header.IPv4ProtocolNumber, tcp.ProtocolNumber, id, nicID)
	if ep == nil {
		t.Fatal("the stack does not know the endpoint of the handshake")
	}
	ep.Abort()
	if err := recv(t, returned); err == nil {
		t.Fatal("the aborted handshake succeeded")
	}
}

// Fact 5: Complete panics the second time, so Pending forgets its request.
func TestFact5CompletingARequestTwicePanics(t *testing.T) {
	panics := make(chan any, 1)
	b, _ := plainStack(t, 0, func(r *tcp.ForwarderRequest) {
		defer func() { panics <- recover() }()
		r.Complete(false)
		r.Complete(false)
	})
	b.hand(client4, dst4).syn(0)
	if recv(t, panics) == nil {
		t.Fatal("the second Complete did not panic")
	}
}

// heard counts what a GRO delivers.
type heard struct {
	stack.NetworkDispatcher
	n atomic.Int64
}

func (h *heard) DeliverNetworkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) { h.n.Add(1) }

// Fact 6: Flush delivers one packet of each of its 8 buckets a call.
func TestFact6GROFlushesOnePacketOfEachBucket(t *testing.T) {
	var h heard
	g := gro.GRO{Dispatcher: &h}
	g.Init(true)
	const flows = 16
	for i := range flows {
		b := segment{src: netip.AddrPortFrom(clientIP4, uint16(1000+i)), dst: dst4, flags: wire.ACK, payload: make([]byte, 100)}.packet()
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
		pkt.NetworkProtocolNumber = header.IPv4ProtocolNumber
		pkt.RXChecksumValidated = true
		g.Enqueue(pkt)
		pkt.DecRef()
	}
	g.Flush()
	if n := h.n.Load(); n < 1 || n > 8 {
		t.Fatalf("one Flush delivered %d of %d packets: more than one of a bucket", n, flows)
	}
	for range flows {
		g.Flush()
	}
	if n := h.n.Load(); n != flows {
		t.Fatalf("%d of %d packets were ever delivered", n, flows)
	}
}

// The 10 s that bound a handshake are nothing against what gVisor would wait.
func TestAcceptEndsWithItsContext(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		errs := make(chan error, 1)
		b.tcp = func(p *Pending) {
			ctx, cancel := context.WithTimeout(p.Context(), 100*time.Millisecond)
			defer cancel()
			_, err := p.Accept(ctx)
			errs <- err
		}
		begun := time.Now()
		b.hand(client, dst).syn(0)
		b.tcpWritten() // the SYN-ACK, never answered
		if err := recv(t, errs); err == nil || time.Since(begun) > 5*time.Second {
			t.Fatalf("accept returned %v after %s", err, time.Since(begun))
		}
		b.wantReset("the client")
	})
}
