package outbound

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/flow"
)

func lockThread() { runtime.LockOSThread() }

// ear records what a link's Receiver hears.
type ear struct {
	mu     sync.Mutex
	got    []flow.Train // datagrams, copied and split
	trains int
	errs   []flow.ICMPError
	inside atomic.Int32
	on     func()
}

func newEar() *ear { return &ear{} }

func (e *ear) Receive(ts []flow.Train) (moved int) {
	if e.inside.Add(1) > 1 {
		panic("calls overlap")
	}
	defer e.inside.Add(-1)
	e.mu.Lock()
	for _, tr := range ts {
		e.trains++
		size := tr.Segment
		if size == 0 {
			size = max(len(tr.Payload), 1)
		}
		rest := bytes.Clone(tr.Payload)
		for first := true; first || len(rest) > 0; first = false {
			n := min(size, len(rest))
			one := tr
			one.Payload, one.Segment = rest[:n], 0
			e.got = append(e.got, one)
			rest = rest[n:]
		}
	}
	on := e.on
	e.mu.Unlock()
	if on != nil {
		on()
	}
	return 0
}

// hook has f called within each Receive.
func (e *ear) hook(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.on = f
}

func (e *ear) Unreachable(ie flow.ICMPError) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ie.Payload = slices.Clone(ie.Payload)
	e.errs = append(e.errs, ie)
}

func (e *ear) Closed(err error) { panic(fmt.Sprintf("a socket does not end by itself: %v", err)) }

func (e *ear) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.got)
}

func (e *ear) texts() (list []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, tr := range e.got {
		list = append(list, string(tr.Payload))
	}
	return list
}

