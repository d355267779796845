package outbound

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// socketBuffer is asked for in each direction, bytes; net.core.rmem_max and
// wmem_max cap it. It is a limit, not memory.
const socketBuffer = 2 << 20

// Socket options and control messages that x/sys does not name everywhere.
const (
	udpSegment = 103 // UDP_SEGMENT, Linux 4.18
	udpGRO     = 104 // UDP_GRO, Linux 5.0
)

// link is a pair of unconnected sockets, so that every peer sees one port
// (endpoint-independent mapping, RFC 4787). The second one opens with the first
// datagram to the other family.
//
// Two locks, recv before send. recv is held while a socket is read and the
// Receiver called, so that calls do not overlap; send while one is written to.
// Descriptors are closed with both held, by Close or, when Close came from
// within a Receiver call or during one, at that call's end.
type link struct {
	d         *Direct
	r         flow.Receiver
	local     netip.AddrPort
	allowHost bool
	closed    atomic.Bool
	plain     atomic.Bool // what comes in is admitted from everybody, by its address
	recv      sync.Mutex

	send struct {
		sync.Mutex
		sockets [2]socket // IPv6, IPv4
		allowed approved
		peers   *peerSet
		names   *names
	}
}

// socket is one family's half of a link.
type socket struct {
	l      *link
	fd     int32
	open   bool
	v4     bool
	pmtu   pmtuMode
	gso    int            // bytes of the largest datagrams that the kernel is asked to cut a message into
	tooBig netip.AddrPort // whom the last datagram that was too big was for
}

// OpenLink opens a socket for datagrams toward f.Dest and any other peer, or for
// an echo stream toward f.Dest alone. It blocks only to look a name up.
func (d *Direct) OpenLink(ctx context.Context, f flow.Flow, r flow.Receiver) (flow.Link, error) {
	if f.Network == flow.ICMP {
		l, err := d.openEcho(ctx, &f, r)
		if err != nil {
			return nil, fmt.Errorf("open %s echo %s: %w", d.c.Name, f.Dest.Addr.Addr(), err)
		}
		return l, nil
	}
	l := &link{d: d, r: r, allowHost: f.AllowHost}
	l.plain.Store(d.c.Filtering == EndpointIndependent)
	if d.c.Filtering != EndpointIndependent {
		l.send.peers = newPeerSet(d.c.Filtering)
	}
	if err := l.openFirst(ctx, &f); err != nil {
		return nil, fmt.Errorf("open %s %s: %w", d.c.Name, f.Dest, err)
	}
	return l, nil
}

// openFirst opens the socket toward f.Dest; of a name, toward its first address
// that has a route.
func (l *link) openFirst(ctx context.Context, f *flow.Flow) error {
	if f.Dest.From != flow.FromClient {
		addr := f.Dest.Addr.Addr().Unmap()
		if _, err := l.d.allowed(f, []netip.Addr{addr}); err != nil {
			return err
		}
		return l.openToward(netip.AddrPortFrom(addr, f.Dest.Addr.Port()))
	}
	ctx, cancel := context.WithTimeout(ctx, l.d.c.DialTimeout)
	defer cancel()
	addrs, err := l.d.resolve(ctx, f)
	for _, addr := range addrs {
		peer := netip.AddrPortFrom(addr, f.Dest.Addr.Port())
		if err = l.openToward(peer); err == nil {
			l.send.Lock()
			l.namesLocked().learn(f.Dest, peer)
			l.send.Unlock()
			return nil
		}
	}
	return err
}

func (l *link) openToward(peer netip.AddrPort) error {
	l.send.Lock()
	defer l.send.Unlock()
	_, err := l.socketLocked(peer.Addr().Is4(), peer)
	return err
}

