// Package device knows who the sources on the local networks are: a MAC with all its
// addresses, as the kernel's neighbour table and the leases of DHCP servers tell, or
// the address itself where no MAC is visible.
//
// Stages: WatchNeighbours tells of the neighbour table on a goroutine of its own and
// hands over to Run, the only writer, which also looks at the lease files and asks for
// addresses that Lookup missed. Run publishes answers into shards of immutable tables,
// which Lookup reads without a lock; then it calls Options.Changed.
package device

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/hostnet"
)

const (
	maxAddresses = 8192 // known in all; the ones that were idle longest go
	maxNameless  = 1024 // of these, without a MAC
	maxPerMAC    = 256  // of these, of one MAC

	// idleKept is how long an address is known that neither the kernel nor a lease
	// knows any more, after it was last heard of or asked about.
	idleKept = 10 * time.Minute

	// lookups is how many addresses the kernel is asked about in a second because of
	// flows, and how many wait for that at once.
	lookups = 64
)

// Options of a Table.
type Options struct {
	// Leases are the lease files to follow, as patterns of filepath.Match. Files
	// that aren't there may come later.
	Leases []string

	// Changed is called after an answer of Lookup changed, in the order of the changes.
	// It must not block; it may call everything but Run and Meet. nil: nobody.
	Changed func(Change)

	Log *slog.Logger // nil: the default
}

// DefaultLeases are where dnsmasq and odhcpd keep their leases unless told otherwise,
// on OpenWrt and on other distributions.
func DefaultLeases() []string {
	return []string{"/tmp/dhcp.leases", "/var/lib/misc/dnsmasq.leases", "/tmp/odhcpd.leases", "/tmp/hosts/odhcpd*"}
}

// Change is another answer to Lookup(Before.Addr). A device without MAC before is an
// address that appeared, one without MAC after it an address that left, perhaps to come
// back with another one.
type Change struct{ Before, After flow.Device }

// Table knows the devices. Its methods may be called at the same time.
type Table struct {
	o    Options
	feed feed

	shards [shards]atomic.Pointer[index]
	seed   uint64
	clock  atomic.Uint32 // seconds since start, set by Run
	tokens atomic.Int32  // looks that are left in this second
	misses chan netip.Addr
	start  time.Time

	telling sync.Mutex // one change at a time is told; before mu

	mu sync.Mutex // guards book
	book
}

// New makes a table that knows nobody until Run runs.
func New(o Options) *Table { return newTable(o, kernel{}) }

func newTable(o Options, f feed) *Table {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return &Table{
		o: o, feed: f, seed: rand.Uint64(), misses: make(chan netip.Addr, lookups), start: time.Now(),
		book: book{
			records: make(map[key]*record), macs: make(map[hostnet.MAC]*owner),
			leases: make(map[key]hostnet.Lease), hosts: make(map[hostnet.MAC]hostnet.Lease),
		},
	}
}

// answer is what Lookup says of one address.
type answer struct {
	dev  flow.Device
	used *atomic.Uint32 // the clock when it was last asked for, plus 1; 0: never
	met  *atomic.Bool   // the neighbour itself was asked, by Meet
}

// Lookup is who has an address; zones and the IPv4-mapped form don't matter. It takes
// no lock, waits for nobody, and allocates nothing for an address that is known, with
// a MAC or without. One that is not is named by itself; Run then asks the kernel
// about it, within a rate, and remembers it, so that a later answer may be better.
// Link-local IPv6 addresses are no sources of routed traffic: they are listed with
// their device, and named by themselves here.
func (t *Table) Lookup(a netip.Addr) flow.Device {
	if e := t.find(a); e != nil {
		return e.dev
	}
	a = a.Unmap().WithZone("")
	t.miss(a)
	return nameless(a)
}

// find is the answer about an address, nil if there is none.
func (t *Table) find(a netip.Addr) *answer {
	k := keyOf(a) // whatever the form of a
	h := t.hash(k)
	e := t.shards[shardOf(h)].Load().find(h, k)
	if e != nil {
		if now := t.clock.Load() + 1; e.used.Load() != now {
			e.used.Store(now)
		}
	}
	return e
}

const (
	meetTime  = 200 * time.Millisecond // that a neighbour has to answer
	meetPause = 5 * time.Millisecond   // between looks whether it did
)

// Meet is Lookup for who begins a flow. What is not known of an address, once as long
// as it is remembered, the kernel is asked for, and where it does not know, the neighbour:
// a host that made itself a new address must not be a stranger with it. That takes 200 ms
// at most. sure is false if too many are being asked, and nothing was found out.
func (t *Table) Meet(ctx context.Context, a netip.Addr) (d flow.Device, sure bool) {
	e := t.find(a)
	if e != nil && (e.dev.MAC != "" || e.met.Load()) {
		return e.dev, true
	}
	a = a.Unmap().WithZone("")
	if !a.IsGlobalUnicast() {
		return nameless(a), true
	}
	if t.tokens.Load() <= 0 || t.tokens.Add(-1) < 0 {
		return nameless(a), false
	}
	n, found := t.ask(ctx, a)
	t.change(func() {
		t.lookedLocked(a, n, found, time.Now())
		if r := t.records[keyOf(a)]; r != nil {
			r.said.met.Store(true)
		}
	})
	return t.Lookup(a), true
}

// ask waits for what a neighbour says of itself.
func (t *Table) ask(ctx context.Context, a netip.Addr) (n hostnet.Neighbour, found bool) {
	n, found, err := t.feed.neighbour(a)
	if found || err != nil {
		return n, found
	}
	index, on, err := t.feed.onLink(a)
	if !on || err != nil {
		return n, false
	}
	if err := t.feed.solicit(a, index); err != nil {
		t.o.Log.Debug("device: neighbour not asked", "err", err)
		return n, false
	}
	ctx, cancel := context.WithTimeout(ctx, meetTime)
	defer cancel()
	again := time.NewTicker(meetPause)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return n, false
		case <-again.C:
		}
		if n, found, err = t.feed.neighbour(a); found || err != nil {
			return n, found
		}
	}
}

// nameless is a device of which nothing but the address is known.
func nameless(a netip.Addr) flow.Device {
	if !a.IsValid() {
		return flow.Device{}
	}
	return flow.Device{Name: a.String(), Addr: a}
}

// miss has Run ask about an address, unless too many were asked about already.
func (t *Table) miss(a netip.Addr) {
	if !a.IsGlobalUnicast() || t.tokens.Load() <= 0 || t.tokens.Add(-1) < 0 {
		return
	}
	select {
	case t.misses <- a:
	default:
	}
}
