package outbound

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

// maxSegments is what one UDP_SEGMENT send may hold (UDP_MAX_SEGMENTS before Linux 6.9).
const maxSegments = 64

// letter is what a sendmsg needs besides the payload.
type letter struct {
	hdr     unix.Msghdr
	iov     unix.Iovec
	name    unix.RawSockaddrInet6 // either family's
	control [64]byte
}

// Send sends trains in order and never blocks. Datagrams toward ourselves, and
// ones that the socket has no room for, are dropped, counted and reported as
// taken. An error is the errno of the train that follows the ones taken.
func (l *link) Send(ts []flow.Train) (taken, moved int, err error) {
	l.send.Lock()
	defer l.send.Unlock()
	for i := range ts {
		n, err := l.sendLocked(&ts[i])
		if err != nil {
			return i, moved, err
		}
		moved += n
	}
	return len(ts), moved, nil
}

func (l *link) sendLocked(tr *flow.Train) (moved int, err error) {
	if l.closed.Load() {
		return 0, net.ErrClosed
	}
	peer := netip.AddrPortFrom(tr.Peer.Addr.Addr().Unmap(), tr.Peer.Addr.Port())
	if tr.Peer.From == flow.FromClient {
		var ok bool
		if peer, ok = l.namesLocked().peerOf(tr.Peer); !ok {
			return l.lookUpLocked(tr), nil
		}
	}
	switch err := l.d.approve(&l.send.allowed, peer.Addr(), l.allowHost); err {
	case nil:
	case error(errSelf):
		l.d.c.Drops.Add(flow.DropSelf, tr.Count())
		return 0, nil
	default:
		return 0, l.sendError(peer, err)
	}
	if l.send.peers != nil {
		l.send.peers.add(peer)
	}
	s, err := l.socketLocked(peer.Addr().Is4(), netip.AddrPort{})
	if err != nil {
		return 0, l.sendError(peer, err)
	}
	s.discover(tr.DontFragment)
	if moved, err = s.sendTrain(tr, peer); err != nil {
		return 0, l.sendError(peer, err)
	}
	return moved, nil
}

func (l *link) sendError(peer netip.AddrPort, err error) error {
	return fmt.Errorf("send %s %s: %w", l.d.c.Name, peer, err)
}

// pmtuMode is what the kernel does with datagrams that are too big (ip(7),
// IP_MTU_DISCOVER).
type pmtuMode uint8

const (
	pmtuSystem   pmtuMode = iota // as the socket was made
	pmtuFragment                 // fragment them: DONT, and WANT with IPv6
	pmtuRefuse                   // EMSGSIZE, and no fragmenting on the way: PROBE
)

