package store

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lockFile creates and locks a file, and writes into it who holds it. Whoever comes
// second is told. The lock goes with the process, the file stays.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		defer f.Close()
		b, _ := io.ReadAll(io.LimitReader(f, 20))
		return nil, fmt.Errorf("%w by %s", ErrInUse, holder(strings.TrimSpace(string(b))))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	// A full disk may take the lock, and no name.
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	}
	return f, nil
}

// holder describes a process.
func holder(pid string) string {
	if _, err := strconv.Atoi(pid); err != nil {
		return "another process"
	}
	b, err := os.ReadFile("/proc/" + pid + "/cmdline")
	if command := strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " ")); err == nil && command != "" {
		return fmt.Sprintf("process %s (%s)", pid, command)
	}
	return "process " + pid
}