// echo is a UDP server that sends back what it gets.
func echo(t testing.TB, addr string) (*net.UDPConn, netip.AddrPort) {
	t.Helper()
	c, dest := peer(t, addr)
	go func() {
		b := make([]byte, 65536)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return c, dest
}

func peer(t testing.TB, addr string) (*net.UDPConn, netip.AddrPort) {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadBuffer(1 << 20)
	t.Cleanup(func() { c.Close() })
	c.SetReadDeadline(time.Now().Add(patience))
	return c, c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func open(t testing.TB, d *Direct, dest netip.AddrPort) (flow.Link, *ear) {
	t.Helper()
	r := newEar()
	l, err := d.OpenLink(t.Context(), toward(flow.UDP, dest), r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, r
}

func to(dest netip.AddrPort, text string) flow.Train {
	return flow.Train{Peer: flow.Destination{Addr: dest}, Payload: []byte(text)}
}

func send(t testing.TB, l flow.Link, ts ...flow.Train) {
	t.Helper()
	all := 0
	for i := range ts {
		all += len(ts[i].Payload)
	}
	if n, moved, err := l.Send(ts); n != len(ts) || moved != all || err != nil {
		t.Fatalf("sent %d of %d trains, %d of %d bytes, %v", n, len(ts), moved, all, err)
	}
}

// lose sends what the link takes and drops.
func lose(t testing.TB, l flow.Link, ts ...flow.Train) {
	t.Helper()
	if n, moved, err := l.Send(ts); n != len(ts) || moved != 0 || err != nil {
		t.Fatalf("sent %d of %d trains, %d bytes, %v: want all taken and none sent", n, len(ts), moved, err)
	}
}

func TestDatagramsEchoOverBothFamiliesFromOnePort(t *testing.T) {
	d, _ := direct(t, nil)
	_, four := echo(t, "127.0.0.1:0")
	_, six := echo(t, "[::1]:0")
	for _, first := range []netip.AddrPort{four, six} {
		l, r := open(t, d, first)
		send(t, l, to(four, "4"), to(six, "6"), to(first, "again"))
		eventually(t, "three echoes", func() bool { return r.count() == 3 })
		for _, tr := range r.got {
			if want := map[string]netip.AddrPort{"4": four, "6": six, "again": first}[string(tr.Payload)]; tr.Peer.Addr != want {
				t.Errorf("%q came from %v, want %v", tr.Payload, tr.Peer.Addr, want)
			}
		}
		if local := l.LocalAddr(); local.Addr() != first.Addr() || local.Port() == 0 {
			t.Errorf("local address %v", local)
		}
	}
}

func TestTheLocalAddressIsTheOneThatPeersSee(t *testing.T) {
	d, _ := direct(t, nil)
	for _, addr := range loopbacks {
		c, dest := peer(t, addr)
		l, _ := open(t, d, dest)
		send(t, l, to(dest, "x"))
		_, from, err := c.ReadFromUDPAddrPort(make([]byte, 10))
		if err != nil || from != l.LocalAddr() {
			t.Errorf("came from %v (%v), local address %v", from, err, l.LocalAddr())
		}
	}
}

func TestEmptyDatagramsPassBothWaysInOrder(t *testing.T) {
	d, _ := direct(t, nil)
	for _, addr := range loopbacks {
		_, dest := echo(t, addr)
		l, r := open(t, d, dest)
		send(t, l, to(dest, "a"), to(dest, ""), to(dest, "b"), to(dest, ""))
		eventually(t, "four echoes", func() bool { return r.count() == 4 })
		if got := r.texts(); !slices.Equal(got, []string{"a", "", "b", ""}) {
			t.Errorf("%s: got %q", addr, got)
		}
	}
}

// refuseSegmentation has a link's open sockets send datagrams one by one.
func refuseSegmentation(l flow.Link) {
	for i := range l.(*link).send.sockets {
		l.(*link).send.sockets[i].gso = noSegmentation
	}
}

func TestATrainArrivesAsItsDatagrams(t *testing.T) {
	d, _ := direct(t, nil)
	for _, noGSO := range []bool{false, true} {
		for _, addr := range loopbacks {
			c, dest := peer(t, addr)
			l, _ := open(t, d, dest)
			if noGSO {
				refuseSegmentation(l)
			}
			payload := bytes.Repeat([]byte("0123456789"), 10*70)
			send(t, l, flow.Train{Peer: flow.Destination{Addr: dest}, Payload: append(payload, "end"...), Segment: 100})
			b := make([]byte, 65536)
			for i := range 71 {
				n, _, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					t.Fatalf("datagram %d: %v", i, err)
				}
				if want := map[bool]int{true: 3, false: 100}[i == 70]; n != want {
					t.Fatalf("datagram %d has %d bytes, want %d", i, n, want)
				}
			}
		}
	}
}

func TestATrainTooLargeForSegmentationIsSentOneByOne(t *testing.T) {
	ns := namespace(t)
	d, drops := direct(t, nil)
	ns.do(func() { // segments above the MTU: EINVAL or EMSGSIZE, but fragments can go
		r := newEar()
		l, err := d.OpenLink(t.Context(), toward(flow.UDP, netip.MustParseAddrPort("192.0.2.99:9")), r)
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		train := flow.Train{Peer: flow.Destination{Addr: netip.MustParseAddrPort("192.0.2.99:9")}, Payload: make([]byte, 6100), Segment: 2000}
		if n, moved, err := l.Send([]flow.Train{train}); n != 1 || moved != 6100 || err != nil {
			t.Errorf("sent %d, %d bytes, %v", n, moved, err)
		}
		train.DontFragment = true
		if n, moved, err := l.Send([]flow.Train{train}); n != 1 || moved != 100 || err != nil || drops[flow.DropSendFailed].Load() != 3 {
			t.Errorf("of three datagrams that are too big and one that is not: sent %d, %d bytes, %v, %d counted as lost", n, moved, err, drops[flow.DropSendFailed].Load())
		}
		if gso := l.(*link).send.sockets[1].gso; gso != 1999 {
			t.Errorf("segmentation is used up to %d bytes, want 1999", gso)
		}
	})
}

func TestCoalescedDatagramsArriveAsTrains(t *testing.T) {
	d, _ := direct(t, nil)
	c, dest := peer(t, "127.0.0.1:0")
	l, r := open(t, d, dest)
	send(t, l, to(dest, "hello"))
	_, from, err := c.ReadFromUDPAddrPort(make([]byte, 10))
	if err != nil {
		t.Fatal(err)
	}
	// The far side sends a train; loopback hands it over whole to a socket with UDP_GRO.
	other, far := open(t, d, from)
	_ = far
	send(t, other, flow.Train{Peer: flow.Destination{Addr: from}, Payload: bytes.Repeat([]byte("x"), 2500), Segment: 1000})
	eventually(t, "three datagrams", func() bool { return r.count() == 3 })
	if r.trains != 1 {
		t.Errorf("came in %d trains, want 1", r.trains)
	}
	if n := len(r.got[2].Payload); n != 500 {
		t.Errorf("the last one has %d bytes, want 500", n)
	}
}

func TestTrafficClassPassesBothWays(t *testing.T) {
	d, _ := direct(t, nil)
	for _, addr := range loopbacks {
		_, dest := peer(t, addr)
		a, ra := open(t, d, dest)
		b, rb := open(t, d, dest)
		_ = b
		at := to(b.LocalAddr(), "x")
		at.TClass = 0xb8 | 1 // EF, ECT(1)
		send(t, a, at)
		eventually(t, "the datagram", func() bool { return rb.count() == 1 })
		if got := rb.got[0].TClass; got != 0xb9 {
			t.Errorf("%s: traffic class %#x, want 0xb9", addr, got)
		}
		send(t, b, to(a.LocalAddr(), "y"))
		eventually(t, "the answer", func() bool { return ra.count() == 1 })
		if got := ra.got[0].TClass; got != 0 {
			t.Errorf("%s: traffic class %#x, want 0", addr, got)
		}
	}
}

func TestAPortUnreachableIsReportedAndTheLinkLivesOn(t *testing.T) {
	d, drops := direct(t, nil)
	for _, addr := range loopbacks {
		gone, dead := peer(t, addr)
		gone.Close()
		_, alive := echo(t, addr)
		l, r := open(t, d, dead)
		send(t, l, to(dead, "x"))
		eventually(t, "the ICMP error", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.errs) == 1 })
		want := flow.ICMPError{Type: 3, Code: 3, Offender: dead.Addr(), Peer: dead, Payload: []byte("x")}
		if dead.Addr().Is6() {
			want.Type, want.Code = 1, 4
		}
		if !reflect.DeepEqual(r.errs[0], want) {
			t.Errorf("reported %+v, want %+v", r.errs[0], want)
		}
		for i := range 5 { // each one after an error that may be pending
			send(t, l, to(dead, "x"), to(alive, "y"))
			eventually(t, "an echo", func() bool { return r.count() == i+1 })
		}
		if n := drops[flow.DropSendFailed].Load(); n != 0 {
			t.Errorf("%d sends failed", n)
		}
	}
}

