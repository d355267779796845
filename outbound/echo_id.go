package outbound

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// echoIDs are the ids of an outbound's raw echo sockets, which the kernel does
// not keep apart: one for each peer and link. The zero value is ready.
type echoIDs struct {
	mu   sync.Mutex
	used map[echoID]struct{}
}

type echoID struct {
	peer netip.Addr
	id   uint16
}

// echoDraws bounds the search: with half of all ids in use it fails once in 2⁶⁴.
const echoDraws = 64

// take is a random id that no other link toward peer has; never 0. The error is
// EADDRINUSE.
func (e *echoIDs) take(peer netip.Addr) (uint16, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.used == nil {
		e.used = map[echoID]struct{}{}
	}
	for range echoDraws {
		k := echoID{peer, uint16(1 + rand.IntN(0xffff))}
		if _, taken := e.used[k]; !taken {
			e.used[k] = struct{}{}
			return k.id, nil
		}
	}
	return 0, fmt.Errorf("echo ids toward %v: %w", peer, unix.EADDRINUSE)
}

// give gives an id back.
func (e *echoIDs) give(peer netip.Addr, id uint16) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.used, echoID{peer, id})
}

// Offsets in the headers that a filter sees. A raw IPv4 socket's data begins at
// the IP header, an IPv6 one's at the ICMP header (raw(7), RFC 3542); skfNetOff
// reaches the IP header of both (SKF_NET_OFF of linux/filter.h).
const (
	skfNetOff = 0xfff00000
	ipv4From  = 12
	ipv6From  = 8
)

// echoFilter is a classic BPF program that accepts echo replies of peer with id
// and nothing else: most packets that reach a raw ICMP socket are for others.
func echoFilter(peer netip.Addr, id uint16) *unix.SockFprog {
	var p bpf
	if peer.Is4() {
		p.load(unix.BPF_ABS|unix.BPF_W, skfNetOff+ipv4From)
		p.want(peer.AsSlice())
		p.add(unix.BPF_LDX|unix.BPF_B|unix.BPF_MSH, 0) // X: bytes of the IP header
	} else {
		from := peer.AsSlice()
		for i := uint32(0); i < 16; i += 4 {
			p.load(unix.BPF_ABS|unix.BPF_W, skfNetOff+ipv6From+i)
			p.want(from[i : i+4])
		}
		p.add(unix.BPF_LDX|unix.BPF_IMM, 0)
	}
	p.load(unix.BPF_IND|unix.BPF_B, 0)
	p.want([]byte{echoReplyType(peer.Is4())})
	p.load(unix.BPF_IND|unix.BPF_H, 4)
	p.want([]byte{byte(id >> 8), byte(id)})
	return p.finish()
}

// bpf is a program of loads and comparisons that all have to hold.
type bpf []unix.SockFilter

func (p *bpf) add(code uint16, k uint32) { *p = append(*p, unix.SockFilter{Code: code, K: k}) }

func (p *bpf) load(mode uint16, at uint32) { p.add(unix.BPF_LD|mode, at) }

// want compares what was loaded with a number of as many bytes, high ones first.
func (p *bpf) want(number []byte) {
	k := uint32(0)
	for _, b := range number {
		k = k<<8 | uint32(b)
	}
	p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, k)
}

// finish appends the verdicts, and sends each comparison that fails to the last.
func (p *bpf) finish() *unix.SockFprog {
	const all = 0xffffffff
	p.add(unix.BPF_RET|unix.BPF_K, all)
	p.add(unix.BPF_RET|unix.BPF_K, 0)
	for i := range *p {
		if f := &(*p)[i]; f.Code&7 == unix.BPF_JMP {
			f.Jf = uint8(len(*p) - 1 - (i + 1))
		}
	}
	return &unix.SockFprog{Len: uint16(len(*p)), Filter: &(*p)[0]}
}
