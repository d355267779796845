package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/api/apitest"
	"gatewayd/internal/exitcode"
	"gatewayd/track"
	"gatewayd/user"
)

// leakCheck runs the tests and then looks for goroutines that they left.
type leakCheck struct{ *testing.M }

func (m leakCheck) Run() int {
	code := m.M.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func TestMain(m *testing.M) {
	testscript.Main(leakCheck{m}, map[string]func(){"gatewayd": main})
}

// TestTheCommandLine runs the scripts. Each has the gateway's API at $GATEWAYD_API,
// behind which is a real server with a tracker and a scripted gateway.
func TestTheCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:      "testdata/script",
		Deadline: time.Now().Add(time.Minute),
		Setup:    setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"open":   openFlow,
			"move":   moveBytes,
			"close":  closeFlow,
			"tick":   func(ts *testscript.TestScript, _ bool, _ []string) { gatewayOf(ts).tracker.Final() },
			"exits":  exits,
			"used":   used,
			"socket": deadSocket,
		},
	})
}

// scripted is the gateway that scripts talk to.
type scripted struct {
	tracker *track.Tracker
	flows   map[string]*track.Flow
	users   *apitest.Users
	events  *api.Events
}

func (*scripted) Status() api.Status {
	return api.Status{Epoch: 4, Associations: 2, FlowLog: &api.FlowLog{File: "/var/log/flows.jsonl", Written: 3, Dropped: 1}, Inbounds: []api.Inbound{{Tag: "lan", Type: "tun", Device: "gw0", MTU: 1500, Addresses: []string{"198.18.0.1/30"}}}}
}

func (*scripted) Outbounds() []api.Outbound {
	up := true
	return []api.Outbound{{Tag: "direct", Version: 2, Type: "direct", Healthy: &up, Flows: 3, Draining: []api.Draining{{Version: 1, Flows: 7}}}}
}

func (*scripted) Rules() []api.Rule                           { return nil }
func (*scripted) Config() (string, string)                    { return "version: 1\n", "abc" }
func (*scripted) Check(string) error                          { return nil }
func (*scripted) Apply(context.Context, string, string) error { return nil }
func (*scripted) Reload(context.Context) error {
	return exitcode.With(exitcode.Config, errors.New("gw.yaml:3:5: tnu: unknown key, did you mean tun?"))
}

type gatewayKey struct{}

func gatewayOf(ts *testscript.TestScript) *scripted { return ts.Value(gatewayKey{}).(*scripted) }

func setup(env *testscript.Env) error {
	tracker, err := track.New(track.Options{Interval: time.Second})
	if err != nil {
		return err
	}
	g := &scripted{tracker: tracker, flows: map[string]*track.Flow{}, users: apitest.NewUsers(), events: api.NewEvents()}
	socket := filepath.Join(env.WorkDir, "api.sock")
	point := []user.Point{{Start: time.UnixMilli(0), Volume: user.Volume{Up: 1000, Down: 2000, ChargedUp: 3000, ChargedDown: 4000}}}
	devices := &apitest.Devices{Users: g.users}
	devices.Add(api.Device{Device: "mac:3c:22:fb:aa:bb:cc", Host: "annes-very-long-name-of-a-phone", Addresses: []string{"192.168.1.9", "fd66:6600:aaaa:bbbb:cccc:dddd:eeee:1"}})
	server, err := api.New(api.Options{
		Listen: []string{"unix:" + socket}, Version: "1.2.3", Tracker: tracker, Gateway: g, Drops: new(flow.Drops), Events: g.events,
		Users: g.users, Devices: devices, Billing: &apitest.Billing{Users: g.users, Points: map[user.Payer][]user.Point{{Kind: user.ForUser, User: 1}: point}},
	})
	if err != nil {
		return err
	}
	if err := server.Listen(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx) }()
	env.Defer(func() {
		cancel()
		<-done
	})
	env.Values[gatewayKey{}] = g
	env.Setenv("GATEWAYD_API", "unix:"+socket)
	return nil
}

// openFlow: open NAME [USER | SOURCE DESTINATION OUTBOUND]
func openFlow(ts *testscript.TestScript, _ bool, args []string) {
	m := track.Meta{
		Inbound: "lan", Network: flow.TCP, Source: netip.MustParseAddrPort("10.0.0.2:51234"),
		Dest: flow.Destination{Addr: netip.MustParseAddrPort("203.0.113.5:443")}, Outbound: "direct", Version: 1, Epoch: 1,
	}
	if len(args) == 2 {
		v, err := gatewayOf(ts).users.Get(args[1])
		ts.Check(err)
		m.User, m.UserName = v.ID, v.Name
	}
	if len(args) == 4 {
		m.Source, m.Dest.Addr, m.Outbound = netip.MustParseAddrPort(args[1]), netip.MustParseAddrPort(args[2]), args[3]
	}
	if m.Outbound == "dns" {
		m.Outbound = ""
	}
	g := gatewayOf(ts)
	g.flows[args[0]] = g.tracker.Open(m, nil)
}

// moveBytes: move NAME UP DOWN
func moveBytes(ts *testscript.TestScript, _ bool, args []string) {
	for i, d := range []flow.Dir{flow.Up, flow.Down} {
		n, err := strconv.Atoi(args[i+1])
		ts.Check(err)
		gatewayOf(ts).flows[args[0]].Moved(d, n)
	}
}

// used: used USER UP DOWN
func used(ts *testscript.TestScript, _ bool, args []string) {
	gatewayOf(ts).users.Change(args[0], func(v *user.View) {
		for i, n := range []*uint64{&v.Usage.Up, &v.Usage.Down} {
			parsed, err := strconv.ParseUint(args[i+1], 10, 64)
			ts.Check(err)
			*n = parsed
		}
		v.Usage.ChargedUp, v.Usage.ChargedDown, v.Usage.FirstUse = v.Usage.Up, v.Usage.Down, time.UnixMilli(1)
	})
}

// closeFlow: close NAME
func closeFlow(ts *testscript.TestScript, _ bool, args []string) {
	gatewayOf(ts).flows[args[0]].Close(nil)
}

// exits: exits CODE COMMAND… runs the command and wants that exit code.
func exits(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	code := 0
	if exit, ok := errors.AsType[interface {
		error
		ExitCode() int
	}](err); ok {
		code = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if strconv.Itoa(code) != args[0] {
		ts.Fatalf("exit code %d: want %s", code, args[0])
	}
}

// deadSocket: socket FILE leaves what a crashed gateway leaves.
func deadSocket(ts *testscript.TestScript, _ bool, args []string) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: ts.MkAbs(args[0]), Net: "unix"})
	ts.Check(err)
	l.SetUnlinkOnClose(false)
	ts.Check(l.Close())
}