// socketLocked is the socket of a family, opened now if it was not. first, if
// valid, is whom the local address is chosen for.
func (l *link) socketLocked(v4 bool, first netip.AddrPort) (*socket, error) {
	i := 0
	if v4 {
		i = 1
	}
	s := &l.send.sockets[i]
	if s.open {
		return s, nil
	}
	if l.closed.Load() {
		return nil, net.ErrClosed
	}
	fd, err := l.d.datagramSocket(v4)
	if err != nil {
		return nil, err
	}
	*s = socket{l: l, fd: int32(fd), open: true, v4: v4, gso: maxSegmentsLen}
	if err = s.bind(first); err == nil {
		err = l.d.c.Poller.AddReader(fd, s)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *socket) close() {
	unix.Close(int(s.fd))
	s.open = false
}

// datagramSocket opens a UDP socket whose kernel coalesces what comes.
func (d *Direct) datagramSocket(v4 bool) (int, error) {
	fd, err := d.packetSocket(v4, unix.SOCK_DGRAM, unix.IPPROTO_UDP, socketBuffer)
	if err != nil {
		return -1, err
	}
	if !v4 {
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) //nolint:errcheck // it is new, and not bound
	}
	unix.SetsockoptInt(fd, unix.IPPROTO_UDP, udpGRO, 1) //nolint:errcheck // old kernels lack it; the link works without
	return fd, nil
}

// packetSocket opens a socket for packets of proto that hears of ICMP errors and of
// traffic classes. buffer is asked for in each direction, bytes.
func (d *Direct) packetSocket(v4 bool, kind, proto, buffer int) (int, error) {
	fd, err := d.socketOf(v4, kind, proto)
	if err != nil {
		return -1, err
	}
	set := func(level, option, value int) { unix.SetsockoptInt(fd, level, option, value) } //nolint:errcheck // the link works without
	if v4 {
		set(unix.IPPROTO_IP, unix.IP_RECVERR, 1)
		set(unix.IPPROTO_IP, unix.IP_RECVTOS, 1)
	} else {
		set(unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)
		set(unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1)
	}
	set(unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
	set(unix.SOL_SOCKET, unix.SO_SNDBUF, buffer)
	return fd, nil
}

// bind gives the socket its port, and the link its local address if first is
// valid. Without a source address of the outbound the socket is bound to none;
// which one the kernel uses toward first, and that there is a route, a probe tells.
func (s *socket) bind(first netip.AddrPort) error {
	fd := int(s.fd)
	source := s.l.d.source(s.v4)
	local := source
	if !source.IsValid() {
		source = unspecified(s.v4)
		if first.IsValid() {
			var err error
			if local, err = s.l.d.probe(first); err != nil {
				return err
			}
		}
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(source, 0))); err != nil {
		return fmt.Errorf("bind %v: %w", source, err)
	}
	if first.IsValid() {
		s.l.local = netip.AddrPortFrom(local, localOf(fd).Port())
	}
	return nil
}

// probe is the source address of datagrams to peer. It connects a socket of its
// own: an IPv6 socket that was connected once takes datagrams from nobody but
// that peer, even when it is connected no more.
func (d *Direct) probe(peer netip.AddrPort) (netip.Addr, error) {
	fd, err := d.socket(peer.Addr().Is4(), unix.SOCK_DGRAM)
	if err != nil {
		return netip.Addr{}, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, sockaddr(peer)); err != nil {
		return netip.Addr{}, err
	}
	return localOf(fd).Addr(), nil
}

// LocalAddr is the address that the first datagram leaves from, and the port
// that every datagram of its family leaves from.
func (l *link) LocalAddr() netip.AddrPort { return l.local }

// Close closes the sockets. It may be called from within a Receiver call; a call
// that another goroutine is just making goes on to its end.
func (l *link) Close() error {
	if l.closed.Swap(true) {
		return net.ErrClosed
	}
	l.closeIfQuiet()
	return nil
}

// closeIfQuiet closes the descriptors of a closed link, unless a receiving call
// is under way: that one calls it at its end.
func (l *link) closeIfQuiet() {
	if !l.recv.TryLock() {
		return
	}
	defer l.recv.Unlock()
	l.send.Lock()
	defer l.send.Unlock()
	if n := l.send.names; n != nil {
		n.stop()
	}
	for i := range l.send.sockets {
		if s := &l.send.sockets[i]; s.open {
			l.d.c.Poller.Remove(int(s.fd))
			s.close()
		}
	}
}

var _ epoll.Handler = (*socket)(nil)
