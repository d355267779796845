package netstack

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/netstack/wire"
)

// A router between the device and a client may have a smaller MTU than the
// device. TCP learns of it in gVisor; for datagrams, which the gateway sends in
// the far side's name, it is remembered here. Over IPv4 replies carry no DF and
// are fragmented on the way; over IPv6 nobody but the sender may. The first router
// is this host's kernel: its too-big would go to the far side and not come here, so
// that it is asked for its route.

const (
	maxPathMTUs = 1024             // clients that are remembered
	pathMTULife = 10 * time.Minute // RFC 8201, 5.3

	// What a message may lower the MTU to, in bytes: anyone can send one.
	minPathMTU4 = 552 // as Linux has it (min_pmtu)
	minPathMTU6 = 1280
)

// pathMTUs are the MTUs toward clients that are known. The zero value is ready.
type pathMTUs struct {
	some atomic.Bool // whether there is any: the packet path asks nothing else over IPv4, as a rule

	mu       sync.RWMutex
	byClient map[netip.Addr]pathMTU
}

type pathMTU struct {
	bytes int
	until time.Time
}

// toward is the MTU toward a client, of which limit is the device's. Of one that is
// not known ask tells it, unless nil.
func (m *pathMTUs) toward(now time.Time, client netip.Addr, limit int, ask func(netip.Addr) int) int {
	m.mu.RLock()
	known, ok := m.byClient[client]
	m.mu.RUnlock()
	switch {
	case ok && now.Before(known.until):
		return min(known.bytes, limit)
	case ask == nil:
		return limit
	}
	mtu := ask(client)
	if mtu <= 0 {
		mtu = limit
	}
	return min(m.learn(now, client, mtu), limit)
}

// learn remembers the MTU that a message about a packet to client, or the route
// there, tells, and returns what holds: the smaller one of two. Over the limit any
// other one is forgotten.
func (m *pathMTUs) learn(now time.Time, client netip.Addr, mtu int) int {
	least := minPathMTU4
	if client.Is6() {
		least = minPathMTU6
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byClient == nil {
		m.byClient = map[netip.Addr]pathMTU{}
	}
	old, known := m.byClient[client]
	for c := range m.byClient {
		if known || len(m.byClient) < maxPathMTUs {
			break
		}
		delete(m.byClient, c)
	}
	mtu = max(mtu, least)
	if known && now.Before(old.until) {
		mtu = min(mtu, old.bytes)
	}
	m.byClient[client] = pathMTU{mtu, now.Add(pathMTULife)}
	m.some.Store(true)
	return mtu
}

// tooBig reports that an ICMP error tells the MTU before a client, for which a
// packet of a kind that the gateway sends was too big.
func tooBig(p, quoted *wire.Packet) bool { return p.MTU != 0 && quoted.Network() != 0 }

// learnMTU takes what such an error tells about the way to a client.
func (s *Stack) learnMTU(client netip.Addr, mtu int) {
	if mtu < s.cfg.Device.MTU() {
		s.paths.learn(time.Now(), client, mtu)
	}
}

// mtu is the largest packet toward a client, in bytes.
func (s *Stack) mtu(client netip.Addr) int {
	limit, ask := s.cfg.Device.MTU(), s.cfg.MTUToward
	if client.Is4() || limit <= minPathMTU6 {
		ask = nil
	}
	if ask == nil && !s.paths.some.Load() {
		return limit
	}
	return s.paths.toward(time.Now(), client, limit, ask)
}
