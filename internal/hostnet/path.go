package hostnet

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// MTUToward is the MTU of this host's route to an IPv6 address, in bytes: the link's,
// or a smaller one of the route or that a router told of. 0 means that there is no
// route. It asks a socket, which takes some microseconds and does not block.
func MTUToward(to netip.Addr) int {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrInet6{Port: anyPort, Addr: to.As16()}); err != nil {
		return 0
	}
	mtu, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU)
	if err != nil {
		return 0
	}
	return mtu
}

const anyPort = 9 // nothing is sent there
