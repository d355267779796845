package netstack

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/sagernet/gvisor/pkg/buffer"
	"pgregory.net/rapid"
)

// packetSizes are those around the views' ends, and any.
var packetSizes = rapid.OneOf(
	rapid.SampledFrom([]int{
		0, 1, copySmall - 1, copySmall, copySmall + 1, smallView - 1, smallView, smallView + 1,
		smallView + copyTail - 1, smallView + copyTail, MaxPacket - 1, MaxPacket,
	}),
	rapid.IntRange(0, 3000),
	rapid.IntRange(0, MaxPacket),
)

// Whatever was in a batch before, short after long or long after short, taken or
// not: what goes in comes out, and what was taken stays as it was.
func TestWhatGoesIntoABatchComesOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var in, taken []wirePacket
		var kept []buffer.Buffer
		defer func() {
			for i := range kept {
				kept[i].Release()
			}
		}()
		var b *Batch
		b = NewBatch(func(*Batch) {
			if b.Len() != len(in) {
				t.Fatalf("%d packets of %d", b.Len(), len(in))
			}
			for i, w := range in {
				head, tail, o := b.Packet(i)
				if o != w.o || !bytes.Equal(slices.Concat(head, tail), w.b) {
					t.Fatalf("packet %d: %d and %d bytes with %+v, want %d bytes with %+v", i, len(head), len(tail), o, len(w.b), w.o)
				}
				if len(w.b) == 0 || !rapid.Bool().Draw(t, "taken") {
					continue
				}
				n := len(w.b) - rapid.IntRange(0, min(20, len(w.b)-1)).Draw(t, "padding")
				kept = append(kept, b.take(i, n))
				taken = append(taken, wirePacket{w.b[:n], w.o})
			}
		})
		for round := range rapid.IntRange(1, 6).Draw(t, "rounds") {
			in = nil
			for i := range rapid.IntRange(0, 8).Draw(t, "packets") {
				n := packetSizes.Draw(t, "size")
				w := wirePacket{fill(n, byte(round*16+i+1)), Offload{GSOSize: uint16(n), Flags: uint8(i)}}
				in = append(in, w)
				add(b, w)
			}
			b.Deliver()
			if b.Len() != 0 {
				t.Fatalf("%d packets are left after delivery", b.Len())
			}
		}
		for i, w := range taken {
			if got := kept[i].Flatten(); !bytes.Equal(got, w.b) {
				t.Fatalf("what was taken as %d bytes is %d others now", len(w.b), len(got))
			}
		}
	})
}

// fill is n bytes that differ from those of another seed.
func fill(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8) ^ seed
	}
	return b
}

func TestABatchIsFullAtItsLimit(t *testing.T) {
	n := 0
	b := NewBatch(func(b *Batch) { n += b.Len() })
	for i := range BatchSize {
		if b.Full() {
			t.Fatalf("full with %d packets", i)
		}
		add(b, wirePacket{fill(40, 1), Offload{}})
	}
	if !b.Full() {
		t.Fatalf("not full with %d packets", b.Len())
	}
	b.Deliver()
	b.Deliver() // an empty one is not delivered
	if n != BatchSize || b.Full() {
		t.Fatalf("%d packets delivered", n)
	}
}

func TestABufferHasRoomForTheLargestPacketOfEitherFamily(t *testing.T) {
	b := NewBatch(func(*Batch) {})
	for range 3 { // again after a short packet
		bufs := b.Bufs()
		if n := len(bufs[0]) + len(bufs[1]); n < MaxPacket {
			t.Fatalf("room for %d bytes", n)
		}
		b.Add(1, Offload{})
		b.Deliver()
	}
}

// A wave of large packets leaves one large view behind, not one for each packet.
func TestAnEmptyBatchHoldsOneLargeView(t *testing.T) {
	b := NewBatch(func(*Batch) {})
	for range BatchSize {
		add(b, wirePacket{fill(60_000, 1), Offload{}})
	}
	b.Deliver()
	for i := range b.packets {
		if b.packets[i].large != nil {
			t.Fatalf("packet %d keeps its large view", i)
		}
	}
	if b.large == nil {
		t.Fatal("no large view is kept for the next packet")
	}
}

func ExampleBatch() {
	b := NewBatch(func(b *Batch) {
		for i := range b.Len() {
			head, tail, _ := b.Packet(i)
			fmt.Println(len(head), len(tail))
		}
	})
	for _, n := range []int{60, 3000} {
		b.Bufs() // read the device into these
		b.Add(n, Offload{})
	}
	b.Deliver()
	// Output:
	// 60 0
	// 2048 952
}
