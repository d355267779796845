// Package hostnettest runs the tests of a package that changes links and
// addresses in a network namespace of their own.
package hostnettest

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
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
