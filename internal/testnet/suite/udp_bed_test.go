package suite

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// udpPatience is how long a datagram, an event or a log line may take.
const udpPatience = 10 * time.Second

// udpBase is a gateway with one device and limits that no test meets by chance.
const udpBase = `version: 1
api: {listen: "$API"}
tun: [{tag: lan, device: gw0}]
timeouts: {udp: {one_way: 60s, answered: 60s}}
sample: 100ms
sweep: 50ms
`

// udpBed is a lab with a gateway that the LAN is diverted into. What the kernel
// tells on the device by itself (which groups it is in) is kept out of the counters.
func udpBed(t *testing.T, config string) (*testnet.Lab, *testnet.Gateway) {
	t.Helper()
	testnet.Require(t)
	lab := testnet.New(t, testnet.Options{})
	lab.GW.Filter("output", `oifname "gw0" ip6 daddr ff00::/8`, "drop")
	return lab, lab.Start(testnet.GatewayOptions{Config: config, Device: "gw0"})
}

// eachFamily runs a test over each family.
func eachFamily(t *testing.T, test func(t *testing.T, f udpFamily)) {
	t.Helper()
	for _, f := range []udpFamily{
		{"IPv4", testnet.FarV4, testnet.ServerV4, testnet.ClientV4, "0.0.0.0"},
		{"IPv6", testnet.FarV6, testnet.ServerV6, testnet.ClientV6, "::"},
	} {
		t.Run(f.name, func(t *testing.T) { test(t, f) })
	}
}

// udpFamily is a family's addresses: the server's behind its link and on it, the
// client's, and any.
type udpFamily struct{ name, far, near, client, any string }

func addrPort(host string, port int) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(host), uint16(port))
}

// hostPort is host and port as one text, with the brackets that IPv6 needs.
func hostPort(host string, port int) string { return addrPort(host, port).String() }

// udpSocket is a client's socket with reads that end.
type udpSocket struct {
	*net.UDPConn
	t *testing.T
}

