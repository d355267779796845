package wire

import "testing"

// FuzzParse gives packets whose first split bytes are in one slice.
func FuzzParse(f *testing.F) {
	f.Fuzz(func(t *testing.T, packet []byte, split uint16, gso bool) {
		head := packet[:min(int(split), len(packet))]
		tail := packet[len(head):]
		var p, inner Packet
		cause, ok := Parse(head, len(packet), gso, &p)
		if !ok {
			_ = cause.String()
			return
		}
		if p.Length > len(packet) || p.HeaderLen < 20 || p.ProtoOffset >= p.HeaderLen {
			t.Fatalf("headers outside of %d bytes: %+v", len(packet), p)
		}
		if p.PayloadOffset < p.HeaderLen || p.PayloadOffset > len(head) || p.PayloadLen < 0 || p.PayloadOffset+p.PayloadLen > p.Length {
			t.Fatalf("payload outside of %d bytes: %+v", len(packet), p)
		}
		if head[p.ProtoOffset] != p.Proto {
			t.Fatalf("protocol is not where it is said to be: %+v", p)
		}
		one := VerifyTransport(packet, nil, &p)
		if two := VerifyTransport(head, tail, &p); one != two {
			t.Fatalf("checksum right in one slice %t, in two %t", one, two)
		}
		Deliverable(p.Src, p.Dst)
		Quoted(head, &p, &inner)
	})
}

// FuzzUnreachable gives packets that an error is wanted about.
func FuzzUnreachable(f *testing.F) {
	f.Fuzz(func(t *testing.T, original []byte, kind uint8, mtu int) {
		e := Unreachable{Kind: Kind(kind), From: router4, MTU: mtu}
		limit := 576
		if len(original) > 0 && original[0]>>4 == 6 {
			e.From, limit = router6, 1280
		}
		b := AppendUnreachable(nil, e, original)
		if b == nil {
			return
		}
		var p, inner, first Packet
		if cause, ok := Parse(b, len(b), false, &p); !ok || len(b) > limit || p.Length != len(b) {
			t.Fatalf("dropped as %v: % x", cause, b)
		}
		if !VerifyTransport(b, nil, &p) || !p.IsICMPError() || p.Src != e.From {
			t.Fatalf("no right error: %+v", p)
		}
		first.network(original)
		if Quoted(b, &p, &inner) && (inner.Src != p.Dst || inner.Src != first.Src || inner.Dst != first.Dst || inner.Proto != first.Proto) {
			t.Fatalf("quotes %+v of %+v", inner, first)
		}
		if AppendUnreachable(nil, e, b) != nil {
			t.Fatal("an error is answered by an error")
		}
	})
}
