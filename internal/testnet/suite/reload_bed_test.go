package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// reloadConfig is a configuration whose rules and outbounds a test fills in. It
// has drain periods and limits that only a wrong reload would meet.
func reloadConfig(outbounds, rules string) string {
	return "version: 1\napi: {listen: \"$API\"}\ntun: [{tag: lan, device: gw0}]\nsample: 100ms\nsweep: 50ms\n" +
		"outbounds: [" + outbounds + "]\nroute: {rules: [" + rules + "]}\n"
}

// reloadBed is a lab with echo servers of both families on some ports.
func reloadBed(t *testing.T, config string, ports ...int) (*testnet.Lab, *testnet.Gateway) {
	t.Helper()
	testnet.Require(t)
	lab := testnet.New(t, testnet.Options{})
	for _, port := range ports {
		for _, host := range []string{testnet.FarV4, testnet.FarV6} {
			lab.Srv.Echo(hostPort(host, port))
			lab.Srv.UDPEcho(hostPort(host, port))
		}
	}
	return lab, lab.Start(testnet.GatewayOptions{Config: config, Device: "gw0"})
}

// answer is what the API answered.
type answer struct {
	status int
	header http.Header
	body   string
}

// call sends a request to a gateway's socket; header is names and values in turn.
func call(t *testing.T, g *testnet.Gateway, method, path, body string, header ...string) answer {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", g.Socket)
		},
	}, Timeout: udpPatience}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://gatewayd"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, string(b)}
}

// reload applies the file that was written, by the API or by SIGHUP, and expects
// that it is taken.
func reload(t *testing.T, g *testnet.Gateway, config string, hangup bool) {
	t.Helper()
	epoch := g.API.Status().Epoch
	g.WriteConfig(config)
	if hangup {
		g.Signal(syscall.SIGHUP)
	} else if a := call(t, g, "POST", "/v1/config/reload", ""); a.status != 200 {
		t.Fatalf("reload: status %d: %s", a.status, a.body)
	}
	testnet.Until(t, udpPatience, "the configuration is applied", func() bool { return g.API.Status().Epoch == epoch+1 })
}

// outboundState is what GET /v1/outbounds tells of one.
type outboundState struct {
	Tag      string
	Version  int
	Flows    int
	Draining []struct{ Version, Flows int }
}

func outboundOf(t *testing.T, g *testnet.Gateway, tag string) (found outboundState) {
	t.Helper()
	var list struct{ Outbounds []outboundState }
	g.API.Get("/v1/outbounds", &list)
	for _, o := range list.Outbounds {
		if o.Tag == tag {
			return o
		}
	}
	return found
}

var goroutineGauge = regexp.MustCompile(`(?m)^gatewayd_goroutines (\d+)`)

// goroutines is how many the gateway has.
func goroutines(t *testing.T, g *testnet.Gateway) int {
	t.Helper()
	m := goroutineGauge.FindStringSubmatch(call(t, g, "GET", "/metrics", "").body)
	if m == nil {
		t.Fatal("no gauge of goroutines")
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// chatter is a set of connections that send and check their echo all the time.
type chatter struct {
	t     *testing.T
	wg    sync.WaitGroup
	stop  chan struct{}
	turns atomic.Uint64
}

func newChatter(t *testing.T) *chatter {
	c := &chatter{t: t, stop: make(chan struct{})}
	t.Cleanup(c.end)
	return c
}

// end stops all of it and waits.
func (c *chatter) end() {
	select {
	case <-c.stop:
	default:
		close(c.stop)
	}
	c.wg.Wait()
}

// talk opens one connection and keeps it talking; the first word is exchanged
// when it returns.
func (c *chatter) talk(n *testnet.Netns, network, address string) net.Conn {
	c.t.Helper()
	conn, err := n.Dial(c.t.Context(), network, address)
	if err == nil {
		err = exchangeWord(conn, "hello")
	}
	if err != nil {
		c.t.Fatalf("%s %s: %v", network, address, err)
	}
	c.wg.Go(func() {
		defer conn.Close()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-tick.C:
			case <-c.stop:
				return
			}
			if err := exchangeWord(conn, fmt.Sprintf("word %d of %s", i, conn.LocalAddr())); err != nil {
				c.t.Errorf("%s %s: word %d: %v", network, address, i, err)
				return
			}
			c.turns.Add(1)
		}
	})
	return conn
}

// exchangeWord sends a word and expects it back.
func exchangeWord(c net.Conn, word string) error {
	if err := c.SetDeadline(time.Now().Add(udpPatience)); err != nil {
		return err
	}
	if _, err := c.Write([]byte(word)); err != nil {
		return err
	}
	buf := make([]byte, len(word))
	if _, err := io.ReadFull(c, buf); err != nil {
		return err
	}
	if !bytes.Equal(buf, []byte(word)) {
		return fmt.Errorf("received %q for %q", buf, word)
	}
	return nil
}

// connects reports whether a new connection is completed; a refusal is the
// other answer, anything else fails the test.
func connects(t *testing.T, n *testnet.Netns, address string) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), udpPatience)
	defer cancel()
	c, err := n.Dial(ctx, "tcp", address)
	if err == nil {
		c.Close()
		return true
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("connect to %s: %v", address, err)
	}
	return false
}

// problem is the part of RFC 9457's document that tests look at.
type problem struct {
	Detail string
	Errors []string
}

// problem is the document that an answer has to be.
func (a answer) problem(t *testing.T) (p problem) {
	t.Helper()
	if kind := a.header.Get("Content-Type"); !strings.HasPrefix(kind, "application/problem+json") {
		t.Errorf("a refusal of type %q: %s", kind, a.body)
	}
	if err := json.Unmarshal([]byte(a.body), &p); err != nil {
		t.Errorf("%v: %s", err, a.body)
	}
	return p
}
