package netstack

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"gatewayd/netstack/wire"
)

// The first fragment has to be among those that came; what made room, or was
// spoilt, is not told of.
func TestTheSenderIsToldThatTheTimeIsOver(t *testing.T) {
	forFamilies(t, func(t *testing.T, client, dst netip.AddrPort) {
		b := newTapBed(t, nil)
		fs := fragments(datagram(client, dst, count(3000), nil), 7, 1000)
		for _, f := range [][]byte{fs[0], fs[2]} {
			b.put(f, Offload{})
		}
		for _, f := range fragments(datagram(client, dst, count(3000), nil), 8, 1000)[1:] {
			b.put(f, Offload{})
		}
		spoilt := fragments(datagram(client, dst, count(3000), nil), 9, 1000)
		b.put(spoilt[0], Offload{})
		b.put(fragments(datagram(client, dst, count(3000), nil), 9, 800)[0], Offload{})
		b.stack.fragments.expire(time.Now().Add(10 * time.Second))
		if len(b.dev.out) != 0 {
			t.Fatal("told too early")
		}
		b.stack.fragments.expire(time.Now().Add(time.Minute))
		w := b.written()
		p := b.parsed(w)
		var inner wire.Packet
		if kind := map[bool]uint8{true: 11, false: 3}[client.Addr().Is4()]; p.ICMPType != kind || p.ICMPCode != 1 || p.Dst != client.Addr() || p.Src != b.stack.router(dst.Addr()) {
			t.Errorf("%+v", p)
		}
		if !wire.Quoted(w.b, &p, &inner) || !inner.MoreFragments || inner.ID != 7 || inner.Source() != client || inner.Destination() != dst {
			t.Errorf("quotes %+v", inner)
		}
		quote := w.b[p.PayloadOffset:]
		if n := len(quote); !bytes.Equal(quote[inner.HeaderLen:], fs[0][len(fs[0])-inner.PayloadLen:][:n-inner.HeaderLen]) {
			t.Error("quotes other bytes")
		}
		if len(b.dev.out) != 0 {
			t.Errorf("something else is told: % x", b.written().b)
		}
	})
}
