package fanout

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
)

const (
	shards   = 16
	sampled  = 32       // associations looked at to find an idle one, when all together are too many
	maxDying = 4096     // ended sub-links that were not closed yet; beyond, none is opened
	maxQueue = 16 << 20 // bytes that wait for openings, all together
)

// Client is a client's socket: whom an association belongs to.
type Client struct {
	Inbound string
	Source  netip.AddrPort // for ICMP the port is the echo id
	Network flow.Network
}

// Target is where one destination's datagrams go, by the routing of one moment.
type Target struct {
	Outbound  any       // identity of the outbound version; comparable, such as a pointer
	Name      string    // "tag@vN", for the log
	Gen       uint64    // decision generation that this belongs to
	Until     time.Time // when to ask again at the latest; zero: never
	Blocked   bool      // drop the datagrams, free of charge
	Cause     flow.Drop // what blocked datagrams are counted as
	Refusal   error     // what Refused is told of blocked datagrams; nil: nothing
	Pin       bool      // send everything of this client through its first sub-link
	AllowHost bool      // addresses of this host may be reached; never shares a sub-link with what may not
	Ctx       any       // the decision, handed on to Open untouched
}

// Opened is an open sub-link, registered as a flow.
type Opened struct {
	Link     flow.Link         // to send through; metered
	Receiver flow.Receiver     // where Sub passes on what it receives: a meter around Sub.Down; nil: Sub.Down itself
	Close    func(cause error) // called once, after the link was closed and its last call returned; may be nil
}

// Config is what a Table depends on. Functions without "may be nil" are needed.
type Config struct {
	// Resolve decides one destination. It is called with locks held: it must be
	// quick and must not call the Table.
	Resolve func(f flow.Flow) Target
	// Gen is the current decision generation; what was decided in another one is
	// decided again.
	Gen func() uint64
	// Open opens the link (giving s to OpenLink as its Receiver) and then registers
	// the flow. It may block until ctx ends. When it fails, it must leave nothing.
	Open func(ctx context.Context, f flow.Flow, t Target, s *Sub) (Opened, error)
	// Reply carries datagrams to the client, and tells how many bytes of payload
	// left; it must not block.
	Reply func(c Client, ts []flow.Train) (moved int)
	// Unreachable tells the client of an ICMP error; it must not block. May be nil.
	Unreachable func(c Client, e flow.ICMPError)
	// Refused hears of what is not sent, with the client's destination as tr.Peer:
	// it is blocked, its sub-link did not open, or the link refuses it. It is called
	// with locks held: it must not block and must not call the Table. May be nil.
	Refused func(c Client, tr flow.Train, err error)

	Timeouts     Timeouts
	Sweep        time.Duration // between looks for what is idle; 0: 1 s
	Associations int           // in all; 0: unlimited
	PerSource    int           // of one source address; 0: unlimited
	Opens        admit.Rates   // how fast new ones may begin; the zero value: unlimited
	// Trusted tells of sources that are known to be real otherwise: Opens does not
	// limit them. It is called with no lock held, for new associations. May be nil.
	Trusted func(source netip.Addr) bool
	// Full reports that there is no memory for another association or sub-link. It
	// is called for each, with locks held, and must be quick. May be nil.
	Full  func() bool
	Drops *flow.Drops
	Log   *slog.Logger // may be nil
}

// Timeouts are how long a sub-link lives without a datagram in either direction.
// Zero values get the defaults: 60 s, 5 min, and 10 s for the ports 53, 123 and
// 3478, 30 s for 443.
type Timeouts struct {
	OneWay   time.Duration            // nothing came back yet
	Answered time.Duration            // something did
	Ports    map[uint16]time.Duration // destination ports with a limit of their own, answered or not
}

func (t Timeouts) withDefaults() Timeouts {
	if t.OneWay <= 0 {
		t.OneWay = time.Minute
	}
	if t.Answered <= 0 {
		t.Answered = 5 * time.Minute
	}
	if t.Ports == nil {
		t.Ports = map[uint16]time.Duration{53: 10 * time.Second, 123: 10 * time.Second, 3478: 10 * time.Second, 443: 30 * time.Second}
	}
	return t
}

// Table holds the associations of all clients. Create it with New; it works
// while Run does.
type Table struct {
	cfg      Config
	base     time.Time // stamps are ns since it
	total    atomic.Int64
	live     atomic.Int64 // sub-links that are not closed yet
	dying    atomic.Int64 // those of them that are over
	queued   atomic.Int64 // bytes in queues of sub-links that are opening
	hand     atomic.Uint32
	closed   atomic.Bool
	inbounds inbounds
	openers  openers
	ended    endedList
	opens    opens
	shards   [shards]shard
}

