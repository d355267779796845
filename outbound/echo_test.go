package outbound

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// pingGroups lets the namespace's processes have ping sockets, or not even root.
func (ns *netns) pingGroups(allowed bool) {
	ns.t.Helper()
	groups := "1 0"
	if allowed {
		groups = "0 2147483647"
	}
	ns.do(func() {
		if err := os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte(groups), 0o644); err != nil {
			ns.t.Errorf("ping_group_range: %v", err)
		}
	})
}

func (ns *netns) run(line string) {
	ns.t.Helper()
	args := append([]string{"netns", "exec", ns.name}, strings.Fields(line)...)
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		needs(ns.t, fmt.Sprintf("%s: %v %s", line, err, out))
	}
}

// eachEcho runs a test over both families with a ping socket and with the raw one
// that takes its place, toward an address of the namespace and toward a dead one.
func eachEcho(t *testing.T, test func(t *testing.T, e echoCase)) {
	ns := namespace(t)
	for _, e := range []echoCase{
		{live: netip.MustParseAddr("192.0.2.1"), other: netip.MustParseAddr("192.0.2.2"), dead: netip.MustParseAddr("192.0.2.99"), max: 65507},
		{live: netip.MustParseAddr("2001:db8::1"), other: netip.MustParseAddr("2001:db8::2"), dead: netip.MustParseAddr("2001:db8::99"), max: 65527},
	} {
		for _, e.raw = range []bool{false, true} {
			e.ns = ns
			name := "IPv6"
			if e.live.Is4() {
				name = "IPv4"
			}
			if name += " ping socket"; e.raw {
				name = strings.Replace(name, "ping", "raw", 1)
			}
			t.Run(name, func(t *testing.T) {
				ns.pingGroups(!e.raw)
				ns.do(func() { test(t, e) })
			})
		}
	}
}

type echoCase struct {
	ns                *netns
	live, other, dead netip.Addr
	max               int // bytes of payload
	raw               bool
}

// addOther gives the namespace its second address.
func (e *echoCase) addOther() {
	e.ns.run("ip addr replace 192.0.2.2/24 dev d0")
	e.ns.run("ip addr replace 2001:db8::2/64 dev d0 nodad")
	e.ns.own("2001:db8::2")
}

// stream opens an echo link toward a peer.
func (e *echoCase) stream(t *testing.T, d *Direct, peer netip.Addr) (*echoLink, *ear) {
	t.Helper()
	r := newEar()
	l, err := d.OpenLink(t.Context(), toward(flow.ICMP, netip.AddrPortFrom(peer, 0)), r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	el := l.(*echoLink)
	if el.raw != e.raw {
		t.Fatalf("raw socket %v, want %v", el.raw, e.raw)
	}
	return el, r
}

func request(peer netip.Addr, seq uint16, payload []byte) flow.Train {
	return flow.Train{Peer: flow.Destination{Addr: netip.AddrPortFrom(peer, 0)}, Payload: payload, Seq: seq}
}

func bytesOf(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) ^ byte(i>>8)
	}
	return b
}

func TestEchoRequestsComeBackWithTheirSequenceAndPayload(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, drops := direct(t, nil)
		e.ns.run("ip link set lo mtu 1500") // the larger ones leave and come back as fragments
		l, r := e.stream(t, d, e.live)
		if l.LocalAddr().Addr() != e.live || l.LocalAddr().Port() == 0 {
			t.Errorf("leaves from %v", l.LocalAddr())
		}
		sizes := []int{0, 1, 56, 1400, 1473, 8000, e.max}
		for i, n := range sizes {
			tr := request(e.live, uint16(65530+3*i), bytesOf(n)) // beyond 65,535 it begins anew
			tr.TClass = 0x40
			send(t, l, tr)
			eventually(t, fmt.Sprintf("%d bytes come back", n), func() bool { return r.count() == i+1 })
			got := r.last()
			if got.Seq != tr.Seq || got.Peer != tr.Peer || !bytes.Equal(got.Payload, tr.Payload) || got.TClass != 0x40 {
				t.Errorf("%d bytes, sequence number %d: %d bytes, %d, class %#x of %v", n, tr.Seq, len(got.Payload), got.Seq, got.TClass, got.Peer)
			}
		}
		quietDrops(t, drops)
	})
}

