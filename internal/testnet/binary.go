package testnet

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// Each binary is built once in a process, and renamed to its place, where a
// running one of another process keeps its own file.
var (
	plainBinary = sync.OnceValues(func() (string, error) { return buildBinary("gatewayd") })
	raceBinary  = sync.OnceValues(func() (string, error) { return buildBinary("gatewayd-race", "-race") })
)

// Binary builds gatewayd and returns its path. It blocks while it builds, for a
// minute when nothing is cached.
func Binary(race bool) (string, error) {
	if race {
		return raceBinary()
	}
	return plainBinary()
}

func buildBinary(name string, flags ...string) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, ".bin", "test")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("build: %w", err)
	}
	fresh := filepath.Join(dir, fmt.Sprintf("%s.%d", name, os.Getpid()))
	defer os.Remove(fresh) // only there if the rename was not reached
	cmd := exec.Command("go", append([]string{"build", "-o", fresh}, append(flags, "./cmd/gatewayd")...)...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build gatewayd: %w: %s", err, strings.TrimSpace(string(out)))
	}
	path := filepath.Join(dir, name)
	return path, os.Rename(fresh, path)
}

// moduleRoot is where go.mod is, from the working directory upward: a test's is its package's.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	mod := strings.TrimSpace(string(out))
	if mod == "" || mod == os.DevNull {
		return "", fmt.Errorf("module: no go.mod at the working directory or above")
	}
	return filepath.Dir(mod), nil
}
