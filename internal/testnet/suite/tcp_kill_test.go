package suite

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

const killLimit = time.Second // from a kill to the client's reset

// stuck are the states in which a flow is killed: what the client does after it
// connected to a port, and whether the server is in the same state.
var stuck = []struct {
	name string
	port int
	do   func(t *testing.T, c *net.TCPConn)
}{
	{"idle", 7, func(*testing.T, *net.TCPConn) {}},
	{"full window", 80, func(*testing.T, *net.TCPConn) {}}, // never reads
	{"full upload", 9, fillUpload},
	{"client half-closed", 7001, func(t *testing.T, c *net.TCPConn) {
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}},
	{"server half-closed", 7002, func(t *testing.T, c *net.TCPConn) {
		if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Fatalf("read %d bytes, %v, want the server's end", n, err)
		}
	}},
}

// serveStuck starts the servers for stuck.
func (b *tcpBed) serveStuck() {
	hold := func(c *net.TCPConn) { io.Copy(io.Discard, c) } //nolint:errcheck // ends with the test
	for _, f := range tcpFamilies() {
		b.Srv.Echo(f.addr(7))
		b.Srv.Source(f.addr(80), -1)
		b.Srv.Serve(f.addr(9), func(c *net.TCPConn) { waitClosed(c) })
		b.Srv.Serve(f.addr(7001), func(c *net.TCPConn) { // says nothing after the client's end
			hold(c)
			waitClosed(c)
		})
		b.Srv.Serve(f.addr(7002), func(c *net.TCPConn) {
			c.CloseWrite() //nolint:errcheck // the client would notice
			hold(c)
		})
	}
}

// waitClosed reads nothing and returns once the connection broke.
func waitClosed(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	raw.Read(func(fd uintptr) bool { return isBroken(fd) }) //nolint:errcheck // ends with the test
}

// fillUpload writes until the far side's buffers have been full for a while.
func fillUpload(t *testing.T, c *net.TCPConn) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for {
		c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)) //nolint:errcheck // the write would block
		if _, err := c.Write(buf); err != nil {
			return
		}
	}
}

func TestB51_AKillEndsATCPFlowInAnyState(t *testing.T) {
	b := newTCPBed(t, "sample: 100ms\n")
	j := b.follow(t)
	b.serveStuck()
	for _, f := range tcpFamilies() {
		for _, s := range stuck {
			t.Run(f.name+"/"+s.name, func(t *testing.T) {
				c := b.connect(t, f.addr(s.port))
				s.do(t, c)
				b.settled(t, c.LocalAddr())
				broken, kill := whenBroken(c), time.Now()
				if status := b.gw.API.Kill(b.live(t, c.LocalAddr()).ID); status != 204 {
					t.Errorf("kill: status %d", status)
				}
				b.endsKilled(t, j, c, (<-broken).Sub(kill))
			})
		}
	}
	j.sound(t)
	b.totalsAgree(t, j)
}

func TestB51_ASelectorKillsEachFlowOnce(t *testing.T) {
	b := newTCPBed(t, "sample: 100ms\n")
	j := b.follow(t)
	b.serveStuck()
	for _, f := range tcpFamilies() {
		var conns []*net.TCPConn
		var broken []<-chan time.Time
		for _, s := range stuck {
			c := b.connect(t, f.addr(s.port))
			s.do(t, c)
			b.settled(t, c.LocalAddr())
			conns, broken = append(conns, c), append(broken, whenBroken(c))
		}
		other := b.connect(t, otherFamily(f).addr(7))
		kill := time.Now()
		if n := b.killAtOnce(t, "source="+f.client); n != len(conns) {
			t.Errorf("%s: the selector killed %d flows of %d", f.name, n, len(conns))
		}
		if n := b.gw.API.KillWhere("source=" + f.client); n != 0 {
			t.Errorf("%s: the second time it killed %d", f.name, n)
		}
		for i, c := range conns {
			b.endsKilled(t, j, c, (<-broken[i]).Sub(kill))
		}
		if _, err := other.Write([]byte("x")); err != nil {
			t.Errorf("a flow that was not selected: %v", err)
		}
		if _, err := other.Read(make([]byte, 1)); err != nil {
			t.Errorf("a flow that was not selected: %v", err)
		}
		other.Close()
	}
	j.sound(t)
	b.totalsAgree(t, j)
}