// last is what was received last.
func (e *ear) last() flow.Train {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.got[len(e.got)-1]
}

func quietDrops(t *testing.T, drops *flow.Drops) {
	t.Helper()
	for cause, n := range drops.Map() {
		if n != 0 {
			t.Errorf("%d drops as %s", n, cause)
		}
	}
}

func TestEchoStreamsTowardOnePeerHearEachTheirOwn(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, _ := direct(t, nil)
		const streams = 20
		var links []*echoLink
		var ears []*ear
		ids := map[uint16]bool{}
		for range streams {
			l, r := e.stream(t, d, e.live)
			links, ears = append(links, l), append(ears, r)
			ids[l.LocalAddr().Port()] = true
		}
		if len(ids) != streams {
			t.Fatalf("%d ids of %d streams", len(ids), streams)
		}
		for i, l := range links {
			send(t, l, request(e.live, 1, fmt.Append(nil, i)))
		}
		for i, r := range ears {
			eventually(t, "an answer", func() bool { return r.count() > 0 })
			if got := r.texts(); !slices.Equal(got, []string{fmt.Sprint(i)}) {
				t.Errorf("stream %d heard %q", i, got)
			}
		}
		for _, l := range links {
			l.Close()
		}
		if n := len(d.echoes.used); n != 0 {
			t.Errorf("%d ids are still taken", n)
		}
	})
}

// forge sends an ICMP message as one of the namespace's own addresses.
func forge(t *testing.T, from, to netip.Addr, message []byte) {
	t.Helper()
	domain := unix.AF_INET6
	if from.Is4() {
		domain = unix.AF_INET
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, icmpOf(from.Is4()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))); err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendto(fd, message, 0, sockaddr(netip.AddrPortFrom(to, 0))); err != nil {
		t.Fatal(err)
	}
}

// answer is an echo reply.
func answer(from, to netip.Addr, id, seq uint16, payload string) []byte {
	h := wire.Header{Src: from, Dst: to}
	return append(h.AppendEchoHeader(nil, true, id, seq, []byte(payload)), payload...)
}

func TestNobodyAnswersForAnEchoStreamsPeer(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, _ := direct(t, nil)
		l, r := e.stream(t, d, e.live)
		e.addOther()
		id := l.LocalAddr().Port()
		forge(t, e.other, e.live, answer(e.other, e.live, id, 1, "from somebody else"))
		forge(t, e.live, e.live, answer(e.live, e.live, id+1, 1, "with another id"))
		if e.live.Is4() { // over IPv6 the kernel makes it right
			wrong := answer(e.live, e.live, id, 1, "with a wrong checksum")
			wrong[2] ^= 1
			forge(t, e.live, e.live, wrong)
		}
		forge(t, e.live, e.live, answer(e.live, e.live, id, 2, "the right one"))
		eventually(t, "the right one", func() bool { return r.count() > 0 })
		if got := r.texts(); !slices.Equal(got, []string{"the right one"}) {
			t.Errorf("heard %q", got)
		}
	})
}

// What a filter lets through is what a raw socket's owner has to look at.
func TestARawEchoSocketsFilterKeepsOutWhatIsForOthers(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		if !e.raw {
			return
		}
		d, drops := direct(t, nil)
		l, r := e.stream(t, d, e.live)
		another, heard := e.stream(t, d, e.live)
		send(t, another, request(e.live, 1, []byte("x")))
		eventually(t, "the other stream's answer", func() bool { return heard.count() == 1 })
		forge(t, e.live, e.live, answer(e.live, e.live, l.LocalAddr().Port()^0x8000, 1, "with another id"))
		forge(t, e.live, e.live, answer(e.live, e.live, l.LocalAddr().Port(), 1, "the right one"))
		eventually(t, "the right one", func() bool { return r.count() == 1 })
		quietDrops(t, drops)
	})
}

// settle waits until the poller took what the socket has.
func (l *echoLink) settle(t *testing.T) {
	t.Helper()
	fds := []unix.PollFd{{Fd: l.send.socket.fd, Events: unix.POLLIN}}
	eventually(t, "nothing more to receive", func() bool {
		n, err := unix.Poll(fds, 0)
		return n == 0 && err == nil
	})
	l.recv.Lock() // the call that took the last is over
	defer l.recv.Unlock()
}

