// Package storetest has disks on which tests of what is stored fail: full ones, and
// such that can't be written.
package storetest

import (
	"os"
	"os/exec"
	"testing"
)

// Mount runs mount with args for dir and undoes it at the end of the test. Without the
// right to mount it skips the test; with CI=true in the environment that is a failure.
func Mount(t testing.TB, dir string, args ...string) {
	t.Helper()
	out, err := exec.Command("mount", append(args, dir)...).CombinedOutput()
	switch {
	case err == nil:
		t.Cleanup(func() { exec.Command("umount", "-l", dir).Run() }) //nolint:errcheck // it may be undone already
	case os.Getenv("CI") == "true":
		t.Fatalf("missing capability: mount %v: %s", args, out)
	default:
		t.Skipf("missing capability: mount %v: %s", args, out)
	}
}

// Small has dir be a disk of 256 KiB.
func Small(t testing.TB, dir string) {
	t.Helper()
	Mount(t, dir, "-t", "tmpfs", "-o", "size=256k", "none")
}
