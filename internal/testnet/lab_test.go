package testnet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const limit = 5 * time.Second

func dial(t *testing.T, n *Netns, network, address string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := n.Dial(ctx, network, address)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func exchange(c net.Conn, text string) (string, error) {
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	buf := make([]byte, len(text))
	_, err := io.ReadFull(c, buf)
	return string(buf), err
}

func TestTheKernelForwardsBothFamilies(t *testing.T) {
	Require(t)
	lab := New(t, Options{})
	for _, host := range []string{ServerV4, ServerV6, FarV4, FarV6} {
		address := net.JoinHostPort(host, "7")
		tcp, udp := lab.Srv.Echo(address), lab.Srv.UDPEcho(address)
		for _, network := range []string{"tcp", "udp"} {
			if got, err := exchange(dial(t, lab.Cli, network, address), "hello"); got != "hello" {
				t.Errorf("%s %s: got %q, %v", network, address, got, err)
			}
		}
		if tcp.Accepted.Load() != 1 || tcp.Received.Load() != 5 {
			t.Errorf("%s: server saw %d connections, %d bytes", address, tcp.Accepted.Load(), tcp.Received.Load())
		}
		for from, n := range udp.Sources() {
			if client := from.Addr().String(); n != 1 || client != ClientV4 && client != ClientV6 {
				t.Errorf("%s: %d datagrams from %v", address, n, from)
			}
		}
	}
	if s := lab.GW.Stats(WANDevice); s.TxPackets < 20 || s.RxPackets < 20 || s.TxBytes == 0 || s.RxBytes == 0 {
		t.Errorf("the gateway's wan0 counted %+v", s)
	}
}

func TestTheFarAddressIsReachedOverEitherWAN(t *testing.T) {
	Require(t)
	lab := New(t, Options{SecondWAN: true})
	lab.Srv.Echo(net.JoinHostPort(FarV4, "7"))
	lab.Srv.Echo(net.JoinHostPort(FarV6, "7"))
	lab.GW.Run("ip", "link", "set", WANDevice, "down")
	// The server's default route leaves with its link to the first WAN as well.
	lab.Srv.Run("ip", "route", "replace", "default", "via", WAN1V4)
	lab.Srv.Run("ip", "-6", "route", "replace", "default", "via", WAN1V6)
	for _, host := range []string{FarV4, FarV6} {
		if _, err := exchange(dial(t, lab.Cli, "tcp", net.JoinHostPort(host, "7")), "hello"); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
}

func TestServersSendCountAndDiscard(t *testing.T) {
	Require(t)
	lab := New(t, Options{})
	const size = 3<<20 + 5
	lab.Srv.Source(FarV4+":80", size)
	if n, err := ReadPattern(dial(t, lab.Cli, "tcp", FarV4+":80")); n != size || err != nil {
		t.Errorf("source: %d bytes, %v", n, err)
	}
	discard := lab.Srv.Discard("[" + FarV6 + "]:9")
	c := dial(t, lab.Cli, "tcp", "["+FarV6+"]:9")
	if n, err := WritePattern(c, size); n != size || err != nil {
		t.Errorf("wrote %d bytes, %v", n, err)
	}
	Until(t, limit, "everything is discarded", func() bool { return discard.Received.Load() == size })

	lab.Srv.HTTP(FarV4+":8080", http.FileServer(http.Dir(t.TempDir())))
	resp, err := lab.Cli.HTTPClient().Get("http://" + FarV4 + ":8080/nothing")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("status %d", resp.StatusCode)
	}

	sink := lab.Srv.UDPSink(FarV4 + ":53")
	u := dial(t, lab.Cli, "udp", FarV4+":53")
	for _, payload := range []string{"", "four"} {
		if _, err := io.WriteString(u, payload); err != nil {
			t.Fatal(err)
		}
	}
	Until(t, limit, "both datagrams arrived", func() bool { n, b := sink.Received(); return n == 2 && b == 4 })
	if from, _ := netip.ParseAddrPort(u.LocalAddr().String()); sink.Sources()[from] != 2 {
		t.Errorf("sources %v, sent from %v", sink.Sources(), from)
	}
}

func TestDoIsolatesNamespaces(t *testing.T) {
	Require(t)
	lab := New(t, Options{})
	before, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 60 {
		ns := []*Netns{lab.Cli, lab.GW, lab.Srv}[i%3]
		wg.Go(func() {
			l, err := ns.Listen(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", 40000+i/3))
			if err != nil {
				t.Errorf("the same address in another namespace: %v", err)
				return
			}
			l.Close()
		})
	}
	wg.Wait()
	inside := make(map[string]bool)
	for _, ns := range []*Netns{lab.Cli, lab.GW, lab.Srv} {
		name, err := in(ns, func() (string, error) { return os.Readlink("/proc/thread-self/ns/net") })
		if err != nil {
			t.Fatal(err)
		}
		inside[name] = true
	}
	if len(inside) != 3 || inside[before] {
		t.Errorf("namespaces %v, ours is %s", inside, before)
	}
	for _, path := range []string{"/proc/thread-self/ns/net", "/proc/self/ns/net"} {
		if after, _ := os.Readlink(path); after != before {
			t.Errorf("%s is %s afterwards, was %s", path, after, before)
		}
	}
	if err := (&Netns{Name: "gwlab-none"}).Do(func() error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a namespace that is not there: %v", err)
	}
}

func TestDivertTakesTheLANAndNeverFallsBackToForwarding(t *testing.T) {
	Require(t)
	lab := New(t, Options{})
	for _, host := range []string{ServerV4, ServerV6} {
		lab.Srv.Echo(net.JoinHostPort(host, "7"))
	}
	for _, host := range []string{LANV4, LANV6, WANV4, WANV6} {
		lab.GW.Echo(net.JoinHostPort(host, "7"))
	}
	try := func(host string, wait time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		c, err := lab.Cli.Dial(ctx, "tcp", net.JoinHostPort(host, "7"))
		if err == nil {
			c.Close()
		}
		return err
	}
	if err := connect(lab.GW, "gw0", lab.GW, "nowhere"); err != nil {
		t.Fatal(err)
	}
	lab.Divert("gw0")
	before := lab.GW.Stats("gw0")
	for _, host := range []string{ServerV4, ServerV6} {
		if err := try(host, 300*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) && !os.IsTimeout(err) {
			t.Errorf("%s, diverted into a device that answers nothing: %v", host, err)
		}
	}
	if after := lab.GW.Stats("gw0"); after.TxPackets < before.TxPackets+2 {
		t.Errorf("the device saw %d packets", after.TxPackets-before.TxPackets)
	}
	for _, host := range []string{LANV4, LANV6, WANV4, WANV6} {
		if err := try(host, limit); err != nil {
			t.Errorf("the gateway's own %s: %v", host, err)
		}
	}
	lab.GW.Run("ip", "link", "del", "gw0")
	for _, host := range []string{ServerV4, ServerV6} {
		if err := try(host, limit); !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("%s, without the device: %v", host, err)
		}
	}
	lab.Undivert()
	for _, host := range []string{ServerV4, ServerV6} {
		if err := try(host, limit); err != nil {
			t.Errorf("%s, not diverted any more: %v", host, err)
		}
	}
}

func TestFiltersDropRejectAndCount(t *testing.T) {
	Require(t)
	lab := New(t, Options{})
	lab.Srv.Echo(ServerV4 + ":81")
	lab.Srv.Echo("[" + ServerV6 + "]:82")
	dropped := lab.Srv.Filter("input", "tcp dport 81", "drop")
	rejected := lab.Srv.Filter("input", "tcp dport 82", "reject with icmpx type host-unreachable")
	counted := lab.Srv.Filter("input", "tcp dport 83", "")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := lab.Cli.Dial(ctx, "tcp", ServerV4+":81"); !os.IsTimeout(err) {
		t.Errorf("dropped: %v", err)
	}
	if _, err := lab.Cli.Dial(t.Context(), "tcp", "["+ServerV6+"]:82"); !errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("rejected: %v", err)
	}
	if _, err := lab.Cli.Dial(t.Context(), "tcp", ServerV4+":83"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("counted only: %v", err)
	}
	if d, r, c := dropped.Packets(), rejected.Packets(), counted.Packets(); d == 0 || r == 0 || c != 1 {
		t.Errorf("dropped %d, rejected %d, counted %d", d, r, c)
	}
	lab.Srv.Unfilter()
	if _, err := exchange(dial(t, lab.Cli, "tcp", ServerV4+":81"), "x"); err != nil {
		t.Errorf("without filters: %v", err)
	}
}

