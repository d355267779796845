package outbound

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

const (
	inboxSize = 16    // messages received at once; with UDP_GRO each may hold a train
	rounds    = 4     // receives of a link before others have their turn
	slotSize  = 65536 // bytes of each; untouched pages of it are not memory
	errRounds = 16    // messages of the error queue taken at once
)

// inbox is room for received messages. It is used by one poller's goroutine at a
// time and pooled, so that idle links hold none.
type inbox struct {
	msgs     [inboxSize]mmsghdr
	iovs     [inboxSize]unix.Iovec
	names    [inboxSize]unix.RawSockaddrInet6
	controls [inboxSize][128]byte
	trains   [inboxSize]flow.Train
	payload  []byte
}

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

func (d *Direct) inbox() *inbox {
	if in, ok := d.inboxes.Get().(*inbox); ok {
		return in
	}
	in := &inbox{payload: make([]byte, inboxSize*slotSize)}
	for i := range in.msgs {
		in.iovs[i].Base = &in.payload[i*slotSize]
		in.iovs[i].SetLen(slotSize)
		h := &in.msgs[i].hdr
		h.Name = (*byte)(unsafe.Pointer(&in.names[i]))
		h.Iov = &in.iovs[i]
		h.SetIovlen(1)
		h.Control = &in.controls[i][0]
	}
	return in
}

// Ready receives until there is nothing more, or others should have their turn.
func (s *socket) Ready(ev epoll.Events) {
	l := s.l
	s.receive(ev)
	if l.closed.Load() {
		l.closeIfQuiet()
	}
}

func (s *socket) receive(ev epoll.Events) {
	l := s.l
	l.recv.Lock()
	defer l.recv.Unlock()
	if l.closed.Load() || !s.open {
		return
	}
	in := l.d.inbox()
	defer l.d.inboxes.Put(in)
	more := ev&unix.EPOLLERR != 0 && s.errors(in)
	if s.datagrams(in) || more {
		l.d.c.Poller.Rearm(int(s.fd))
	}
}

// datagrams receives some rounds and reports whether there may be more.
func (s *socket) datagrams(in *inbox) (more bool) {
	for range rounds {
		n, errno := in.fetch(int(s.fd))
		switch {
		case errno == unix.EAGAIN:
			return false
		case errno != 0: // of an ICMP message, returned once; the error queue tells
			continue
		}
		s.deliver(in, n)
		if s.l.closed.Load() {
			return false
		}
		if n < inboxSize {
			return false // whatever comes later is a new edge
		}
	}
	return true
}

// fetch is the system call.
func (in *inbox) fetch(fd int) (int, unix.Errno) {
	for i := range in.msgs {
		in.msgs[i].hdr.Namelen = unix.SizeofSockaddrInet6
		in.msgs[i].hdr.SetControllen(len(in.controls[i]))
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&in.msgs)), inboxSize, unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// deliver hands n messages to the Receiver, without those that filtering keeps out.
func (s *socket) deliver(in *inbox, n int) {
	kept := in.trains[:0]
	for i := range n {
		tr := flow.Train{Payload: in.payload[i*slotSize:][:in.msgs[i].n]}
		in.read(i, &tr)
		peer := in.peer(i)
		var ok bool
		if tr.Peer, ok = s.l.admit(peer); !ok {
			s.l.d.c.Drops.Add(flow.DropFilter, tr.Count())
			continue
		}
		kept = append(kept, tr)
	}
	if len(kept) > 0 && !s.l.closed.Load() {
		s.l.r.Receive(kept)
	}
}

// admit is what the client calls peer, and whether peer may send to it. As a rule it
// does not wait for what is just being sent.
func (l *link) admit(peer netip.AddrPort) (flow.Destination, bool) {
	if l.plain.Load() {
		return flow.Destination{Addr: peer}, true
	}
	l.send.Lock()
	defer l.send.Unlock()
	if l.send.peers != nil && !l.send.peers.has(peer) {
		return flow.Destination{}, false
	}
	if l.send.names != nil {
		return l.send.names.destOf(peer), true
	}
	return flow.Destination{Addr: peer}, true
}

// peer is who sent message i.
func (in *inbox) peer(i int) netip.AddrPort {
	name := &in.names[i]
	port := networkOrder(name.Port)
	if name.Family == unix.AF_INET {
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(name.Addr).Unmap(), port)
}

