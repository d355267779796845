package gateway

import (
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"

	"gatewayd/netstack"
)

// machine is what the gateway runs on, as far as memory goes.
type machine struct {
	ram   int64 // bytes that this machine or control group has; 0 if unknown
	limit int64 // bytes, GOMEMLIMIT; 0: none was given; math.MaxInt64: off
	gogc  bool  // GOGC was given
	files int   // descriptors that this process may have
}

// memoryPlan is how much of everything fits a machine.
type memoryPlan struct {
	budget  int64 // bytes for heap, stacks and the runtime; 0: no limit
	buffers netstack.Buffers
	flows   int // limits.flows: auto
	percent int // GOGC while memory is plenty; 0: what the environment says
}

const (
	budgetPart  = 4        // of RAM is the budget
	minBudget   = 16 << 20 // what the program needs anyway
	smallRAM    = 2 << 30  // below which a budget is at most smallBudget
	smallBudget = 256 << 20
	tinyBudget  = 64 << 20  // up to which collections are frequent; at most for profile: tiny
	unknownRAM  = 128 << 20 // is assumed where the kernel does not tell
)

// Limits of what limits.flows: auto allows. An idle flow takes about half of
// flowBytes, so that a gateway full of idle ones still has half of its memory.
const (
	maxAutoFlows = 1 << 18
	minAutoFlows = 1024
	flowBytes    = 16 << 10 // of the budget for each allowed flow
	spareFiles   = 256      // descriptors for everything but flows
)

// planMemory decides what fits m under profile, which is auto, tiny or large.
func planMemory(profile string, m machine) memoryPlan {
	room := budgetOf(profile, m)
	p := memoryPlan{budget: room, buffers: buffersWithin(room), percent: 200}
	if m.limit == math.MaxInt64 {
		p.budget = 0
	}
	if profile == "large" {
		p.buffers = netstack.DefaultBuffers
	} else if room <= tinyBudget {
		p.percent = 100
	}
	if m.gogc {
		p.percent = 0
	}
	flows := min(room/flowBytes, maxAutoFlows)
	p.flows = min(max(int(flows), minAutoFlows), max(m.files-spareFiles, 1))
	return p
}

// budgetOf is what GOMEMLIMIT says, or else a part of RAM.
func budgetOf(profile string, m machine) int64 {
	if m.limit > 0 && m.limit < math.MaxInt64 {
		return m.limit
	}
	if m.ram == 0 {
		m.ram = unknownRAM
	}
	b := m.ram / budgetPart
	if m.ram < smallRAM {
		b = min(b, smallBudget)
	}
	if profile == "tiny" {
		b = min(b, tinyBudget)
	}
	return max(b, minBudget)
}

// buffersWithin are buffers with which some hundred flows that use them up fit a
// budget, and with their maxima about a hundred.
func buffersWithin(budget int64) netstack.Buffers {
	b := netstack.DefaultBuffers
	size := func(part int64, least, most int) int { return max(least, int(min(budget/part, int64(most)))) }
	return netstack.Buffers{
		Recv: size(2048, 32<<10, b.Recv), RecvMax: size(128, 512<<10, b.RecvMax),
		Send: size(1024, 32<<10, b.Send), SendMax: size(128, 512<<10, b.SendMax),
	}
}

// thisMachine looks at RAM, control group, environment and limits of the process.
func thisMachine() machine {
	m := machine{ram: memoryTotal(), gogc: os.Getenv("GOGC") != "", files: maxFiles()}
	if os.Getenv("GOMEMLIMIT") != "" {
		m.limit = debug.SetMemoryLimit(-1)
	}
	return m
}

var (
	memTotal = regexp.MustCompile(`MemTotal:\s+(\d+) kB`)
	cgroup   = regexp.MustCompile(`(?m)^0::(/.*)$`)
)

// memoryTotal is the RAM that this process may use, in bytes: this machine's, or
// less if its control group (cgroup v2) is limited; 0 if unknown.
func memoryTotal() int64 {
	b, _ := os.ReadFile("/proc/meminfo")
	m := memTotal.FindSubmatch(b)
	if m == nil {
		return 0
	}
	total, _ := strconv.ParseInt(string(m[1]), 10, 64)
	total <<= 10
	b, _ = os.ReadFile("/proc/self/cgroup")
	if m = cgroup.FindSubmatch(b); m == nil {
		return total
	}
	for dir := string(m[1]); ; dir = filepath.Dir(dir) { // parents' limits hold too
		b, _ := os.ReadFile(filepath.Join("/sys/fs/cgroup", dir, "memory.max"))
		if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil {
			total = min(total, n)
		}
		if dir == "/" {
			return total
		}
	}
}
