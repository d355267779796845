package user

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"gatewayd/flow"
)

const users = 100_000

// BenchmarkLoad takes users of a configuration in, who are new or all have usage; it
// reports the heap that the registry keeps of them.
func BenchmarkLoad(b *testing.B) {
	groups, specs := many(users)
	for name, k := range map[string]Keeper{"new": nil, "used": busy{}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				before := heapNow()
				began := time.Now()
				u := newUsers(b, Options{Keeper: k})
				apply(b, u, groups, specs)
				b.ReportMetric(time.Since(began).Seconds(), "s/load")
				b.ReportMetric(float64(heapNow()-before)/1e6, "MB/load")
				runtime.KeepAlive(u)
			}
		})
	}
}

// busy says that every user has usage of this month.
type busy struct{ memory }

func (busy) Usage(key flow.UserKey) (Usage, error) {
	now := time.Now()
	return Usage{Up: uint64(key), Down: 1, FirstUse: now, LastSeen: now, PeriodStart: now}, nil
}

func heapNow() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkEdit changes one user beside many.
func BenchmarkEdit(b *testing.B) {
	u := newUsers(b, Options{})
	groups, specs := many(users)
	apply(b, u, groups, specs)
	n := 0
	b.Run("limit", func(b *testing.B) {
		for b.Loop() {
			n++
			put(b, u, Spec{Name: "m-limit", Limits: Limits{Connections: n}})
		}
	})
	b.Run("new", func(b *testing.B) {
		for b.Loop() {
			n++
			put(b, u, Spec{Name: fmt.Sprint("m-", n), Devices: []string{fmt.Sprintf("10.%d.%d.%d", n>>16&255, n>>8&255, n&255)}})
		}
	})
	b.Run("reload", func(b *testing.B) {
		for b.Loop() {
			apply(b, u, groups, specs)
		}
	})
	b.Run("group", func(b *testing.B) {
		for b.Loop() {
			n++
			groups[0].Limits.Speed = uint64(n)
			apply(b, u, groups, specs)
		}
	})
}

// BenchmarkLookup is what the data path asks.
func BenchmarkLookup(b *testing.B) {
	u := newUsers(b, Options{})
	groups, specs := many(users)
	apply(b, u, groups, specs)
	key := get(b, u, "user-012345").ID
	d := device("10.1.2.3", "02:00:00:00:30:39")
	b.Run("facts", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			u.Facts(key)
		}
	})
	b.Run("device", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, ok := u.UserOf(d); !ok {
				b.Fatal("nobody")
			}
		}
	})
	b.Run("admit", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			l, err := u.Admit(key, client(1))
			if err != nil {
				b.Fatal(err)
			}
			l.Release()
		}
	})
	b.Run("idle sweep", func(b *testing.B) {
		for b.Loop() {
			u.sweep(b.Context())
		}
	})
	b.Run("idle commit", func(b *testing.B) {
		for b.Loop() {
			u.commit(false)
		}
	})
}
