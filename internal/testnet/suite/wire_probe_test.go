package suite

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// probe is one packet of a client, and what came back of it.
type probe struct {
	tcp     bool // a connection attempt instead of a datagram
	hops    int  // TTL or hop limit; 0: the system's
	payload int  // bytes, of a datagram
}

// heard is the ICMP error that a client's socket heard (ip(7), IP_RECVERR).
type heard struct {
	errno      syscall.Errno // 0: an answer, or nothing within the limit
	kind, code uint8
	offender   netip.Addr
	quoted     int // bytes of payload
}

func (o heard) String() string {
	if o.errno == 0 {
		return "nothing"
	}
	return fmt.Sprintf("type %d code %d from %v, %q", o.kind, o.code, o.offender, error(o.errno))
}

// send sends the probe from a namespace and waits for an error, at most limit.
func (p probe) send(t *testing.T, n *testnet.Netns, to netip.AddrPort, limit time.Duration) (o heard) {
	t.Helper()
	if err := n.Do(func() (err error) {
		o, err = p.sendHere(to, limit)
		return err
	}); err != nil {
		t.Fatalf("probe of %v: %v", to, err)
	}
	return o
}

func (p probe) sendHere(to netip.AddrPort, limit time.Duration) (heard, error) {
	family, level, option, hops := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, unix.IPV6_UNICAST_HOPS
	var sa unix.Sockaddr = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	if to.Addr().Is4() {
		family, level, option, hops = unix.AF_INET, unix.IPPROTO_IP, unix.IP_RECVERR, unix.IP_TTL
		sa = &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	kind := unix.SOCK_DGRAM
	if p.tcp {
		kind = unix.SOCK_STREAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return heard{}, err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return heard{}, err
	}
	if p.hops > 0 {
		if err := unix.SetsockoptInt(fd, level, hops, p.hops); err != nil {
			return heard{}, err
		}
	}
	if err := unix.Connect(fd, sa); err != nil && err != unix.EINPROGRESS {
		return heard{}, err
	}
	if !p.tcp {
		if _, err := unix.Write(fd, make([]byte, p.payload)); err != nil {
			return heard{}, err
		}
	}
	return awaitError(fd, limit)
}

// awaitError polls for what a socket hears.
func awaitError(fd int, limit time.Duration) (o heard, err error) {
	fds := []unix.PollFd{{Fd: int32(fd)}}
	for end := time.Now().Add(limit); ; {
		_, err := unix.Poll(fds, int(time.Until(end)/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if err != nil || fds[0].Revents&unix.POLLERR == 0 {
			return o, err
		}
		return queued(fd)
	}
}

// queued reads the error queue, or SO_ERROR when it holds nothing.
func queued(fd int) (o heard, err error) {
	control, data := make([]byte, 256), make([]byte, 2048)
	m, n, _, _, err := unix.Recvmsg(fd, data, control, unix.MSG_ERRQUEUE)
	if err != nil {
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		return heard{errno: syscall.Errno(code)}, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil {
		return o, err
	}
	for _, c := range messages {
		v4 := c.Header.Level == unix.IPPROTO_IP && c.Header.Type == unix.IP_RECVERR
		v6 := c.Header.Level == unix.IPPROTO_IPV6 && c.Header.Type == unix.IPV6_RECVERR
		if !v4 && !v6 || len(c.Data) < 16+8 {
			continue
		}
		o = heard{errno: syscall.Errno(binary.NativeEndian.Uint32(c.Data)), kind: c.Data[5], code: c.Data[6], quoted: m}
		if v4 {
			o.offender, _ = netip.AddrFromSlice(c.Data[16+4 : 16+8])
		} else if len(c.Data) >= 16+24 {
			o.offender, _ = netip.AddrFromSlice(c.Data[16+8 : 16+24])
		}
	}
	return o, nil
}
