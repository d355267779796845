package tun

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/internal/exitcode"
	"gatewayd/netstack"
)

func prefixes(texts ...string) (ps []netip.Prefix) {
	for _, s := range texts {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

// refused checks an error's exit code, and that it is one line with these words.
func refused(t *testing.T, err error, code int, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("it opened")
	}
	if got := exitcode.Of(err); got != code {
		t.Errorf("exit code %d, want %d: %v", got, code, err)
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %v", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q is missing in: %v", w, err)
		}
	}
}

func TestABadConfigIsRefusedBeforeAnythingIsOpened(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		word string
	}{
		"no name":            {Config{}, "empty"},
		"long name":          {Config{Name: "abcdefghijklmnop"}, "at most 15"},
		"slash":              {Config{Name: "a/b"}, "not allowed"},
		"space":              {Config{Name: "a b"}, "not allowed"},
		"pattern":            {Config{Name: "gw%d"}, "not allowed"},
		"colon":              {Config{Name: "gw:0"}, "not allowed"},
		"zero byte":          {Config{Name: "gw\x00"}, "not allowed"},
		"dots":               {Config{Name: ".."}, "reserved"},
		"sysctl's all":       {Config{Name: "all"}, "reserved"},
		"small mtu":          {Config{Name: "gw0", MTU: 575}, "mtu 575"},
		"large mtu":          {Config{Name: "gw0", MTU: 65536}, "mtu 65536"},
		"negative queues":    {Config{Name: "gw0", Queues: -1}, "-1 queues"},
		"many queues":        {Config{Name: "gw0", Queues: 257}, "257 queues"},
		"no prefix":          {Config{Name: "gw0", Addresses: make([]netip.Prefix, 1)}, "invalid"},
		"multicast":          {Config{Name: "gw0", Addresses: prefixes("224.0.0.1/24")}, "unicast"},
		"loopback":           {Config{Name: "gw0", Addresses: prefixes("127.0.0.1/8")}, "unicast"},
		"mapped":             {Config{Name: "gw0", Addresses: prefixes("::ffff:10.0.0.1/120")}, "unicast"},
		"overlap with other": {Config{Name: "gw0", Addresses: prefixes("10.0.0.1/24", "10.0.0.2/30")}, "overlaps"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(c.cfg, filepath.Join(t.TempDir(), "tun"))
			refused(t, err, exitcode.Config, c.word)
		})
	}
}

func TestAHeaderIsDecodedToWhatWasEncoded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u16 := rapid.Uint16()
		want := netstack.Offload{
			Flags: rapid.Uint8().Draw(t, "flags"), GSO: rapid.Uint8().Draw(t, "gso"),
			HdrLen: u16.Draw(t, "header length"), GSOSize: u16.Draw(t, "gso size"),
			CsumStart: u16.Draw(t, "checksum start"), CsumOffset: u16.Draw(t, "checksum offset"),
		}
		var h [headerSize]byte
		encode(&h, want)
		if got := decode(&h); got != want {
			t.Fatalf("%+v became %+v", want, got)
		}
	})
}

func TestTheAutomaticPairIsTheFirstThatOverlapsNothing(t *testing.T) {
	pairs := automaticPairs()
	for _, c := range []struct {
		taken []netip.Prefix
		want  int
	}{
		{nil, 0},
		{prefixes("172.31.255.254/32"), 1},
		{prefixes("fd86:6761:7465::/126", "172.31.255.248/30"), 2},
		{prefixes("172.16.0.0/12"), 4},
		{prefixes("172.16.0.0/12", "10.0.0.0/8"), 6},
		{prefixes("10.0.0.0/8", "192.168.0.0/16"), 0},
	} {
		if got, ok := firstFree(pairs, c.taken); !ok || got != pairs[c.want] {
			t.Errorf("with %v taken: %v, want %v", c.taken, got, pairs[c.want])
		}
	}
	if _, ok := firstFree(pairs, prefixes("fd00::/8")); ok {
		t.Error("a pair is free although all IPv6 is taken")
	}
}

func TestAutomaticPairsAreNetworksOfTheirOwn(t *testing.T) {
	var all []netip.Prefix
	for _, pair := range automaticPairs() {
		for _, p := range pair {
			if p != p.Masked() || !p.Contains(first(p).Addr()) || !first(p).Addr().IsPrivate() {
				t.Errorf("%v is not a private network with a first address", p)
			}
			for _, other := range all {
				if p.Overlaps(other) {
					t.Errorf("%v overlaps %v", p, other)
				}
			}
			all = append(all, p)
		}
	}
}

func TestAReadThatCannotBeAWholePacketIsMalformed(t *testing.T) {
	var drops flow.Drops
	delivered := 0
	r := &reader{queue: &queue{drops: &drops}, batch: netstack.NewBatch(func(b *netstack.Batch) { delivered += b.Len() })}
	room := 0
	for _, b := range r.batch.Bufs() {
		room += len(b)
	}
	for _, n := range []int{0, headerSize - 1, headerSize, headerSize + room + 1} {
		r.take(n)
	}
	if r.batch.Deliver(); delivered != 0 || drops[flow.DropMalformed].Load() != 4 {
		t.Fatalf("%d delivered, %d malformed: want 0 and 4", delivered, drops[flow.DropMalformed].Load())
	}
	r.take(headerSize + 1)
	r.take(headerSize + room)
	if r.batch.Deliver(); delivered != 2 {
		t.Fatalf("%d delivered: want the smallest packet and the largest", delivered)
	}
}

func TestAWriteForgetsItsBuffers(t *testing.T) {
	w := newWriteCall().(*writeCall)
	if !w.prepare([][]byte{make([]byte, 10), nil, make([]byte, 5)}, netstack.Offload{}) {
		t.Fatal("three parts are too many")
	}
	if iov := w.iov; len(iov) != 3 {
		t.Fatalf("%d parts, want the header and two that are not empty", len(iov))
	}
	w.forget()
	for _, v := range w.iov[:cap(w.iov)] {
		if v.Base != nil {
			t.Fatal("it still points to a buffer")
		}
	}
	if w.prepare(make([][]byte, maxParts), netstack.Offload{}) {
		t.Fatal("more parts than the kernel takes")
	}
}

func TestAMissingDriverIsNamedWithItsPackage(t *testing.T) {
	_, err := openQueue(filepath.Join(t.TempDir(), "net", "tun"), "gw0", true, false)
	refused(t, err, exitcode.Missing, "net/tun is missing", "modprobe tun", "kmod-tun")
}
