package wire

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

func drawHeader(t *rapid.T) Header {
	h := Header{
		TClass: rapid.Byte().Draw(t, "class"), TTL: rapid.Byte().Draw(t, "ttl"),
		DontFragment: rapid.Bool().Draw(t, "df"), ID: uint32(rapid.Uint16().Draw(t, "id")),
	}
	n := rapid.SampledFrom([]int{4, 16}).Draw(t, "family")
	h.Src, _ = netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "src"))
	h.Dst, _ = netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "dst"))
	return h
}

func agree(t *rapid.T, h Header, p *Packet) {
	if p.Src != h.Src.Unmap() || p.Dst != h.Dst.Unmap() || p.TTL != h.TTL || p.TClass != h.TClass {
		t.Fatalf("built %+v, parsed %+v", h, p)
	}
	if p.Version == 4 && (p.ID != h.ID || p.DontFragment != h.DontFragment) {
		t.Fatalf("built %+v, parsed %+v", h, p)
	}
}

func TestWhatIsBuiltIsParsedBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHeader(t)
		payload := make([]byte, rapid.OneOf(rapid.IntRange(0, 64), rapid.IntRange(0, 65507)).Draw(t, "size"))
		for i := range payload {
			payload[i] = byte(i * 7)
		}
		src, dst := rapid.Uint16().Draw(t, "src port"), rapid.Uint16Min(1).Draw(t, "dst port")
		echo, reply := rapid.Bool().Draw(t, "echo"), rapid.Bool().Draw(t, "reply")
		room := make([]byte, 3, 3+MaxHeader)
		b := room
		if echo {
			b = h.AppendEcho(b, reply, src, dst, payload)
		} else {
			b = h.AppendUDP(b, src, dst, payload, false)
		}
		if &b[0] != &room[0] {
			t.Fatal("headers do not fit into MaxHeader")
		}
		b = b[3:]
		var p Packet
		if cause, ok := Parse(b, len(b)+len(payload), false, &p); !ok {
			t.Fatalf("dropped as %v", cause)
		}
		agree(t, h, &p)
		if !VerifyTransport(b, payload, &p) || p.PayloadOffset != len(b) || p.PayloadLen != len(payload) {
			t.Fatalf("wrong checksum or payload: %+v", p)
		}
		if !echo && (p.SrcPort != src || p.DstPort != dst) {
			t.Fatalf("ports %d and %d: want %d and %d", p.SrcPort, p.DstPort, src, dst)
		}
		if echo && (p.IsEchoReply() != reply || p.IsEchoRequest() == reply || p.EchoID != src || p.EchoSeq != dst) {
			t.Fatalf("not the echo that was built: %+v", p)
		}
	})
}

func TestAPartialChecksumIsWhatADeviceCompletes(t *testing.T) {
	payload := make([]byte, 3000)
	for _, h := range []Header{{Src: server4, Dst: client4}, {Src: server6, Dst: client6}} {
		b := h.AppendUDP(nil, 53, 5000, payload, true)
		l4 := len(b) - UDPHeaderLen
		sum := ^SumTwo(b[l4:], payload, 0) // as the device does, over the field too
		binary.BigEndian.PutUint16(b[l4+6:], sum)
		var p Packet
		if _, ok := Parse(b, len(b)+len(payload), true, &p); !ok || !VerifyTransport(b, payload, &p) {
			t.Errorf("%v: wrong once completed", h.Src)
		}
	}
}

func TestAComputedChecksumOfZeroIsSentAsOnes(t *testing.T) {
	h := Header{Src: server6, Dst: client6}
	b := h.AppendUDP(nil, 53, 5000, []byte{0, 0}, false)
	payload := be16(int(binary.BigEndian.Uint16(b[46:]))) // makes the sum 0xffff
	b = h.AppendUDP(nil, 53, 5000, payload, false)
	var p Packet
	Parse(b, len(b)+2, false, &p)
	if got := binary.BigEndian.Uint16(b[46:]); got != 0xffff || !VerifyTransport(b, payload, &p) {
		t.Errorf("checksum %#04x: want 0xffff and right", got)
	}
}

func TestAMappedAddressIsBuiltAsIPv4(t *testing.T) {
	h := Header{Src: netip.AddrFrom16(server4.As16()), Dst: client4}
	want := Header{Src: server4, Dst: client4}
	if b := h.AppendUDP(nil, 1, 2, data, false); !bytes.Equal(b, want.AppendUDP(nil, 1, 2, data, false)) {
		t.Errorf("built % x", b)
	}
}