// discover has the next datagrams sent with or without permission to fragment.
func (s *socket) discover(dontFragment bool) {
	mode, v4, v6 := pmtuFragment, unix.IP_PMTUDISC_DONT, unix.IPV6_PMTUDISC_WANT
	if dontFragment {
		mode, v4, v6 = pmtuRefuse, unix.IP_PMTUDISC_PROBE, unix.IPV6_PMTUDISC_PROBE
	}
	if s.pmtu == mode {
		return
	}
	s.pmtu = mode
	if s.v4 {
		unix.SetsockoptInt(int(s.fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, v4) //nolint:errcheck // the system's way at worst
	} else {
		unix.SetsockoptInt(int(s.fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, v6) //nolint:errcheck // as above
	}
}

// sendTrain sends the datagrams of a train, as many at once as the kernel takes,
// and tells how many bytes of them left. It fails if nothing left and the socket
// refuses the first ones; what it refuses later is lost and counted.
func (s *socket) sendTrain(tr *flow.Train, peer netip.AddrPort) (moved int, err error) {
	m := s.l.d.letter()
	defer s.l.d.letters.Put(m)
	size, most, rest := tr.Segment, maxSegments, tr.Payload
	if tr.Count() == 1 {
		size = len(rest)
	}
	for first := true; first || len(rest) > 0; first = false {
		if s.l.send.noGSO {
			most = 1
		}
		part := flow.Train{Payload: rest[:min(len(rest), most*size)], Segment: size}
		n, segment := part.Count(), size
		if n == 1 {
			segment = 0
		}
		err := s.write(m, part.Payload, segment, tr.TClass, peer)
		if n > 1 && s.refusesTrains(err) {
			most = 1
			continue
		}
		if err == nil {
			moved += len(part.Payload)
		} else if !isLoss(err) && len(rest) == len(tr.Payload) {
			return 0, err
		} else {
			s.l.d.c.Drops.Add(flow.DropSendFailed, n)
		}
		rest = rest[len(part.Payload):]
	}
	return moved, nil
}

// refusesTrains reports that the device or the path takes datagrams one by one only.
func (s *socket) refusesTrains(err error) bool {
	switch err {
	case unix.EIO, unix.ENOPROTOOPT, unix.EOPNOTSUPP:
		s.l.send.noGSO = true
		return true
	}
	return err == unix.EINVAL || err == unix.EMSGSIZE
}

// isLoss reports that there was no room for a datagram, or that it is too big for
// the path: the sender hears of the latter by the error queue.
func isLoss(err error) bool {
	return err == unix.EAGAIN || err == unix.ENOBUFS || err == unix.EMSGSIZE
}

// write is one sendmsg. An error that the socket had pending from an ICMP
// message is returned once by the kernel: the send is tried again.
func (s *socket) write(m *letter, payload []byte, segment int, tclass uint8, peer netip.AddrPort) error {
	m.address(peer)
	m.fill(payload)
	m.controls(segment, tclass, s.v4)
	err := m.post(int(s.fd))
	switch err {
	case nil:
		return nil
	case unix.EAGAIN, unix.ENOBUFS, unix.EINVAL, unix.EIO:
		return err
	}
	if err = m.post(int(s.fd)); err == nil {
		return nil
	}
	if err == unix.EMSGSIZE {
		s.tooBig = peer
	}
	return err
}

func (d *Direct) letter() *letter {
	if m, ok := d.letters.Get().(*letter); ok {
		return m
	}
	m := &letter{}
	m.hdr.Name = (*byte)(unsafe.Pointer(&m.name))
	m.hdr.Iov = &m.iov
	m.hdr.SetIovlen(1)
	return m
}

func (m *letter) address(peer netip.AddrPort) {
	if peer.Addr().Is4() {
		name := (*unix.RawSockaddrInet4)(unsafe.Pointer(&m.name))
		name.Family = unix.AF_INET
		name.Port = networkOrder(peer.Port())
		name.Addr = peer.Addr().As4()
		m.hdr.Namelen = unix.SizeofSockaddrInet4
		return
	}
	m.name = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: networkOrder(peer.Port()), Addr: peer.Addr().As16()}
	m.hdr.Namelen = unix.SizeofSockaddrInet6
}

// networkOrder is port as a sockaddr holds it.
func networkOrder(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

func (m *letter) fill(payload []byte) {
	m.iov.Base = unsafe.SliceData(payload)
	m.iov.SetLen(len(payload))
}

// controls writes the control messages that are needed.
func (m *letter) controls(segment int, tclass uint8, v4 bool) {
	n := 0
	if segment > 0 {
		n += m.header(n, unix.IPPROTO_UDP, udpSegment, 2)
		binary.NativeEndian.PutUint16(m.control[unix.CmsgLen(0):], uint16(segment))
	}
	if tclass != 0 {
		data := n + unix.CmsgLen(0)
		if v4 {
			n += m.header(n, unix.IPPROTO_IP, unix.IP_TOS, 4)
		} else {
			n += m.header(n, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, 4)
		}
		binary.NativeEndian.PutUint32(m.control[data:], uint32(tclass))
	}
	m.hdr.Control = nil
	if n > 0 {
		m.hdr.Control = &m.control[0]
	}
	m.hdr.SetControllen(n)
}

// header writes one message's header and returns the room that it takes.
func (m *letter) header(at int, level, kind int32, size int) int {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&m.control[at]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(size))
	return unix.CmsgSpace(size)
}

// post is the system call.
func (m *letter) post(fd int) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.hdr)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errno != 0 {
		return errno
	}
	return nil
}
