package netstack

import (
	"math/rand/v2"
	"net/netip"
	"sync/atomic"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// A datagram toward a client that is larger than the MTU there leaves in
// fragments, cut here on the goroutine that sends it. Over IPv6 the gateway may do
// so since it is the source; over IPv4 since the far side did not forbid it.

// datagramIDs names datagrams, so that fragments of one are told from those of
// another. Over IPv4 an id has 16 bits and must not come again soon (RFC 6864):
// they are counted, for each pair of addresses (more or less) by itself, from a
// start that nobody can guess. Over IPv6 they are random (RFC 7739).
type datagramIDs struct {
	seed     uint32
	counters [256]atomic.Uint32
}

func (d *datagramIDs) init() {
	d.seed = rand.Uint32()
	for i := range d.counters {
		d.counters[i].Store(rand.Uint32())
	}
}

// next is the id of the first one of n datagrams, whose ids follow each other.
func (d *datagramIDs) next(src, dst netip.Addr, n int) uint32 {
	if dst.Is6() {
		return rand.Uint32()
	}
	s, t := src.As16(), dst.As16()
	h := d.seed
	for i := 12; i < 16; i++ {
		h = (h^uint32(s[i]))*0x01000193 ^ uint32(t[i])<<16
	}
	return d.counters[h*0x9e3779b1>>24].Add(uint32(n)) - uint32(n) + 1
}

// sendFragments sends a message of proto that does not fit the MTU toward the client. head
// is what AppendUDP or AppendEcho made for the whole, with a complete checksum; of
// h the fields that fragments differ in are filled in. It may overwrite head. It
// tells whether the device took all of it: what follows a fragment that it did not
// take is of no use.
func (s *Stack) sendFragments(b *udpBuilder, hash uint32, h wire.Header, proto uint8, head, payload []byte) bool {
	var transport [transportLen]byte
	copy(transport[:], head[len(head)-transportLen:])
	h.MoreFragments = true
	room := (s.mtu(h.Dst) - len(h.AppendIP(b.header[:0], proto, 8))) &^ 7
	if room < transportLen || h.DontFragment && h.Dst.Unmap().Is4() {
		s.cfg.Drops.Add(flow.DropTooBig, 1)
		return false
	}
	first := transport[:]
	for h.MoreFragments {
		n := min(room, len(first)+len(payload))
		h.MoreFragments = n < len(first)+len(payload)
		head = append(h.AppendIP(b.header[:0], proto, n), first...)
		h.FragOffset += n
		n -= len(first)
		b.bufs = [2][]byte{head, payload[:n]}
		if !s.write(hash, b.bufs[:], Offload{}, 1) {
			return false
		}
		first, payload = nil, payload[n:]
	}
	return true
}

// transportLen is the header of UDP and of an ICMP echo, in bytes.
const transportLen = 8
