package wire

import (
	"bytes"
	"net/netip"
	"testing"

	"gatewayd/flow"
)

func TestAnErrorSaysItsKindAndQuotesTheOriginal(t *testing.T) {
	four, six := ip4(17, nil, udp(4, data)), ip6(60, ext(17), udp(6, data))
	for _, c := range []struct {
		kind         Kind
		type4, code4 uint8
		rest4        [4]byte
		type6, code6 uint8
		rest6        [4]byte
	}{
		{NetUnreachable, 3, 0, [4]byte{}, 1, 0, [4]byte{}},
		{HostUnreachable, 3, 1, [4]byte{}, 1, 3, [4]byte{}},
		{PortUnreachable, 3, 3, [4]byte{}, 1, 4, [4]byte{}},
		{Prohibited, 3, 13, [4]byte{}, 1, 1, [4]byte{}},
		{ProtocolUnreachable, 3, 2, [4]byte{}, 4, 1, [4]byte{0, 0, 0, 40}},
		{TooBig, 3, 4, [4]byte{0, 0, 0x05, 0x14}, 2, 0, [4]byte{0, 0, 0x05, 0x14}},
		{TimeExceeded, 11, 0, [4]byte{}, 3, 0, [4]byte{}},
		{ReassemblyTime, 11, 1, [4]byte{}, 3, 1, [4]byte{}},
	} {
		check := func(original []byte, from netip.Addr, kind, code uint8, rest [4]byte) {
			b := AppendUnreachable(nil, Unreachable{Kind: c.kind, From: from, MTU: 1300}, original)
			var p, inner Packet
			if cause, ok := Parse(b, len(b), false, &p); !ok || !VerifyTransport(b, nil, &p) {
				t.Fatalf("kind %d: dropped as %v: % x", c.kind, cause, b)
			}
			if p.ICMPType != kind || p.ICMPCode != code || [4]byte(b[p.HeaderLen+4:]) != rest || p.Src != from {
				t.Errorf("kind %d: % x", c.kind, b)
			}
			if c.kind == TooBig && p.MTU != 1300 {
				t.Errorf("MTU %d: want 1300", p.MTU)
			}
			if !bytes.Equal(b[p.PayloadOffset:], original) || !Quoted(b, &p, &inner) || inner.SrcPort != 5000 || inner.DstPort != 53 {
				t.Errorf("kind %d quotes %+v", c.kind, inner)
			}
			e := flow.ICMPError{Type: kind, Code: code, Peer: netip.AddrPortFrom(inner.Dst, inner.DstPort)}
			if k, ok := KindOf(e); c.kind != ReassemblyTime && (!ok || k != c.kind) { // which is for the gateway alone
				t.Errorf("kind %d is read as %d, %t", c.kind, k, ok)
			}
		}
		check(four, router4, c.type4, c.code4, c.rest4)
		check(six, router6, c.type6, c.code6, c.rest6)
	}
}

func TestAnErrorQuotesAsMuchAsItMayAndNoPadding(t *testing.T) {
	long := make([]byte, 1400)
	for _, c := range []struct {
		original []byte
		from     netip.Addr
		want     int
	}{
		{ip4(17, nil, udp(4, long)), router4, 576},
		{ip6(17, udp(6, long)), router6, 1280},
		{cat(ip4(17, nil, udp(4, data)), make([]byte, 10)), router4, 28 + 40},
		{ip6(17, udp(6, long))[:100], router6, 48 + 100}, // of a super-packet, a head is enough
	} {
		if b := AppendUnreachable(nil, Unreachable{From: c.from}, c.original); len(b) != c.want {
			t.Errorf("%d bytes: want %d", len(b), c.want)
		}
	}
}

func TestNoErrorIsSentWhereNoneMayBe(t *testing.T) {
	addr := func(b []byte, at int, a string) []byte { // set an address of a packet
		b = bytes.Clone(b)
		copy(b[at:], netip.MustParseAddr(a).AsSlice())
		return b
	}
	four, six := ip4(17, nil, udp(4, data)), ip6(17, udp(6, data))
	for name, original := range map[string][]byte{
		"nothing":                    nil,
		"a cut header":               four[:19],
		"an unreachable":             ip4(1, nil, icmp(4, 3, 1, [4]byte{}, four)),
		"a redirect":                 ip4(1, nil, icmp(4, 5, 1, [4]byte{}, four)),
		"a time exceeded fragment":   ip4frag(1, 0x2000, nil, icmp(4, 11, 0, [4]byte{}, four)),
		"an ICMP without a type":     ip4(1, nil, nil),
		"an ICMP that is padding":    cat(ip4(1, nil, nil), make([]byte, 8)),
		"a packet too big":           ip6(58, icmp(6, 2, 0, [4]byte{}, six)),
		"a redirect6":                ip6(58, icmp(6, 137, 0, [4]byte{}, six)),
		"a later fragment":           ip4frag(17, 0x2001, nil, make([]byte, 8)),
		"a later fragment6":          ip6(44, frag6(17, 8, 1), make([]byte, 8)),
		"nothing that follows":       ip6(59),
		"a multicast":                addr(four, 16, "224.0.0.251"),
		"a broadcast":                addr(four, 16, "255.255.255.255"),
		"a multicast6":               addr(six, 24, "ff02::fb"),
		"a broadcast source":         addr(four, 12, "255.255.255.255"),
		"an unspecified source":      addr(four, 12, "0.0.0.0"),
		"an unspecified source6":     addr(six, 8, "::"),
		"a loopback source":          addr(four, 12, "127.0.0.1"),
		"a multicast source6":        addr(six, 8, "ff02::1"),
		"a mapped source":            addr(six, 8, "::ffff:10.0.0.2"),
		"an unspecified destination": addr(four, 16, "0.0.0.0"),
	} {
		from := router4
		if len(original) > 0 && original[0]>>4 == 6 {
			from = router6
		}
		if b := AppendUnreachable(nil, Unreachable{From: from}, original); b != nil {
			t.Errorf("%s is answered: % x", name, b)
		}
	}
	if AppendUnreachable(nil, Unreachable{From: router6}, four) != nil || AppendUnreachable(nil, Unreachable{From: router4, Kind: numKinds}, four) != nil {
		t.Error("an error from the other family, or of no kind, is sent")
	}
	for name, original := range map[string][]byte{
		"an echo":          ip4(1, nil, icmp(4, 8, 0, noACK, data)),
		"a first fragment": ip4frag(17, 0x2000, nil, udp(4, nil)),
		"loopback":         addr(four, 16, "127.0.0.1"),
	} {
		if AppendUnreachable(nil, Unreachable{From: router4}, original) == nil {
			t.Errorf("%s is not answered", name)
		}
	}
}

