package hostnet

import (
	"context"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

// AddrSet knows all addresses of this host, and the broadcast addresses of its
// IPv4 networks, which reach it as well. Readers see one immutable snapshot;
// Run replaces it when addresses change. The zero value holds none.
type AddrSet struct {
	snapshot atomic.Pointer[snapshot]
	mu       sync.Mutex // serialises writers
}

// snapshot is the host's addresses at one moment.
type snapshot struct {
	gen        uint64
	addrs      map[netip.Addr]struct{} // by the last dump
	fresh      []netip.Prefix          // addresses told of since that dump began, with their networks' lengths
	broadcasts map[[4]byte]struct{}    // of all their networks, unless they are addresses too
}

// owns reports whether a is an address of the host.
func (n *snapshot) owns(a netip.Addr) bool {
	_, ok := n.addrs[a]
	return ok || slices.ContainsFunc(n.fresh, func(p netip.Prefix) bool { return p.Addr() == a })
}

// cast sees to the broadcast addresses after a became the host's own, with a network.
func (n *snapshot) cast(a netip.Addr, network netip.Prefix) {
	if a.Is4() {
		delete(n.broadcasts, a.As4())
	}
	if b, ok := broadcastOf(network); ok && !n.owns(b) {
		n.broadcasts[b.As4()] = struct{}{}
	}
}

// maxFresh bounds addresses that are searched one by one; a burst of more of
// them waits for the dump that follows.
const maxFresh = 64

// NewAddrSet makes a set of the present addresses. It changes only while Run
// runs, or by Refresh.
func NewAddrSet() (*AddrSet, error) {
	s := new(AddrSet)
	return s, s.Refresh()
}

// Contains reports whether a is an address of this host or a broadcast address of
// its networks; zones and the IPv4-mapped form don't matter. It neither locks nor
// allocates. While Run runs, an address that was added is in the set as soon as the
// kernel's message of it was read; one that was removed may stay for 100 ms.
func (s *AddrSet) Contains(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return s.IsBroadcast(a) || s.now().owns(a)
}

// IsBroadcast reports whether a is the broadcast address of one of this host's
// networks, and not an address of its own. It is as Contains is, and quick enough to
// be asked about every packet.
func (s *AddrSet) IsBroadcast(a netip.Addr) bool {
	now := s.snapshot.Load()
	if now == nil || !a.Is4() {
		return false
	}
	_, ok := now.broadcasts[a.As4()]
	return ok
}

// Gen changes when the set does.
func (s *AddrSet) Gen() uint64 {
	if now := s.snapshot.Load(); now != nil {
		return now.gen
	}
	return 0
}

// Refresh reads the addresses anew. After an error the set is as it was.
func (s *AddrSet) Refresh() error {
	before := s.now()
	found, err := Addresses()
	if err != nil {
		return err
	}
	next := &snapshot{addrs: make(map[netip.Addr]struct{}, len(found)), broadcasts: make(map[[4]byte]struct{})}
	for _, a := range found {
		next.addrs[a.Addr] = struct{}{}
		next.cast(a.Addr, a.Net)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	next.gen = now.gen + 1
	// What was told of while the kernel was asked may not be in its answer.
	if len(now.fresh) > len(before.fresh) {
		next.fresh = now.fresh[len(before.fresh):]
	}
	for _, p := range next.fresh {
		next.cast(p.Addr(), p)
	}
	s.snapshot.Store(next)
	return nil
}

func (s *AddrSet) now() *snapshot {
	if now := s.snapshot.Load(); now != nil {
		return now
	}
	return new(snapshot)
}

// add puts an address into the set that the kernel just told of, with the length
// of its network.
func (s *AddrSet) add(p netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if now.owns(p.Addr()) || len(now.fresh) >= maxFresh {
		return
	}
	next := &snapshot{gen: now.gen + 1, addrs: now.addrs, fresh: append(slices.Clip(now.fresh), p), broadcasts: make(map[[4]byte]struct{})}
	maps.Copy(next.broadcasts, now.broadcasts)
	next.cast(p.Addr(), p)
	s.snapshot.Store(next)
}

// broadcastOf is the last address of an IPv4 network that has hosts beside it;
// those of two addresses or one have none (RFC 3021).
func broadcastOf(p netip.Prefix) (netip.Addr, bool) {
	if !p.Addr().Is4() || p.Bits() > 30 {
		return netip.Addr{}, false
	}
	b := p.Masked().Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])|(1<<(32-p.Bits())-1))
	return netip.AddrFrom4(b), true
}

// Run follows the host's addresses until ctx ends (nil) or netlink fails.
func (s *AddrSet) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var failed error
	err := watch(ctx, s.add, func() {
		if failed = s.Refresh(); failed != nil {
			cancel()
		}
	})
	if failed != nil {
		return failed
	}
	return err
}
