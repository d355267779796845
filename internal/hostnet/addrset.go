package hostnet

import (
	"context"
	"encoding/binary"
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
	gen   uint64
	addrs map[netip.Addr]struct{} // by the last dump
	fresh []netip.Addr            // told of since that dump began
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

// Contains reports whether a is an address of this host; zones and the IPv4-mapped
// form don't matter. It neither locks nor allocates. While Run runs, an address
// that was added is in the set as soon as the kernel's message of it was read; one
// that was removed may stay for 100 ms.
func (s *AddrSet) Contains(a netip.Addr) bool {
	now := s.snapshot.Load()
	if now == nil {
		return false
	}
	a = a.Unmap().WithZone("")
	if _, ok := now.addrs[a]; ok {
		return true
	}
	return slices.Contains(now.fresh, a)
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
	addrs := make(map[netip.Addr]struct{}, len(found))
	for _, a := range found {
		addrs[a.Addr] = struct{}{}
		if b, ok := Broadcast(a.Net); ok {
			addrs[b] = struct{}{}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	// What was told of while the kernel was asked may not be in its answer.
	var fresh []netip.Addr
	if len(now.fresh) > len(before.fresh) {
		fresh = now.fresh[len(before.fresh):]
	}
	s.snapshot.Store(&snapshot{gen: now.gen + 1, addrs: addrs, fresh: fresh})
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
	if s.Contains(p.Addr()) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if len(now.fresh) >= maxFresh {
		return
	}
	fresh := append(slices.Clip(now.fresh), p.Addr())
	if b, ok := Broadcast(p); ok {
		fresh = append(fresh, b)
	}
	s.snapshot.Store(&snapshot{gen: now.gen + 1, addrs: now.addrs, fresh: fresh})
}

// Broadcast is the last address of an IPv4 network that has hosts beside it;
// those of two addresses or one have none (RFC 3021).
func Broadcast(p netip.Prefix) (netip.Addr, bool) {
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
