package device

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Entry is one device with all that is known of it.
type Entry struct {
	Name  string       // as flow.Device's
	MAC   string       // empty: not visible
	Host  string       // empty: unknown
	Addrs []netip.Addr // sorted, IPv4 first; without zones
	Link  string       // name of the interface that it was last heard on; empty: unknown
	First time.Time    // heard of, since the start
	Seen  time.Time    // heard of last, or source of a flow last
	Used  time.Time    // source of a flow last, to the second; zero: not yet
}

// All lists the devices that are known, by name. It asks the kernel for the names of
// interfaces, for which it may block for one exchange.
func (t *Table) All() []Entry {
	links := t.feed.links()
	now := time.Now()
	begin := now.Add(-now.Sub(t.start)) // by the wall clock of now, which may have been set since
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]Entry, 0, len(t.macs)+t.nameless)
	for _, o := range t.macs {
		records := make([]*record, 0, len(o.records))
		for _, r := range o.records {
			records = append(records, r)
		}
		all = append(all, entryOf(records, links, begin))
	}
	for _, r := range t.records {
		if r.owner == nil {
			all = append(all, entryOf([]*record{r}, links, begin))
		}
	}
	slices.SortFunc(all, func(a, b Entry) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// entryOf is the device that has some records, at least one. The table's clock began
// at begin.
func entryOf(records []*record, links map[int]string, begin time.Time) Entry {
	at := func(sec uint32) time.Time { return begin.Add(time.Duration(sec) * time.Second) }
	slices.SortFunc(records, func(a, b *record) int { return a.addr.Compare(b.addr) })
	dev := records[0].said.dev
	e := Entry{Name: dev.Name, MAC: dev.MAC}
	first, seen, used, heard := records[0].first, uint32(0), uint32(0), uint32(0)
	if o := records[0].owner; o != nil {
		first = o.first
	}
	for _, r := range records {
		e.Addrs = append(e.Addrs, r.addr)
		e.Host = cmp.Or(e.Host, r.said.dev.Host)
		if r.index != 0 && (r.seen >= heard || e.Link == "") {
			heard, e.Link = r.seen, links[r.index]
		}
		seen, used = max(seen, r.last()), max(used, r.said.used.Load())
	}
	e.First, e.Seen = at(first), at(seen)
	if used > 0 {
		e.Used = at(used - 1)
	}
	return e
}