func TestLabsOfDeadProcessesAreRemoved(t *testing.T) {
	Require(t)
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	stale := fmt.Sprintf("gwlab-%d-1-1-cli", gone.ProcessState.Pid())
	reused := fmt.Sprintf("gwlab-%d-1-1-cli", os.Getpid()) // an earlier process with our id
	other := fmt.Sprintf("gwlabx-%d-1-1-cli", gone.ProcessState.Pid())
	for _, name := range []string{stale, reused, other} {
		if err := ipBatch("", "", "netns add "+name); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	}
	orphan := exec.Command("ip", "netns", "exec", stale, "sleep", "60")
	if err := orphan.Start(); err != nil {
		t.Fatal(err)
	}
	Until(t, limit, "the orphan is in its namespace", func() bool { return len(processesIn(stale)) == 1 })

	first := New(t, Options{})
	New(t, Options{})
	if err := orphan.Wait(); err == nil {
		t.Error("the orphan was not ended")
	}
	exists := func(name string) bool { _, err := os.Stat(filepath.Join(netnsDir, name)); return err == nil }
	if exists(stale) || exists(reused) {
		t.Error("a stale namespace is still there")
	}
	if !exists(other) || !exists(first.Cli.Name) {
		t.Error("a namespace that is not stale was removed")
	}
}

