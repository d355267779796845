package user

import (
	"hash/maphash"
	"iter"
	"maps"
	"sync/atomic"
)

// shards is a power of two: an edit of 100,000 copies some 400.
const shards = 256

// shared is a map that anybody reads without a lock. It is cut into maps that never
// change: an edit replaces those that it touches, so that a reader sees either what
// was or what is, key by key. Writers follow each other.
type shared[K comparable, V any] struct {
	seed  maphash.Seed
	parts [shards]atomic.Pointer[map[K]V]
}

func newShared[K comparable, V any]() *shared[K, V] {
	return &shared[K, V]{seed: maphash.MakeSeed()}
}

func (m *shared[K, V]) shard(k K) int { return int(maphash.Comparable(m.seed, k) % shards) }

func (m *shared[K, V]) get(k K) (v V, ok bool) {
	if part := m.parts[m.shard(k)].Load(); part != nil {
		v, ok = (*part)[k]
	}
	return v, ok
}

// all yields everything, of each part what it was when it was reached.
func (m *shared[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for i := range m.parts {
			part := m.parts[i].Load()
			if part == nil {
				continue
			}
			for k, v := range *part {
				if !yield(k, v) {
					return
				}
			}
		}
	}
}

// draft is an edit of a shared map, until it is published.
type draft[K comparable, V any] struct {
	of    *shared[K, V]
	parts map[int]map[K]V
}

func (m *shared[K, V]) draft() draft[K, V] {
	return draft[K, V]{m, make(map[int]map[K]V)}
}

func (d draft[K, V]) part(k K) map[K]V {
	i := d.of.shard(k)
	p := d.parts[i]
	if p == nil {
		if old := d.of.parts[i].Load(); old != nil {
			p = maps.Clone(*old)
		} else {
			p = make(map[K]V)
		}
		d.parts[i] = p
	}
	return p
}

func (d draft[K, V]) set(k K, v V) { d.part(k)[k] = v }
func (d draft[K, V]) delete(k K)   { delete(d.part(k), k) }

func (d draft[K, V]) get(k K) (v V, ok bool) {
	if p := d.parts[d.of.shard(k)]; p != nil {
		v, ok = p[k]
		return v, ok
	}
	return d.of.get(k)
}

func (d draft[K, V]) publish() {
	for i, p := range d.parts {
		d.of.parts[i].Store(&p)
	}
}
