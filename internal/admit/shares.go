package admit

import (
	"net/netip"

	"gatewayd/internal/shrink"
)

// minShare is what a source may hold however full everything is.
const minShare = 4

// Refusal says which limit was met; the zero value is none.
type Refusal uint8

// The limits, in the order in which they are looked at.
const (
	Admitted  Refusal = iota
	ByAddress         // the source address holds its share
	ByNetwork         // its network does
	ByAll             // everybody together does
)

// Shares counts what sources hold at once. An address may hold Per, and less
// once more than half of Max is held: its share shrinks in proportion to what is
// left, down to minShare, so that those with little come through when those with
// much do not. A network may hold Network. 0 is unlimited. The zero value counts
// and limits nothing.
type Shares struct {
	Max, Per, Network int

	total int
	held  map[key]int
	peak  int // of held
}

// Len is how much is held in all.
func (s *Shares) Len() int { return s.total }

// Held is how much a's address holds.
func (s *Shares) Held(a netip.Addr) int { return s.held[hostOf(a)] }

// Take adds one to what a holds, unless a limit refuses it.
func (s *Shares) Take(a netip.Addr) Refusal {
	host, network := hostOf(a), netOf(a)
	switch {
	case s.Per > 0 && s.held[host] >= s.share():
		return ByAddress
	case s.Network > 0 && s.held[network] >= s.Network:
		return ByNetwork
	case s.Max > 0 && s.total >= s.Max:
		return ByAll
	}
	if s.held == nil {
		s.held = make(map[key]int)
	}
	s.total++
	s.held[host]++
	s.held[network]++
	return Admitted
}

// share is what one address may hold now.
func (s *Shares) share() int {
	left := s.Max - s.total
	if s.Max == 0 || left >= s.Max/2 {
		return s.Per
	}
	return min(s.Per, max(minShare, s.Per*2*left/s.Max))
}

// Give takes one back that a holds.
func (s *Shares) Give(a netip.Addr) {
	s.total--
	s.held = shrink.Map(s.held, &s.peak)
	for _, k := range [...]key{hostOf(a), netOf(a)} {
		if s.held[k]--; s.held[k] == 0 {
			delete(s.held, k)
		}
	}
}
