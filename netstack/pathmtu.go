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
// are fragmented on the way; over IPv6 nobody but the sender may.

const (
	maxPathMTUs = 256              // clients that are remembered
	pathMTULife = 10 * time.Minute // RFC 8201, 5.3

	// What a message may lower the MTU to, in bytes: anyone can send one.
	minPathMTU4 = 552 // as Linux has it (min_pmtu)
	minPathMTU6 = 1280
)

// pathMTUs are the MTUs toward clients that are behind a smaller link. The zero
// value is ready.
type pathMTUs struct {
	some atomic.Bool // whether there is any: the packet path asks nothing else, as a rule

	mu       sync.RWMutex
	byClient map[netip.Addr]pathMTU
}

type pathMTU struct {
	bytes int
	until time.Time
}

// toward is the MTU toward a client, of which limit is the device's.
func (m *pathMTUs) toward(client netip.Addr, limit int) int {
	if !m.some.Load() {
		return limit
	}
	return m.at(time.Now(), client, limit)
}

func (m *pathMTUs) at(now time.Time, client netip.Addr, limit int) int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if known, ok := m.byClient[client]; ok && now.Before(known.until) {
		return min(known.bytes, limit)
	}
	return limit
}

// learn remembers the MTU that a message about a packet to client tells. Over the
// limit, which nobody reaches who does not try, any other one is forgotten.
func (m *pathMTUs) learn(now time.Time, client netip.Addr, mtu int) {
	least := minPathMTU4
	if client.Is6() {
		least = minPathMTU6
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byClient == nil {
		m.byClient = map[netip.Addr]pathMTU{}
	}
	_, known := m.byClient[client]
	for c := range m.byClient {
		if known || len(m.byClient) < maxPathMTUs {
			break
		}
		delete(m.byClient, c)
	}
	m.byClient[client] = pathMTU{max(mtu, least), now.Add(pathMTULife)}
	m.some.Store(true)
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
	return s.paths.toward(client, s.cfg.Device.MTU())
}
