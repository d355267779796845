package suite

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// What a slow flow may add to the gateway's memory. Toward a slow client that is
// its endpoint's send queue, which begins at 256 KiB and grows to 2 MiB only for
// a client that reads fast. From a fast client it is the receive queue, which
// grows to 2 MiB while the server's buffers fill. Beside the bytes there are
// their packets' overheads, and what the collector has not freed yet.
const (
	slowClientRSS = 1 << 20 // bytes
	slowServerRSS = 5 << 19 // bytes
	slowClients   = 100
	slowRate      = 10_000         // bytes/s of each
	slowSocket    = 64 << 10       // bytes of a slow reader's receive buffer
	socketBuffer  = 4 * slowSocket // bytes behind it at most: the kernel doubles it (socket(7)), and takes a last segment past it
	maxKernelSend = 4 << 20        // bytes that a kernel socket takes (net.ipv4.tcp_wmem); they count as sent
	held          = 2 * time.Second
)

// sippers read from connections at slowRate each, and count.
type sippers struct {
	total atomic.Uint64
	wg    sync.WaitGroup
}

func (s *sippers) sip(c *net.TCPConn, read *atomic.Uint64) {
	buf := make([]byte, slowRate/20)
	tick := time.NewTicker(time.Second / 20)
	defer tick.Stop()
	for range tick.C {
		n, err := c.Read(buf)
		s.total.Add(uint64(n))
		read.Add(uint64(n))
		if err != nil {
			return
		}
	}
}

func TestB09_SlowClientsHoldTheServerBackAndNotMemory(t *testing.T) {
	b := newTCPBed(t, "")
	var served atomic.Uint64
	for _, f := range tcpFamilies() {
		b.Srv.Serve(f.addr(80), func(c *net.TCPConn) {
			testnet.WritePattern(countingWriter{c, &served}, -1) //nolint:errcheck // ends with the client
		})
	}
	rss := b.gw.Process().RSS
	var s sippers
	conns, read := make([]*net.TCPConn, slowClients), make([]atomic.Uint64, slowClients)
	for i := range conns {
		c := b.connect(t, tcpFamilies()[i%2].addr(80))
		if err := c.SetReadBuffer(slowSocket); err != nil {
			t.Fatal(err)
		}
		conns[i] = c
		s.wg.Go(func() { s.sip(c, &read[i]) })
	}
	testnet.Until(t, patience, "buffers are full", stalled(&served))
	before, readBefore, begin := served.Load(), s.total.Load(), time.Now()
	time.Sleep(held)
	sent, got, took := served.Load()-before, s.total.Load()-readBefore, time.Since(begin)
	t.Logf("clients read %d kB/s, the server sent %d kB/s", rate(got, took), rate(sent, took))
	if want := uint64(float64(slowClients*slowRate) * took.Seconds()); sent > 2*want {
		t.Errorf("the server sent %d bytes while the clients could read %d", sent, want)
	}
	b.boundedRSS(t, rss, slowClientRSS)
	// The counter is looked at first: what is read meanwhile is on the safe side.
	for _, f := range b.gw.API.Flows("") {
		for i, c := range conns {
			if n := read[i].Load(); c.LocalAddr().String() == f.Source && f.Down > n+socketBuffer {
				t.Errorf("flow %d counts %d bytes down, its client read %d", f.ID, f.Down, n)
			}
		}
	}
	for _, c := range conns {
		c.Close()
	}
	s.wg.Wait()
	testnet.Until(t, patience, "no flow is left", func() bool { return b.gw.API.Status().Flows == 0 })
}

func TestB09_ASlowServerHoldsUploadsBackAndNotMemory(t *testing.T) {
	b := newTCPBed(t, "")
	var s sippers
	read := make(map[string]*atomic.Uint64)
	var mu sync.Mutex // guards read
	for _, f := range tcpFamilies() {
		b.Srv.Serve(f.addr(9), func(c *net.TCPConn) {
			n := new(atomic.Uint64)
			mu.Lock()
			read[c.RemoteAddr().String()] = n
			mu.Unlock()
			if c.SetReadBuffer(slowSocket) == nil {
				s.sip(c, n)
			}
		})
	}
	rss := b.gw.Process().RSS
	var sent atomic.Uint64
	var wg sync.WaitGroup
	conns := make([]*net.TCPConn, slowClients)
	for i := range conns {
		c := b.connect(t, tcpFamilies()[i%2].addr(9))
		conns[i] = c
		wg.Go(func() {
			testnet.WritePattern(countingWriter{c, &sent}, -1) //nolint:errcheck // ends with the test
		})
	}
	testnet.Until(t, patience, "buffers are full", stalled(&sent))
	time.Sleep(held)
	b.boundedRSS(t, rss, slowServerRSS)
	flows := b.gw.API.Flows("")
	if len(flows) != slowClients {
		t.Errorf("%d flows", len(flows))
	}
	mu.Lock()
	for _, f := range flows {
		n := read[f.Egress]
		if n == nil {
			t.Errorf("the server knows nobody at %s", f.Egress)
		} else if f.Up < n.Load()/2 || f.Up > n.Load()+maxKernelSend+socketBuffer {
			t.Errorf("flow %d counts %d bytes up, its server read %d", f.ID, f.Up, n.Load())
		}
	}
	mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
	wg.Wait()
}

// stalled reports whether a counter that stands for a fast side has come down to
// the slow side's rate.
func stalled(n *atomic.Uint64) func() bool {
	var before uint64
	at := time.Now()
	return func() bool {
		took := time.Since(at)
		if took < 500*time.Millisecond {
			return false
		}
		now := n.Load()
		slow := now > 0 && float64(now-before) < 2*slowClients*slowRate*took.Seconds()
		before, at = now, time.Now()
		return slow
	}
}

func (b *tcpBed) boundedRSS(t *testing.T, before, perFlow uint64) {
	t.Helper()
	now := b.gw.Process().RSS
	t.Logf("resident memory grew from %d to %d KiB: %d KiB a flow", before>>10, now>>10, (now-before)>>10/slowClients)
	if now > before+slowClients*perFlow {
		t.Errorf("resident memory grew by %d MiB for %d slow flows, want at most %d", (now-before)>>20, slowClients, slowClients*perFlow>>20)
	}
}

func rate(n uint64, took time.Duration) int { return int(float64(n) / took.Seconds() / 1000) }

// countingWriter counts what it wrote. It hides ReadFrom.
type countingWriter struct {
	w io.Writer
	n *atomic.Uint64
}

func (c countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n.Add(uint64(n))
	return n, err
}
