package outbound

import "net/netip"

// peerSet is the peers that a link sent to, for filtering. It holds two halves:
// when the newer one is full, it becomes the older one, which is forgotten. So
// the peers sent to most recently are known, half of maxPeers at least.
type peerSet struct {
	ports      bool // of AddressAndPortDependent
	newer, old map[netip.AddrPort]struct{}
}

const maxPeers = 1024

func newPeerSet(f Filtering) *peerSet {
	return &peerSet{ports: f == AddressAndPortDependent, newer: map[netip.AddrPort]struct{}{}}
}

func (p *peerSet) key(peer netip.AddrPort) netip.AddrPort {
	if p.ports {
		return peer
	}
	return netip.AddrPortFrom(peer.Addr(), 0)
}

// add remembers a peer that is sent to.
func (p *peerSet) add(peer netip.AddrPort) {
	k := p.key(peer)
	if _, ok := p.newer[k]; ok {
		return
	}
	if len(p.newer) == maxPeers/2 {
		p.old, p.newer = p.newer, make(map[netip.AddrPort]struct{}, maxPeers/2)
	}
	p.newer[k] = struct{}{}
}

// has reports whether a peer may send.
func (p *peerSet) has(peer netip.AddrPort) bool {
	k := p.key(peer)
	if _, ok := p.newer[k]; ok {
		return true
	}
	_, ok := p.old[k]
	return ok
}
