package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"gatewayd/internal/testnet"
)

const config = `version: 1
api: {listen: ["$API"]}
tun:
  - {tag: lan, device: gw0}
outbounds:
  - {tag: wan, type: direct, interface: wan0}
route:
  rules:
    - {name: no-telnet, network: tcp, port: 23, outbound: reject}
    - {name: echo, network: udp, port: 7, outbound: direct}
  default: wan
`

const (
	fileSize  = 64 << 20              // bytes of a plain download
	slowChunk = 128 << 10             // bytes that a long download gets …
	slowEvery = 50 * time.Millisecond // … each time
	patience  = 5 * time.Second       // for anything that should be at once
	telnet    = testnet.FarV4 + ":23" // refused by a rule
)

var hosts = []struct{ family, host string }{{"IPv4", testnet.FarV4}, {"IPv6", testnet.FarV6}}

// show is the whole demonstration.
func show(s *session) {
	s.Logf("A client (%s, %s), a gateway and a server (%s, %s), each in a network namespace of its own.",
		testnet.ClientV4, testnet.ClientV6, testnet.FarV4, testnet.FarV6)
	lab := testnet.New(s, testnet.Options{})
	for _, h := range hosts {
		lab.Srv.HTTP(net.JoinHostPort(h.host, "80"), site())
		lab.Srv.UDPEcho(net.JoinHostPort(h.host, "7"))
	}
	g := lab.Start(testnet.GatewayOptions{Config: config, Device: "gw0"})
	title(s, "Plain traffic")
	for _, h := range hosts {
		fetch(s, lab, h.family, h.host)
		echo(s, lab, h.family, h.host)
	}
	refused(s, lab)

	title(s, "Two long downloads: gatewayd flows")
	long := []*download{start(s, lab, testnet.FarV4), start(s, lab, testnet.FarV6)}
	for _, d := range long {
		testnet.Until(s, patience, "a long download moves", func() bool { return d.got.Load() > 4*slowChunk })
	}
	command(s, g, "flows")
	title(s, "gatewayd top")
	command(s, g, "top", "--once")
	title(s, "gatewayd status")
	command(s, g, "status")
	traffic(s, g)
	kill(s, g, long[0])
	shutdown(s, g, long[1])
}

func title(s *session, text string) { s.Logf("\n== %s", text) }

// command runs one client command and shows what it printed.
func command(s *session, g *testnet.Gateway, args ...string) {
	out, err := g.CLI(args...)
	if err != nil {
		s.Fatalf("%v", err)
	}
	s.Logf("%s", strings.TrimRight(out, "\n"))
}

// site has a file and a page that never ends.
func site() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/file", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(fileSize))
		w.Header().Set("X-Seen-From", r.RemoteAddr)
		testnet.WritePattern(w, fileSize) //nolint:errcheck // the client looks
	})
	mux.HandleFunc("/slow", func(w http.ResponseWriter, r *http.Request) {
		tick := time.NewTicker(slowEvery)
		defer tick.Stop()
		for chunk := make([]byte, slowChunk); ; {
			if _, err := w.Write(chunk); err != nil {
				return
			}
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
		}
	})
	return mux
}

func fetch(s *session, lab *testnet.Lab, family, host string) {
	begin := time.Now()
	req, err := http.NewRequestWithContext(s.ctx, http.MethodGet, "http://"+net.JoinHostPort(host, "80")+"/file", nil)
	if err != nil {
		s.Fatalf("%v", err)
	}
	resp, err := lab.Cli.HTTPClient().Do(req)
	if err != nil {
		s.Fatalf("download over %s: %v", family, err)
	}
	defer resp.Body.Close()
	n, err := testnet.ReadPattern(resp.Body)
	if err != nil || n != fileSize {
		s.Fatalf("download over %s: %d of %d bytes: %v", family, n, fileSize, err)
	}
	took := time.Since(begin).Seconds()
	s.Logf("%s TCP  %d MiB by HTTP in %.2f s (%.1f Gbit/s), every byte right; the server saw %s", family, n>>20, took, float64(n)*8/1e9/took, resp.Header.Get("X-Seen-From"))
}

