package gateway

import (
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"gatewayd/internal/admit"
	"gatewayd/internal/config"
)

// limits counts what is live and has a descriptor: TCP flows with the dials in
// progress, and the sub-links of associations.
type limits struct {
	total    int // flows in all; 0 is unlimited
	maxLinks int // sub-links, so that datagrams can't take every flow; 0 is unlimited

	mu    sync.Mutex // guards what follows
	flows admit.Shares
	links int
}

// How fast sources may begin what may come to nothing. What completes a handshake,
// or is answered and goes on, costs nothing (see admit.Rates), so that these are
// limits of failures and of forgeries.
//
// An address may begin 500 connections a second, 1,000 at once. Addresses that
// proved nothing of late share as much with their /24 or /64, and twice as much
// with all others: what a router of two slow cores dials beside its work.
// Associations are cheaper to begin and come to nothing by design, so that only
// those who may be forged are limited.
var (
	synRates = admit.Rates{
		Address: admit.Rate{PerSecond: 500, Burst: 1000},
		Network: admit.Rate{PerSecond: 500, Burst: 1000},
		All:     admit.Rate{PerSecond: 1000, Burst: 2000},
	}
	openRates = admit.Rates{
		Network: admit.Rate{PerSecond: 1000, Burst: 2000},
		All:     admit.Rate{PerSecond: 2000, Burst: 4000},
	}
)

// newLimits makes the limits of c; auto is limits.flows: auto.
func newLimits(c config.Limits, auto int) *limits {
	l := &limits{total: c.Flows}
	if c.Flows == config.Auto {
		l.total = auto
	}
	l.flows = admit.Shares{Max: l.total, Per: c.PerSource.Flows}
	l.maxLinks = part(l.total, 3, 4)
	return l
}

// part is n/d of a limit, all of one that is too small to be shared out.
func part(limit, n, d int) int {
	if limit <= fewFlows {
		return limit
	}
	return limit * n / d
}

const fewFlows = 16

// acquire takes a place for a TCP flow of src.
func (l *limits) acquire(src netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.flows.Take(src) == admit.Admitted
}

func (l *limits) release(src netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flows.Give(src)
}

// acquireLink takes a place for a sub-link of src.
func (l *limits) acquireLink(src netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.maxLinks > 0 && l.links >= l.maxLinks || l.flows.Take(src) != admit.Admitted {
		return false
	}
	l.links++
	return true
}

func (l *limits) releaseLink(src netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.links--
	l.flows.Give(src)
}

// dials is how many dials may be in progress on one device: half of all flows at
// most, of one network half of that, and of one source perSource.
func (l *limits) dials(perSource int) admit.Shares {
	s := admit.Shares{Max: maxDials, Per: perSource}
	if l.total > 0 {
		s.Max = min(s.Max, part(l.total, 1, 2))
	}
	s.Network = part(s.Max, 1, 2)
	return s
}

// maxDials bounds dials in progress on one device: each holds a goroutine and a socket.
const maxDials = 4096

// associations is how many UDP associations there may be on one device: fewer than
// sub-links, of which those that were evicted are there for a moment more.
func (l *limits) associations() int { return part(l.total, 1, 2) }

const defaultFiles = 1024

// maxFiles is how many descriptors this process may have open.
func maxFiles() int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return defaultFiles
	}
	return int(min(r.Max, 1<<30)) // Go raised the soft limit at start
}