func TestALabIsGoneAfterAFailedTest(t *testing.T) {
	Require(t)
	var name string
	func() {
		p := &partTest{T: t}
		defer p.end()
		lab := New(p, Options{Shim: WANDevice})
		name = lab.prefix
		lab.Srv.Echo(ServerV4 + ":7")
		panic("a test that fails")
	}()
	left, err := filepath.Glob(filepath.Join(netnsDir, name+"*"))
	if err != nil || len(left) != 0 || name == "" {
		t.Errorf("left over: %v %v", left, err)
	}
}

// partTest is a part of a test whose cleanup runs before the test's end.
type partTest struct {
	*testing.T
	cleanup []func()
}

func (p *partTest) Cleanup(f func()) { p.cleanup = append(p.cleanup, f) }

func (p *partTest) end() {
	recover() //nolint:errcheck // the panic was on purpose
	for _, f := range p.cleanup {
		f()
	}
}

func TestAGatewayIsWatchedFromReadyToItsExitCode(t *testing.T) {
	Require(t)
	lab := New(t, Options{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	g := lab.launch(self, GatewayOptions{Config: "$API\n"})
	g.Ready("")
	if pids := processesIn(lab.GW.Name); len(pids) != 1 || pids[0] != g.PID() {
		t.Errorf("processes %v in the gateway's namespace, it is %d", pids, g.PID())
	}
	if p := g.Process(); p.RSS < 1<<20 || p.FDs < 3 || p.Threads < 1 || p.CPU > time.Minute {
		t.Errorf("process %+v", p)
	}
	checkAPI(t, g.API)
	if out, err := g.CLI("flows"); err != nil || !strings.Contains(out, "unix:"+g.Socket) {
		t.Errorf("command line: %q, %v", out, err)
	}
	g.Signal(syscall.SIGHUP)
	g.WaitLog(limit, "applied")
	if code := g.Stop(); code != 7 {
		t.Errorf("exit code %d", code)
	}
	bad := lab.launch(self, GatewayOptions{Config: "nonsense"})
	if code := bad.Wait(limit); code != 3 || !strings.Contains(bad.Log(), "config: no address") {
		t.Errorf("exit code %d, log %q", code, bad.Log())
	}
}

func checkAPI(t *testing.T, api *API) {
	t.Helper()
	if f := api.Flows("outbound=direct"); len(f) != 1 || f[0].ID != 17 {
		t.Errorf("flows %+v", f)
	}
	if f := api.Closed(); len(f) != 1 || f[0].Reason != "killed" || f[0].Down != 456 {
		t.Errorf("closed %+v", f)
	}
	if s := api.Status(); s.Drops["checksum"] != 3 {
		t.Errorf("status %+v", s)
	}
	if tr := api.Traffic(); tr.Tick != 7 || tr.Total.Down != 456 {
		t.Errorf("traffic %+v", tr)
	}
	if live, none, n := api.Kill(17), api.Kill(18), api.KillWhere("inbound=lan"); live != 204 || none != 404 || n != 2 {
		t.Errorf("kill: %d, %d, %d", live, none, n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	events := api.Events(ctx, "/v1/connections/events")
	e := <-events
	if f, err := e.Flow(); e.Type != "closed" || err != nil || f.ID != 17 {
		t.Errorf("event %+v, %v", e, err)
	}
	cancel()
	if _, more := <-events; more {
		t.Error("an event after the end")
	}
}

func TestALogIsBoundedAndKeepsItsBeginningAndEnd(t *testing.T) {
	b := newLogBuffer()
	for i := range 3 * logKept {
		fmt.Fprintf(b, "line %d\n", i)
	}
	b.Write(bytes.Repeat([]byte("x"), 10*logLine))
	s := b.String()
	for _, want := range []string{"(4000 lines", "line 0\n", fmt.Sprintf("line %d\n", 3*logKept-1)} {
		if !strings.Contains(s, want) {
			t.Errorf("no %q in the log", want)
		}
	}
	if len(s) > logKept*20+2*logLine {
		t.Errorf("%d bytes kept", len(s))
	}
	b.end()
	if _, err := b.wait(t.Context(), func(string) bool { return false }); !errors.Is(err, errLogEnded) {
		t.Errorf("waiting for a line that cannot come: %v", err)
	}
}

func TestAWrongByteOfThePatternIsFound(t *testing.T) {
	var buf bytes.Buffer
	for _, size := range []int64{0, 1, 7, 8, patternChunk - 1, patternChunk, patternChunk + 9} {
		buf.Reset()
		if n, err := WritePattern(&buf, size); n != size || err != nil || int64(buf.Len()) != size {
			t.Fatalf("wrote %d of %d bytes, %v", n, size, err)
		}
		if n, err := ReadPattern(bytes.NewReader(buf.Bytes())); n != size || err != nil {
			t.Errorf("read %d of %d bytes, %v", n, size, err)
		}
		if size == 0 {
			continue
		}
		buf.Bytes()[size-1] ^= 1
		if _, err := ReadPattern(bytes.NewReader(buf.Bytes())); err == nil {
			t.Errorf("a flipped bit in byte %d went unseen", size-1)
		}
	}
}
