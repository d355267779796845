package wire

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// inNamespace runs the rest of the test in a network namespace of its own, whose
// loopback device has the addresses that the packets of these tests use. Its
// thread, and so the namespace, ends with the test.
func inNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := syscall.Unshare(syscall.CLONE_NEWNET); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("unshare: %v: needs CAP_SYS_ADMIN", err)
		}
		t.Skipf("unshare: %v: needs CAP_SYS_ADMIN", err)
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"addr", "add", client4.String() + "/32", "dev", "lo"},
		{"addr", "add", server4.String() + "/32", "dev", "lo"},
		{"addr", "add", client6.String() + "/128", "dev", "lo", "nodad"},
		{"addr", "add", server6.String() + "/128", "dev", "lo", "nodad"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	// The kernel adds the routes of IPv6 addresses in a work queue, after the addresses.
	end := time.Now().Add(10 * time.Second)
	for _, addr := range []netip.Addr{client6, server6} {
		for local := false; !local; {
			out, err := exec.Command("ip", "route", "get", addr.String()).Output()
			if local = err == nil && bytes.HasPrefix(out, []byte("local ")); !local && time.Now().After(end) {
				t.Fatalf("%v is not local: %s %v", addr, out, err)
			}
		}
	}
}

// inject sends a packet as it is.
func inject(t *testing.T, dst netip.Addr, packet []byte) {
	t.Helper()
	const headerIncluded6 = 36 // IPV6_HDRINCL, linux/in6.h
	family, sa := syscall.AF_INET6, syscall.Sockaddr(&syscall.SockaddrInet6{Addr: dst.As16()})
	if dst.Is4() {
		family, sa = syscall.AF_INET, &syscall.SockaddrInet4{Addr: dst.As4()}
	}
	fd, err := syscall.Socket(family, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.IPPROTO_RAW)
	if err != nil {
		t.Fatalf("raw socket: %v", err)
	}
	defer syscall.Close(fd)
	if dst.Is6() {
		if err := syscall.SetsockoptInt(fd, syscall.IPPROTO_IPV6, headerIncluded6, 1); err != nil {
			t.Fatalf("IPV6_HDRINCL: %v", err)
		}
	}
	if err := syscall.Sendto(fd, packet, 0, sa); err != nil {
		t.Fatalf("send packet: %v", err)
	}
}

// TestTheKernelTakesWhatIsBuilt lets sockets hear datagrams, whole and in
// fragments, and errors about a datagram that was kept and one that was not.
func TestTheKernelTakesWhatIsBuilt(t *testing.T) {
	inNamespace(t)
	for _, c := range []struct{ client, server netip.Addr }{{client4, server4}, {client6, server6}} {
		local, remote := netip.AddrPortFrom(c.client, 5000), netip.AddrPortFrom(c.server, 53)
		conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(local), net.UDPAddrFromAddrPort(remote))
		if err != nil {
			t.Fatalf("dial %v: %v", remote, err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		h := Header{Src: c.server, Dst: c.client, TTL: 64, ID: 42}
		hears(t, conn, c.client, append(h.AppendUDP(nil, 53, 5000, data, false), data...))
		hears(t, conn, c.client, fragments(h)...)
		original := append((&Header{Src: c.client, Dst: c.server, TTL: 64}).AppendUDP(nil, 5000, 53, data, false), data...)
		refused(t, conn, c.client, AppendUnreachable(nil, Unreachable{Kind: PortUnreachable, From: c.server}, original))
	}
}

func fragments(h Header) [][]byte {
	l4 := append(h.AppendUDPHeader(nil, 53, 5000, data, false), data...)
	h.MoreFragments = true
	first := append(h.AppendIP(nil, ProtoUDP, 16), l4[:16]...)
	h.FragOffset, h.MoreFragments = 16, false
	return [][]byte{first, append(h.AppendIP(nil, ProtoUDP, len(l4)-16), l4[16:]...)}
}

func hears(t *testing.T, conn *net.UDPConn, to netip.Addr, packets ...[]byte) {
	t.Helper()
	for _, b := range packets {
		inject(t, to, b)
	}
	buf := make([]byte, 100)
	if n, err := conn.Read(buf); err != nil || string(buf[:n]) != string(data) {
		t.Errorf("%v: read %q, %v: want %q", to, buf[:n], err, data)
	}
}

func refused(t *testing.T, conn *net.UDPConn, to netip.Addr, packet []byte) {
	t.Helper()
	inject(t, to, packet)
	if _, err := conn.Read(make([]byte, 100)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v: read: %v: want connection refused", to, err)
	}
}
