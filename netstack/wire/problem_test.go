package wire

import (
	"encoding/binary"
	"slices"
	"testing"

	"gatewayd/flow"
)

// Each packet is malformed; what has a pointer is told to its sender.
func TestAProblemOfAnIPv6PacketPointsToItsByte(t *testing.T) {
	query := udp(6, data)
	tooBig := icmp(6, 2, 0, [4]byte{}, ip6(17, query))
	for _, c := range []struct {
		name   string
		packet []byte
		want   Problem
	}{
		{"option to be told", ip6(60, ext(17, 1, 0, 0x80, 0), query), Problem{2, 44}},
		{"option to be told but about multicast", ip6(0, ext(60), ext(17, 0xc2, 4), query), Problem{2, 50}},
		{"two of them", ip6(60, ext(60, 0xbe, 0), ext(17, 0xfe, 0), query), Problem{2, 42}},
		{"option to be dropped in silence", ip6(60, ext(17, 0x40, 0), query), Problem{}},
		{"and one behind it", ip6(60, ext(17, 0x80, 0, 0x40, 0), query), Problem{}},
		{"hop-by-hop in the second place", ip6(60, ext(0), ext(17), query), Problem{1, 40}},
		{"hop-by-hop in the third place", ip6(0, ext(60), ext(0), ext(17), query), Problem{1, 48}},
		{"routing with segments left", ip6(43, ext(17, 4, 1), query), Problem{0, 42}},
		{"a header that ends beyond the packet", ip6(60, ext(60, 0x80, 0), set(ext(17), 1, 200), query), Problem{}},
		{"too many headers", ip6(60, ext(60, 0x80, 0), slices.Repeat(ext(60), 7), ext(17), query), Problem{}},
		{"cut", ip6(60, ext(17, 0x80, 0), query)[:55], Problem{}},
		{"a fragment of an odd size", ip6(44, frag6(17, 1, 1), data), Problem{0, 4}},
		{"one behind another header", ip6(60, ext(44), frag6(17, 1, 1), data), Problem{0, 4}},
		{"a fragment past the end", ip6(60, ext(44), frag6(17, 0xfff8, 1), data), Problem{0, 50}},
		{"a fragment without data", ip6(44, frag6(17, 1, 1)), Problem{}},
		{"a fragment of an odd size over IPv4", ip4frag(17, 0x2000, nil, make([]byte, 9)), Problem{}},
	} {
		var p, inner Packet
		if cause, ok := Parse(c.packet, len(c.packet), false, &p); ok || cause != flow.DropMalformed || p.Problem != c.want {
			t.Errorf("%s: %v, %t, %+v; want %+v", c.name, cause, ok, p.Problem, c.want)
		}
		if c.want == (Problem{}) {
			continue
		}
		b := AppendUnreachable(nil, Unreachable{Kind: ParameterProblem, From: router6, Problem: p.Problem}, c.packet)
		if cause, ok := Parse(b, len(b), false, &inner); !ok || inner.ICMPType != 4 || inner.ICMPCode != c.want.Code || inner.Dst != client6 {
			t.Errorf("%s: %v, %+v", c.name, cause, inner)
		} else if n := binary.BigEndian.Uint32(b[44:]); int(n) != c.want.Pointer || string(b[48:]) != string(c.packet) {
			t.Errorf("%s: pointer %d, quotes % x", c.name, n, b[48:])
		}
	}
	for name, original := range map[string][]byte{
		"an ICMP error":           ip6(60, ext(58, 0x80, 0), tooBig),
		"an ICMP error's rest":    ip6(44, frag6(58, 0xfff8, 1), data),
		"multicast":               set(ip6(60, ext(17, 0x80, 0), query), 24, 0xff),
		"an unspecified sender":   cat(ip6(60)[:8], make([]byte, 16), ip6(60, ext(17, 0x80, 0), query)[24:]),
		"a packet cut in its IP":  ip6(60)[:39],
		"nothing that is a quote": {},
	} {
		if b := AppendUnreachable(nil, Unreachable{Kind: ParameterProblem, From: router6, Problem: Problem{2, 42}}, original); b != nil {
			t.Errorf("%s is answered: % x", name, b)
		}
	}
}