func TestADeadEchoPeerIsSilence(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, drops := direct(t, nil)
		l, r := e.stream(t, d, e.dead)
		for seq := range uint16(3) {
			send(t, l, request(e.dead, seq, bytesOf(56)))
		}
		alive, heard := e.stream(t, d, e.live)
		send(t, alive, request(e.live, 1, nil))
		eventually(t, "somebody else's answer", func() bool { return heard.count() == 1 })
		alive.settle(t)
		l.settle(t)
		if r.count() != 0 || len(r.errs) != 0 {
			t.Errorf("heard %d answers and errors %+v", r.count(), r.errs)
		}
		quietDrops(t, drops)
	})
}

func TestAnICMPErrorAboutAnEchoRequestNamesIt(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		e.ns.run("nft add table inet t")
		defer e.ns.run("nft delete table inet t")
		e.ns.run("nft add chain inet t in { type filter hook input priority 0 ; }")
		e.ns.run("nft add rule inet t in icmp type echo-request reject with icmp type admin-prohibited")
		e.ns.run("nft add rule inet t in icmpv6 type echo-request reject with icmpv6 type admin-prohibited")
		d, _ := direct(t, nil)
		l, r := e.stream(t, d, e.live)
		_, bystander := e.stream(t, d, e.live)
		want := flow.ICMPError{Type: 3, Code: 13, Offender: e.live, Peer: netip.AddrPortFrom(e.live, 0)}
		if e.live.Is6() {
			want.Type, want.Code = 1, 1
		}
		const requests = 3
		for i := range requests {
			send(t, l, request(e.live, uint16(700+i), []byte("is anybody there")))
		}
		heard := func(r *ear) int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.errs) }
		eventually(t, "three errors", func() bool { return heard(r) == requests })
		for i, got := range r.errs {
			if want.Seq = uint16(700 + i); got.Type != want.Type || got.Code != want.Code || got.Offender != want.Offender || got.Peer != want.Peer || got.Seq != want.Seq {
				t.Errorf("%+v, want %+v", got, want)
			}
		}
		if heard(bystander) != 0 {
			t.Errorf("the other stream heard %+v", bystander.errs)
		}
	})
}

func TestAnEchoRequestTooBigForThePathIsToldTheMTU(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, drops := direct(t, nil)
		l, r := e.stream(t, d, e.dead)
		tr := request(e.dead, 9, bytesOf(1473))
		tr.DontFragment = true
		want := flow.ICMPError{Type: 3, Code: 4, MTU: 1500, Peer: tr.Peer.Addr, Seq: 9}
		if e.live.Is6() {
			want.Type, want.Code = 2, 0
		}
		lose(t, l, tr)
		eventually(t, "the error", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.errs) > 0 })
		tr.DontFragment = false
		send(t, l, tr)
		l.settle(t)
		r.mu.Lock()
		defer r.mu.Unlock()
		if !reflect.DeepEqual(r.errs, []flow.ICMPError{want}) {
			t.Errorf("%+v, want one %+v", r.errs, want)
		}
		if n := drops[flow.DropSendFailed].Load(); n != 1 {
			t.Errorf("%d drops of two requests, of which the second may be fragmented", n)
		}
	})
}

func TestEchoSocketsHaveTheOutboundsMarkDeviceAndSource(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		e.addOther()
		d, _ := direct(t, func(c *DirectConfig) {
			c.Mark, c.Interface = 0x51, "d0"
			c.Source4, c.Source6 = netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")
		})
		l, _ := e.stream(t, d, e.dead)
		fd := int(l.send.socket.fd)
		mark, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK)
		device, _ := unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		if mark != 0x51 || device != "d0" || l.LocalAddr().Addr() != e.other || localOf(fd).Addr() != e.other {
			t.Errorf("mark %#x, device %q, from %v", mark, device, l.LocalAddr())
		}
	})
}