func TestAPacketThatCannotBeIsNotBuilt(t *testing.T) {
	four, six, mixed := Header{Src: server4, Dst: client4}, Header{Src: server6, Dst: client6}, Header{Src: server4, Dst: client6}
	big := make([]byte, 65536)
	for name, b := range map[string][]byte{
		"two families":       mixed.AppendUDP(nil, 1, 2, data, false),
		"no addresses":       new(Header).AppendUDP(nil, 1, 2, data, false),
		"udp too long":       four.AppendUDP(nil, 1, 2, big[:65508], false),
		"udp6 too long":      six.AppendUDP(nil, 1, 2, big[:65528], false),
		"echo too long":      four.AppendEcho(nil, true, 1, 2, big),
		"negative":           six.AppendIP(nil, 17, -1),
		"fragment6 too long": (&Header{Src: server6, Dst: client6, FragOffset: 8}).AppendIP(nil, 17, 65528),
	} {
		if b != nil {
			t.Errorf("%s: built % x", name, b)
		}
	}
	if four.AppendUDP(nil, 1, 2, big[:65507], false) == nil || six.AppendUDP(nil, 1, 2, big[:65527], false) == nil {
		t.Error("the largest datagrams are not built")
	}
}

func TestFragmentsOfADatagramParseAndJoinToTheWhole(t *testing.T) {
	payload := bytes.Repeat(data, 300)
	for _, h := range []Header{{Src: server4, Dst: client4, ID: 0xbeef}, {Src: server6, Dst: client6, ID: 0xdeadbeef}} {
		l4 := append(h.AppendUDPHeader(nil, 53, 5000, payload, false), payload...)
		var joined []byte
		for at := 0; at < len(l4); at += 1224 {
			part := l4[at:min(at+1224, len(l4))]
			h.FragOffset, h.MoreFragments = at, at+len(part) < len(l4)
			b := append(h.AppendIP(nil, ProtoUDP, len(part)), part...)
			var p Packet
			if cause, ok := Parse(b, len(b), false, &p); !ok {
				t.Fatalf("dropped as %v", cause)
			}
			if !p.Fragment || p.FragOffset != at || p.MoreFragments != h.MoreFragments || p.ID != h.ID || p.Proto != ProtoUDP {
				t.Fatalf("%d: %+v", at, p)
			}
			joined = append(joined, b[p.PayloadOffset:][:p.PayloadLen]...)
		}
		h.FragOffset, h.MoreFragments = 0, false
		b := append(h.AppendIP(nil, ProtoUDP, len(joined)), joined...)
		var p Packet
		if cause, ok := Parse(b, len(b), false, &p); !ok || !VerifyTransport(b, nil, &p) || p.DstPort != 5000 {
			t.Errorf("the whole: %v, %+v", cause, p)
		}
	}
}

func TestNothingAllocates(t *testing.T) {
	buf := make([]byte, 0, MaxUnreachable)
	quote := make([]byte, 0, MaxHeader)
	original := ip6(60, ext(17), udp(6, data))
	h, h4 := Header{Src: server6, Dst: client6, ID: 1, MoreFragments: true}, Header{Src: server4, Dst: client4}
	var p, inner Packet
	if n := testing.AllocsPerRun(100, func() {
		Parse(original, len(original), false, &p)
		VerifyTransport(original, nil, &p)
		Deliverable(p.Src, p.Dst)
		h.AppendUDP(buf, 1, 2, data, false)
		h4.AppendEcho(buf, true, 1, 2, data)
		AppendUnreachable(buf, Unreachable{Kind: TooBig, From: router4, MTU: 1280}, h4.AppendUDP(quote, 1, 2, data, false))
		b := AppendUnreachable(buf, Unreachable{Kind: PortUnreachable, From: router6}, original)
		Parse(b, len(b), false, &p)
		if !Quoted(b, &p, &inner) {
			t.Fatal("no quote")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkParse(b *testing.B) {
	for name, packet := range map[string][]byte{
		"udp4": ip4(17, nil, udp(4, data)), "tcp6": ip6(6, tcp(6, ACK, make([]byte, 12), data)), "extensions": ip6(0, ext(60), ext(17), udp(6, data)),
	} {
		b.Run(name, func(b *testing.B) {
			var p Packet
			for b.Loop() {
				Parse(packet, len(packet), false, &p)
			}
		})
	}
}

func BenchmarkAppendUDP(b *testing.B) {
	buf, payload := make([]byte, 0, MaxHeader), make([]byte, 1448)
	h := Header{Src: server6, Dst: client6, TTL: 64}
	for b.Loop() {
		h.AppendUDP(buf, 53, 5000, payload, false)
	}
}