func TestADatagramTooBigForThePathIsReportedWithTheMTU(t *testing.T) {
	ns := namespace(t)
	d, drops := direct(t, nil)
	ns.do(func() {
		for _, dest := range []netip.AddrPort{netip.MustParseAddrPort("192.0.2.99:9"), netip.MustParseAddrPort("[2001:db8::99]:9")} {
			r := newEar()
			l, err := d.OpenLink(t.Context(), toward(flow.UDP, dest), r)
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Close()
			big := to(dest, strings.Repeat("x", 1600))
			big.DontFragment = true
			before := drops[flow.DropSendFailed].Load()
			if n, moved, err := l.Send([]flow.Train{big}); n != 1 || moved != 0 || err != nil {
				t.Errorf("sent %d, %d bytes, %v", n, moved, err)
			}
			if n := drops[flow.DropSendFailed].Load() - before; n != 1 {
				t.Errorf("%d counted, want 1", n)
			}
			deadline := time.Now().Add(patience)
			for r.mu.Lock(); len(r.errs) == 0 && time.Now().Before(deadline); r.mu.Lock() {
				r.mu.Unlock()
				runtime.Gosched()
			}
			if len(r.errs) == 0 || r.errs[0].MTU != 1500 || r.errs[0].Peer != dest {
				t.Errorf("%v: reported %+v", dest, r.errs)
			}
			r.mu.Unlock()
			big.DontFragment = false
			before = drops[flow.DropSendFailed].Load()
			if n, moved, err := l.Send([]flow.Train{big}); n != 1 || moved != 1600 || err != nil || drops[flow.DropSendFailed].Load() != before {
				t.Errorf("with fragments: sent %d, %d bytes, %v", n, moved, err)
			}
		}
	})
}

