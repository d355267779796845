package testnet

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// T is what a lab needs of a test: *testing.T and *testing.B have it, and the
// demonstration brings its own. Fatalf ends the calling goroutine.
type T interface {
	Cleanup(f func())
	Context() context.Context
	Failed() bool
	Fatalf(format string, args ...any)
	Helper()
	Logf(format string, args ...any)
}

// tools are the programs that every lab needs, with the Debian package of each.
var tools = map[string]string{"ip": "iproute2", "nft": "nftables"}

// Missing names what this host lacks for a lab, in one line; "" is nothing.
// Programs beyond those that every lab needs are given by name.
func Missing(programs ...string) string {
	var missing []string
	if os.Geteuid() != 0 {
		missing = append(missing, "root")
	}
	if f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0); err != nil {
		missing = append(missing, "/dev/net/tun (kernel module tun)")
	} else {
		f.Close()
	}
	for name, pkg := range tools {
		if _, err := exec.LookPath(name); err != nil {
			missing = append(missing, fmt.Sprintf("%s (package %s)", name, pkg))
		}
	}
	for _, name := range programs {
		if _, err := exec.LookPath(name); err != nil {
			missing = append(missing, name)
		}
	}
	return strings.Join(missing, ", ")
}

// Require skips the test with -short, and on a host that lacks what a lab needs,
// naming it. Under CI=true a lack is a failure, so that no suite passes by skipping.
func Require(t testing.TB, programs ...string) {
	t.Helper()
	if testing.Short() {
		t.Skip("namespace test: not run with -short")
	}
	missing := Missing(programs...)
	switch {
	case missing == "":
	case os.Getenv("CI") == "true":
		t.Fatalf("namespace test: this host lacks %s", missing)
	default:
		t.Skipf("namespace test: this host lacks %s", missing)
	}
}