func TestQuotesOfEachKindAreRead(t *testing.T) {
	quoted := func(v int, original []byte) (inner Packet, ok bool) {
		b := ip4(1, nil, icmp(4, 3, 3, [4]byte{}, original))
		if v == 6 {
			b = ip6(58, icmp(6, 1, 4, [4]byte{}, original))
		}
		var p Packet
		Parse(b, len(b), false, &p)
		ok = Quoted(b, &p, &inner)
		return inner, ok
	}
	if p, ok := quoted(4, ip4(6, nil, tcp(4, ACK, nil, data))[:28]); !ok || p.Proto != ProtoTCP || p.SrcPort != 5000 || p.TCPFlags != 0 {
		t.Errorf("28 bytes of tcp: %+v, %t", p, ok)
	}
	if p, ok := quoted(6, ip6(58, icmp(6, 129, 0, noACK, data))); !ok || !p.IsEchoReply() || p.EchoID != 7 {
		t.Errorf("echo reply: %+v, %t", p, ok)
	}
	if p, ok := quoted(4, ip4frag(1, 0x2000, nil, icmp(4, 8, 0, noACK, data))); !ok || p.EchoID != 7 || !p.Fragment {
		t.Errorf("first fragment: %+v, %t", p, ok)
	}
	if p, ok := quoted(4, ip4frag(17, 8, nil, udp(4, data))); !ok || p.SrcPort != 0 || p.FragOffset != 64 {
		t.Errorf("later fragment: %+v, %t", p, ok)
	}
	for name, original := range map[string][]byte{
		"nothing": nil, "half a header": ip4(17, nil, udp(4, data))[:12], "7 bytes of udp": ip4(17, nil, udp(4, data))[:27], "the other family": ip6(17, udp(6, data)),
	} {
		if p, ok := quoted(4, original); ok {
			t.Errorf("%s: %+v", name, p)
		}
	}
	if p, ok := quoted(4, cat(ip4(17, nil, udp(4, data)[:4]), make([]byte, 8))); ok {
		t.Errorf("padding is read as udp: %+v", p)
	}
	if p, ok := quoted(6, ip6(60, ext(17))); ok {
		t.Errorf("a chain that is cut: %+v", p)
	}
}

func TestOnlyErrorsQuote(t *testing.T) {
	inner4, inner6 := ip4(17, nil, udp(4, data)), ip6(17, udp(6, data))
	for _, b := range [][]byte{
		inner4,
		ip4(1, nil, icmp(4, 8, 0, noACK, inner4)),
		ip6(58, icmp(6, 137, 0, [4]byte{}, inner6)),
		ip4frag(1, 0x2000, nil, cat(icmp(4, 3, 3, [4]byte{}, inner4))),
	} {
		var p, inner Packet
		Parse(b, len(b), false, &p)
		if p.IsICMPError() || Quoted(b, &p, &inner) {
			t.Errorf("%+v quotes %+v", p, inner)
		}
	}
}

func TestOutsideErrorsAndVerdictsBecomeWhatAClientUnderstands(t *testing.T) {
	four, six := netip.AddrPortFrom(server4, 1), netip.AddrPortFrom(server6, 1)
	const none = numKinds
	for _, c := range []struct {
		peer       netip.AddrPort
		kind, code uint8
		want       Kind
	}{
		{four, 3, 6, NetUnreachable},
		{four, 3, 5, HostUnreachable},
		{four, 3, 7, HostUnreachable},
		{four, 3, 9, Prohibited},
		{four, 3, 10, Prohibited},
		{four, 11, 1, none},
		{four, 12, 0, none},
		{four, 5, 0, none},
		{six, 1, 2, HostUnreachable},
		{six, 1, 5, Prohibited},
		{six, 4, 0, none},
		{six, 3, 1, none},
		{six, 137, 0, none},
		{netip.AddrPortFrom(netip.AddrFrom16(server4.As16()), 1), 3, 3, PortUnreachable},
	} {
		k, ok := KindOf(flow.ICMPError{Type: c.kind, Code: c.code, Peer: c.peer})
		if ok != (c.want != none) || ok && k != c.want {
			t.Errorf("%v type %d code %d: kind %d, %t", c.peer, c.kind, c.code, k, ok)
		}
	}
	for v, want := range map[flow.Verdict]Kind{
		flow.VerdictReset: PortUnreachable, flow.VerdictNetUnreachable: NetUnreachable,
		flow.VerdictHostUnreachable: HostUnreachable, flow.VerdictProhibited: Prohibited, flow.VerdictSilent: none,
	} {
		if k, ok := KindOfVerdict(v); ok != (want != none) || ok && k != want {
			t.Errorf("verdict %d: kind %d, %t", v, k, ok)
		}
	}
}