func TestFilteringLetsInWhatItIsConfiguredTo(t *testing.T) {
	for filtering, want := range map[Filtering][]string{
		EndpointIndependent:     {"other address", "other port", "peer"},
		AddressDependent:        {"other port", "peer"},
		AddressAndPortDependent: {"peer"},
	} {
		d, drops := direct(t, func(c *DirectConfig) { c.Filtering = filtering })
		c, dest := peer(t, "127.0.0.1:0")
		port, _ := peer(t, "127.0.0.1:0")
		address, _ := peer(t, "127.0.0.2:0")
		l, r := open(t, d, dest)
		send(t, l, to(dest, "x"))
		_, from, err := c.ReadFromUDPAddrPort(make([]byte, 10))
		if err != nil {
			t.Fatal(err)
		}
		address.WriteToUDPAddrPort([]byte("other address"), from)
		port.WriteToUDPAddrPort([]byte("other port"), from)
		c.WriteToUDPAddrPort([]byte("peer"), from)
		eventually(t, "the peer's datagram", func() bool { return slices.Contains(r.texts(), "peer") })
		if got := r.texts(); !slices.Equal(got, want) {
			t.Errorf("filtering %d: got %q, want %q", filtering, got, want)
		}
		if n := drops[flow.DropFilter].Load(); n != uint64(3-len(want)) {
			t.Errorf("filtering %d: %d counted", filtering, n)
		}
	}
}

func TestThePeersOfAFilterAreBoundedAndTheRecentOnesKept(t *testing.T) {
	p := newPeerSet(AddressAndPortDependent)
	active := netip.MustParseAddrPort("192.0.2.1:1")
	for i := range 10 * maxPeers {
		p.add(active)
		p.add(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 7))
		if n := len(p.newer) + len(p.old); n > maxPeers {
			t.Fatalf("%d peers", n)
		}
		if !p.has(active) {
			t.Fatal("the active peer was forgotten")
		}
	}
	if p.has(netip.MustParseAddrPort("10.0.0.0:7")) {
		t.Error("the oldest peer is still let in")
	}
}

func TestEveryPeerOfALinkIsChecked(t *testing.T) {
	d, drops := direct(t, nil)
	c, dest := peer(t, "127.0.0.1:0")
	ns := flow.Flow{Network: flow.UDP, Dest: flow.Destination{Addr: netip.MustParseAddrPort("192.0.2.1:9")}}
	l := &link{d: d, r: newEar(), allowHost: ns.AllowHost}
	defer l.Close()
	lose(t, l, to(dest, "to ourselves"), to(netip.AddrPort{}, "to nobody"))
	if n := drops[flow.DropSelf].Load(); n != 2 {
		t.Errorf("%d counted, want 2", n)
	}
	l.allowHost = true
	send(t, l, to(dest, "allowed"))
	b := make([]byte, 20)
	n, _, err := c.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != "allowed" {
		t.Errorf("got %q, %v", b[:n], err)
	}
}

func TestRepliesOfANameComeFromTheAddressThatTheClientUsed(t *testing.T) {
	_, a := echo(t, "127.0.0.1:0")
	d, drops := direct(t, func(c *DirectConfig) {
		c.Resolver = table{"a.example": {a.Addr()}, "b.example": {netip.MustParseAddr("127.0.0.1")}}
	})
	f := flow.Flow{Network: flow.UDP, Dest: name("a.example", a.Port()), AllowHost: true}
	r := newEar()
	l, err := d.OpenLink(t.Context(), f, r)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	send(t, l, flow.Train{Peer: f.Dest, Payload: []byte("first")})
	eventually(t, "an echo", func() bool { return r.count() == 1 })
	if r.got[0].Peer != f.Dest {
		t.Errorf("came from %v, want %v", r.got[0].Peer, f.Dest)
	}
	later := name("b.example", a.Port()) // looked up behind the sender's back
	send(t, l, flow.Train{Peer: later, Payload: []byte("later")}, flow.Train{Peer: name("none.example", 1), Payload: []byte("lost")})
	eventually(t, "an echo", func() bool { return r.count() == 2 && drops[flow.DropSendFailed].Load() == 1 })
	if r.got[1].Peer != later {
		t.Errorf("came from %v, want %v", r.got[1].Peer, later)
	}
}