func echo(s *session, lab *testnet.Lab, family, host string) {
	c, err := lab.Cli.Dial(s.ctx, "udp", net.JoinHostPort(host, "7"))
	if err != nil {
		s.Fatalf("UDP over %s: %v", family, err)
	}
	defer c.Close()
	const count = 5
	buf, begin := make([]byte, 100), time.Now()
	for i := range count {
		c.SetDeadline(time.Now().Add(patience)) //nolint:errcheck // a read without it is caught by the limit
		if _, err := fmt.Fprintf(c, "datagram %d", i); err != nil {
			s.Fatalf("UDP over %s: %v", family, err)
		}
		if n, err := c.Read(buf); err != nil || string(buf[:n]) != fmt.Sprintf("datagram %d", i) {
			s.Fatalf("UDP over %s: echo %d: %q, %v", family, i, buf[:n], err)
		}
	}
	s.Logf("%s UDP  %d datagrams echoed, %d µs each", family, count, time.Since(begin).Microseconds()/count)
}

func refused(s *session, lab *testnet.Lab) {
	c, err := lab.Cli.Dial(s.ctx, "tcp", telnet)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		s.Fatalf("the rule no-telnet: want refused, got %v", err)
	}
	s.Logf("Port 23   %v, by the rule no-telnet", err)
}

// download reads a page without end and counts what its socket gave.
type download struct {
	local string
	got   atomic.Uint64
	ended chan error // has its end, once
}

func start(s *session, lab *testnet.Lab, host string) *download {
	c, err := lab.Cli.Dial(s.ctx, "tcp", net.JoinHostPort(host, "80"))
	if err != nil {
		s.Fatalf("long download: %v", err)
	}
	s.Cleanup(func() { c.Close() })
	if _, err := fmt.Fprintf(c, "GET /slow HTTP/1.1\r\nHost: server\r\n\r\n"); err != nil {
		s.Fatalf("long download: %v", err)
	}
	d := &download{local: c.LocalAddr().String(), ended: make(chan error, 1)}
	go func() { d.ended <- d.read(c) }()
	return d
}

func (d *download) read(r io.Reader) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		d.got.Add(uint64(n))
		if err != nil {
			return err
		}
	}
}

// end waits for the download's end.
func (d *download) end(s *session) error {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-d.ended:
		return err
	case <-timer.C:
		s.Fatalf("the long download of %s still runs", d.local)
	case <-s.ctx.Done():
		s.Fatalf("%v", s.ctx.Err())
	}
	return nil
}

func traffic(s *session, g *testnet.Gateway) {
	testnet.Until(s, patience, "a tick of the sampler", func() bool { t := g.API.Traffic(); return t.Tick > 0 && t.Total.DownRate > 0 })
	t := g.API.Traffic()
	title(s, fmt.Sprintf("Traffic, tick %d (%.0f ms)", t.Tick, t.IntervalMS))
	line := func(kind, name string, c testnet.Counters) {
		s.Logf("%-9s %-7s up %9d B %9d B/s   down %11d B %10d B/s   %d flows", kind, name, c.Up, c.UpRate, c.Down, c.DownRate, c.Flows)
	}
	for name, c := range t.Inbounds {
		line("inbound", name, c)
	}
	for name, c := range t.Outbounds {
		line("outbound", name, c)
	}
	line("total", "", t.Total)
}

func kill(s *session, g *testnet.Gateway, d *download) {
	var id uint64
	for _, f := range g.API.Flows("") {
		if f.Source == d.local {
			id = f.ID
		}
	}
	if id == 0 {
		s.Fatalf("the flow of %s is not listed", d.local)
	}
	title(s, fmt.Sprintf("gatewayd kill %d", id))
	begin := time.Now()
	command(s, g, "kill", fmt.Sprint(id))
	err := d.end(s)
	if !errors.Is(err, syscall.ECONNRESET) {
		s.Fatalf("the killed download: want a reset, got %v", err)
	}
	s.Logf("The client: %v, %d ms after the command began, with %d bytes.", err, time.Since(begin).Milliseconds(), d.got.Load())
	record := closed(s, g, id)
	s.Logf("Its record: down %d, reason %s.", record.Down, record.Reason)
	if record.Down != d.got.Load() || record.Reason != "killed" {
		s.Fatalf("the record differs from what the client got")
	}
}

func closed(s *session, g *testnet.Gateway, id uint64) (record testnet.FlowRecord) {
	testnet.Until(s, patience, "the flow's record is closed", func() bool {
		for _, f := range g.API.Closed() {
			if f.ID == id {
				record = f
			}
		}
		return record.ID == id
	})
	return record
}

func shutdown(s *session, g *testnet.Gateway, d *download) {
	title(s, "kill -TERM")
	begin := time.Now()
	code := g.Stop()
	s.Logf("The gateway ended with %d after %d ms; the other download: %v.", code, time.Since(begin).Milliseconds(), d.end(s))
	if code != 0 {
		s.Fatalf("exit code %d", code)
	}
}
