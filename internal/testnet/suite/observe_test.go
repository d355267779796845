package suite

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

func TestEveryRecordTellsTheAddressThatItsFlowLeftFrom(t *testing.T) {
	eachEchoBed(t, testnet.Options{}, func(t *testing.T, lab *testnet.Lab, g *testnet.Gateway) {
		eachFamily(t, func(t *testing.T, f udpFamily) {
			wan := map[string]string{testnet.FarV4: testnet.WANV4, testnet.FarV6: testnet.WANV6}[f.far]
			peers := make(chan netip.AddrPort, 1)
			lab.Srv.Serve(hostPort(f.far, 2001), func(c *net.TCPConn) {
				peers <- c.RemoteAddr().(*net.TCPAddr).AddrPort()
				c.Write([]byte("x")) //nolint:errcheck // the client looks
			})
			udp := lab.Srv.UDPEcho(hostPort(f.far, 2001))

			conn, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(f.far, 2001))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			c := openUDP(t, lab.Cli, f.client)
			c.sendTo(addrPort(f.far, 2001), "hello")
			c.want(addrPort(f.far, 2001), "hello")
			if p := ping(t, lab, f.far, "-c", "1"); p.received != 1 {
				t.Fatal(p.text)
			}
			seen := map[string]netip.AddrPort{"tcp": <-peers}
			for from := range udp.Sources() {
				seen["udp"] = from
			}
			egress := map[string]string{}
			for _, flow := range g.API.Flows("") {
				got, err := netip.ParseAddrPort(flow.Egress)
				if err != nil || got.Addr().String() != wan || got.Port() == 0 {
					t.Errorf("%s: egress %q, want an address of %s", flow.Network, flow.Egress, wan)
				}
				if want, told := seen[flow.Network]; told && got != want {
					t.Errorf("%s: egress %v, the server saw %v", flow.Network, got, want)
				}
				egress[flow.Network] = flow.Egress
				g.API.Kill(flow.ID)
				if end := closedFlow(t, g, flow.ID); end.Egress != flow.Egress {
					t.Errorf("%s: closed with egress %q, listed with %q", flow.Network, end.Egress, flow.Egress)
				}
			}
			if len(egress) != 3 {
				t.Errorf("flows of %v", egress)
			}
		})
	})
}

// auditRules mark everything to one host, and refuse some of it.
const auditRules = `route:
  rules:
    - {name: audit, ip: ["` + testnet.FarV4 + `", "` + testnet.FarV6 + `"], record: true}
    - {name: no-smtp, network: tcp, port: 25, outbound: reject}
    - {name: no-snmp, network: udp, port: 161, outbound: drop}
    - {name: no-ping, network: icmp, outbound: reject}
    - {name: no-telnet, network: tcp, port: 23, outbound: reject, record: true}
`

