package outbound

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
	"gatewayd/netstack/wire"
)

// Ready receives until there is nothing more, or others should have their turn.
func (l *echoLink) Ready(ev epoll.Events) {
	l.receive(ev)
	if l.closed.Load() {
		l.closeIfQuiet()
	}
}

func (l *echoLink) receive(ev epoll.Events) {
	l.recv.Lock()
	defer l.recv.Unlock()
	if l.closed.Load() || !l.send.socket.open { // open is written with both locks held
		return
	}
	in := l.d.inbox()
	defer l.d.inboxes.Put(in)
	more := ev&unix.EPOLLERR != 0 && l.errors(in)
	if l.replies(in) || more {
		l.d.c.Poller.Rearm(int(l.send.socket.fd))
	}
}

// replies receives some rounds and reports whether there may be more.
func (l *echoLink) replies(in *inbox) (more bool) {
	for range rounds {
		n, errno := in.fetch(int(l.send.socket.fd))
		switch {
		case errno == unix.EAGAIN:
			return false
		case errno != 0: // of an ICMP message, returned once; the error queue tells
			continue
		}
		l.deliver(in, n)
		if l.closed.Load() {
			return false
		}
	}
	return true
}

// deliver hands the replies among n messages to the Receiver.
func (l *echoLink) deliver(in *inbox, n int) {
	kept := in.trains[:0]
	for i := range n {
		tr := flow.Train{Peer: l.dest}
		var ok bool
		tr.Seq, tr.Payload, ok = l.reply(in.payload[i*slotSize:][:in.msgs[i].n])
		if !ok || in.peer(i).Addr() != l.peer {
			l.d.c.Drops.Add(flow.DropFilter, 1)
			continue
		}
		in.read(i, &tr)
		kept = append(kept, tr)
	}
	if len(kept) > 0 && !l.closed.Load() {
		l.r.Receive(kept)
	}
}

// reply reads an echo reply with the link's id. A raw IPv4 socket gets the IP
// header too, and before anybody verified the checksum.
func (l *echoLink) reply(b []byte) (seq uint16, payload []byte, ok bool) {
	v4 := l.peer.Is4()
	if l.raw && v4 {
		if len(b) < wire.IPv4HeaderLen || len(b) < int(b[0]&0x0f)*4 {
			return 0, nil, false
		}
		b = b[int(b[0]&0x0f)*4:]
		if wire.Sum(b, 0) != 0xffff {
			return 0, nil, false
		}
	}
	if seq, ok = l.mine(b, echoReplyType(v4)); !ok {
		return 0, nil, false
	}
	return seq, b[wire.ICMPHeaderLen:], true
}

// mine reads the sequence number of an echo message with the link's id.
func (l *echoLink) mine(b []byte, kind uint8) (seq uint16, ok bool) {
	if len(b) < wire.ICMPHeaderLen || b[0] != kind || binary.BigEndian.Uint16(b[4:]) != l.local.Port() {
		return 0, false
	}
	return binary.BigEndian.Uint16(b[6:]), true
}

// errors takes messages from the error queue (ip(7), IP_RECVERR) and reports
// whether there may be more.
func (l *echoLink) errors(in *inbox) (more bool) {
	for range errRounds {
		h := &in.msgs[0].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(len(in.controls[0]))
		n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(l.send.socket.fd), uintptr(unsafe.Pointer(h)), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if errno != 0 {
			return false
		}
		if e, ok := l.icmpError(in, in.payload[:n]); ok && !l.closed.Load() {
			l.r.Unreachable(e)
		}
	}
	return true
}

// icmpError reads the message of the error queue in slot 0, which quotes the
// request that it is about. Raw sockets are told of everybody's requests to the
// peer; the kernel's own message, about one that was too big, quotes nothing, and
// comes for each time that the sending was tried.
func (l *echoLink) icmpError(in *inbox, quoted []byte) (e flow.ICMPError, ok bool) {
	in.control(0, func(level, kind int32, data []byte) {
		if level == unix.IPPROTO_IP && kind == unix.IP_RECVERR || level == unix.IPPROTO_IPV6 && kind == unix.IPV6_RECVERR {
			e, ok = l.send.socket.parse(data)
		}
	})
	if !ok {
		return e, false
	}
	if e.Offender.IsValid() {
		if e.Seq, ok = l.mine(quoted, echoRequestType(l.peer.Is4())); ok {
			e.Payload = quoted[wire.ICMPHeaderLen:]
		}
	} else {
		e.Seq, ok = l.takeTooBig()
	}
	e.Peer = netip.AddrPortFrom(l.dest.Addr.Addr(), 0)
	return e, ok
}

// takeTooBig is the sequence number of a request that was too big, once.
func (l *echoLink) takeTooBig() (seq uint16, ok bool) {
	l.send.Lock()
	defer l.send.Unlock()
	n := l.send.tooBig
	l.send.tooBig = -1
	return uint16(n), n >= 0
}
