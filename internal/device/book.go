package device

import (
	"cmp"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/hostnet"
)

// book is what Run knows. Times are seconds of the table's clock.
type book struct {
	records  map[key]*record
	macs     map[hostnet.MAC]*owner
	nameless int                           // records without a MAC
	leases   map[key]hostnet.Lease         // by address
	hosts    map[hostnet.MAC]hostnet.Lease // the lease that names a MAC: that which ends last
	round    uint32                        // of telling the neighbour table
	changes  []Change                      // that nobody was told yet
}

// record is one address.
//
// Who has it: the neighbour that the kernel knows, else the client of a lease, else
// the neighbour that it knew last, else nobody that has a MAC.
type record struct {
	addr        netip.Addr
	index       int // of the link; 0: unknown
	neighbour   hostnet.MAC
	live        bool // the kernel knows the neighbour
	round       uint32
	first, seen uint32

	owner *owner // who has it, by the present answer; nil: no MAC
	said  *answer
}

// owner is a MAC that has addresses.
type owner struct {
	mac        hostnet.MAC
	text, name string // as in flow.Device
	first      uint32
	records    map[key]*record
}

// last is when the record was last heard of or asked for.
func (r *record) last() uint32 {
	if used := r.said.used.Load(); used > 0 {
		return max(r.seen, used-1)
	}
	return r.seen
}

// hearLocked takes in what the kernel told of a neighbour. onLink is asked, where two
// links claim the same address, which of them this host reaches it by.
func (t *Table) hearLocked(n hostnet.Neighbour, now time.Time, onLink func(netip.Addr) int) {
	k, sec := keyOn(n.Addr, n.Index), t.seconds(now)
	r := t.records[k]
	switch known := n.MAC != (hostnet.MAC{}); {
	case r == nil && !known:
		return
	case r == nil:
		r = t.addLocked(k, n.Addr, n.MAC, now)
	case r.live && r.index != n.Index && (!known || r.neighbour != n.MAC && onLink(n.Addr) != n.Index):
		return // of another link than the one by which the address is reached
	case !known:
		r.live = false
		t.settleLocked(k, r, now)
		return
	case n.Confirmed || !r.live:
		r.seen = sec
	}
	r.neighbour, r.index, r.live, r.round = n.MAC, n.Index, true, t.round
	t.settleLocked(k, r, now)
}

// lookedLocked takes in what the kernel answered about an address that was missed.
func (t *Table) lookedLocked(a netip.Addr, n hostnet.Neighbour, found bool, now time.Time) {
	if found {
		t.hearLocked(n, now, func(netip.Addr) int { return n.Index })
	}
	k := keyOf(a)
	r := t.records[k]
	if r == nil {
		r = t.addLocked(k, a, t.leases[k].MAC, now)
		t.settleLocked(k, r, now)
	}
	r.said.used.Store(t.seconds(now) + 1) // a flow asked
}

// beginTableLocked and endTableLocked enclose the whole neighbour table.
func (t *Table) beginTableLocked() { t.round++ }

func (t *Table) endTableLocked(now time.Time) {
	for k, r := range t.records {
		if r.live && r.round != t.round {
			r.live = false
			t.settleLocked(k, r, now)
		}
	}
}

// leasesLocked takes the place of all leases that were known.
func (t *Table) leasesLocked(leases []hostnet.Lease, now time.Time) {
	before, beforeHosts := t.leases, t.hosts
	t.leases = make(map[key]hostnet.Lease, len(leases))
	t.hosts = make(map[hostnet.MAC]hostnet.Lease)
	for _, l := range leases {
		if !l.Addr.IsGlobalUnicast() || !valid(l, now) {
			continue
		}
		t.leases[keyOf(l.Addr)] = l
		if h, ok := t.hosts[l.MAC]; l.MAC != (hostnet.MAC{}) && l.Host != "" && (!ok || ends(h).Before(ends(l))) {
			t.hosts[l.MAC] = l
		}
	}
	for k, l := range t.leases {
		r := t.records[k]
		if r == nil && l.MAC != (hostnet.MAC{}) { // else it tells a name, for when somebody has the address
			r = t.addLocked(k, l.Addr, l.MAC, now)
		}
		t.settleLocked(k, r, now)
	}
	for k := range before {
		if _, still := t.leases[k]; !still {
			t.settleLocked(k, t.records[k], now)
		}
	}
	for mac := range beforeHosts {
		t.renameLocked(mac, now)
	}
	for mac := range t.hosts {
		t.renameLocked(mac, now)
	}
}

func (t *Table) renameLocked(mac hostnet.MAC, now time.Time) {
	if o := t.macs[mac]; o != nil {
		for k, r := range o.records {
			t.settleLocked(k, r, now)
		}
	}
}

// valid reports whether a lease holds.
func valid(l hostnet.Lease, now time.Time) bool {
	return l.Addr.IsValid() && (l.Expires.IsZero() || now.Before(l.Expires))
}

// ends is when a lease does; one that doesn't ends far away.
func ends(l hostnet.Lease) time.Time {
	if l.Expires.IsZero() {
		return time.Unix(1<<40, 0)
	}
	return l.Expires
}

