// Package hostnettest runs the tests of a package that changes links and
// addresses in a network namespace of their own.
package hostnettest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"gatewayd/internal/hostnet"
)

// mark tells the process inside the namespace from the one that started it.
const mark = "GATEWAYD_TEST_NAMESPACE"

// Main is the body of a TestMain: it runs the tests in a child process, all of
// whose threads are in a new network namespace, which ends with it. Where such a
// namespace can't be made, it runs them here, and Need skips those that need it.
func Main(m *testing.M) {
	if os.Getenv(mark) == "" {
		if code, ok := inside(); ok {
			os.Exit(code)
		}
	}
	os.Exit(m.Run())
}

func inside() (code int, ok bool) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), mark+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	signal.Ignore(os.Interrupt) // the child gets it too, and tells
	if err := cmd.Start(); err != nil {
		return 0, false
	}
	err := cmd.Wait()
	if failed, is := errors.AsType[*exec.ExitError](err); is {
		return max(failed.ExitCode(), 1), true
	}
	return 0, err == nil
}

// Need skips the test unless it runs in a namespace of its own, with lo up. With
// CI=true in the environment that is a failure instead.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv(mark) != "" {
		up(t, "lo")
		return
	}
	const why = "needs CAP_SYS_ADMIN to make a network namespace"
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

func up(t testing.TB, name string) {
	t.Helper()
	l, ok, err := hostnet.LinkByName(name)
	if err != nil || !ok {
		t.Fatalf("link %s: found %v, %v", name, ok, err)
	}
	if err := hostnet.SetUp(l.Index); err != nil {
		t.Fatal(err)
	}
}

// IP runs ip(8) with the words of args, and fails the test if it fails.
func IP(t testing.TB, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

// Host is another host: a network namespace that lives as long as its test, or as
// this process.
type Host struct{ pid string }

// NewHost makes a host without links but lo, which is up.
func NewHost(t testing.TB) *Host {
	t.Helper()
	Need(t)
	cmd := exec.Command("sleep", "infinity") // holds the namespace
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // tells of the kill
	})
	h := &Host{pid: strconv.Itoa(cmd.Process.Pid)}
	h.Run(t, "ip link set lo up")
	return h
}

// Run runs a program with the words of command on the host, and fails the test if it
// fails. A nil host is this one.
func (h *Host) Run(t testing.TB, command string) {
	t.Helper()
	if err := h.Try(command); err != nil {
		t.Fatal(err)
	}
}

// Try is Run with the failure as an error.
func (h *Host) Try(command string) error {
	words := strings.Fields(command)
	if h != nil {
		words = append([]string{"nsenter", "-t", h.pid, "-n"}, words...)
	}
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, out)
	}
	return nil
}

// Connect joins another host, or this one (nil), by a link called near to the host,
// where it is called far and has a MAC, or any (""). Both ends are up, without
// duplicate address detection, and the host forwards.
func (h *Host) Connect(t testing.TB, other *Host, near, far, mac string) {
	t.Helper()
	IP(t, "link add "+near+" type veth peer name "+far+" netns "+h.pid)
	if other != nil {
		IP(t, "link set "+near+" netns "+other.pid)
	} else {
		t.Cleanup(func() {
			if l, ok, err := hostnet.LinkByName(near); err == nil && ok {
				_ = hostnet.Delete(l.Index) // it may be going with the host
			}
		})
	}
	if mac != "" {
		h.Run(t, "ip link set "+far+" address "+mac)
	}
	h.Run(t, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
	for _, end := range []struct {
		*Host
		name string
	}{{other, near}, {h, far}} {
		end.Run(t, "sysctl -qw net.ipv6.conf."+end.name+".accept_dad=0")
		end.Run(t, "ip link set "+end.name+" up")
	}
}
