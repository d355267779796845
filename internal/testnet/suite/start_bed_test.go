package suite

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// startLimit is how long a start that fails may take.
const startLimit = 15 * time.Second

// attempt is a place to start gatewayd in, seen from before and after.
type attempt struct {
	t            *testing.T
	lab          *testnet.Lab
	binary       string
	dir          string
	file, socket string // the configuration file, the API's socket
}

// newAttempt prepares a lab without a gateway.
func newAttempt(t *testing.T) *attempt {
	t.Helper()
	testnet.Require(t)
	binary, err := testnet.Binary(false)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "gwstart") // short: a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return &attempt{
		t: t, lab: testnet.New(t, testnet.Options{}), binary: binary, dir: dir,
		file: filepath.Join(dir, "gatewayd.yaml"), socket: filepath.Join(dir, "api.sock"),
	}
}

// configure writes the configuration file; $API stands for the socket's address,
// $DIR for the directory.
func (a *attempt) configure(text string) {
	a.t.Helper()
	text = strings.NewReplacer("$API", "unix:"+a.socket, "$DIR", a.dir).Replace(text)
	if err := os.WriteFile(a.file, []byte(text), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// outcome is how a process ended.
type outcome struct {
	code           int
	stdout, stderr string
}

// gatewayd runs the binary in the gateway's namespace to its end, behind wrap, a
// command that runs what follows it.
func (a *attempt) gatewayd(wrap []string, args ...string) outcome {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(a.t.Context(), startLimit)
	defer cancel()
	line := append(append(wrap, a.binary), args...)
	cmd := a.lab.GW.Command(ctx, line[0], line[1:]...)
	var stdout, stderr bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = a.dir, &stdout, &stderr, time.Second
	err := cmd.Run()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited || ctx.Err() != nil {
		a.t.Fatalf("gatewayd %v: %v; it said:\n%s", args, err, stderr.String())
	}
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// run is `gatewayd run` with the configuration file.
func (a *attempt) run(wrap ...string) outcome {
	a.t.Helper()
	return a.gatewayd(wrap, "run", "-c", a.file)
}

// refused expects that a start fails with a code and one line that has all of
// the parts, and that it leaves everything as it was.
func (a *attempt) refused(code int, wrap []string, parts ...string) {
	a.t.Helper()
	before := a.traces()
	o := a.run(wrap...)
	line := strings.TrimSuffix(o.stderr, "\n")
	if o.code != code || line == "" || strings.Contains(line, "\n") || o.stdout != "" {
		a.t.Errorf("exit code %d, want %d with one line; it said:\n%s%s", o.code, code, o.stdout, o.stderr)
	}
	for _, part := range parts {
		if !strings.Contains(line, part) {
			a.t.Errorf("it said %q, without %q", line, part)
		}
	}
	if after := a.traces(); after != before {
		a.t.Errorf("left behind; before:\n%s\nafter:\n%s", before, after)
	}
}

// traces is all that a gateway changes: links, addresses, routes, rules and
// nftables of its namespace, the processes in it, the files beside its configuration.
func (a *attempt) traces() string {
	a.t.Helper()
	var b strings.Builder
	for _, line := range []string{
		"ip -o link show", "ip -o addr show", "ip rule show", "ip -6 rule show",
		"ip route show table all", "ip -6 route show table all", "nft list ruleset",
	} {
		f := strings.Fields(line)
		b.WriteString("# " + line + "\n" + a.lab.GW.Run(f[0], f[1:]...))
	}
	pids, err := exec.Command("ip", "netns", "pids", a.lab.GW.Name).Output()
	if err != nil {
		a.t.Fatal(err)
	}
	b.WriteString("# processes\n" + string(pids) + "# files\n")
	files, err := os.ReadDir(a.dir)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, f := range files {
		b.WriteString(f.Name() + " " + f.Type().String() + "\n")
	}
	return b.String()
}
