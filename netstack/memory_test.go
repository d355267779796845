package netstack

import (
	"io"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"unsafe"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

const (
	// idleFlowBytes is what an idle relayed flow may cost in heap and stacks: its
	// Conn, gVisor's endpoint with its demultiplexer entries, and the outbound's
	// socket in Go's runtime. The kernel's share of that socket is not in it.
	idleFlowBytes = 12 << 10
	// connBytes is the part of it that is ours.
	connBytes = 768
)

func TestAConnIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(Conn{}); n > connBytes {
		t.Errorf("a Conn has %d bytes, want at most %d", n, connBytes)
	}
}

// The clients are played by hand, so that no stack of theirs is in the sum. What
// the test's own end of each outbound costs is: the figure is an upper bound.
func TestAnIdleFlowIsCheapInMemory(t *testing.T) {
	const flows = 500
	b := newTapBed(t, nil)
	done := make(chan error, flows+1)
	accepted := make(chan net.Conn, flows+1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b.tcp = b.relays(l.Addr().String(), new(counter), done)
	open := func(port int) *Conn {
		h := b.hand(netip.AddrPortFrom(clientIP4, uint16(port)), dst4)
		h.syn(0)
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		accepted <- c
		h.answered()
		h.exchange(c)
		return recv(t, b.conns)
	}
	conns := []*Conn{open(1000)} // what there is once is not a flow's
	before := memory()
	for i := range flows {
		conns = append(conns, open(2000+i))
	}
	b.drain()
	each := (memory() - before) / flows
	t.Logf("%d bytes for an idle flow", each)
	if each > idleFlowBytes {
		t.Errorf("an idle flow costs %d bytes, want at most %d", each, idleFlowBytes)
	}
	for _, c := range conns {
		c.End(flow.ErrShutdown)
	}
	for range conns {
		recv(t, done)
		(<-accepted).Close()
	}
	for len(b.dev.out) > 0 {
		<-b.dev.out
	}
}

// exchange sends four bytes each way, so that the flow was in use before it idles.
func (h *hand) exchange(server net.Conn) {
	h.b.t.Helper()
	h.send(wire.ACK|wire.PSH, []byte("ping"))
	if _, err := io.ReadFull(server, make([]byte, 4)); err != nil {
		h.b.t.Fatal(err)
	}
	server.Write([]byte("pong"))
	for got := 0; got < 4; {
		p, tcp := h.b.tcpWritten()
		got += p.PayloadLen
		h.ack = tcp.SequenceNumber() + uint32(p.PayloadLen)
	}
	h.send(wire.ACK, nil)
}

// memory is what heap and stacks hold after a collection, in bytes.
func memory() int {
	var m runtime.MemStats
	for range 3 { // pools are emptied by the second
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc + m.StackInuse)
}
