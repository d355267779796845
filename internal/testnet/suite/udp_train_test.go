package suite

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// coalesced has a socket get equal datagrams as trains, as the kernel has them.
func (s udpSocket) coalesced() {
	s.t.Helper()
	raw, err := s.SyscallConn()
	if err != nil {
		s.t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1) })
	if err := errors.Join(cerr, err); err != nil {
		s.t.Fatalf("UDP_GRO: %v", err)
	}
}

// train is the next datagrams of a socket that gets them coalesced.
func (s udpSocket) train() (datagrams []string, from netip.AddrPort) {
	s.t.Helper()
	if err := s.SetReadDeadline(time.Now().Add(udpPatience)); err != nil {
		s.t.Fatal(err)
	}
	buf, control := make([]byte, 1<<16), make([]byte, 100)
	n, cn, _, from, err := s.ReadMsgUDPAddrPort(buf, control)
	if err != nil {
		s.t.Fatalf("a train: %v", err)
	}
	messages, err := syscall.ParseSocketControlMessage(control[:cn])
	if err != nil {
		s.t.Fatal(err)
	}
	size := n
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_UDP && m.Header.Type == unix.UDP_GRO {
			size = int(binary.NativeEndian.Uint32(m.Data))
		}
	}
	from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
	if n <= size {
		return []string{string(buf[:n])}, from
	}
	for d := range slices.Chunk(buf[:n], size) {
		datagrams = append(datagrams, string(d))
	}
	return datagrams, from
}

// burst is what an application sends at once: packets of QUIC with a last one that
// is shorter, acknowledgements, calls, and whatever else.
func burst(name string) (datagrams []string) {
	add := func(n, size int) {
		for range n {
			d := fmt.Sprintf("%s %d ", name, len(datagrams))
			datagrams = append(datagrams, strings.Repeat(d, size/len(d)+1)[:size])
		}
	}
	for _, d := range [][2]int{{12, 1350}, {1, 417}, {3, 35}, {70, 64}, {1, 0}, {1, 1}, {5, 1200}, {1, 1201}, {2, 0}, {1, 65507}, {1, 1472}, {1, 1473}, {10, 1200}} {
		add(d[0], d[1])
	}
	return datagrams
}

// The gateway finds each burst as a whole, since it stands still meanwhile.
func TestBurstsOfAnySizesArriveInOrderBothWays(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	eachFamily(t, func(t *testing.T, f udpFamily) {
		server, c := openUDP(t, lab.Srv, f.far), openUDP(t, lab.Cli, f.client)
		peer := addrPort(f.far, server.port())
		c.sendTo(peer, "first") // opens the flow
		_, mapped, err := server.next(udpPatience)
		if err != nil {
			t.Fatal(err)
		}
		before := g.API.Status().Drops
		server.coalesced()
		c.coalesced()
		var total uint64
		for _, way := range []struct {
			name     string
			from, to udpSocket
			far, as  netip.AddrPort
		}{{"up", c, server, peer, mapped}, {"down", server, c, mapped, peer}} {
			want := burst(way.name)
			total = 0
			stopped(t, g, func() {
				for _, d := range want {
					way.from.sendTo(way.far, d)
					total += uint64(len(d))
				}
			})
			var got []string
			trains := 0
			for len(got) < len(want) {
				datagrams, from := way.to.train()
				if from != way.as {
					t.Fatalf("%s: from %v, want %v", way.name, from, way.as)
				}
				if got = append(got, datagrams...); len(datagrams) > 1 {
					trains++
				}
			}
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("%s: datagram %d has %d bytes %.20q, want %d bytes %.20q", way.name, i, len(got[i]), got[i], len(want[i]), want[i])
				}
			}
			if way.name == "up" && trains == 0 {
				t.Error("no equal datagrams were sent as a train")
			}
			t.Logf("%s: %d datagrams came, also in %d trains", way.name, len(got), trains)
		}
		if flow := onlyFlow(t, g, "source="+f.client); flow.Up != total+5 || flow.Down != total {
			t.Errorf("charged %d up, %d down, want %d and %d", flow.Up, flow.Down, total+5, total)
		}
		if d := drops(g, before); len(d) != 0 {
			t.Errorf("drops %v", d)
		}
	})
}

// stopped runs f while the gateway stands still.
func stopped(t *testing.T, g *testnet.Gateway, f func()) {
	t.Helper()
	g.Signal(unix.SIGSTOP)
	defer g.Signal(unix.SIGCONT)
	f()
}
