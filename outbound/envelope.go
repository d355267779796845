package outbound

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// envelope is what a message needs besides its header and payload.
type envelope struct {
	_       [0]uint64 // aligns control, which holds struct cmsghdr
	control [64]byte
	name    unix.RawSockaddrInet6 // either family's
}

// address writes whom a message is for.
func (m *envelope) address(h *unix.Msghdr, peer netip.AddrPort) {
	h.Name = (*byte)(unsafe.Pointer(&m.name))
	if peer.Addr().Is4() {
		name := (*unix.RawSockaddrInet4)(unsafe.Pointer(&m.name))
		name.Family = unix.AF_INET
		name.Port = networkOrder(peer.Port())
		name.Addr = peer.Addr().As4()
		h.Namelen = unix.SizeofSockaddrInet4
		return
	}
	m.name = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: networkOrder(peer.Port()), Addr: peer.Addr().As16()}
	h.Namelen = unix.SizeofSockaddrInet6
}

// networkOrder is port as a sockaddr holds it.
func networkOrder(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// controls writes the control messages that are needed.
func (m *envelope) controls(h *unix.Msghdr, segment int, tclass uint8, v4 bool) {
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
	h.Control = nil
	if n > 0 {
		h.Control = &m.control[0]
	}
	h.SetControllen(n)
}

// header writes one message's header and returns the room that it takes.
func (m *envelope) header(at int, level, kind int32, size int) int {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&m.control[at]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(size))
	return unix.CmsgSpace(size)
}
