package netstack

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// drawFragments draws a datagram and cuts it at random places.
func drawFragments(t *rapid.T) (packet []byte, cuts []int) {
	client, dst := client4, dst4
	if rapid.Bool().Draw(t, "v6") {
		client, dst = client6, dst6
	}
	n := rapid.IntRange(1, 9000).Draw(t, "bytes")
	packet = datagram(client, dst, count(n), func(h *wire.Header) { h.TClass = rapid.Uint8().Draw(t, "class") &^ 3 })
	total := 8 + n
	cuts = rapid.SliceOfNDistinct(rapid.IntRange(1, (total-1)/8), 1, min(20, (total-1)/8), rapid.ID).Draw(t, "cuts")
	slices.Sort(cuts)
	for i := range cuts {
		cuts[i] *= 8
	}
	return packet, append(cuts, total)
}

func TestFragmentsInAnyOrderAndRepeatedBecomeTheDatagram(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := newBare(t, defaultFragmentLimits())
		packet, cuts := drawFragments(rt)
		var fs [][]byte
		start := 0
		for _, end := range cuts {
			fs = append(fs, fragmentOf(packet, 77, start, end))
			start = end
		}
		order := rapid.Permutation(fs).Draw(rt, "order")
		var whole []byte
		repeated := 0
		for i, f := range order {
			if i > 0 && rapid.Bool().Draw(rt, "again") {
				again := order[rapid.IntRange(0, i-1).Draw(rt, "which")]
				if b.put(again) != nil {
					rt.Fatal("whole by a repetition")
				}
				repeated++
			}
			if whole != nil {
				rt.Fatal("whole before the last fragment")
			}
			whole = b.put(f)
		}
		if !samePacket(whole, packet) {
			rt.Fatalf("%d fragments became %d bytes of %d", len(fs), len(whole), len(packet))
		}
		b.counted(uint64(repeated))
		if len(b.mu.sets) > 0 || b.mu.bytes != 0 {
			rt.Fatalf("%d sets remain", len(b.mu.sets))
		}
	})
}

func TestAnyOverlapDropsTheWholeDatagram(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := newBare(t, defaultFragmentLimits())
		packet, cuts := drawFragments(rt)
		total := cuts[len(cuts)-1]
		var fs [][]byte
		start := 0
		for _, end := range cuts {
			fs = append(fs, fragmentOf(packet, 77, start, end))
			start = end
		}
		// One more, with other limits than any but overlapping one at least; or with
		// the limits of one and other bytes.
		i := rapid.IntRange(0, len(cuts)-1).Draw(rt, "which")
		from, end := 0, cuts[i]
		if i > 0 {
			from = cuts[i-1]
		}
		var odd []byte
		last := (i + 1) % len(fs)
		if from+8 < end && rapid.Bool().Draw(rt, "inside") {
			odd = fragmentOf(packet, 77, from+8, end)
		} else if end < total && len(fs) > 2 && rapid.Bool().Draw(rt, "beyond") {
			odd = fragmentOf(packet, 77, from, min(total, end+8))
			last = (i + 2) % len(fs)
		} else {
			odd = fragmentOf(packet, 77, from, end)
			odd[len(odd)-1] ^= 1
		}
		// One that the odd one does not stand for comes last: before, nothing is whole.
		fs[last], fs[len(fs)-1] = fs[len(fs)-1], fs[last]
		order := rapid.Permutation(append([][]byte{odd}, fs[:len(fs)-1]...)).Draw(rt, "order")
		for _, f := range append(order, fs[len(fs)-1]) {
			if b.put(f) != nil {
				rt.Fatal("it was put together")
			}
		}
		b.counted(uint64(len(fs) + 1))
		if len(b.mu.sets) != 1 {
			rt.Fatalf("%d sets", len(b.mu.sets))
		}
		b.expire(b.now.Add(time.Minute))
		b.counted(uint64(len(fs) + 1))
		if len(b.mu.sets) != 0 || b.mu.bytes != 0 {
			rt.Fatal("what was spoilt remains for ever")
		}
	})
}

