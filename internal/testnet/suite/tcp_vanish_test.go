package suite

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestB10_FlowsOfAVanishedClientEndAndOthersStay(t *testing.T) {
	vanish(t, "timeouts: {tcp: {keepalive: {idle: 2s, interval: 1s, probes: 2}}}\n", 200, 4*time.Second)
}

const vanishSlack = 3 * time.Second // for timers of whole seconds on both legs

// vanish lets so many idle connections lose their client, with a configuration
// by which that shows after limit: keepalive's idle + interval × probes.
func vanish(t *testing.T, config string, vanishing int, limit time.Duration) {
	b := newTCPBed(t, config)
	j := b.follow(t)
	var legs atomic.Int64 // connections that the server has
	var alive []*net.TCPConn
	var gone []net.Addr
	for _, f := range tcpFamilies() {
		for _, port := range []int{7, 22} {
			b.Srv.Serve(f.addr(port), func(c *net.TCPConn) {
				legs.Add(1)
				io.Copy(c, c) //nolint:errcheck // ends with the client
				legs.Add(-1)
			})
		}
		alive = append(alive, b.connect(t, f.addr(22)))
		for range vanishing / 2 {
			gone = append(gone, b.connect(t, f.addr(7)).LocalAddr())
		}
	}
	all := vanishing + len(alive)
	testnet.Until(t, patience, "all are connected", func() bool { return int(legs.Load()) == all })
	// Idle is not vanished: keepalive probes are answered.
	time.Sleep(limit + time.Second)
	if n := b.gw.API.Status().Flows; n != all {
		t.Fatalf("%d of %d idle flows live on", n, all)
	}

	b.Cli.Filter("output", "tcp dport 7", "drop") // these clients say nothing any more
	began := time.Now()
	testnet.Until(t, limit+vanishSlack, "flows of vanished clients ended", func() bool {
		return b.gw.API.Status().Flows <= len(alive)
	})
	if took := time.Since(began); took < time.Second {
		t.Errorf("they ended after %v, before a probe could miss an answer", took)
	}
	testnet.Until(t, patience, "outbound legs ended", func() bool { return int(legs.Load()) == len(alive) })
	for _, local := range gone {
		j.wants(t, local, "timeout", 0, 0)
	}
	for _, c := range alive {
		c.SetDeadline(time.Now().Add(patience)) //nolint:errcheck // the one of its dial may be over
		if _, err := c.Write([]byte("ping")); err != nil {
			t.Errorf("idle connection: %v", err)
		}
		if n, err := io.ReadFull(c, make([]byte, 4)); err != nil {
			t.Errorf("idle connection: read %d bytes, %v", n, err)
		}
	}

	b.Cli.Run("ip", "link", "set", "eth0", "down")
	testnet.Until(t, limit+vanishSlack, "flows of a client without a link ended", func() bool {
		return b.gw.API.Status().Flows == 0 && legs.Load() == 0
	})
	for _, c := range alive {
		j.wants(t, c.LocalAddr(), "timeout", 4, 4)
	}
	j.sound(t)
}
