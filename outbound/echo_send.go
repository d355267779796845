package outbound

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/netstack/wire"
)

// Types of echo messages (RFC 792, RFC 4443).
const (
	icmpEchoRequest, icmpEchoReply   = 8, 0
	icmp6EchoRequest, icmp6EchoReply = 128, 129
)

func echoRequestType(v4 bool) uint8 {
	if v4 {
		return icmpEchoRequest
	}
	return icmp6EchoRequest
}

func echoReplyType(v4 bool) uint8 {
	if v4 {
		return icmpEchoReply
	}
	return icmp6EchoReply
}

var errOnePeer = errors.New("an echo stream has one peer")

// echoLetter is what a sendmsg of a request needs besides the payload.
type echoLetter struct {
	envelope
	hdr  unix.Msghdr
	head [wire.ICMPHeaderLen]byte
	iovs [2]unix.Iovec
}

// Send sends one request for each train, and never blocks. It treats what the
// socket has no room for as link.Send does.
func (l *echoLink) Send(ts []flow.Train) (taken, moved int, err error) {
	l.send.Lock()
	defer l.send.Unlock()
	for i := range ts {
		n, err := l.sendLocked(&ts[i])
		if err != nil {
			return i, moved, fmt.Errorf("send %s %s: %w", l.d.c.Name, l.peer, err)
		}
		moved += n
	}
	return len(ts), moved, nil
}

func (l *echoLink) sendLocked(tr *flow.Train) (moved int, err error) {
	switch {
	case l.closed.Load():
		return 0, net.ErrClosed
	case tr.Peer != l.dest:
		return 0, errOnePeer
	}
	switch err := l.d.approve(&l.send.allowed, l.peer, l.allowHost); err {
	case nil:
	case error(errSelf): // the host got the peer's address meanwhile
		l.d.c.Drops.Add(flow.DropSelf, 1)
		return 0, nil
	default:
		return 0, err
	}
	l.send.socket.discover(tr.DontFragment)
	m := l.d.echoLetter()
	defer l.d.echoLetters.Put(m)
	m.address(&m.hdr, netip.AddrPortFrom(l.peer, 0))
	m.controls(&m.hdr, 0, tr.TClass, l.peer.Is4())
	m.request(l, tr)
	if err = l.post(m); err == nil {
		return len(tr.Payload), nil
	}
	if err == unix.EMSGSIZE {
		l.send.tooBig = int(tr.Seq)
	}
	if isLoss(err) {
		l.d.c.Drops.Add(flow.DropSendFailed, 1)
		return 0, nil
	}
	return 0, err
}

// post is one sendmsg. An error that the socket had pending from an ICMP message
// is returned once by the kernel: the send is tried again.
func (l *echoLink) post(m *echoLetter) error {
	fd := int(l.send.socket.fd)
	err := m.post(fd)
	switch err {
	case nil, unix.EAGAIN, unix.ENOBUFS:
		return err
	}
	return m.post(fd)
}

// post is the system call.
func (m *echoLetter) post(fd int) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.hdr)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errno != 0 {
		return errno
	}
	return nil
}

// request writes the ICMP header. A ping socket's kernel sets id and checksum
// itself, and so it does with the checksum of ICMPv6.
func (m *echoLetter) request(l *echoLink, tr *flow.Train) {
	m.head = [wire.ICMPHeaderLen]byte{echoRequestType(l.peer.Is4())}
	binary.BigEndian.PutUint16(m.head[4:], l.local.Port())
	binary.BigEndian.PutUint16(m.head[6:], tr.Seq)
	if l.raw && l.peer.Is4() {
		binary.BigEndian.PutUint16(m.head[2:], ^wire.SumTwo(m.head[:], tr.Payload, 0))
	}
	m.iovs[1].Base = unsafe.SliceData(tr.Payload)
	m.iovs[1].SetLen(len(tr.Payload))
}

func (d *Direct) echoLetter() *echoLetter {
	if m, ok := d.echoLetters.Get().(*echoLetter); ok {
		return m
	}
	m := &echoLetter{}
	m.hdr.Iov = &m.iovs[0]
	m.hdr.SetIovlen(len(m.iovs))
	m.iovs[0].Base = &m.head[0]
	m.iovs[0].SetLen(len(m.head))
	return m
}
