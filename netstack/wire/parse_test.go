package wire

import (
	"net/netip"
	"slices"
	"testing"

	"gatewayd/flow"
)

var (
	data  = []byte("some payload")
	ah    = []byte{17, 1, 0, 0, 0, 0, 0, 1} // 12 bytes with what follows
	noACK = [4]byte{0, 7, 0, 9}
)

// rejected has a packet for each check of Parse, with the cause that it is dropped under.
var rejected = []struct {
	name   string
	packet []byte
	cause  flow.Drop
}{
	{"empty", nil, flow.DropMalformed},
	{"version 0", set(ip4(17, nil, udp(4, data)), 0, 0x05), flow.DropMalformed},
	{"version 5", set(ip4(17, nil, udp(4, data)), 0, 0x55), flow.DropMalformed},
	{"v4 header cut", ip4(17, nil, udp(4, data))[:19], flow.DropMalformed},
	{"v4 header length 16", fix4(set(ip4(17, nil, udp(4, data)), 0, 0x44)), flow.DropMalformed},
	{"v4 options cut", fix4(set(ip4(17, nil, nil), 0, 0x4f)), flow.DropMalformed},
	{"v4 length below header", fix4(set(ip4(17, nil, udp(4, data)), 3, 19)), flow.DropMalformed},
	{"v4 length zero", fix4(set(ip4(17, nil, udp(4, data)), 3, 0)), flow.DropMalformed},
	{"v4 length above what was read", fix4(set(ip4(17, nil, udp(4, data)), 3, 41)), flow.DropMalformed},
	{"v4 header checksum", set(ip4(17, nil, udp(4, data)), 8, 63), flow.DropChecksum},
	{"v4 option length 0", ip4(17, []byte{7, 0, 0, 0}, udp(4, data)), flow.DropMalformed},
	{"v4 option length 1", ip4(17, []byte{7, 1, 0, 0}, udp(4, data)), flow.DropMalformed},
	{"v4 option too long", ip4(17, []byte{7, 5, 0, 0}, udp(4, data)), flow.DropMalformed},
	{"v4 option without length", ip4(17, []byte{1, 1, 1, 7}, udp(4, data)), flow.DropMalformed},
	{"v4 loose source route", ip4(17, []byte{131, 7, 4, 192, 0, 2, 1, 0}, udp(4, data)), flow.DropMalformed},
	{"v4 strict source route", ip4(17, []byte{1, 137, 7, 4, 192, 0, 2, 1}, udp(4, data)), flow.DropMalformed},
	{"v4 source route without pointer", ip4(17, []byte{1, 1, 131, 2}, udp(4, data)), flow.DropMalformed},
	{"v4 fragment without data", ip4frag(17, 0x2000, nil, nil), flow.DropMalformed},
	{"v4 fragment of odd size", ip4frag(17, 0x2000, nil, make([]byte, 9)), flow.DropMalformed},
	{"v4 fragment past the end", ip4frag(17, 0x1fff, nil, make([]byte, 16)), flow.DropMalformed},
	{"v6 header cut", ip6(17, udp(6, data))[:39], flow.DropMalformed},
	{"v6 length above what was read", set(ip6(17, udp(6, data)), 5, 21), flow.DropMalformed},
	{"v6 jumbo", func() []byte {
		b := ip6(0, ext(17, 0xc2, 4, 0, 1, 0, 0), udp(6, data))
		b[4], b[5] = 0, 0
		return b
	}(), flow.DropMalformed},
	{"v6 jumbo option", ip6(0, ext(17, 0xc2, 4, 0, 1, 0, 0), udp(6, data)), flow.DropMalformed},
	{"v6 hop-by-hop second", ip6(60, ext(0), ext(17), udp(6, data)), flow.DropMalformed},
	{"v6 hop-by-hop twice", ip6(0, ext(0), ext(17), udp(6, data)), flow.DropMalformed},
	{"v6 option that must be known", ip6(60, ext(17, 0x40, 0), udp(6, data)), flow.DropMalformed},
	{"v6 option too long", ip6(60, ext(17, 1, 5), udp(6, data)), flow.DropMalformed},
	{"v6 option without length", ip6(60, ext(17, 0, 0, 0, 0, 0, 1), udp(6, data)), flow.DropMalformed},
	{"v6 extension cut", ip6(60, ext(17)[:7]), flow.DropMalformed},
	{"v6 extension longer than packet", ip6(60, set(ext(17), 1, 9), udp(6, data)), flow.DropMalformed},
	{"v6 chain ends in an extension", ip6(0, ext(60)), flow.DropMalformed},
	{"v6 routing with segments left", ip6(43, ext(17, 0, 1), udp(6, data)), flow.DropMalformed},
	{"v6 routing longer than packet", ip6(43, set(ext(17), 1, 200), udp(6, data)), flow.DropMalformed},
	{"v6 nine extensions", ip6(60, slices.Repeat(ext(60), 8), ext(17), udp(6, data)), flow.DropMalformed},
	{"v6 chain of 520 bytes", ip6(60, ext(60, make([]byte, 510)...), ext(17), udp(6, data)), flow.DropMalformed},
	{"v6 fragment header cut", ip6(44, frag6(17, 1, 1)[:6]), flow.DropMalformed},
	{"v6 fragment without data", ip6(44, frag6(17, 1, 1)), flow.DropMalformed},
	{"v6 fragment of odd size", ip6(44, frag6(17, 1, 1), data), flow.DropMalformed},
	{"v6 fragment past the end", ip6(44, frag6(17, 0xfff8, 1), data), flow.DropMalformed},
	{"tcp cut", ip4(6, nil, tcp(4, SYN, nil, nil)[:19]), flow.DropMalformed},
	{"tcp data offset 4", ip4(6, nil, set(tcp(4, SYN, nil, nil), 12, 0x40)), flow.DropMalformed},
	{"tcp options cut", ip4(6, nil, set(tcp(4, SYN, nil, nil), 12, 0x60)), flow.DropMalformed},
	{"tcp port 0", ip4(6, nil, set(set(tcp(4, SYN, nil, nil), 2, 0), 3, 0)), flow.DropDestinationZero},
	{"udp cut", ip4(17, nil, udp(4, nil)[:7]), flow.DropMalformed},
	{"udp length 7", ip4(17, nil, set(udp(4, data), 5, 7)), flow.DropMalformed},
	{"udp length above packet", ip4(17, nil, set(udp(4, data), 5, 21)), flow.DropMalformed},
	{"udp6 length 0", ip6(17, set(udp(6, data), 5, 0)), flow.DropMalformed},
	{"udp6 length above packet", ip6(17, set(udp(6, data), 5, 21)), flow.DropMalformed},
	{"udp port 0", ip6(17, set(udp(6, data), 3, 0)), flow.DropDestinationZero},
	{"icmp cut", ip4(1, nil, []byte{8, 0, 0, 0, 0, 0, 0}), flow.DropMalformed},
	{"icmp6 cut", ip6(58, []byte{128, 0, 0, 0}), flow.DropMalformed},
}

