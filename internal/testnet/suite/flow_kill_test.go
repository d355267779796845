package suite

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// commandLimit is from the start of `gatewayd kill` to the client's reset. The
// promise is 100 ms for the kill; the command is a process of its own, on a
// machine that is busy with the transfer.
const commandLimit = 500 * time.Millisecond

// fetch is a download in progress.
type fetch struct {
	conn  *net.TCPConn
	local net.Addr
	got   atomic.Int64 // bytes; the pattern is checked
	done  chan struct{}
	err   error     // valid once done
	ended time.Time // valid once done
}

func startFetch(c *net.TCPConn, pause time.Duration) *fetch {
	f := &fetch{conn: c, local: c.LocalAddr(), done: make(chan struct{})}
	go func() {
		defer close(f.done)
		n, err := testnet.ReadPattern(fetchReader{f, pause})
		f.err, f.ended = err, time.Now()
		if err == nil || isReset(err) {
			if n != f.got.Load() {
				f.err = fmt.Errorf("%d bytes of %d follow the pattern: %w", n, f.got.Load(), err)
			}
		}
	}()
	return f
}

// fetchReader counts, and pauses before each read.
type fetchReader struct {
	*fetch
	pause time.Duration
}

func (r fetchReader) Read(p []byte) (int, error) {
	if r.pause > 0 {
		time.Sleep(r.pause)
	}
	n, err := r.conn.Read(p)
	r.got.Add(int64(n))
	return n, err
}

func (f *fetch) wait(t *testing.T) {
	t.Helper()
	select {
	case <-f.done:
	case <-time.After(patience):
		t.Fatal("the download did not end")
	}
}

func TestADownloadIsSeenGrowingAndKilledByCommand(t *testing.T) {
	b := newTCPBed(t, "")
	j := b.follow(t)
	for _, f := range tcpFamilies() {
		b.Srv.Source(f.addr(80), -1)
		d := startFetch(b.connect(t, f.addr(80)), 0)
		first := b.shownBy(t, d)
		for grown := first; grown.Down < first.Down+100<<20; { // a gigabyte passes the same way
			next := b.shownBy(t, d)
			if next.Down < grown.Down || next.ID != first.ID {
				t.Fatalf("%s: the list shows %+v after %+v", f.name, next, grown)
			}
			grown = next
		}
		begin := time.Now()
		if _, err := b.gw.CLI("kill", fmt.Sprint(first.ID)); err != nil {
			t.Fatal(err)
		}
		d.wait(t)
		if took := d.ended.Sub(begin); took > commandLimit {
			t.Errorf("%s: the download ended %v after the command began", f.name, took)
		}
		if !isReset(d.err) {
			t.Errorf("%s: the download ended with %v, want a reset", f.name, d.err)
		}
		j.wants(t, d.local, "killed", 0, uint64(d.got.Load()))
		if out, err := b.gw.CLI("kill", fmt.Sprint(first.ID)); err == nil || !strings.Contains(out, "no live flow") {
			t.Errorf("%s: killed again: %q, %v", f.name, out, err)
		}
	}
	j.sound(t)
}

// shownBy is what `gatewayd flows --json` shows of a download, while it lives.
func (b *tcpBed) shownBy(t *testing.T, d *fetch) testnet.FlowRecord {
	t.Helper()
	out, err := b.gw.CLI("flows", "--json")
	var list struct{ Flows []testnet.FlowRecord }
	if err == nil {
		err = json.Unmarshal([]byte(out), &list)
	}
	if err != nil {
		t.Fatalf("flows --json: %v: %s", err, out)
	}
	i := slices.IndexFunc(list.Flows, func(f testnet.FlowRecord) bool { return f.Source == d.local.String() })
	if i < 0 {
		t.Fatalf("the download is not in the list: %s", out)
	}
	return list.Flows[i]
}

func TestAKilledDownloadIsCountedAsItsClientSawIt(t *testing.T) {
	const rounds = 40
	b := newTCPBed(t, "sample: 100ms\n")
	j := b.follow(t)
	random := rand.New(rand.NewPCG(1, 2))
	for _, f := range tcpFamilies() {
		b.Srv.Source(f.addr(80), -1)
	}
	var slowest time.Duration
	for i := range rounds {
		f := tcpFamilies()[i%2]
		pause := []time.Duration{0, 0, 2 * time.Millisecond, 50 * time.Millisecond}[i/2%4]
		c := b.connect(t, f.addr(80))
		if i/8%2 == 1 {
			c.SetReadBuffer(slowSocket) //nolint:errcheck // a larger one does as well
		}
		d := startFetch(c, pause)
		time.Sleep(time.Duration(random.Int64N(int64(150 * time.Millisecond))))
		broken := whenBroken(c)
		id, kill := b.live(t, d.local).ID, time.Now()
		if status := b.gw.API.Kill(id); status != 204 {
			t.Fatalf("kill: status %d", status)
		}
		slowest = max(slowest, (<-broken).Sub(kill))
		d.wait(t)
		if !isReset(d.err) {
			t.Errorf("round %d: the download ended with %v, want a reset", i, d.err)
		}
		j.wants(t, d.local, "killed", 0, uint64(d.got.Load()))
	}
	t.Logf("the slowest of %d kills took %v", rounds, slowest)
	if slowest > prompt {
		t.Errorf("a kill took %v to reach the client", slowest)
	}
	j.sound(t)
	b.totalsAgree(t, j)
}