func TestAnEchoStreamTowardOurselvesOrNowhereIsRefused(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, _ := direct(t, func(c *DirectConfig) { c.Self = func(a netip.Addr) bool { return a == e.live } })
		before := descriptors(t)
		f := toward(flow.ICMP, netip.AddrPortFrom(e.live, 0))
		f.AllowHost = false
		if _, err := d.OpenLink(t.Context(), f, newEar()); !errors.Is(err, errSelf) {
			t.Errorf("toward ourselves: %v", err)
		}
		f.Dest.Addr = netip.MustParseAddrPort("203.0.113.1:0")
		if e.live.Is6() {
			f.Dest.Addr = netip.MustParseAddrPort("[2001:db8:ffff::1]:0")
		}
		if _, err := d.OpenLink(t.Context(), f, newEar()); flow.VerdictOf(err) != flow.VerdictNetUnreachable {
			t.Errorf("without a route: %v", err)
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	})
}

func TestAnAddressThatBecameOursGetsNoMoreEchoRequests(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		gen := uint64(1)
		d, drops := direct(t, func(c *DirectConfig) {
			c.Self = func(a netip.Addr) bool { return gen > 1 && a == e.live }
			c.SelfGen = func() uint64 { return gen }
		})
		f := toward(flow.ICMP, netip.AddrPortFrom(e.live, 0))
		f.AllowHost = false
		r := newEar()
		l, err := d.OpenLink(t.Context(), f, r)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		send(t, l, request(e.live, 1, nil))
		eventually(t, "the answer", func() bool { return r.count() == 1 })
		gen++
		send(t, l, request(e.live, 2, nil))
		if n := drops[flow.DropSelf].Load(); n != 1 {
			t.Errorf("%d drops", n)
		}
	})
}

func TestAClosedEchoLinkIsSilentAndSendsNothing(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, _ := direct(t, nil)
		before := descriptors(t)
		l, r := e.stream(t, d, e.live)
		r.hook(func() { l.Close() }) // from within a call
		send(t, l, request(e.live, 1, nil))
		eventually(t, "the answer", func() bool { return r.count() == 1 })
		eventually(t, "the descriptor is closed", func() bool { return descriptors(t) <= before })
		if _, _, err := l.Send([]flow.Train{request(e.live, 2, nil)}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("sending: %v", err)
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closing again: %v", err)
		}
	})
}

func TestAnEchoLinkHasOnePeerByWhateverNameTheClientCallsIt(t *testing.T) {
	eachEcho(t, func(t *testing.T, e echoCase) {
		d, _ := direct(t, func(c *DirectConfig) { c.Resolver = oneAddress(e.live) })
		f := toward(flow.ICMP, netip.MustParseAddrPort("198.18.0.7:0"))
		f.Dest.Domain, f.Dest.From = "host.example", flow.FromClient
		r := newEar()
		l, err := d.OpenLink(t.Context(), f, r)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		send(t, l, flow.Train{Peer: f.Dest, Seq: 5})
		eventually(t, "the answer", func() bool { return r.count() == 1 })
		if r.got[0].Peer != f.Dest {
			t.Errorf("from %v", r.got[0].Peer)
		}
		if n, _, err := l.Send([]flow.Train{request(e.dead, 1, nil)}); n != 0 || !errors.Is(err, errOnePeer) {
			t.Errorf("to somebody else: %d, %v", n, err)
		}
	})
}

type oneAddress netip.Addr

func (a oneAddress) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	return []netip.Addr{netip.Addr(a)}, nil
}

func TestEchoIDsTowardAPeerAreNeverGivenTwice(t *testing.T) {
	var ids echoIDs
	peer, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	seen := map[uint16]bool{}
	for range 1000 {
		id, err := ids.take(peer)
		if err != nil || id == 0 || seen[id] {
			t.Fatalf("id %d, %v", id, err)
		}
		seen[id] = true
	}
	for id := range 0xffff {
		ids.used[echoID{peer, uint16(id + 1)}] = struct{}{}
	}
	if _, err := ids.take(peer); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("when all are taken: %v", err)
	}
	if _, err := ids.take(other); err != nil {
		t.Errorf("toward another peer: %v", err)
	}
	for id := range uint16(0xffff) {
		ids.give(peer, id+1)
	}
	if len(ids.used) != 1 {
		t.Errorf("%d ids are still taken", len(ids.used))
	}
}
