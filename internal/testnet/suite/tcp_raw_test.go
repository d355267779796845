package suite

import (
	"encoding/binary"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Flags of a TCP header (RFC 9293, 3.1).
const (
	tcpSYN = 0x02
	tcpRST = 0x04
	tcpACK = 0x10
	tcpECE = 0x40
	tcpCWR = 0x80
)

const tcpHeader = 20 // bytes, without options

// answerTo sends a SYN with the given flags from a raw socket, and returns the
// flags of the first segment that comes back. It blocks for at most 2 s.
func answerTo(src, dst net.IP, sport, dport uint16, flags byte) (byte, error) {
	v4 := dst.To4() != nil
	family := unix.AF_INET6
	if v4 {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return 0, fmt.Errorf("raw socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2}); err != nil {
		return 0, err
	}
	seg := make([]byte, tcpHeader)
	binary.BigEndian.PutUint16(seg[0:], sport)
	binary.BigEndian.PutUint16(seg[2:], dport)
	binary.BigEndian.PutUint32(seg[4:], 0x12345678)
	seg[12], seg[13] = tcpHeader/4<<4, flags
	binary.BigEndian.PutUint16(seg[14:], 0xffff)
	binary.BigEndian.PutUint16(seg[16:], tcpChecksum(src, dst, seg))
	if err := unix.Sendto(fd, seg, 0, rawAddr(dst, v4)); err != nil {
		return 0, fmt.Errorf("send: %w", err)
	}
	for buf := make([]byte, 2048); ; {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return 0, fmt.Errorf("no answer to a SYN with flags %#x: %w", flags, err)
		}
		h := buf[:n]
		if v4 { // raw IPv4 sockets give the IP header too (raw(7))
			h = h[min(int(h[0]&15)*4, n):]
		}
		if len(h) >= tcpHeader && binary.BigEndian.Uint16(h) == dport && binary.BigEndian.Uint16(h[2:]) == sport {
			return h[13], nil
		}
	}
}

func rawAddr(ip net.IP, v4 bool) unix.Sockaddr {
	if v4 {
		return &unix.SockaddrInet4{Addr: [4]byte(ip.To4())}
	}
	return &unix.SockaddrInet6{Addr: [16]byte(ip)}
}

// tcpChecksum is the checksum over pseudo-header and segment.
func tcpChecksum(src, dst net.IP, seg []byte) uint16 {
	if src.To4() != nil {
		src, dst = src.To4(), dst.To4()
	}
	sum := uint32(unix.IPPROTO_TCP) + uint32(len(seg))
	for _, b := range [][]byte{src, dst, seg} {
		for i := 0; i+1 < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
