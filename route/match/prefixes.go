// Package match holds the sets that conditions are made of, built once and then
// read by any number of goroutines without a lock or an allocation.
package match

import (
	"fmt"
	"net/netip"

	"github.com/gaissmai/bart"
)

// Prefixes is an immutable set of IPv4 and IPv6 addresses, made of prefixes that
// may overlap.
type Prefixes struct {
	table bart.Lite
}

// NewPrefixes makes the set. A prefix that is invalid or has host bits set is
// refused. Prefixes inside ::ffff:0:0/96 stand for their IPv4 ones.
func NewPrefixes(prefixes []netip.Prefix) (*Prefixes, error) {
	s := new(Prefixes)
	for i, p := range prefixes {
		if !p.IsValid() {
			return nil, fmt.Errorf("prefix at %d: invalid", i)
		}
		if masked := p.Masked(); p != masked {
			return nil, fmt.Errorf("prefix %v: host bits set, want %v", p, masked)
		}
		s.table.Insert(unmap(p))
	}
	return s, nil
}

// Contains reports whether a prefix of the set covers a. An IPv4-mapped IPv6
// address is its IPv4 one, a zone is ignored, the zero Addr is in no set.
func (s *Prefixes) Contains(a netip.Addr) bool {
	return s.table.Contains(a.Unmap())
}

// unmap keeps shorter prefixes as they are: without host bits, what is shorter
// than /96 covers more than the mapped addresses.
func unmap(p netip.Prefix) netip.Prefix {
	if !p.Addr().Is4In6() {
		return p
	}
	return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
}
