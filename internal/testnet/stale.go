package testnet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Names of namespaces carry the process that made them and when it started
// (ticks after boot): a process id alone may be someone else's by now.
var labName = regexp.MustCompile(`^gwlab-(\d+)-(\d+)-\d+-[a-z]+$`)

func labPrefix(n int) string {
	pid := os.Getpid()
	return fmt.Sprintf("gwlab-%d-%s-%d-", pid, startTime(pid), n)
}

// startTime is field 22 of /proc/PID/stat (proc_pid_stat(5)); "" for no process.
func startTime(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b[max(0, strings.LastIndexByte(string(b), ')')):]), " ")
	fields := strings.Fields(rest) // from field 3 on
	if len(fields) < 20 {
		return ""
	}
	return fields[19]
}

// removeStale removes the namespaces of labs whose process is gone. It cannot
// fail a test: what it could not remove the next lab tries again.
func removeStale() {
	entries, _ := os.ReadDir(netnsDir)
	for _, e := range entries {
		m := labName.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		pid, err := strconv.Atoi(m[1])
		if err == nil && startTime(pid) != m[2] {
			_ = removeNamespace(e.Name())
		}
	}
}

// removeNamespace ends what still runs in a namespace and deletes it; without
// processes in it, its devices go at once.
func removeNamespace(name string) error {
	for _, pid := range processesIn(name) {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("namespace %s: kill %d: %w", name, pid, err)
		}
	}
	err := exec.Command("ip", "netns", "del", name).Run()
	if _, gone := os.Stat(filepath.Join(netnsDir, name)); errors.Is(gone, fs.ErrNotExist) {
		return nil // by another process at the same time, perhaps
	}
	if err != nil {
		return fmt.Errorf("namespace %s: delete: %w", name, err)
	}
	return nil
}

// processesIn are the processes that live in a namespace. This one never counts:
// its threads visit.
func processesIn(name string) []int {
	out, err := exec.Command("ip", "netns", "pids", name).Output()
	if err != nil {
		return nil
	}
	var pids []int
	for _, f := range strings.Fields(string(out)) {
		if pid, err := strconv.Atoi(f); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}