func TestContradictionsAboutTheEndDropTheDatagram(t *testing.T) {
	packet := datagram(client4, dst4, count(3992), nil) // 4,000 bytes behind the IP header
	cut := func(from, end int, more bool) []byte {
		f := fragmentOf(packet, 1, from, end)
		f[6] = f[6]&^0x20 | map[bool]byte{true: 0x20}[more]
		setID(f, 1)
		return f
	}
	for name, fs := range map[string][][]byte{
		"two ends":                {cut(1000, 2000, false), cut(3000, 4000, false)},
		"beyond the end":          {cut(1000, 2000, false), cut(3000, 4000, true)},
		"the end before":          {cut(3000, 4000, true), cut(1000, 2000, false)},
		"more behind the end":     {cut(1000, 2000, false), cut(0, 2000, true)},
		"last, then not last":     {cut(1000, 2000, false), cut(1000, 2000, true)},
		"not last, and then last": {cut(1000, 2000, true), cut(1000, 2000, false)},
		"right behind the end":    {cut(1000, 1008, false), cut(1008, 2000, true)},
	} {
		b := newBare(t, defaultFragmentLimits())
		for _, f := range fs {
			if b.put(f) != nil {
				t.Errorf("%s: it was put together", name)
			}
		}
		if got := b.drops[flow.DropFragment].Load(); got != uint64(len(fs)) {
			t.Errorf("%s: %d fragments were counted", name, got)
		}
	}
}

// FuzzReassembly gives a script of fragments: 8 bytes each say which datagram
// they are of, their place and length, and when they come.
func FuzzReassembly(f *testing.F) {
	f.Fuzz(func(t *testing.T, script []byte) {
		b := newBare(t, fragmentLimits{
			bytes: 32 << 10, sourceBytes: 16 << 10, sets: 12, sourceSets: 6, pieces: 8,
			life4: 30 * time.Second, life6: time.Minute,
		})
		var put, given int
		for script = script[:min(len(script), 8*200)]; len(script) >= 8; script = script[8:] {
			h := wire.Header{Src: clientIP4, Dst: serverIP4, TTL: 64, TClass: script[7] & 3}
			if script[0]&1 != 0 {
				h.Src, h.Dst = clientIP6, serverIP6
			}
			if script[0]&2 != 0 {
				h.Src = h.Src.Next()
			}
			h.ID = uint32(script[0] >> 2 & 7)
			h.FragOffset = int(binary.BigEndian.Uint16(script[1:])&0x1fff) * 8
			h.MoreFragments = script[3]&1 != 0
			n := int(binary.BigEndian.Uint16(script[4:])) % 1500
			if h.MoreFragments {
				n &^= 7
			}
			packet := append(h.AppendIP(nil, script[6], n), bytes.Repeat(script[3:4], n)...)
			b.now = b.now.Add(time.Duration(script[7]>>2) * time.Second)
			var p wire.Packet
			if _, ok := wire.Parse(packet, len(packet), false, &p); !ok || !p.Fragment {
				continue
			}
			put++
			s := b.add(b.now, packet, nil, &p)
			if err := b.check(); err != nil {
				t.Fatal(err)
			}
			if s == nil {
				continue
			}
			given += len(s.pieces)
			whole := make([]byte, s.size())
			s.write(whole, nil)
			b.release(s)
			wire.Parse(whole, len(whole), false, &p)
			if p.Length != len(whole) || p.Src != h.Src || p.Dst != h.Dst {
				t.Fatalf("%d bytes are %+v", len(whole), p)
			}
		}
		b.expire(b.now.Add(time.Hour))
		if err := b.check(); err != nil || len(b.mu.sets) > 0 {
			t.Fatalf("%d sets remain: %v", len(b.mu.sets), err)
		}
		if dropped := int(b.drops[flow.DropFragment].Load()); dropped+given != put {
			t.Fatalf("%d fragments: %d became datagrams, %d were counted", put, given, dropped)
		}
	})
}
