package wire

import (
	"bytes"
	"encoding/hex"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestTheSumOfAKnownHeaderIsRight(t *testing.T) {
	b, _ := hex.DecodeString("45000073000040004011b861c0a80001c0a800c7")
	if s := Sum(b, 0); s != 0xffff {
		t.Errorf("sum %#04x: want 0xffff", s)
	}
	b[10], b[11] = 0, 0
	if s := ^Sum(b, 0); s != 0xb861 {
		t.Errorf("checksum %#04x: want 0xb861", s)
	}
}

func TestSumsEqualTheNaiveSumHoweverTheBytesAreSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 700).Draw(t, "bytes")
		if rapid.Bool().Draw(t, "all ones") {
			b = bytes.Repeat([]byte{0xff}, len(b)) // every addition carries
		}
		offset := rapid.IntRange(0, len(b)).Draw(t, "offset")
		initial := rapid.Uint16().Draw(t, "initial")
		b = b[offset:]
		want := naive(cat(be16(int(initial)), b))
		if got := Sum(b, initial); got != want {
			t.Fatalf("Sum %#04x: want %#04x", got, want)
		}
		if got := add(bigEndian(fold(sum32(b))), initial); got != want {
			t.Fatalf("with 32-bit words %#04x: want %#04x", got, want)
		}
		split := rapid.IntRange(0, len(b)).Draw(t, "split")
		if got := SumTwo(b[:split], b[split:], initial); got != want {
			t.Fatalf("SumTwo at %d %#04x: want %#04x", split, got, want)
		}
	})
}

func TestEveryFlippedBitIsSeenInEverySplit(t *testing.T) {
	for _, c := range accepted {
		var p Packet
		Parse(c.packet, len(c.packet), false, &p)
		if p.Fragment || p.Network() == 0 {
			continue
		}
		for split := p.PayloadOffset; split <= len(c.packet); split++ {
			if !VerifyTransport(c.packet[:split], c.packet[split:], &p) {
				t.Errorf("%s: wrong when split at %d", c.name, split)
			}
		}
		for bit := p.HeaderLen * 8; bit < (p.PayloadOffset+p.PayloadLen)*8; bit++ {
			b := slices.Clone(c.packet)
			b[bit/8] ^= 1 << (bit % 8)
			split := p.PayloadOffset + bit%(len(b)-p.PayloadOffset+1)
			if VerifyTransport(b[:split], b[split:], &p) {
				t.Errorf("%s: bit %d flipped and still right", c.name, bit)
			}
		}
	}
}

func TestAMissingUDPChecksumIsRightOverIPv4Alone(t *testing.T) {
	four, six := ip4(17, nil, udp(4, data)), ip6(17, udp(6, data))
	four, six = set(set(four, 26, 0), 27, 0), set(set(six, 46, 0), 47, 0)
	var p Packet
	if Parse(four, len(four), false, &p); !VerifyTransport(four, nil, &p) {
		t.Error("IPv4: wrong")
	}
	if Parse(six, len(six), false, &p); VerifyTransport(six, nil, &p) {
		t.Error("IPv6: right")
	}
}

func TestAChecksumOverTooFewBytesIsWrong(t *testing.T) {
	b := ip4(17, nil, udp(4, data))
	var p Packet
	Parse(b, len(b), false, &p)
	if VerifyTransport(b[:24], b[24:], &p) {
		t.Error("right though the header is split, which Parse would not have accepted")
	}
	for _, cut := range []int{0, 20, 27, 39} {
		if VerifyTransport(b[:cut], nil, &p) {
			t.Errorf("right with %d of %d bytes", cut, len(b))
		}
	}
}

func BenchmarkSum(b *testing.B) {
	for _, size := range []int{20, 1448, 65535} {
		data := make([]byte, size)
		b.Run(map[int]string{20: "header", 1448: "datagram", 65535: "super-packet"}[size], func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				Sum(data, 0)
			}
		})
	}
}