// read takes what the control messages of message i tell about tr.
func (in *inbox) read(i int, tr *flow.Train) {
	in.control(i, func(level, kind int32, data []byte) {
		switch {
		case level == unix.IPPROTO_UDP && kind == udpGRO && len(data) >= 4:
			if size := int(binary.NativeEndian.Uint32(data)); size < len(tr.Payload) {
				tr.Segment = size
			}
		case level == unix.IPPROTO_IP && kind == unix.IP_TOS && len(data) >= 1:
			tr.TClass = data[0]
		case level == unix.IPPROTO_IPV6 && kind == unix.IPV6_TCLASS && len(data) >= 4:
			tr.TClass = uint8(binary.NativeEndian.Uint32(data))
		}
	})
}

// control calls visit with each control message of message i.
func (in *inbox) control(i int, visit func(level, kind int32, data []byte)) {
	rest := in.controls[i][:min(int(in.msgs[i].hdr.Controllen), len(in.controls[i]))]
	for len(rest) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&rest[0]))
		size := int(h.Len)
		if size < unix.CmsgLen(0) || size > len(rest) {
			return
		}
		visit(h.Level, h.Type, rest[unix.CmsgLen(0):size])
		rest = rest[min(unix.CmsgSpace(size-unix.CmsgLen(0)), len(rest)):]
	}
}

// Origins of an extended error (linux/errqueue.h).
const (
	originLocal = 1
	originICMP  = 2
	originICMP6 = 3
)

// errors takes messages from the error queue (ip(7), IP_RECVERR) and reports
// whether there may be more.
func (s *socket) errors(in *inbox) (more bool) {
	var last flow.ICMPError
	for range errRounds {
		h := &in.msgs[0].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(len(in.controls[0]))
		n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(s.fd), uintptr(unsafe.Pointer(h)), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if errno != 0 {
			return false
		}
		e, ok := s.icmpError(in)
		if ok && !s.l.closed.Load() && !(tooBigHere(&e) && tooBigHere(&last) && e.Peer == last.Peer) {
			e.Payload = in.payload[:min(int(n), slotSize)]
			s.l.r.Unreachable(e)
		}
		last = e
	}
	return true
}

// tooBigHere reports the kernel's own message about a datagram that does not fit
// the device. It comes for each attempt to send, of which write makes two.
func tooBigHere(e *flow.ICMPError) bool { return e.MTU > 0 && !e.Offender.IsValid() }

// icmpError reads the message of the error queue in slot 0.
func (s *socket) icmpError(in *inbox) (e flow.ICMPError, ok bool) {
	peer := in.peer(0)
	in.control(0, func(level, kind int32, data []byte) {
		if level == unix.IPPROTO_IP && kind == unix.IP_RECVERR || level == unix.IPPROTO_IPV6 && kind == unix.IPV6_RECVERR {
			e, ok = s.parse(data)
		}
	})
	if !ok {
		return e, false
	}
	e.Peer = s.named(peer)
	return e, true
}

// parse reads struct sock_extended_err and the offender's address behind it.
func (s *socket) parse(data []byte) (e flow.ICMPError, ok bool) {
	if len(data) < 16 {
		return e, false
	}
	errno, info := unix.Errno(binary.NativeEndian.Uint32(data)), binary.NativeEndian.Uint32(data[8:])
	e.Type, e.Code = data[5], data[6]
	if errno == unix.EMSGSIZE {
		e.MTU = int(info)
	}
	switch data[4] {
	case originLocal:
		if errno != unix.EMSGSIZE {
			return e, false
		}
		if e.Type, e.Code = 3, 4; !s.v4 {
			e.Type, e.Code = 2, 0
		}
	case originICMP, originICMP6:
		e.Offender = offender(data[16:])
	default:
		return e, false
	}
	return e, true
}

func offender(sa []byte) netip.Addr {
	if len(sa) < unix.SizeofSockaddrInet4 {
		return netip.Addr{}
	}
	switch binary.NativeEndian.Uint16(sa) {
	case unix.AF_INET:
		return netip.AddrFrom4([4]byte(sa[4:8]))
	case unix.AF_INET6:
		if len(sa) >= 24 {
			return netip.AddrFrom16([16]byte(sa[8:24])).Unmap()
		}
	}
	return netip.Addr{}
}

// named is what the client calls the peer of an error. The kernel's own message
// about a datagram that was too big does not tell the port.
func (s *socket) named(peer netip.AddrPort) netip.AddrPort {
	s.l.send.Lock()
	defer s.l.send.Unlock()
	if peer.Port() == 0 && s.tooBig.Addr() == peer.Addr() {
		peer = s.tooBig
	}
	if s.l.send.names != nil {
		return s.l.send.names.destOf(peer).Addr
	}
	return peer
}