// sweepLocked forgets leases that ended and addresses that nobody has any more.
func (t *Table) sweepLocked(now time.Time) {
	for mac, l := range t.hosts {
		if !valid(l, now) {
			delete(t.hosts, mac)
			t.renameLocked(mac, now)
		}
	}
	for k, l := range t.leases {
		if !valid(l, now) {
			delete(t.leases, k)
			t.settleLocked(k, t.records[k], now)
		}
	}
	sec := t.seconds(now)
	for k, r := range t.records {
		_, leased := t.leases[k]
		if !r.live && !leased && r.last()+uint32(idleKept/time.Second) <= sec {
			t.dropLocked(k, r)
		}
	}
}

// settleLocked makes the answer for a record, which may be nil, what is known of it.
func (t *Table) settleLocked(k key, r *record, now time.Time) {
	if r == nil {
		return
	}
	l := t.leases[k]
	mac := r.neighbour
	if !r.live && l.MAC != (hostnet.MAC{}) {
		mac = l.MAC
	}
	t.giveLocked(k, r, mac, now)
	dev := flow.Device{Addr: r.addr}
	if r.owner != nil {
		dev.Name, dev.MAC, dev.Host = r.owner.name, r.owner.text, t.hosts[mac].Host
	} else {
		dev.Name = r.addr.String()
	}
	if own := l.MAC == (hostnet.MAC{}) || l.MAC == mac; own && l.Host != "" {
		dev.Host = l.Host
	}
	if before := r.said.dev; before != dev {
		r.said = &answer{dev: dev, used: r.said.used, met: r.said.met}
		t.publish(k, r.said)
		t.changedLocked(before, dev)
	}
}

// giveLocked has a record belong to a MAC, or to none.
func (t *Table) giveLocked(k key, r *record, mac hostnet.MAC, now time.Time) {
	if r.owner != nil && r.owner.mac == mac || r.owner == nil && mac == (hostnet.MAC{}) {
		return
	}
	t.releaseLocked(k, r)
	if mac == (hostnet.MAC{}) {
		t.nameless++
		return
	}
	o := t.macs[mac]
	if o == nil {
		text := mac.String()
		o = &owner{mac: mac, text: text, name: "mac:" + text, first: t.seconds(now), records: make(map[key]*record)}
		t.macs[mac] = o
	}
	o.records[k], r.owner = r, o
}

func (t *Table) releaseLocked(k key, r *record) {
	if r.owner == nil {
		t.nameless--
		return
	}
	delete(r.owner.records, k)
	if len(r.owner.records) == 0 {
		delete(t.macs, r.owner.mac)
	}
	r.owner = nil
}

// addLocked makes a record of an address that is to be a MAC's, or nobody's, after
// room was made for it.
func (t *Table) addLocked(k key, a netip.Addr, mac hostnet.MAC, now time.Time) *record {
	switch o := t.macs[mac]; {
	case len(t.records) >= maxAddresses:
		t.makeRoomLocked(t.records, maxAddresses/16)
	case mac == (hostnet.MAC{}) && t.nameless >= maxNameless:
		t.makeRoomLocked(t.withoutMACLocked(), maxNameless/16)
	case o != nil && len(o.records) >= maxPerMAC:
		t.makeRoomLocked(o.records, maxPerMAC/16)
	}
	sec := t.seconds(now)
	r := &record{addr: a, first: sec, seen: sec, said: &answer{dev: nameless(a), used: new(atomic.Uint32), met: new(atomic.Bool)}}
	t.records[k] = r
	t.nameless++
	t.publish(k, r.said)
	return r
}

func (t *Table) withoutMACLocked() map[key]*record {
	found := make(map[key]*record, t.nameless)
	for k, r := range t.records {
		if r.owner == nil {
			found[k] = r
		}
	}
	return found
}

// makeRoomLocked drops n of the records, those that were idle longest.
func (t *Table) makeRoomLocked(records map[key]*record, n int) {
	type idle struct {
		k    key
		r    *record
		last uint32
	}
	all := make([]idle, 0, len(records))
	for k, r := range records {
		all = append(all, idle{k, r, r.last()})
	}
	slices.SortFunc(all, func(a, b idle) int { return cmp.Compare(a.last, b.last) })
	for _, i := range all[:min(n, len(all))] {
		t.dropLocked(i.k, i.r)
	}
}

func (t *Table) dropLocked(k key, r *record) {
	t.releaseLocked(k, r)
	delete(t.records, k)
	t.publish(k, nil)
	t.changedLocked(r.said.dev, nameless(r.addr))
}

// changedLocked notes a change for Changed.
func (t *Table) changedLocked(before, after flow.Device) {
	if before != after && t.o.Changed != nil {
		t.changes = append(t.changes, Change{Before: before, After: after})
	}
}

// seconds is the table's clock at a time.
func (t *Table) seconds(now time.Time) uint32 { return uint32(max(now.Sub(t.start), 0) / time.Second) }