// shard holds the associations of the source addresses that hash to it.
type shard struct {
	mu      sync.Mutex
	byKey   map[key]*association
	sources map[key]*source
	peaks   struct{ byKey, sources int } // of these
}

// source lists the associations of one source address, newest to oldest as they
// were placed: when they began, or when they were found in use at the old end.
type source struct {
	n              int
	newest, oldest *association
}

func (s *source) place(a *association) {
	a.placed = a.seen.Load()
	a.prev, a.next = nil, s.newest
	if s.newest != nil {
		s.newest.prev = a
	} else {
		s.oldest = a
	}
	s.newest = a
	s.n++
}

func (s *source) remove(a *association) {
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		s.newest = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	} else {
		s.oldest = a.prev
	}
	a.prev, a.next = nil, nil
	s.n--
}

// idlest is the oldest association that carried nothing since it was placed. One
// that did is placed anew (the CLOCK algorithm), so that finding the idlest costs
// a step for each association that was used, however many there are.
func (s *source) idlest() *association {
	for range s.n {
		a := s.oldest
		if a.seen.Load() == a.placed {
			break
		}
		s.remove(a)
		s.place(a)
	}
	return s.oldest
}

// key is a Client, packed; with port and network 0 its source address.
type key struct {
	addr    [16]byte
	inbound uint32
	port    uint16
	network flow.Network
	v4      bool
}

func (k key) source() key {
	k.port, k.network = 0, 0
	return k
}

func (k *key) shard() uint64 {
	h := binary.LittleEndian.Uint64(k.addr[:8]) ^ binary.LittleEndian.Uint64(k.addr[8:]) ^ uint64(k.inbound)
	return h * 0x9e3779b97f4a7c15 >> 60 // Fibonacci hashing: the top 4 bits, for 16 shards
}

