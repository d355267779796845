package suite

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

const (
	loadEach = 5               // flows of each kind and family: TCP down, TCP both ways, UDP echo
	grace    = 2 * time.Second // timeouts.grace
	stopping = grace + 2*time.Second
)

// load is traffic that goes on until its gateway ends.
type load struct {
	downloads []*fetch
	wg        sync.WaitGroup
	stop      context.CancelFunc
}

func (b *tcpBed) startLoad(t *testing.T) *load {
	ctx, stop := context.WithCancel(t.Context())
	l := &load{stop: stop}
	for _, f := range tcpFamilies() {
		b.Srv.Source(f.addr(80), -1)
		b.Srv.Echo(f.addr(7))
		b.Srv.UDPEcho(f.addr(7))
		for range loadEach {
			l.downloads = append(l.downloads, startFetch(b.connect(t, f.addr(80)), 0))
			c := b.connect(t, f.addr(7))
			l.wg.Go(func() { testnet.WritePattern(c, -1) })      //nolint:errcheck // ends with the gateway
			l.wg.Go(func() { io.Copy(io.Discard, onlyRead{c}) }) //nolint:errcheck
			u, err := b.Cli.Dial(ctx, "udp", f.addr(7))
			if err != nil {
				t.Fatal(err)
			}
			context.AfterFunc(ctx, func() { u.Close() })
			l.wg.Go(func() { sendEvery(ctx, u) })
			l.wg.Go(func() { io.Copy(io.Discard, onlyRead{u}) }) //nolint:errcheck
		}
	}
	t.Cleanup(func() {
		stop()
		l.wg.Wait()
	})
	return l
}

type onlyRead struct{ io.Reader }

// sendEvery sends a datagram every millisecond.
func sendEvery(ctx context.Context, c net.Conn) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for buf := make([]byte, 500); ctx.Err() == nil; <-tick.C {
		c.Write(buf) //nolint:errcheck // the gateway may be gone
	}
}

func TestATerminatedGatewayEndsEveryFlowAndCountsEveryByte(t *testing.T) {
	b := newTCPBed(t, fmt.Sprintf("sample: 100ms\ntimeouts: {grace: %v}\n", grace))
	j := b.follow(t)
	last := b.lastTraffic()
	l := b.startLoad(t)
	flows := 2 * 3 * loadEach
	testnet.Until(t, patience, "every flow moves bytes both ways", func() bool { return b.moving() == flows })

	begin := time.Now()
	b.gw.Signal(syscall.SIGTERM)
	if code := b.gw.Wait(stopping); code != 0 {
		t.Errorf("exit code %d", code)
	}
	t.Logf("it took %v to end", time.Since(begin))
	l.stop()
	select {
	case <-j.ended:
	case <-time.After(patience):
		t.Fatal("the event stream did not end")
	}
	j.sound(t)
	if opened, closed := j.counts(); opened < flows || closed != opened {
		t.Errorf("%d flows opened and %d closed, want %d and the same", opened, closed, flows)
	}
	for id, r := range j.closed {
		if r.Reason != "shutdown" {
			t.Errorf("flow %d closed as %s", id, r.Reason)
		}
	}
	for _, d := range l.downloads {
		d.wait(t)
		if !isReset(d.err) {
			t.Errorf("a download ended with %v, want a reset", d.err)
		}
		j.wants(t, d.local, "shutdown", 0, uint64(d.got.Load()))
	}
	up, down := j.bytes()
	if up == 0 || down == 0 {
		t.Errorf("%d bytes up, %d down", up, down)
	}
	b.gw.WaitLog(time.Second, fmt.Sprintf("msg=stopped up=%d down=%d", up, down))
	if s := <-last; s.Total.Up != up || s.Total.Down != down || s.Total.Flows != 0 {
		t.Errorf("the last snapshot has %+v, the closed flows' sums are %d and %d", s.Total, up, down)
	}
}

// moving is how many flows have moved bytes both ways, or down if they are
// downloads, which send nothing.
func (b *tcpBed) moving() (n int) {
	for _, f := range b.gw.API.Flows("") {
		_, port, _ := net.SplitHostPort(f.Destination)
		if f.Down > 0 && (f.Up > 0 || port == "80") {
			n++
		}
	}
	return n
}

// lastTraffic gives the last snapshot that the stream told of when it ends.
func (b *tcpBed) lastTraffic() <-chan testnet.Traffic {
	events, out := b.gw.API.Events(context.Background(), "/v1/traffic"), make(chan testnet.Traffic, 1)
	go func() {
		var last testnet.Traffic
		for e := range events {
			var s testnet.Traffic
			if e.Type == "traffic" && json.Unmarshal(e.Data, &s) == nil {
				last = s
			}
		}
		out <- last
	}()
	return out
}
