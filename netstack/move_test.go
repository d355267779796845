package netstack

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// A second packet for the rest would cost as much as the first.
func TestWhatIsMovedDownAtOnceLeavesAsOnePacket(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	fd, peer := socketPair(t)
	c.fd = fd
	c.ep.SocketOptions().SetSendBufferSize(2<<20, true)
	packets := 0
	for range 16 { // the congestion window grows to what is asked for
		if _, err := peer.Write(make([]byte, chunkBytes)); err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { return waiting(t, fd) == chunkBytes })
		if n, ok := c.writeClient(chunkBytes); !ok || n != chunkBytes {
			t.Fatalf("the endpoint took %d bytes, %v", n, ok)
		}
		packets = 0
		for got := 0; got < chunkBytes; packets++ {
			p, _ := b.tcpWritten()
			got += p.PayloadLen
			h.ack += uint32(p.PayloadLen)
			h.send(wire.ACK, nil)
		}
	}
	if packets != 1 {
		t.Fatalf("%d bytes left as %d packets", chunkBytes, packets)
	}
}

// What a packet brings is written at once, and small packets together: the socket is
// one that keeps writes apart.
func TestASuperPacketIsWrittenToTheSocketAtOnce(t *testing.T) {
	b := newTapBed(t, nil)
	h := b.hand(client4, dst4)
	c := h.open()
	c.meter = &counter{}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	c.fd = pair[0]
	c.ep.SocketOptions().SetReceiveBufferSize(1<<20, true)
	for _, size := range []int{40_000, 20_000, 100, 200, 300, 30_000} {
		h.send(wire.ACK|wire.PSH, count(size))
		for {
			if _, tcp := b.tcpWritten(); tcp.AckNumber() == h.seq {
				break
			}
		}
	}
	c.set(outWritable)
	for range 3 {
		if _, err := c.readClient(c.metered(flow.Up)); err != nil {
			t.Fatal(err)
		}
	}
	var sizes []int
	room := make([]byte, 1<<17)
	for {
		n, err := unix.Read(pair[1], room)
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		sizes = append(sizes, n)
	}
	if want := []int{40_000, 20_000, 30_600}; !slices.Equal(sizes, want) {
		t.Fatalf("writes of %d bytes, want %d", sizes, want)
	}
}
