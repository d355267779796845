package suite

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// fairBed is a user with 10 Mbit/s each way, whose bulk download has begun.
func fairBed(t *testing.T) (b *userBed, who person, bulk *arrivals) {
	who = people(1)[0]
	b = newUserBed(t, usersConfig([]string{who.yaml("limits: {bandwidth: {up: 10Mbit/s, down: 10Mbit/s}}")}, ""), who)
	b.serveAll()
	bulk = new(arrivals)
	b.download(who.v4, bulk)
	testnet.Until(t, patience, "the bulk is under way", func() bool { return bulk.until(time.Now()) > 500_000 })
	return b, who, bulk
}

func TestSmallRequestsGetOnBesideABulkDownloadOfTheirUser(t *testing.T) {
	const (
		requests, clients, size = 200, 10, 10_000
		// In a round of the line each waits for one transfer of the bulk, which is 64 KiB,
		// and for one answer of each other client: 131 ms at 10 Mbit/s.
		round = 131 * time.Millisecond
	)
	b, who, bulk := fairBed(t)
	b.Srv.Serve(hostPort(testnet.FarV6, 1001), func(c *net.TCPConn) {
		if _, err := io.ReadFull(c, make([]byte, 100)); err == nil {
			testnet.WritePattern(c, size) //nolint:errcheck // its client tells
		}
	})
	var slowest time.Duration
	for range 3 { // the machine's own slowness is not the gateway's
		var mu sync.Mutex
		var wg sync.WaitGroup
		slowest = 0
		before, begin := bulk.until(time.Now()), time.Now()
		for range clients {
			wg.Go(func() {
				for range requests / clients {
					asked := time.Now()
					c, err := b.dial(who.v6, "tcp", hostPort(testnet.FarV6, 1001))
					if err != nil {
						t.Errorf("a request: %v", err)
						return
					}
					c.Write(make([]byte, 100)) //nolint:errcheck // the read tells
					n, err := testnet.ReadPattern(c)
					c.Close()
					if err != nil || n != size {
						t.Errorf("a request: %d bytes, %v", n, err)
					}
					mu.Lock()
					slowest = max(slowest, time.Since(asked))
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		took := time.Since(begin)
		got := bulk.until(time.Now()) - before
		t.Logf("%d requests took %v, the slowest %v; the bulk got %d bytes meanwhile", requests, took, slowest, got)
		if float64(got) < 0.2*1_250_000*took.Seconds() {
			t.Errorf("the bulk got %d bytes in %v", got, took)
		}
		if slowest < 4*round || t.Failed() {
			return
		}
	}
	t.Errorf("the slowest request took %v, three times", slowest)
}

func TestTCPAndEchoGetOnBesideABlastOfDatagramsOfTheirUser(t *testing.T) {
	testnet.Require(t, "ping")
	b, who, bulk := fairBed(t)
	stop := make(chan struct{})
	var blasts sync.WaitGroup
	defer blasts.Wait()
	defer close(stop)
	b.Srv.ServeUDP(hostPort(testnet.FarV6, 1002), func(s *testnet.UDPServer, from netip.AddrPort, _ []byte) {
		blasts.Go(func() { gush(toward{s, from}, 1200, 5_000_000, stop) })
	})
	udp := b.mustDial(who.v6, "udp", hostPort(testnet.FarV6, 1002))
	udp.Write([]byte("go")) //nolint:errcheck // nothing would come
	var datagrams arrivals
	go datagrams.drain(udp)
	testnet.Until(t, patience, "the blast is under way", func() bool { return datagrams.until(time.Now()) > 1_000_000 })
	begin, tcp, blast := time.Now(), bulk.until(time.Now()), datagrams.until(time.Now())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := b.Cli.Command(ctx, "ping", "-n", "-i", "0.2", "-c", "15", "-W", "2", "-I", who.v4, testnet.FarV4).CombinedOutput()
	if err != nil {
		t.Errorf("ping: %v: %s", err, out)
	}
	m := pingSummary.FindStringSubmatch(string(out))
	if m == nil || m[2] != "15" {
		t.Errorf("ping: %s", out)
	}
	seconds := time.Since(begin).Seconds()
	tcp, blast = bulk.until(time.Now())-tcp, datagrams.until(time.Now())-blast
	t.Logf("in %.1f s: TCP %d bytes, datagrams %d; %s", seconds, tcp, blast, pingTimes.FindString(string(out)))
	all := float64(tcp + blast)
	if float64(tcp) < all/4 || float64(blast) < all/4 || !within(all/seconds, 1_250_000, 0.1) {
		t.Errorf("TCP got %d bytes, datagrams %d in %.1f s", tcp, blast, seconds)
	}
}