func TestARuleThatRecordsMarksFlowsAndTellsOfThoseThatAreRefused(t *testing.T) {
	testnet.Require(t, "ping")
	lab, g := udpBed(t, udpBase+auditRules)
	lab.Srv.Echo(hostPort(testnet.FarV4, 80))
	events := g.API.Events(t.Context(), "/v1/connections/events")
	before := g.API.Traffic().Total

	refused := func(network string) (e testnet.FlowRecord) {
		t.Helper()
		for {
			select {
			case ev := <-events:
				if ev.Type != "blocked" {
					continue
				}
				var fields map[string]json.RawMessage
				if err := json.Unmarshal(ev.Data, &fields); err != nil {
					t.Fatal(err)
				}
				for _, no := range []string{"id", "up", "down", "killed"} {
					if _, there := fields[no]; there {
						t.Errorf("%s has %s: %s", network, no, ev.Data)
					}
				}
				e, err := ev.Flow()
				if err != nil || e.Network != network {
					t.Fatalf("%s: %v; want %s", ev.Data, err, network)
				}
				return e
			case <-time.After(udpPatience):
				t.Fatalf("no blocked event of %s", network)
			}
		}
	}
	for port, rule := range map[int]string{25: "no-smtp", 23: "no-telnet"} {
		if connects(t, lab.Cli, hostPort(testnet.FarV4, port)) {
			t.Fatalf("port %d connects", port)
		}
		if e := refused("tcp"); e.RuleName != rule || e.Outbound != "reject" || e.Destination != hostPort(testnet.FarV4, port) {
			t.Errorf("told %+v", e)
		}
	}
	openUDP(t, lab.Cli, testnet.ClientV6).sendTo(addrPort(testnet.FarV6, 161), "hello")
	if e := refused("udp"); e.RuleName != "no-snmp" || e.Outbound != "drop" {
		t.Errorf("told %+v", e)
	}
	ping(t, lab, testnet.FarV4, "-c", "1")
	if e := refused("icmp"); e.RuleName != "no-ping" {
		t.Errorf("told %+v", e)
	}

	// What nothing refuses is marked and goes on; what no rule records is not told.
	if connects(t, lab.Cli, hostPort(testnet.ServerV4, 25)) {
		t.Error("port 25 of another host connects")
	}
	conn, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(testnet.FarV4, 80))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var list struct {
		Flows []struct {
			Recorded bool
			Rule     *int
		}
	}
	g.API.Get("/v1/connections", &list)
	if len(list.Flows) != 1 || !list.Flows[0].Recorded || list.Flows[0].Rule != nil {
		t.Errorf("listed %+v", list.Flows)
	}
	conn.Close()
	closed := closedFlow(t, g, 1)
	for more := true; more; {
		select {
		case ev := <-events:
			if ev.Type == "blocked" {
				t.Errorf("told %s", ev.Data)
			}
			more = ev.Type != "closed"
		case <-time.After(udpPatience):
			t.Fatal("the flow's end is not told")
		}
	}
	// Refused traffic is free: the one flow is all that was counted.
	testnet.Until(t, udpPatience, "a tick", func() bool { return g.API.Traffic().Total.Flows == 0 })
	if after := g.API.Traffic().Total; after.Up-before.Up != closed.Up || after.Down-before.Down != closed.Down {
		t.Errorf("counted %+v, before %+v, the flow %+v", after, before, closed)
	}
}

// logged are the flow log's lines.
func logged(t *testing.T, file string) (flows []testnet.FlowRecord) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var f testnet.FlowRecord
		if err := json.Unmarshal([]byte(line), &f); err != nil || !strings.HasSuffix(line, "\n") {
			t.Fatalf("%s: line %q: %v", file, line, err)
		}
		flows = append(flows, f)
	}
	return flows
}

