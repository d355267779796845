package testnet

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// LinkStats are a device's counters, as it sees itself. TxDropped is, of a TUN
// device, what its full queue lost.
type LinkStats struct{ RxBytes, RxPackets, TxBytes, TxPackets, TxDropped uint64 }

// Stats reads the counters of a device of the namespace.
func (n *Netns) Stats(device string) LinkStats {
	n.lab.t.Helper()
	s, err := in(n, func() (LinkStats, error) { return readStats(device) })
	if err != nil {
		n.lab.t.Fatalf("%s: counters of %s: %v", n.Name, device, err)
	}
	return s
}

// readStats reads /proc/thread-self/net/dev, which follows the calling thread's
// namespace (/sys/class/net follows the mount).
func readStats(device string) (LinkStats, error) {
	b, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return LinkStats{}, err
	}
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		name, counters, _ := strings.Cut(sc.Text(), ":")
		f := strings.Fields(counters)
		if strings.TrimSpace(name) != device || len(f) < 12 {
			continue
		}
		var s LinkStats
		for i, p := range map[int]*uint64{0: &s.RxBytes, 1: &s.RxPackets, 8: &s.TxBytes, 9: &s.TxPackets, 11: &s.TxDropped} {
			if *p, err = strconv.ParseUint(f[i], 10, 64); err != nil {
				return s, err
			}
		}
		return s, nil
	}
	return LinkStats{}, os.ErrNotExist
}

// ProcessStats are what the kernel says of a process.
type ProcessStats struct {
	RSS     uint64        // bytes resident
	FDs     int           // open descriptors
	Threads int           // kernel threads
	CPU     time.Duration // user and system time so far
}

// clockTick is the unit of times in /proc: USER_HZ, 100 on every architecture of Linux that Go has.
const clockTick = 10 * time.Millisecond

// ReadProcess reads a process' figures.
func ReadProcess(pid int) (ProcessStats, error) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	fds, err := os.ReadDir(dir + "fd")
	if err != nil {
		return ProcessStats{}, err
	}
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return ProcessStats{}, err
	}
	// Numbered from 0 after the command's name: field 3 of proc_pid_stat(5) is 0 here.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 22 {
		return ProcessStats{}, fmt.Errorf("/proc/%d/stat: short", pid)
	}
	var v [4]int64
	for i, field := range []int{11, 12, 17, 21} {
		if v[i], err = strconv.ParseInt(f[field], 10, 64); err != nil {
			return ProcessStats{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	return ProcessStats{
		RSS: uint64(v[3]) * uint64(os.Getpagesize()), FDs: len(fds), Threads: int(v[2]),
		CPU: time.Duration(v[0]+v[1]) * clockTick,
	}, nil
}

// Rule is a packet filter rule with a counter.
type Rule struct {
	n    *Netns
	name string
}

// filterBase makes the lab's table; nft takes what exists already.
const filterBase = `add table inet testnet
add chain inet testnet %[1]s { type filter hook %[1]s priority -10; }
`

// Filter adds a rule at a hook (input, output, forward, prerouting, postrouting):
// match and verdict are nftables', as "tcp dport 81" and "drop",
// "reject with icmpx type host-unreachable", or "" to count only.
func (n *Netns) Filter(hook, match, verdict string) *Rule {
	n.lab.t.Helper()
	r := &Rule{n: n, name: fmt.Sprintf("r%d", rules.Add(1))}
	script := fmt.Sprintf(filterBase, hook) + fmt.Sprintf("add counter inet testnet %s\nadd rule inet testnet %s %s counter name %s %s\n", r.name, hook, match, r.name, verdict)
	n.Run("nft", script)
	return r
}

// Unfilter removes every rule that Filter made in the namespace.
func (n *Netns) Unfilter() {
	n.lab.t.Helper()
	n.Run("nft", "add table inet testnet; delete table inet testnet")
}

// Packets is how many packets matched so far.
func (r *Rule) Packets() uint64 {
	r.n.lab.t.Helper()
	var list struct {
		NFTables []struct {
			Counter struct{ Packets uint64 }
		} `json:"nftables"`
	}
	out := r.n.Run("nft", "-j", "list", "counter", "inet", "testnet", r.name)
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		r.n.lab.t.Fatalf("nft: %v: %s", err, out)
	}
	var sum uint64
	for _, o := range list.NFTables {
		sum += o.Counter.Packets
	}
	return sum
}
