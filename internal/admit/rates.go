package admit

import (
	"maps"
	"net/netip"
	"time"

	"gatewayd/internal/shrink"
)

// Rate is a token bucket: PerSecond on average, Burst at once. Zero PerSecond is
// unlimited.
type Rate struct{ PerSecond, Burst int }

func (r Rate) interval() time.Duration { return time.Second / time.Duration(max(r.PerSecond, 1)) }

const (
	// maxEntries bounds what is remembered of addresses, and of networks.
	maxEntries = 8192
	// fewEntries are not worth forgetting.
	fewEntries = 1024
	// trustFor is how long a source that proved to be real is trusted.
	trustFor = 10 * time.Minute
	// sampled is how many entries are looked at for the one to be forgotten.
	sampled = 8
)

// Rates limits how fast sources begin something. A beginning costs a token of its
// address; an address that is not trusted pays also for its network and for all.
// A beginning that proves its source to be real (a handshake completed, an answer
// arrived) gets its tokens back, and the source is trusted for ten minutes: forged
// sources prove nothing, so that they can only use up what is theirs.
type Rates struct {
	Address, Network, All Rate

	base      time.Time // what times count from
	all       time.Duration
	addresses map[key]entry
	networks  map[key]entry
	peaks     struct{ addresses, networks int } // of these
}

// entry is one bucket. Spent is the time at which the bucket is full again, which
// is all that there is to a token bucket (the generic cell rate algorithm, ITU-T I.371).
type entry struct{ spent, trusted time.Duration }

// Allow takes a token for a's beginning at now; false when one is missing, and
// then none is taken.
func (r *Rates) Allow(a netip.Addr, now time.Time) bool {
	t := r.at(now)
	host, network := hostOf(a), netOf(a)
	e := r.addresses[host]
	if !r.Address.room(e.spent, t) {
		return false
	}
	if e.trusted <= t {
		n := r.networks[network]
		if !r.Network.room(n.spent, t) || !r.All.room(r.all, t) {
			return false
		}
		r.all = r.All.spend(r.all, t)
		n.spent = r.Network.spend(n.spent, t)
		put(&r.networks, network, n, t, r.Network)
	}
	e.spent = r.Address.spend(e.spent, t)
	put(&r.addresses, host, e, t, r.Address)
	return true
}

// Prove gives back what a beginning of a cost, and trusts a from now on.
func (r *Rates) Prove(a netip.Addr, now time.Time) {
	t := r.at(now)
	host, network := hostOf(a), netOf(a)
	e := r.addresses[host]
	if e.trusted <= t {
		r.all -= r.All.interval()
		if n, ok := r.networks[network]; ok {
			n.spent -= r.Network.interval()
			r.networks[network] = n
		}
	}
	e.spent -= r.Address.interval()
	e.trusted = t + trustFor
	if r.addresses == nil {
		r.addresses = make(map[key]entry)
	}
	makeRoom(r.addresses, host, t)
	r.addresses[host] = e
}

// Trusted reports whether a proved to be real of late.
func (r *Rates) Trusted(a netip.Addr, now time.Time) bool {
	return r.addresses[hostOf(a)].trusted > r.at(now)
}

// Forget gives back the memory of a flood, once that is over: when nobody who is
// not trusted begins anything, what is known of such sources tells nothing any
// more. It is to be called now and then.
func (r *Rates) Forget(now time.Time) {
	t := r.at(now)
	if r.all > t {
		return
	}
	forget(&r.addresses, &r.peaks.addresses, t)
	forget(&r.networks, &r.peaks.networks, t)
}

// forget drops the entries that say nothing that their absence would not.
func forget(m *map[key]entry, peak *int, now time.Duration) {
	if *m = shrink.Map(*m, peak); *peak <= fewEntries {
		return
	}
	maps.DeleteFunc(*m, func(_ key, e entry) bool { return e.spent <= now && e.trusted <= now })
	*m = shrink.Map(*m, peak)
}

// at is now as a time since the first one.
func (r *Rates) at(now time.Time) time.Duration {
	if r.base.IsZero() {
		r.base = now.Add(-time.Second)
	}
	return now.Sub(r.base)
}

func (r Rate) room(spent, now time.Duration) bool {
	return r.PerSecond == 0 || spent-now <= time.Duration(r.Burst-1)*r.interval()
}

func (r Rate) spend(spent, now time.Duration) time.Duration {
	if r.PerSecond == 0 {
		return spent
	}
	return max(spent, now) + r.interval()
}

// put stores e, unless it says nothing that its absence would not.
func put(m *map[key]entry, k key, e entry, now time.Duration, r Rate) {
	if r.PerSecond == 0 && e.trusted <= now {
		return
	}
	if *m == nil {
		*m = make(map[key]entry)
	}
	makeRoom(*m, k, now)
	(*m)[k] = e
}

// makeRoom forgets an entry of a full table for k: one that is full again, else
// of those that it looks at the one that is trusted least and spent least. Who is
// forgotten begins with a full bucket.
func makeRoom(m map[key]entry, k key, now time.Duration) {
	if len(m) < maxEntries {
		return
	}
	if _, known := m[k]; known {
		return
	}
	var (
		victim key
		least  entry
		n      int
	)
	for k, e := range m { // Go's maps begin anywhere
		if n++; n == 1 || e.less(least, now) {
			victim, least = k, e
		}
		if n == sampled {
			break
		}
	}
	delete(m, victim)
}

func (e entry) less(f entry, now time.Duration) bool {
	if et, ft := e.trusted > now, f.trusted > now; et != ft {
		return ft
	}
	return e.spent < f.spent
}
