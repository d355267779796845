package testnet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	readyLimit = 20 * time.Second // from start to the line "ready"
	stopLimit  = 20 * time.Second // from SIGTERM to the exit
)

// Gateway is a running gatewayd in a lab.
type Gateway struct {
	API    *API
	Config string // path of its configuration file
	Socket string // path of its API socket

	lab    *Lab
	cmd    *exec.Cmd
	log    *logBuffer
	exited chan struct{} // closed after the process was waited for
}

// GatewayOptions say how to run gatewayd.
type GatewayOptions struct {
	// Config is its YAML; $API stands for the API socket's address and $DIR for
	// the gateway's own temporary directory.
	Config string
	Device string   // the TUN into which the LAN is diverted once it is ready; "" diverts nothing
	Race   bool     // build with the race detector
	Args   []string // further arguments of `run`
	Env    []string // further variables, as "GOMEMLIMIT=64MiB"
}

// Launch starts gatewayd in the gateway's namespace without waiting for it. It
// is stopped with the lab.
func (l *Lab) Launch(o GatewayOptions) *Gateway {
	l.t.Helper()
	binary, err := Binary(o.Race)
	if err != nil {
		l.t.Fatalf("%v", err)
	}
	return l.launch(binary, o)
}

func (l *Lab) launch(binary string, o GatewayOptions) *Gateway {
	l.t.Helper()
	dir, err := os.MkdirTemp("", "gwlab") // short: a socket's path has 107 bytes
	if err != nil {
		l.t.Fatalf("gateway: %v", err)
	}
	l.onClose(func() { os.RemoveAll(dir) })
	g := &Gateway{
		lab: l, Config: filepath.Join(dir, "gatewayd.yaml"), Socket: filepath.Join(dir, "api.sock"),
		log: newLogBuffer(), exited: make(chan struct{}),
	}
	g.API = newAPI(l.t, g.Socket)
	g.WriteConfig(o.Config)
	g.cmd = l.GW.Command(context.Background(), binary, append([]string{"run", "-c", g.Config}, o.Args...)...)
	g.cmd.Env = append(g.cmd.Environ(), o.Env...)
	g.cmd.Dir, g.cmd.Stdout, g.cmd.Stderr = dir, g.log, g.log
	if err := g.cmd.Start(); err != nil {
		l.t.Fatalf("gateway: %v", err)
	}
	go func() {
		g.cmd.Wait() //nolint:errcheck // ProcessState tells
		g.log.end()
		close(g.exited)
	}()
	l.onClose(g.end)
	return g
}

// Start is Launch, then waits for the line "ready" and diverts the LAN. A
// gateway that exits or is not ready within 20 s fails the test with its log.
func (l *Lab) Start(o GatewayOptions) *Gateway {
	l.t.Helper()
	g := l.Launch(o)
	g.Ready(o.Device)
	return g
}

// Ready waits for the line "ready" of a launched gateway and diverts the LAN
// into device, unless that is "".
func (g *Gateway) Ready(device string) {
	g.lab.t.Helper()
	ctx, cancel := context.WithTimeout(g.lab.t.Context(), readyLimit)
	defer cancel()
	if _, err := g.log.wait(ctx, isReady); err != nil {
		g.lab.t.Fatalf("gateway: not ready: %v; its log:\n%s", err, g.Log())
	}
	if device != "" {
		g.lab.Divert(device)
	}
}

// isReady knows the line in both log formats.
func isReady(line string) bool {
	return strings.TrimSpace(line) == "ready" || strings.Contains(line, "msg=ready") || strings.Contains(line, `"msg":"ready"`)
}

// WriteConfig replaces the configuration file; Signal(SIGHUP) has it applied. One without
// a state directory gets one that goes with the lab.
func (g *Gateway) WriteConfig(text string) {
	g.lab.t.Helper()
	if strings.HasPrefix(text, "version: 1\n") && strings.HasSuffix(text, "\n") && !strings.Contains(text, "state_dir") {
		text += "state_dir: $DIR/state\n"
	}
	text = strings.NewReplacer("$API", "unix:"+g.Socket, "$DIR", filepath.Dir(g.Config)).Replace(text)
	if err := os.WriteFile(g.Config, []byte(text), 0o600); err != nil {
		g.lab.t.Fatalf("gateway: %v", err)
	}
}

// PID is its process id.
func (g *Gateway) PID() int { return g.cmd.Process.Pid }

// Process reads its figures.
func (g *Gateway) Process() ProcessStats {
	g.lab.t.Helper()
	s, err := ReadProcess(g.PID())
	if err != nil {
		g.lab.t.Fatalf("gateway: %v", err)
	}
	return s
}

// Signal sends it a signal.
func (g *Gateway) Signal(s os.Signal) {
	g.lab.t.Helper()
	if err := g.cmd.Process.Signal(s); err != nil {
		g.lab.t.Fatalf("gateway: %v: %v", s, err)
	}
}

// Stop sends SIGTERM and returns the exit code. One that takes over 20 s fails the test.
func (g *Gateway) Stop() int {
	g.lab.t.Helper()
	if err := g.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		g.lab.t.Fatalf("gateway: %v", err)
	}
	return g.Wait(stopLimit)
}

// Wait waits for it to exit by itself and returns the exit code; -1 is a signal.
func (g *Gateway) Wait(limit time.Duration) int {
	g.lab.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-g.exited:
	case <-timer.C:
		g.lab.t.Fatalf("gateway: still there after %v; its log:\n%s", limit, g.Log())
	}
	return g.cmd.ProcessState.ExitCode()
}

// end stops it at the end of its lab, and shows its log if the test failed.
func (g *Gateway) end() {
	g.API.close()
	g.cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it is gone at worst
	timer := time.NewTimer(stopLimit)
	defer timer.Stop()
	select {
	case <-g.exited:
	case <-timer.C:
		g.lab.t.Logf("gateway: killed, since it was still there %v after SIGTERM", stopLimit)
		g.cmd.Process.Kill() //nolint:errcheck // it is gone at worst
		<-g.exited
	}
	if g.lab.t.Failed() {
		g.lab.t.Logf("the gateway's log:\n%s", g.Log())
	}
}

// Log is what it logged: its first and last lines, if it logged very much.
func (g *Gateway) Log() string { return g.log.String() }

// WaitLog waits until a line of its log, a past or a coming one, contains text,
// and returns the line. None within the limit fails the test.
func (g *Gateway) WaitLog(limit time.Duration, text string) string {
	g.lab.t.Helper()
	ctx, cancel := context.WithTimeout(g.lab.t.Context(), limit)
	defer cancel()
	line, err := g.log.wait(ctx, func(line string) bool { return strings.Contains(line, text) })
	if err != nil {
		g.lab.t.Fatalf("gateway: no %q in its log: %v; the log:\n%s", text, err, g.Log())
	}
	return line
}

// CLI runs a client command of gatewayd against this gateway and returns what it printed.
func (g *Gateway) CLI(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, g.binary(), args...)
	cmd.Env = append(os.Environ(), "GATEWAYD_API=unix:"+g.Socket)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("gatewayd %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// binary is the fourth argument of `ip netns exec NAME BINARY`.
func (g *Gateway) binary() string { return g.cmd.Args[4] }