func TestEachMalformedPacketIsDroppedUnderItsCause(t *testing.T) {
	for _, c := range rejected {
		var p Packet
		if cause, ok := Parse(c.packet, len(c.packet), false, &p); ok || cause != c.cause {
			t.Errorf("%s: cause %v, accepted %t: want %v", c.name, cause, ok, c.cause)
		}
	}
}

// accepted has well-formed packets, with what is understood of them.
var accepted = []struct {
	name   string
	packet []byte
	want   Packet
}{
	{"udp", ip4(17, nil, udp(4, data)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 20, Length: 40, PayloadOffset: 28, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"empty udp", ip4(17, nil, udp(4, nil)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 20, Length: 28, PayloadOffset: 28, SrcPort: 5000, DstPort: 53,
	}},
	{"empty udp6", ip6(17, udp(6, nil)), Packet{
		Version: 6, Proto: 17, ProtoOffset: 6, HeaderLen: 40, Length: 48, PayloadOffset: 48, SrcPort: 5000, DstPort: 53,
	}},
	{"padded", cat(ip4(17, nil, udp(4, data)), make([]byte, 6)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 20, Length: 40, PayloadOffset: 28, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"padded inside ip", ip4(17, nil, cat(udp(4, data), make([]byte, 6))), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 20, Length: 46, PayloadOffset: 28, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"options", ip4(17, []byte{1, 148, 4, 0, 0, 0, 9, 9, 131, 7, 8, 1}, udp(4, data)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 32, Length: 52, PayloadOffset: 40, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"source route at its end", ip4(17, []byte{131, 7, 8, 192, 0, 2, 1, 0}, udp(4, data)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 28, Length: 48, PayloadOffset: 36, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"syn with ecn", ip4(6, nil, tcp(4, SYN|ECE|CWR, []byte{2, 4, 5, 180}, nil)), Packet{
		Version: 4, Proto: 6, ProtoOffset: 9, HeaderLen: 20, Length: 44, PayloadOffset: 44, SrcPort: 5000, DstPort: 443, TCPFlags: SYN | ECE | CWR,
	}},
	{"tcp6 behind five extensions", ip6(0, ext(60, 5, 2, 0, 0), ext(43, 1, 4, 0, 0, 0, 0), ext(60, 0, 0), ext(44), frag6(6, 0, 9), tcp(6, ACK, nil, data)), Packet{
		Version: 6, Proto: 6, ProtoOffset: 72, HeaderLen: 80, Length: 112, PayloadOffset: 100, PayloadLen: 12, SrcPort: 5000, DstPort: 443, TCPFlags: ACK, ID: 9,
	}},
	{"udp6 behind eight extensions", ip6(60, slices.Repeat(ext(60), 7), ext(17), udp(6, data)), Packet{
		Version: 6, Proto: 17, ProtoOffset: 96, HeaderLen: 104, Length: 124, PayloadOffset: 112, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"udp6 behind 512 bytes of extensions", ip6(60, ext(17, make([]byte, 510)...), udp(6, data)), Packet{
		Version: 6, Proto: 17, ProtoOffset: 40, HeaderLen: 552, Length: 572, PayloadOffset: 560, PayloadLen: 12, SrcPort: 5000, DstPort: 53,
	}},
	{"udp6 behind AH", ip6(51, ah, make([]byte, 4), udp(6, data)), Packet{
		Version: 6, Proto: 51, ProtoOffset: 6, HeaderLen: 40, Length: 72, PayloadOffset: 40, PayloadLen: 32,
	}},
	{"first fragment", ip4frag(17, 0x2000, nil, make([]byte, 64)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 20, Length: 84, PayloadOffset: 20, PayloadLen: 64, Fragment: true, MoreFragments: true,
	}},
	{"last fragment that looks like udp", ip4frag(17, 8, nil, udp(4, data)), Packet{
		Version: 4, Proto: 17, ProtoOffset: 9, HeaderLen: 20, Length: 40, PayloadOffset: 20, PayloadLen: 20, Fragment: true, FragOffset: 64,
	}},
	{"v6 fragment", ip6(60, ext(44), frag6(60, 64|1, 77), ext(17), make([]byte, 16)), Packet{
		Version: 6, Proto: 60, ProtoOffset: 48, HeaderLen: 56, Length: 80, PayloadOffset: 56, PayloadLen: 24, Fragment: true, MoreFragments: true, FragOffset: 64, ID: 77,
	}},
	{"echo", ip4(1, nil, icmp(4, 8, 0, noACK, data)), Packet{
		Version: 4, Proto: 1, ProtoOffset: 9, HeaderLen: 20, Length: 40, PayloadOffset: 28, PayloadLen: 12, ICMPType: 8, EchoID: 7, EchoSeq: 9,
	}},
	{"echo6 reply", ip6(58, icmp(6, 129, 0, noACK, nil)), Packet{
		Version: 6, Proto: 58, ProtoOffset: 6, HeaderLen: 40, Length: 48, PayloadOffset: 48, ICMPType: 129, EchoID: 7, EchoSeq: 9,
	}},
	{"sctp that looks like dns", ip4(132, nil, udp(4, data)), Packet{
		Version: 4, Proto: 132, ProtoOffset: 9, HeaderLen: 20, Length: 40, PayloadOffset: 20, PayloadLen: 20,
	}},
	{"esp behind destination options", ip6(60, ext(50), udp(6, data)), Packet{
		Version: 6, Proto: 50, ProtoOffset: 40, HeaderLen: 48, Length: 68, PayloadOffset: 48, PayloadLen: 20,
	}},
	{"unknown header that looks like an extension", ip6(135, ext(17), udp(6, data)), Packet{
		Version: 6, Proto: 135, ProtoOffset: 6, HeaderLen: 40, Length: 68, PayloadOffset: 40, PayloadLen: 28,
	}},
	{"icmp of the other family", ip6(1, icmp(4, 8, 0, noACK, nil)), Packet{
		Version: 6, Proto: 1, ProtoOffset: 6, HeaderLen: 40, Length: 48, PayloadOffset: 40, PayloadLen: 8,
	}},
	{"nothing follows", ip6(59), Packet{
		Version: 6, Proto: 59, ProtoOffset: 6, HeaderLen: 40, Length: 40, PayloadOffset: 40,
	}},
}

func TestWellFormedPacketsAreUnderstood(t *testing.T) {
	for _, c := range accepted {
		want := c.want
		want.TTL, want.TClass = 64, 0x28
		if want.Src, want.Dst, want.DontFragment = client6, server6, true; want.Version == 4 {
			want.Src, want.Dst, want.ID = client4, server4, 0x1234
			want.DontFragment = !want.Fragment
		}
		var p Packet
		if cause, ok := Parse(c.packet, len(c.packet), false, &p); !ok {
			t.Errorf("%s: dropped as %v", c.name, cause)
		} else if p != want {
			t.Errorf("%s:\n got %+v\nwant %+v", c.name, p, want)
		}
		if ok := VerifyTransport(c.packet, nil, &p); ok == p.Fragment {
			t.Errorf("%s: transport checksum right: %t", c.name, ok)
		}
	}
}

func TestASuperPacketIsParsedFromItsHead(t *testing.T) {
	payload := make([]byte, 3000)
	for _, size := range []int{len(payload), 1000} { // the UDP length of the whole, or of one datagram
		b := ip6(17, udp(6, payload))
		copy(b[44:], be16(8+size))
		var p Packet
		if cause, ok := Parse(b[:2048], len(b), true, &p); !ok || p.PayloadOffset != 48 || p.PayloadLen != 3000 {
			t.Errorf("udp length of %d: %v, %+v", size, cause, p)
		}
	}
	b := ip4(6, nil, tcp(4, ACK, nil, payload))
	var p Packet
	if cause, ok := Parse(b[:2048], len(b), true, &p); !ok || p.PayloadLen != 3000 || !VerifyTransport(b[:2048], b[2048:], &p) {
		t.Errorf("tcp: %v, %+v", cause, p)
	}
	if _, ok := Parse(b[:2048], 2048, true, &p); ok {
		t.Error("a packet whose rest was not read is accepted")
	}
}

func TestHeadersThatAreNotInTheHeadAreMalformed(t *testing.T) {
	for _, c := range accepted {
		var whole, p Packet
		Parse(c.packet, len(c.packet), false, &whole)
		for n := range len(c.packet) {
			_, ok := Parse(c.packet[:n], len(c.packet), false, &p)
			if headers := whole.PayloadOffset; ok != (n >= headers) {
				t.Errorf("%s: %d bytes of %d bytes of headers: accepted %t", c.name, n, headers, ok)
			}
		}
	}
}

func TestAFragmentIsNoEcho(t *testing.T) {
	b := ip4frag(1, 0x2000, nil, icmp(4, 0, 0, noACK, nil))
	var p Packet
	if _, ok := Parse(b, len(b), false, &p); !ok || p.IsEchoReply() || p.IsEchoRequest() {
		t.Errorf("an echo: %+v", p)
	}
}

func TestAddressesDecideWhatMayBecomeAFlow(t *testing.T) {
	const fine = flow.NumDrops
	for _, c := range []struct {
		src, dst string
		want     flow.Drop
	}{
		{"10.0.0.2", "203.0.113.5", fine},
		{"fd00::2", "2001:db8::5", fine},
		{"10.0.0.2", "240.0.0.1", fine},
		{"10.0.0.2", "224.0.0.251", flow.DropMulticast},
		{"10.0.0.2", "239.255.255.250", flow.DropMulticast},
		{"10.0.0.2", "255.255.255.255", flow.DropMulticast},
		{"0.0.0.0", "255.255.255.255", flow.DropMulticast},
		{"10.0.0.2", "169.254.169.254", flow.DropMulticast},
		{"169.254.1.1", "203.0.113.5", flow.DropMulticast},
		{"10.0.0.2", "0.0.0.0", flow.DropMulticast},
		{"10.0.0.2", "0.1.2.3", flow.DropMulticast},
		{"fd00::2", "ff02::fb", flow.DropMulticast},
		{"fe80::1", "ff02::2", flow.DropMulticast},
		{"fe80::1", "2001:db8::5", flow.DropMulticast},
		{"fd00::2", "fe80::1", flow.DropMulticast},
		{"fd00::2", "::", flow.DropMulticast},
		{"0.0.0.0", "203.0.113.5", flow.DropSource},
		{"::", "2001:db8::5", flow.DropSource},
		{"224.0.0.1", "203.0.113.5", flow.DropSource},
		{"ff02::1", "2001:db8::5", flow.DropSource},
		{"255.255.255.255", "203.0.113.5", flow.DropSource},
		{"127.0.0.1", "203.0.113.5", flow.DropSource},
		{"::1", "2001:db8::5", flow.DropSource},
		{"203.0.113.5", "203.0.113.5", flow.DropSource},
		{"::ffff:10.0.0.2", "2001:db8::5", flow.DropSource},
		{"10.0.0.2", "127.0.0.53", flow.DropSelf},
		{"fd00::2", "::1", flow.DropSelf},
		{"fd00::2", "::ffff:127.0.0.1", flow.DropSelf},
		{"fd00::2", "::ffff:10.0.0.1", flow.DropMalformed},
	} {
		cause, ok := Deliverable(netip.MustParseAddr(c.src), netip.MustParseAddr(c.dst))
		if ok != (c.want == fine) || !ok && cause != c.want {
			t.Errorf("%s to %s: cause %v, deliverable %t", c.src, c.dst, cause, ok)
		}
	}
}

func TestAPacketTellsItsEnds(t *testing.T) {
	var p Packet
	for _, c := range []struct {
		packet   []byte
		network  flow.Network
		src, dst string
	}{
		{ip4(17, nil, udp(4, data)), flow.UDP, "10.0.0.2:5000", "203.0.113.5:53"},
		{ip6(6, tcp(6, SYN, nil, nil)), flow.TCP, "[fd00::2]:5000", "[2001:db8::5]:443"},
		{ip6(58, icmp(6, 128, 0, noACK, nil)), flow.ICMP, "[fd00::2]:7", "[2001:db8::5]:0"},
		{ip4(58, nil, icmp(6, 128, 0, noACK, nil)), 0, "10.0.0.2:0", "203.0.113.5:0"},
	} {
		Parse(c.packet, len(c.packet), false, &p)
		if p.Network() != c.network || p.Source().String() != c.src || p.Destination().String() != c.dst {
			t.Errorf("%v %v %v: want %v %s %s", p.Network(), p.Source(), p.Destination(), c.network, c.src, c.dst)
		}
	}
}
