package device

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/hostnet"
	"gatewayd/internal/hostnet/hostnettest"
)

func TestMain(m *testing.M) { hostnettest.Main(m) }

// fake is a kernel whose neighbour table a test writes.
type fake struct {
	news chan hostnet.NeighbourNews

	mu    sync.Mutex
	table map[netip.Addr]hostnet.Neighbour
	link  map[netip.Addr]int
	asked []netip.Addr

	answers   map[netip.Addr]hostnet.Neighbour // who answers when it is asked itself
	solicited []netip.Addr
}

func (f *fake) watch(ctx context.Context, tell func(hostnet.NeighbourNews)) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case n := <-f.news:
			tell(n)
		}
	}
}

func (f *fake) neighbour(a netip.Addr) (hostnet.Neighbour, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, a)
	n, ok := f.table[a]
	return n, ok, nil
}

func (f *fake) onLink(a netip.Addr) (int, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	index, ok := f.link[a]
	return index, ok, nil
}

// solicit has who answers come into the table.
func (f *fake) solicit(a netip.Addr, index int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.solicited = append(f.solicited, a)
	if n, ok := f.answers[a]; ok {
		n.Index = index
		f.table[a] = n
	}
	return nil
}

func (f *fake) links() map[int]string { return map[int]string{2: "br-lan", 3: "br-guest"} }

// bench is a table that runs in a bubble.
type bench struct {
	*Table
	t      *testing.T
	f      *fake
	leases string

	mu   sync.Mutex
	told []Change
}

// changes are what was told since the last call.
func (b *bench) changes() []Change {
	b.mu.Lock()
	defer b.mu.Unlock()
	told := b.told
	b.told = nil
	return told
}

func inBubble(t *testing.T, body func(b *bench)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "leases")
	synctest.Test(t, func(t *testing.T) {
		f := &fake{news: make(chan hostnet.NeighbourNews), table: map[netip.Addr]hostnet.Neighbour{}, link: map[netip.Addr]int{}}
		b := &bench{t: t, f: f, leases: path}
		b.Table = newTable(Options{
			Leases: []string{path}, Log: slog.New(slog.DiscardHandler),
			Changed: func(c Change) {
				b.mu.Lock()
				defer b.mu.Unlock()
				b.told = append(b.told, c)
			},
		}, f)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- b.Run(ctx) }()
		synctest.Wait()
		body(b)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		checkBook(t, b.Table)
	})
}

// hear has the kernel tell a neighbour, "" for none, on link 2.
func (b *bench) hear(addr, mac string) { b.hearOn(2, addr, mac) }

func (b *bench) hearOn(index int, addr, mac string) {
	b.news(hostnet.NeighbourNews{Neighbour: neighbour(index, addr, mac)})
}

func (b *bench) news(n hostnet.NeighbourNews) {
	b.f.news <- n
	synctest.Wait()
}

func neighbour(index int, addr, mac string) hostnet.Neighbour {
	n := hostnet.Neighbour{Addr: netip.MustParseAddr(addr), Index: index, Confirmed: mac != ""}
	if mac != "" {
		if _, err := fmt.Sscanf(mac, "%x:%x:%x:%x:%x:%x", &n.MAC[0], &n.MAC[1], &n.MAC[2], &n.MAC[3], &n.MAC[4], &n.MAC[5]); err != nil {
			panic(err)
		}
	}
	return n
}

// lease writes the lease file, and waits until it was looked at.
func (b *bench) lease(lines string) {
	if err := os.WriteFile(b.leases, []byte(lines), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.pass(pollEvery * time.Second)
}

func (b *bench) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (b *bench) want(addr, name, host string) {
	b.t.Helper()
	if d := b.Lookup(netip.MustParseAddr(addr)); d.Name != name || d.Host != host || d.Addr.String() != addr || d.MAC != "" && "mac:"+d.MAC != name {
		b.t.Errorf("%s: %+v, want %q with host %q", addr, d, name, host)
	}
}

// checkBook compares what a table keeps twice, and its bounds.
func checkBook(t *testing.T, tab *Table) {
	t.Helper()
	tab.mu.Lock()
	defer tab.mu.Unlock()
	answers, nameless, owned := 0, 0, 0
	for i := range tab.shards {
		if x := tab.shards[i].Load(); x != nil {
			answers += x.n
			if 2*x.n > len(x.slots) {
				t.Errorf("%d answers in %d slots", x.n, len(x.slots))
			}
		}
	}
	for k, r := range tab.records {
		if r.owner == nil {
			nameless++
		} else if r.owner.records[k] != r || tab.macs[r.owner.mac] != r.owner {
			t.Errorf("%s: its MAC does not know it", r.addr)
		}
		if h := tab.hash(k); tab.shards[shardOf(h)].Load().find(h, k) != r.said {
			t.Errorf("%s: what is said is not what is known", r.addr)
		}
		if (r.owner == nil) != (r.said.dev.MAC == "") || r.said.dev.Addr != r.addr {
			t.Errorf("%s: said %+v", r.addr, r.said.dev)
		}
	}
	for _, o := range tab.macs {
		owned += len(o.records)
		if len(o.records) == 0 || len(o.records) > maxPerMAC {
			t.Errorf("%s has %d addresses", o.name, len(o.records))
		}
	}
	if n := len(tab.records); answers != n || nameless != tab.nameless || owned+nameless != n || n > maxAddresses || nameless > maxNameless {
		t.Errorf("%d records, %d answers, %d owned, %d nameless (counted %d)", n, answers, owned, nameless, tab.nameless)
	}
}

func device(addr, mac, host string) flow.Device {
	d := flow.Device{Name: addr, MAC: mac, Host: host, Addr: netip.MustParseAddr(addr)}
	if mac != "" {
		d.Name = "mac:" + mac
	}
	return d
}