// killAtOnce closes by a selector from several clients of the API at a time, and
// returns what they were told in sum.
func (b *tcpBed) killAtOnce(t *testing.T, selector string) int {
	t.Helper()
	var sum atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			status, body, err := b.gw.API.Do(http.MethodDelete, "/v1/connections?"+selector, nil)
			var answer struct{ Closed int64 }
			if err == nil {
				err = json.Unmarshal(body, &answer)
			}
			if err != nil || status != http.StatusOK {
				t.Errorf("kill %q: status %d, %v", selector, status, err)
			}
			sum.Add(answer.Closed)
		})
	}
	wg.Wait()
	return int(sum.Load())
}

func otherFamily(f family) family {
	for _, o := range tcpFamilies() {
		if o.name != f.name {
			return o
		}
	}
	return f
}

// settled waits until a client's flow is there and moves nothing any more.
func (b *tcpBed) settled(t *testing.T, local net.Addr) {
	t.Helper()
	var before testnet.FlowRecord
	at := time.Now()
	testnet.Until(t, patience, "the flow has settled", func() bool {
		if time.Since(at) < 150*time.Millisecond {
			return false
		}
		at = time.Now()
		for _, f := range b.gw.API.Flows("") {
			if f.Source == local.String() {
				same := f.Up == before.Up && f.Down == before.Down && f.ID == before.ID
				before = f
				return same
			}
		}
		return false
	})
}

// whenBroken tells when a client's kernel has got a reset, whatever waits to be
// read before it.
func whenBroken(c *net.TCPConn) <-chan time.Time {
	out, end := make(chan time.Time, 1), time.Now().Add(patience)
	go func() {
		for !socketBroken(c) && time.Now().Before(end) {
			time.Sleep(time.Millisecond)
		}
		out <- time.Now()
	}()
	return out
}

// endsKilled wants the client reset in time, after exactly the bytes that the
// closed event counts.
func (b *tcpBed) endsKilled(t *testing.T, j *journal, c *net.TCPConn, took time.Duration) {
	t.Helper()
	if took > killLimit {
		t.Errorf("the client was reset after %v", took)
	}
	n, err := testnet.ReadPattern(c)
	if n == 0 && err == nil { // its end had come before: writing shows the reset
		if _, err = c.Write([]byte("x")); errors.Is(err, syscall.EPIPE) {
			err = syscall.ECONNRESET
		}
	}
	if !isReset(err) {
		t.Errorf("after %d bytes the client saw %v, want a reset", n, err)
	}
	r := j.end(t, patience, c.LocalAddr())
	if r.Reason != "killed" || !r.Killed || r.Down != uint64(n) {
		t.Errorf("the closed event says %s with %d bytes down, the client got %d", r.Reason, r.Down, n)
	}
	if b.gw.API.Kill(r.ID) != 404 {
		t.Errorf("flow %d can be killed once more", r.ID)
	}
	c.Close()
}

// totalsAgree wants every closed flow's bytes in the totals, and nothing that was
// counted later. No flow that moves bytes may be live.
func (b *tcpBed) totalsAgree(t *testing.T, j *journal) {
	t.Helper()
	testnet.Until(t, patience, "no flow is left", func() bool {
		opened, closed := j.counts()
		return opened == closed && b.gw.API.Status().Flows == 0
	})
	up, down := j.bytes()
	tick := b.gw.API.Traffic().Tick
	testnet.Until(t, patience, "two ticks", func() bool { return b.gw.API.Traffic().Tick > tick+1 })
	if total := b.gw.API.Traffic().Total; total.Up != up || total.Down != down {
		t.Errorf("the totals are %d up and %d down, the closed flows' sums %d and %d", total.Up, total.Down, up, down)
	}
}

// bytes are the sums over closed flows.
func (j *journal) bytes() (up, down uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, r := range j.closed {
		up += r.Up
		down += r.Down
	}
	return up, down
}
