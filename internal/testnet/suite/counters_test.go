package suite

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// collected is what a collector saw of the traffic stream until it ended.
type collected struct {
	last  testnet.Traffic
	wrong []string
}

// collect reads the traffic stream: ticks are numbered without a gap, and no total ever falls.
func collect(g *testnet.Gateway) <-chan collected {
	events, out := g.API.Events(context.Background(), "/v1/traffic"), make(chan collected, 1)
	go func() {
		var c collected
		for e := range events {
			var s testnet.Traffic
			if err := json.Unmarshal(e.Data, &s); e.Type != "traffic" || err != nil {
				c.wrong = append(c.wrong, e.Type+" "+string(e.Data))
				continue
			}
			was := &c.last
			if was.Tick > 0 && s.Tick != was.Tick+1 || s.Total.Up < was.Total.Up || s.Total.Down < was.Total.Down ||
				s.Outbounds["steady"].Up < was.Outbounds["steady"].Up || s.Outbounds["changing"].Up < was.Outbounds["changing"].Up {
				c.wrong = append(c.wrong, fmt.Sprintf("%+v after %+v", s, *was))
			}
			c.last = s
		}
		out <- c
	}()
	return out
}

func TestB46_CountersGoOnOverFiftyReloadsUntilTheLastTick(t *testing.T) {
	const reloads, transfers, piece = 50, 10, 10_000
	config := func(i int) string {
		return reloadConfig(fmt.Sprintf("{tag: steady, type: direct}, {tag: changing, type: direct, mark: %d}", 1+i),
			"{port: 7, outbound: steady}, {port: 9, outbound: changing}")
	}
	lab, g := reloadBed(t, config(0), 7, 9)
	traffic := collect(g)
	var clients sync.WaitGroup
	var truth [2]uint64 // by port 7 and 9, each way
	for i := range transfers {
		port, pieces := 7+i%2*2, 20*(i+1)
		truth[i%2] += uint64(pieces * piece)
		c, err := lab.Cli.Dial(t.Context(), "tcp", hostPort([]string{testnet.FarV4, testnet.FarV6}[i/2%2], port))
		if err != nil {
			t.Fatal(err)
		}
		clients.Go(func() {
			defer c.Close()
			c.SetDeadline(time.Now().Add(2 * udpPatience)) //nolint:errcheck // a read would tell
			p := make([]byte, piece)
			for range pieces {
				if _, err := c.Write(p); err != nil {
					t.Errorf("transfer %d: %v", i, err)
					return
				}
				if _, err := io.ReadFull(c, p); err != nil {
					t.Errorf("transfer %d: %v", i, err)
					return
				}
			}
		})
	}
	for i := range reloads {
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		reload(t, g, config(i+1), i%2 == 0)
	}
	clients.Wait()
	testnet.Until(t, udpPatience, "every flow is closed", func() bool { return len(g.API.Closed()) == transfers })
	closed := [2]uint64{}
	for _, f := range g.API.Closed() {
		closed[0] += f.Up
		closed[1] += f.Down
	}
	g.Signal(syscall.SIGTERM)
	if code := g.Wait(udpPatience); code != 0 {
		t.Errorf("exit code %d", code)
	}
	c := <-traffic
	if len(c.wrong) > 0 {
		t.Errorf("%d wrong ticks, as %s", len(c.wrong), c.wrong[0])
	}
	all := truth[0] + truth[1]
	if closed != [2]uint64{all, all} || c.last.Total.Up != all || c.last.Total.Down != all {
		t.Errorf("moved %d each way; closed flows sum to %v, the last tick has %+v", all, closed, c.last.Total)
	}
	if up := [2]uint64{c.last.Outbounds["steady"].Up, c.last.Outbounds["changing"].Up}; up != truth {
		t.Errorf("by outbound %v, want %v", up, truth)
	}
}