func TestTheFlowLogOutlivesRotationsAndRemovalsAndAFullDiskAndNoFlowFeelsIt(t *testing.T) {
	testnet.Require(t)
	disk := t.TempDir()
	if err := unix.Mount("none", disk, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, 0); err != nil {
			t.Error(err)
		}
	})
	file := filepath.Join(disk, "log", "flows.jsonl")
	config := udpBase + "events: {flow_log: {file: " + file + ", size: 64KiB, keep: 1}}\n"
	lab, g := udpBed(t, config)
	lab.Srv.Echo(hostPort(testnet.FarV4, 7))
	talk := newChatter(t)
	talk.talk(lab.Cli, "tcp", hostPort(testnet.FarV4, 7))
	var ended uint64
	end := func(n int) {
		t.Helper()
		for range n {
			c, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(testnet.FarV4, 7))
			if err == nil {
				err = exchangeWord(c, "word")
			}
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		ended += uint64(n)
	}
	state := func() (s struct {
		Written, Dropped uint64
		Error            string
	},
	) {
		var st struct {
			FlowLog *struct {
				Written, Dropped uint64
				Error            string
			} `json:"flow_log"`
		}
		g.API.Get("/v1/status", &st)
		if st.FlowLog != nil {
			s = *st.FlowLog
		}
		return s
	}
	settled := func() {
		t.Helper()
		testnet.Until(t, udpPatience, "every flow is written or dropped", func() bool { s := state(); return s.Written+s.Dropped == ended })
	}

	end(5)
	settled()
	if got := logged(t, file); len(got) != 5 || got[4].Reason != "eof" || got[4].Up != 4 || got[4].Down != 4 || got[4].Egress == "" || got[4].Ended.IsZero() {
		t.Fatalf("the log has %+v", got)
	}
	for i, f := range g.API.Closed() {
		if l := logged(t, file)[i]; fmt.Sprint(l.ID, l.Started, l.Ended, l.Source) != fmt.Sprint(f.ID, f.Started, f.Ended, f.Source) {
			t.Errorf("logged %+v, the ring has %+v", l, f)
		}
	}

	// logrotate: the file is moved, and the gateway told.
	if err := os.Rename(file, file+"-1"); err != nil {
		t.Fatal(err)
	}
	reload(t, g, config, true)
	testnet.Until(t, udpPatience, "a new file is opened", func() bool { _, err := os.Stat(file); return err == nil })
	end(1)
	settled()
	if n := len(logged(t, file)); n != 1 {
		t.Errorf("%d lines in the new file", n)
	}

	if err := os.RemoveAll(filepath.Dir(file)); err != nil {
		t.Fatal(err)
	}
	testnet.Until(t, udpPatience, "the directory is made anew", func() bool {
		end(1)
		settled()
		return len(logged(t, file)) > 0
	})

	// A full disk costs lines, which are counted and told, and nothing else.
	ballast, err := os.Create(filepath.Join(disk, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	chunk := make([]byte, 4096)
	for err == nil {
		_, err = ballast.Write(chunk)
	}
	ballast.Close()
	testnet.Until(t, 30*time.Second, "the disk is full", func() bool {
		end(5)
		settled()
		return strings.Contains(state().Error, "no space left")
	})
	g.WaitLog(udpPatience, "flow log can't be written")
	if w := g.API.Status().Warnings; len(w) != 1 || !strings.Contains(w[0], "flow log") {
		t.Errorf("warnings %q", w)
	}
	turns := talk.turns.Load()
	testnet.Until(t, udpPatience, "the connection beside it goes on", func() bool { return talk.turns.Load() > turns+20 })
	logged(t, file) // whole lines only
	if err := os.Remove(ballast.Name()); err != nil {
		t.Fatal(err)
	}
	written := state().Written
	testnet.Until(t, 30*time.Second, "it is written again", func() bool {
		end(1)
		settled()
		return state().Written > written && state().Error == ""
	})
	g.WaitLog(udpPatience, "flow log is written again")
	if s := state(); s.Dropped == 0 {
		t.Errorf("%+v", s)
	}

	// By size, with one old file.
	testnet.Until(t, time.Minute, "the file is rotated", func() bool {
		end(10)
		_, err := os.Stat(file + ".1")
		return err == nil
	})
	settled()
	if info, err := os.Stat(file + ".1"); err != nil || info.Size() > 64<<10 || info.Size() < 60<<10 {
		t.Errorf("the old file has %v, %v", info, err)
	}
	talk.end()
	g.Signal(syscall.SIGTERM)
	g.Wait(patience)
	last := logged(t, file)
	if r := last[len(last)-1].Reason; r != "shutdown" && r != "eof" {
		t.Errorf("the last line says %s", r)
	}
}

func TestTopShowsWhatMoves(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	lab.Srv.Source(hostPort(testnet.FarV4, 9), 1<<40)
	c, err := lab.Cli.Dial(t.Context(), "tcp", hostPort(testnet.FarV4, 9))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f := startFetch(c.(*net.TCPConn), 5*time.Millisecond)
	defer f.wait(t)
	defer c.Close()
	testnet.Until(t, udpPatience, "the download moves", func() bool { return f.got.Load() > 1<<20 })
	out, err := g.CLI("top", "--once", "--interval", "500ms")
	lines := strings.Split(out, "\n")
	if err != nil || len(lines) < 5 || !strings.HasPrefix(lines[4], "     1 tcp  10.10.0.2:") {
		t.Fatalf("%v\n%s", err, out)
	}
	fields := strings.Fields(lines[4])
	if rate := fields[len(fields)-3]; !strings.ContainsAny(rate, "kMG") {
		t.Errorf("a download at %s/s:\n%s", rate, out)
	}
}
