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
	sets *shared[flow.DeviceSet, V]

	// lengths are those of the prefixes that there are, longest first, of IPv4 and
	// IPv6: a look-up tries one after the other.
	lengths [2]atomic.Pointer[[]int]
	counts  [2]map[int]int // the writer's: prefixes by length
}

func newBindings[V any]() *bindings[V] {
	return &bindings[V]{
		sets:   newShared[flow.DeviceSet, V](),
		counts: [2]map[int]int{make(map[int]int), make(map[int]int)},
	}
}

// of is what belongs to the device's MAC, else to its host name, else to the longest
// prefix that has its address.
func (b *bindings[V]) of(d flow.Device) (v V, ok bool) {
	if d.MAC != "" {
		if v, ok = b.sets.get(flow.DeviceSet{MAC: d.MAC}); ok {
			return v, ok
		}
	}
	if d.Host != "" {
		if v, ok = b.sets.get(flow.DeviceSet{Host: d.Host}); ok {
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
				if v, ok = b.sets.get(flow.DeviceSet{Prefix: p}); ok {
					return v, ok
				}
			}
		}
	}
	return v, false
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
	of    *bindings[V]
	draft draft[flow.DeviceSet, V]
}

func (b *bindings[V]) edit() rebinding[V] { return rebinding[V]{b, b.sets.draft()} }

func (r rebinding[V]) set(d flow.DeviceSet, v V) {
	if _, was := r.draft.get(d); !was {
		r.count(d, 1)
	}
	r.draft.set(d, v)
}

func (r rebinding[V]) delete(d flow.DeviceSet) {
	if _, was := r.draft.get(d); was {
		r.count(d, -1)
	}
	r.draft.delete(d)
}

func (r rebinding[V]) count(d flow.DeviceSet, n int) {
	if d.Prefix.IsValid() {
		r.of.counts[family(d.Prefix.Addr())][d.Prefix.Bits()] += n
	}
}

func (r rebinding[V]) publish() {
	r.draft.publish()
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