// New makes a table and starts nothing.
func New(cfg Config) (*Table, error) {
	if cfg.Resolve == nil || cfg.Gen == nil || cfg.Open == nil || cfg.Reply == nil || cfg.Drops == nil {
		return nil, errors.New("fanout: Resolve, Gen, Open, Reply and Drops are needed")
	}
	cfg.Timeouts = cfg.Timeouts.withDefaults()
	if cfg.Sweep <= 0 {
		cfg.Sweep = time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	t := &Table{cfg: cfg, base: time.Now()}
	t.ended.wake = make(chan struct{}, 1)
	t.opens.rates = cfg.Opens
	for i := range t.shards {
		t.shards[i].byKey = map[key]*association{}
		t.shards[i].sources = map[key]*source{}
	}
	return t, nil
}

// Associations is how many there are now.
func (t *Table) Associations() int { return int(t.total.Load()) }

// Handle carries what f's client sent, each train to its Peer and in this order.
// It never blocks; ts and their payloads are valid during the call only.
func (t *Table) Handle(f flow.Flow, ts []flow.Train) {
	now := t.now()
	k := t.keyOf(&f)
	for {
		a, cause := t.find(k, &f, now)
		if a == nil {
			for i := range ts {
				t.cfg.Drops.Add(cause, ts[i].Count())
			}
			return
		}
		if a.handle(&f, ts, now) {
			return
		}
		// It was evicted between the look-up and the lock: make another one.
	}
}

func (t *Table) now() int64 { return int64(time.Since(t.base)) }

// stamp is at as now would have told it; the zero time is the end of time.
func (t *Table) stamp(at time.Time) int64 {
	if at.IsZero() {
		return math.MaxInt64
	}
	return int64(at.Sub(t.base))
}

func (t *Table) keyOf(f *flow.Flow) key {
	addr := f.Source.Addr()
	return key{
		addr: addr.As16(), v4: addr.Is4(), port: f.Source.Port(),
		network: f.Network, inbound: t.inbounds.number(f.Inbound),
	}
}

// find returns the client's association, a new one if there is none, or nil and
// the cause when a limit or the shutdown forbids that.
func (t *Table) find(k key, f *flow.Flow, now int64) (*association, flow.Drop) {
	sh := &t.shards[k.shard()]
	sh.mu.Lock()
	a := sh.byKey[k]
	sh.mu.Unlock()
	if a != nil {
		return a, 0
	}
	if t.full() {
		return nil, flow.DropMemory
	}
	if !t.mayOpen(f.Source.Addr(), now) {
		return nil, flow.DropOpenRate
	}
	if !t.reserve() {
		return nil, flow.DropFlowLimit
	}
	fresh := &association{t: t, key: k, client: Client{f.Inbound, f.Source, f.Network}}
	fresh.seen.Store(now)
	sh.mu.Lock()
	if a = sh.byKey[k]; a != nil || t.closed.Load() {
		sh.mu.Unlock()
		t.total.Add(-1)
		return a, flow.DropFlowLimit
	}
	evicted := sh.insertLocked(fresh, t.cfg.PerSource)
	sh.mu.Unlock()
	if evicted != nil {
		t.evict(evicted)
	}
	return fresh, 0
}

func (t *Table) full() bool { return t.cfg.Full != nil && t.cfg.Full() }

// reserve counts one association more; when that would be too many, it evicts
// an idle one first, so that the count never exceeds the limit.
func (t *Table) reserve() bool {
	for {
		n := t.total.Load()
		if limit := t.cfg.Associations; limit > 0 && n >= int64(limit) {
			if !t.evictOne() {
				return false
			}
			continue
		}
		if t.total.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// evictOne evicts the idlest of a sample from the next shard that has any.
func (t *Table) evictOne() bool {
	for range shards {
		sh := &t.shards[t.hand.Add(1)%shards]
		sh.mu.Lock()
		a := sh.idlestLocked()
		if a != nil {
			sh.removeLocked(a)
		}
		sh.mu.Unlock()
		if a != nil {
			t.evict(a)
			return true
		}
	}
	return false
}

// evict ends an association that was taken out of its shard.
func (t *Table) evict(a *association) {
	t.cfg.Drops.Add(flow.DropFlowLimit, 1)
	t.total.Add(-1)
	a.end(flow.ErrEvicted)
}

// insertLocked adds a and returns the idlest association of its source, taken
// out, if the source has too many now.
func (sh *shard) insertLocked(a *association, perSource int) (evicted *association) {
	k := a.key.source()
	src := sh.sources[k]
	if src == nil {
		src = &source{}
		sh.sources[k] = src
	}
	if perSource > 0 && src.n >= perSource {
		evicted = src.idlest()
		sh.removeLocked(evicted)
		sh.sources[k] = src // removing the last one forgot it
	}
	sh.byKey[a.key] = a
	src.place(a)
	return evicted
}

// removeLocked takes a out of the shard. It must be in it.
func (sh *shard) removeLocked(a *association) {
	k := a.key.source()
	src := sh.sources[k]
	if src.remove(a); src.n == 0 {
		delete(sh.sources, k)
	}
	delete(sh.byKey, a.key)
}

// idlestLocked is the idlest of some associations, of those that are not proved
// if there are any; Go's maps begin anywhere.
func (sh *shard) idlestLocked() (idlest *association) {
	n := 0
	for _, a := range sh.byKey {
		if idlest == nil || a.rather(idlest) {
			idlest = a
		}
		if n++; n == sampled {
			break
		}
	}
	return idlest
}

// EndAll ends every association and sub-link with cause. Later datagrams open new ones.
func (t *Table) EndAll(cause error) {
	for i := range t.shards {
		sh := &t.shards[i]
		sh.mu.Lock()
		all := make([]*association, 0, len(sh.byKey))
		for _, a := range sh.byKey {
			a.prev, a.next = nil, nil
			all = append(all, a)
		}
		clear(sh.byKey)
		clear(sh.sources)
		sh.mu.Unlock()
		t.total.Add(-int64(len(all)))
		for _, a := range all {
			a.end(cause)
		}
	}
}

// inbounds numbers the tags of inbounds, so that keys hold no pointer. There are
// as many as the configuration ever named.
type inbounds struct {
	mu     sync.Mutex
	byName atomic.Pointer[map[string]uint32]
}

func (in *inbounds) number(tag string) uint32 {
	if m := in.byName.Load(); m != nil {
		if n, ok := (*m)[tag]; ok {
			return n
		}
	}
	return in.add(tag)
}

func (in *inbounds) add(tag string) uint32 {
	in.mu.Lock()
	defer in.mu.Unlock()
	next := map[string]uint32{}
	if m := in.byName.Load(); m != nil {
		if n, ok := (*m)[tag]; ok {
			return n
		}
		for name, n := range *m {
			next[name] = n
		}
	}
	n := uint32(len(next) + 1)
	next[tag] = n
	in.byName.Store(&next)
	return n
}
