package user

import (
	"net/netip"
	"slices"
	"sync/atomic"

	"gatewayd/flow"
)

// bindings tell what belongs to a device. They are read without a lock; writers
// follow each other.
type bindings[V any] struct {
	macs     *shared[uint64, V]
	hosts    *shared[string, V]
	prefixes *shared[netip.Prefix, V]

	// lengths are those of the prefixes that there are, longest first, of IPv4 and
	// IPv6: a look-up tries one after the other.
	lengths [2]atomic.Pointer[[]int]
	counts  [2]map[int]int // the writer's: prefixes by length

	named atomic.Bool // there is, or was, a MAC or a host name
}

func newBindings[V any]() *bindings[V] {
	return &bindings[V]{
		macs: newShared[uint64, V](), hosts: newShared[string, V](), prefixes: newShared[netip.Prefix, V](),
		counts: [2]map[int]int{make(map[int]int), make(map[int]int)},
	}
}

// of is what belongs to the device's MAC, else to its host name, else to the longest
// prefix that has its address.
func (b *bindings[V]) of(d flow.Device) (v V, ok bool) {
	if d.MAC != "" {
		if v, ok = b.macs.get(macNumber(d.MAC)); ok {
			return v, ok
		}
	}
	if d.Host != "" {
		if v, ok = b.hosts.get(d.Host); ok {
			return v, ok
		}
	}
	a := d.Addr.Unmap()
	if !a.IsValid() {
		return v, false
	}
	if lengths := b.lengths[family(a)].Load(); lengths != nil {
		for _, bits := range *lengths {
			if p, err := a.Prefix(bits); err == nil {
				if v, ok = b.prefixes.get(p); ok {
					return v, ok
				}
			}
		}
	}
	return v, false
}

// get is what belongs to that very set.
func (b *bindings[V]) get(d flow.DeviceSet) (V, bool) {
	switch {
	case d.MAC != "":
		return b.macs.get(macNumber(d.MAC))
	case d.Host != "":
		return b.hosts.get(d.Host)
	}
	return b.prefixes.get(d.Prefix)
}

// macNumber is a MAC address, as flow.DeviceSet writes it, as a number.
func macNumber(mac string) (n uint64) {
	for i := range len(mac) {
		switch c := mac[i]; {
		case c >= '0' && c <= '9':
			n = n<<4 | uint64(c-'0')
		case c >= 'a' && c <= 'f':
			n = n<<4 | uint64(c-'a'+10)
		}
	}
	return n
}

// family is 0 for IPv4 and 1 for IPv6.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// rebinding is an edit of bindings, until it is published.
type rebinding[V any] struct {
	of       *bindings[V]
	macs     draft[uint64, V]
	hosts    draft[string, V]
	prefixes draft[netip.Prefix, V]
}

func (b *bindings[V]) edit() rebinding[V] {
	return rebinding[V]{b, b.macs.draft(), b.hosts.draft(), b.prefixes.draft()}
}

func (r rebinding[V]) set(d flow.DeviceSet, v V) {
	switch {
	case d.MAC != "":
		r.of.named.Store(true)
		r.macs.set(macNumber(d.MAC), v)
	case d.Host != "":
		r.of.named.Store(true)
		r.hosts.set(d.Host, v)
	default:
		if _, was := r.prefixes.get(d.Prefix); !was {
			r.of.counts[family(d.Prefix.Addr())][d.Prefix.Bits()]++
		}
		r.prefixes.set(d.Prefix, v)
	}
}

func (r rebinding[V]) delete(d flow.DeviceSet) {
	switch {
	case d.MAC != "":
		r.macs.delete(macNumber(d.MAC))
	case d.Host != "":
		r.hosts.delete(d.Host)
	default:
		if _, was := r.prefixes.get(d.Prefix); was {
			r.of.counts[family(d.Prefix.Addr())][d.Prefix.Bits()]--
		}
		r.prefixes.delete(d.Prefix)
	}
}

// get is what belongs to the set after the edit.
func (r rebinding[V]) get(d flow.DeviceSet) (V, bool) {
	switch {
	case d.MAC != "":
		return r.macs.get(macNumber(d.MAC))
	case d.Host != "":
		return r.hosts.get(d.Host)
	}
	return r.prefixes.get(d.Prefix)
}

func (r rebinding[V]) publish() {
	r.macs.publish()
	r.hosts.publish()
	r.prefixes.publish()
	for i, counts := range r.of.counts {
		lengths := make([]int, 0, len(counts))
		for bits, n := range counts {
			if n > 0 {
				lengths = append(lengths, bits)
			}
		}
		slices.Sort(lengths)
		slices.Reverse(lengths)
		r.of.lengths[i].Store(&lengths)
	}
}