// openUDP opens an unconnected socket of host in a namespace.
func openUDP(t *testing.T, n *testnet.Netns, host string) udpSocket {
	t.Helper()
	c, err := n.ListenUDP(t.Context(), hostPort(host, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return udpSocket{c, t}
}

func (s udpSocket) sendTo(to netip.AddrPort, payload string) {
	s.t.Helper()
	if _, err := s.WriteToUDPAddrPort([]byte(payload), to); err != nil {
		s.t.Fatalf("send to %v: %v", to, err)
	}
}

// next is the next datagram, within the limit.
func (s udpSocket) next(limit time.Duration) (payload string, from netip.AddrPort, err error) {
	if err := s.SetReadDeadline(time.Now().Add(limit)); err != nil {
		s.t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	n, from, err := s.ReadFromUDPAddrPort(buf)
	return string(buf[:n]), netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), err
}

// want expects one datagram.
func (s udpSocket) want(from netip.AddrPort, payload string) {
	s.t.Helper()
	got, peer, err := s.next(udpPatience)
	if err != nil || got != payload || peer != from {
		s.t.Fatalf("received %d bytes %.40q from %v, %v; want %d bytes %.40q from %v", len(got), got, peer, err, len(payload), payload, from)
	}
}

// wantNothing expects silence.
func (s udpSocket) wantNothing(limit time.Duration) {
	s.t.Helper()
	if got, from, err := s.next(limit); !errors.Is(err, os.ErrDeadlineExceeded) {
		s.t.Fatalf("received %d bytes %.40q from %v, %v; want nothing", len(got), got, from, err)
	}
}

// port is the socket's own.
func (s udpSocket) port() int { return s.LocalAddr().(*net.UDPAddr).Port }

// closedFlow waits for the record of a closed flow.
func closedFlow(t *testing.T, g *testnet.Gateway, id uint64) (found testnet.FlowRecord) {
	t.Helper()
	testnet.Until(t, udpPatience, fmt.Sprintf("flow#%d is closed", id), func() bool {
		for _, f := range g.API.Closed() {
			if f.ID == id {
				found = f
				return true
			}
		}
		return false
	})
	return found
}

// onlyFlow is the one live flow that a selector picks.
func onlyFlow(t *testing.T, g *testnet.Gateway, selector string) testnet.FlowRecord {
	t.Helper()
	flows := g.API.Flows(selector)
	if len(flows) != 1 {
		t.Fatalf("%d flows %q, want one: %+v", len(flows), selector, flows)
	}
	return flows[0]
}

// drops is what was counted since before, without what was not.
func drops(g *testnet.Gateway, before map[string]uint64) map[string]uint64 {
	changed := map[string]uint64{}
	for cause, n := range g.API.Status().Drops {
		if n != before[cause] {
			changed[cause] = n - before[cause]
		}
	}
	return changed
}

// injector writes packets into a device as if the kernel had routed them there.
type injector struct {
	t     *testing.T
	fd    int
	index int
}

// injectInto opens one for a device of a namespace.
func injectInto(t *testing.T, n *testnet.Netns, device string) injector {
	t.Helper()
	in := injector{t: t, fd: -1}
	err := n.Do(func() error {
		link, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		in.index = link.Index
		in.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatalf("packet socket on %s: %v", device, err)
	}
	t.Cleanup(func() { unix.Close(in.fd) })
	return in
}

func (in injector) send(packet []byte) {
	in.t.Helper()
	proto := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		proto = unix.ETH_P_IPV6
	}
	to := &unix.SockaddrLinklayer{Protocol: proto<<8 | proto>>8, Ifindex: in.index, Halen: 0}
	if err := unix.Sendto(in.fd, packet, 0, to); err != nil {
		in.t.Fatalf("packet socket: %v", err)
	}
}

// Numbers of protocols.
const (
	protoICMP   = 1
	protoIGMP   = 2
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58
)

// packet is an IP packet with a transport header and payload, checksums filled in.
func packet(src, dst string, proto int, transport []byte) []byte {
	s, d := netip.MustParseAddr(src), netip.MustParseAddr(dst)
	body := bytes.Clone(transport)
	pseudo := append(s.AsSlice(), d.AsSlice()...)
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(body)))
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(proto))
	at := map[int]int{protoTCP: 16, protoUDP: 6, protoICMP: 2, protoIGMP: 2, protoICMPv6: 2}[proto]
	if proto == protoICMP || proto == protoIGMP {
		pseudo = nil
	}
	binary.BigEndian.PutUint16(body[at:], internetSum(append(pseudo, body...)))
	if s.Is6() {
		h := make([]byte, 40, 40+len(body))
		h[0] = 0x60
		binary.BigEndian.PutUint16(h[4:], uint16(len(body)))
		h[6], h[7] = byte(proto), 255
		copy(h[8:], s.AsSlice())
		copy(h[24:], d.AsSlice())
		return append(h, body...)
	}
	h := make([]byte, 20, 20+len(body))
	h[0] = 0x45
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(body)))
	h[8], h[9] = 64, byte(proto)
	copy(h[12:], s.AsSlice())
	copy(h[16:], d.AsSlice())
	binary.BigEndian.PutUint16(h[10:], internetSum(h))
	return append(h, body...)
}

// internetSum is the checksum of RFC 1071.
func internetSum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// udpPacket is a datagram, synPacket the first segment of a connection.
func udpPacket(src string, srcPort int, dst string, dstPort int, payload string) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(srcPort))
	b = binary.BigEndian.AppendUint16(b, uint16(dstPort))
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	return packet(src, dst, protoUDP, append(append(b, 0, 0), payload...))
}

func synPacket(src string, srcPort int, dst string, dstPort int) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, uint16(srcPort))
	binary.BigEndian.PutUint16(b[2:], uint16(dstPort))
	binary.BigEndian.PutUint32(b[4:], 0x1234)
	b[12], b[13] = 5<<4, 2
	binary.BigEndian.PutUint16(b[14:], 0xffff)
	return packet(src, dst, protoTCP, b)
}

// setSegment has each write of a socket cut into datagrams of size bytes (udp(7)).
func setSegment(t *testing.T, c syscall.Conn, size int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatalf("UDP_SEGMENT: %v", err)
	}
}
