package outbound

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// Echo streams: one socket for each, of the ping kind (icmp(7)) where
// net.ipv4.ping_group_range lets this process have one, else a raw one with a
// filter. Requests go out with an id of the link's own, which is how replies are
// told apart; sequence number and payload are the client's.
//
//	Send     header, requests → sendmsg                         (echo_send.go)
//	Ready    recvmmsg → source and id checked → Receiver        (echo_receive.go)
//
// Locks, closing and pooled buffers are those of link (link.go).

// echoLink is the link of one echo stream, toward one peer.
type echoLink struct {
	d         *Direct
	r         flow.Receiver
	dest      flow.Destination // what the client calls the peer
	peer      netip.Addr
	local     netip.AddrPort // its port is the id
	raw       bool
	allowHost bool
	closed    atomic.Bool
	recv      sync.Mutex

	send struct {
		sync.Mutex
		socket  socket // its l is not set
		allowed approved
		tooBig  int // sequence number of a request that was, not reported yet; -1: none
	}
}

// openEcho opens a link toward f.Dest, and refuses to send to
// anybody else. It blocks only to look a name up.
func (d *Direct) openEcho(ctx context.Context, f *flow.Flow, r flow.Receiver) (*echoLink, error) {
	if f.Dest.From != flow.FromClient {
		addr := f.Dest.Addr.Addr().Unmap()
		if _, err := d.allowed(f, []netip.Addr{addr}); err != nil {
			return nil, err
		}
		return d.openEchoToward(f, addr, r)
	}
	ctx, cancel := context.WithTimeout(ctx, d.c.DialTimeout)
	defer cancel()
	addrs, err := d.resolve(ctx, f)
	for _, addr := range addrs {
		var l *echoLink
		if l, err = d.openEchoToward(f, addr, r); err == nil {
			return l, nil
		}
	}
	return nil, err
}

func (d *Direct) openEchoToward(f *flow.Flow, peer netip.Addr, r flow.Receiver) (*echoLink, error) {
	l := &echoLink{d: d, r: r, dest: f.Dest, peer: peer, allowHost: f.AllowHost}
	fd, err := d.pingSocket(peer.Is4())
	if errors.Is(err, unix.EACCES) {
		l.raw = true
		fd, err = d.rawSocket(peer.Is4())
	}
	if err != nil {
		return nil, err
	}
	l.send.tooBig = -1
	l.send.socket = socket{fd: int32(fd), open: true, v4: peer.Is4()}
	if err = l.bind(); err == nil {
		err = d.c.Poller.AddReader(fd, l)
	}
	if err != nil {
		l.closeSocketLocked()
		return nil, err
	}
	return l, nil
}

func (d *Direct) pingSocket(v4 bool) (int, error) { return d.echoSocket(v4, unix.SOCK_DGRAM) }

func (d *Direct) rawSocket(v4 bool) (int, error) { return d.echoSocket(v4, unix.SOCK_RAW) }

func (d *Direct) echoSocket(v4 bool, kind int) (int, error) {
	return d.packetSocket(v4, kind, icmpOf(v4), echoBuffer)
}

// echoBuffer is asked for in each direction, bytes: some of the largest packets.
const echoBuffer = 256 << 10

func icmpOf(v4 bool) int {
	if v4 {
		return unix.IPPROTO_ICMP
	}
	return unix.IPPROTO_ICMPV6
}

// bind gives the link its id and its local address, and tells whether there is a
// route. The socket is bound to the outbound's source address only: an address
// that the host gets later serves too.
func (l *echoLink) bind() error {
	fd, v4 := int(l.send.socket.fd), l.peer.Is4()
	source := l.d.source(v4)
	local := source
	if !source.IsValid() {
		source = unspecified(v4)
		var err error
		if local, err = l.d.probe(netip.AddrPortFrom(l.peer, probePort)); err != nil {
			return err
		}
	}
	if l.raw {
		return l.bindRaw(fd, source, local)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(source, 0))); err != nil {
		return fmt.Errorf("bind %v: %w", source, err)
	}
	l.local = netip.AddrPortFrom(local, localOf(fd).Port()) // the kernel chose an id that no other ping socket has
	return nil
}

// probePort is any port: a connected UDP socket tells the source address.
const probePort = 7

// bindRaw chooses the id, since any number of raw sockets may have the same.
func (l *echoLink) bindRaw(fd int, source, local netip.Addr) error {
	id, err := l.d.echoes.take(l.peer)
	if err != nil {
		return err
	}
	l.local = netip.AddrPortFrom(local, id)
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, echoFilter(l.peer, id)); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(source, 0))); err != nil {
		return fmt.Errorf("bind %v: %w", source, err)
	}
	return nil
}

func unspecified(v4 bool) netip.Addr {
	if v4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// LocalAddr is the address that the first request leaves from, and the id on the
// way as its port.
func (l *echoLink) LocalAddr() netip.AddrPort { return l.local }

// Close closes the socket, as link.Close does.
func (l *echoLink) Close() error {
	if l.closed.Swap(true) {
		return net.ErrClosed
	}
	l.closeIfQuiet()
	return nil
}

// closeIfQuiet closes the descriptor of a closed link, unless a receiving call is
// under way: that one calls it at its end.
func (l *echoLink) closeIfQuiet() {
	if !l.recv.TryLock() {
		return
	}
	defer l.recv.Unlock()
	l.send.Lock()
	defer l.send.Unlock()
	if l.send.socket.open {
		l.d.c.Poller.Remove(int(l.send.socket.fd))
		l.closeSocketLocked()
	}
}

func (l *echoLink) closeSocketLocked() {
	l.send.socket.close()
	if l.raw && l.local.IsValid() {
		l.d.echoes.give(l.peer, l.local.Port())
	}
}

var _ epoll.Handler = (*echoLink)(nil)
