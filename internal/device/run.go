package device

import (
	"context"
	"net/netip"
	"time"

	"gatewayd/internal/hostnet"
)

const (
	second      = time.Second
	pollEvery   = 2  // seconds between two looks at the lease files
	sweepsEvery = 30 // seconds between two sweeps
)

// feed is what the kernel tells.
type feed interface {
	// watch is hostnet.WatchNeighbours.
	watch(ctx context.Context, tell func(hostnet.NeighbourNews)) error

	// neighbour and onLink are hostnet.NeighbourAt and hostnet.OnLink.
	neighbour(a netip.Addr) (hostnet.Neighbour, bool, error)
	onLink(a netip.Addr) (index int, ok bool, err error)

	// solicit is hostnet.Solicit.
	solicit(a netip.Addr, index int) error

	// links are the names of the links by their index; nil if they can't be told.
	links() map[int]string
}

// kernel is the feed of this host.
type kernel struct{}

func (kernel) watch(ctx context.Context, tell func(hostnet.NeighbourNews)) error {
	return hostnet.WatchNeighbours(ctx, tell)
}

func (kernel) neighbour(a netip.Addr) (hostnet.Neighbour, bool, error) { return hostnet.NeighbourAt(a) }

func (kernel) onLink(a netip.Addr) (int, bool, error) { return hostnet.OnLink(a) }

func (kernel) solicit(a netip.Addr, index int) error { return hostnet.Solicit(a, index) }

func (kernel) links() map[int]string {
	found, err := hostnet.Links()
	if err != nil {
		return nil
	}
	names := make(map[int]string, len(found))
	for _, l := range found {
		names[l.Index] = l.Name
	}
	return names
}

// Run follows the neighbour table and the lease files until ctx ends (nil) or netlink
// fails. What is known then stays.
func (t *Table) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	news := make(chan hostnet.NeighbourNews)
	failed := make(chan error, 1)
	go func() {
		failed <- t.feed.watch(ctx, func(n hostnet.NeighbourNews) {
			select {
			case news <- n:
			case <-ctx.Done():
			}
		})
	}()
	w := &worker{Table: t, files: hostnet.NewLeaseFiles(t.o.Leases)}
	w.tick(time.Now())
	tick := time.NewTicker(second)
	defer tick.Stop()
	for {
		select {
		case err := <-failed:
			return err
		case n := <-news:
			w.hear(n, time.Now())
		case a := <-t.misses:
			w.look(a, time.Now())
		case now := <-tick.C:
			w.tick(now)
		}
	}
}

// worker is what Run alone uses.
type worker struct {
	*Table
	files     *hostnet.LeaseFiles
	ticks     int
	complaint string // the last one, so that each is logged once
}

// change runs f with the lock held and then tells of what changed, in order.
func (t *Table) change(f func()) {
	t.telling.Lock()
	defer t.telling.Unlock()
	t.mu.Lock()
	f()
	changes := t.changes
	t.changes = nil
	t.mu.Unlock()
	for _, c := range changes {
		t.o.Changed(c)
	}
}

func (w *worker) hear(n hostnet.NeighbourNews, now time.Time) {
	w.change(func() {
		switch n.Kind {
		case hostnet.TableBegins:
			w.beginTableLocked()
		case hostnet.TableEnds:
			w.endTableLocked(now)
		case hostnet.NeighbourChanged:
			w.hearLocked(n.Neighbour, now, w.linkOf)
		}
	})
}

// linkOf is the link by which this host reaches an address; 0 if there is none, or if
// too much was asked in this second.
func (w *worker) linkOf(a netip.Addr) int {
	if w.tokens.Add(-1) < 0 {
		return 0
	}
	index, _, err := w.feed.onLink(a)
	if err != nil {
		w.o.Log.Debug("device: link of an address unknown", "addr", a, "err", err)
	}
	return index
}

// look asks about an address that Lookup missed.
func (w *worker) look(a netip.Addr, now time.Time) {
	n, found, err := w.feed.neighbour(a)
	if err != nil {
		w.o.Log.Debug("device: neighbour unknown", "addr", a, "err", err)
	}
	w.change(func() { w.lookedLocked(a, n, found, now) })
}

// tick is each second's work.
func (w *worker) tick(now time.Time) {
	w.clock.Store(w.seconds(now))
	w.tokens.Store(lookups)
	if w.ticks%pollEvery == 0 {
		w.poll(now)
	}
	if w.ticks++; w.ticks%sweepsEvery == 0 {
		w.change(func() { w.sweepLocked(now) })
	}
}

func (w *worker) poll(now time.Time) {
	leases, changed, err := w.files.Poll()
	complaint := ""
	if err != nil {
		complaint = err.Error()
	}
	if complaint != w.complaint && err != nil {
		w.o.Log.Warn("device: some leases are unknown", "err", err)
	}
	w.complaint = complaint
	if changed {
		w.change(func() { w.leasesLocked(leases, now) })
	}
}
