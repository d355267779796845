package outbound

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// Family says which IP versions an outbound uses.
type Family uint8

// The families.
const (
	AnyFamily Family = 0
	IPv4Only  Family = 4
	IPv6Only  Family = 6
)

// Filtering says whose datagrams a link lets in (RFC 4787, section 5).
type Filtering uint8

// The filterings. With the last two only peers that were sent to are let in, the
// 512 most recent ones at least and 1,024 at most for each link.
const (
	EndpointIndependent     Filtering = iota // everybody's
	AddressDependent                         // those of addresses sent to
	AddressAndPortDependent                  // those of addresses and ports sent to
)

// Keepalive is how a stream notices a dead far side. Zero values leave the
// system's.
type Keepalive struct {
	Idle     time.Duration // whole seconds
	Interval time.Duration // whole seconds
	Probes   int
}

// Resolver looks names up; *net.Resolver is one.
type Resolver interface {
	// LookupNetIP returns the addresses of host; network is "ip", "ip4" or "ip6".
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// DirectConfig is what a Direct is made of.
type DirectConfig struct {
	Name             string // in errors; empty: "direct"
	Interface        string // leave through this device; empty: any
	Source4, Source6 netip.Addr
	Mark             uint32 // SO_MARK; 0: none
	Family           Family
	DialTimeout      time.Duration // of a stream, look-up included; 0: 10 s
	Keepalive        Keepalive
	Self             func(netip.Addr) bool // an address of this host, or otherwise never to be reached; may be nil
	SelfGen          func() uint64         // changes when answers of Self do; nil: never
	Filtering        Filtering
	Resolver         Resolver // nil: net.DefaultResolver
	Poller           *epoll.Poller
	Drops            *flow.Drops
}

// Direct is the outbound through the host's own sockets.
type Direct struct {
	c        DirectConfig
	timers   sync.Pool // *time.Timer, of dials
	outboxes sync.Pool // *outbox, to send with
	inboxes  sync.Pool // *inbox, to receive with

	echoLetters sync.Pool // *echoLetter, to send echo requests with
	echoes      echoIDs
}

// NewDirect checks c and makes a Direct. It starts nothing.
func NewDirect(c DirectConfig) (*Direct, error) {
	if c.Name == "" {
		c.Name = "direct"
	}
	switch {
	case c.Poller == nil || c.Drops == nil:
		return nil, fmt.Errorf("outbound %s: needs a poller and drop counters", c.Name)
	case c.Source4.IsValid() && !c.Source4.Is4():
		return nil, fmt.Errorf("outbound %s: source %v is not an IPv4 address", c.Name, c.Source4)
	case c.Source6.IsValid() && (!c.Source6.Is6() || c.Source6.Is4In6()):
		return nil, fmt.Errorf("outbound %s: source %v is not an IPv6 address", c.Name, c.Source6)
	case len(c.Interface) >= unix.IFNAMSIZ:
		return nil, fmt.Errorf("outbound %s: interface name %q is too long", c.Name, c.Interface)
	case c.Family != AnyFamily && c.Family != IPv4Only && c.Family != IPv6Only:
		return nil, fmt.Errorf("outbound %s: family %d: want 4, 6 or 0 for any", c.Name, c.Family)
	}
	if c.DialTimeout <= 0 {
		c.DialTimeout = 10 * time.Second
	}
	if c.Resolver == nil {
		c.Resolver = net.DefaultResolver
	}
	return &Direct{c: c}, nil
}

// takes reports whether the outbound may use addr's family.
func (d *Direct) takes(addr netip.Addr) bool {
	switch d.c.Family {
	case IPv4Only:
		return addr.Is4()
	case IPv6Only:
		return !addr.Is4()
	}
	return true
}

// source is the address to leave from toward v4 or v6 peers; invalid: any.
func (d *Direct) source(v4 bool) netip.Addr {
	if v4 {
		return d.c.Source4
	}
	return d.c.Source6
}

// socket opens a non-blocking socket with the mark and device of the outbound.
func (d *Direct) socket(v4 bool, kind int) (int, error) { return d.socketOf(v4, kind, 0) }

// socketOf is socket for an IP protocol that is not the kind's own.
func (d *Direct) socketOf(v4 bool, kind, proto int) (int, error) {
	domain := unix.AF_INET6
	if v4 {
		domain = unix.AF_INET
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	if err := d.mark(fd); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (d *Direct) mark(fd int) error {
	if d.c.Mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(int32(d.c.Mark))); err != nil {
			return fmt.Errorf("mark %#x: %w", d.c.Mark, err)
		}
	}
	if d.c.Interface != "" {
		if err := unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, d.c.Interface); err != nil {
			return fmt.Errorf("interface %s: %w", d.c.Interface, err)
		}
	}
	return nil
}

// resolve returns the addresses that f may be sent to, in the order to try them.
// It blocks while a name is looked up.
func (d *Direct) resolve(ctx context.Context, f *flow.Flow) ([]netip.Addr, error) {
	network := "ip"
	switch d.c.Family {
	case IPv4Only:
		network = "ip4"
	case IPv6Only:
		network = "ip6"
	}
	addrs, err := d.c.Resolver.LookupNetIP(ctx, network, f.Dest.Domain)
	if err != nil {
		return nil, err
	}
	return d.allowed(f, addrs)
}

// allowed keeps the addresses that may be reached; none left is an error. Refused
// dials are counted; datagrams are by who drops them.
func (d *Direct) allowed(f *flow.Flow, addrs []netip.Addr) ([]netip.Addr, error) {
	var kept []netip.Addr
	err := error(errNoAddress)
	for _, addr := range addrs {
		addr = addr.Unmap()
		if refused := d.check(addr, f.AllowHost); refused != nil {
			err = refused
		} else {
			kept = append(kept, addr)
		}
	}
	if len(kept) > 0 {
		return kept, nil
	}
	if errors.Is(err, errSelf) && f.Network == flow.TCP {
		d.c.Drops.Add(flow.DropSelf, 1)
	}
	return nil, err
}

// errNoAddress is a name without an address of a family that is used.
var errNoAddress = &net.DNSError{Err: "no address of a family in use", IsNotFound: true}

func sockaddr(ap netip.AddrPort) unix.Sockaddr {
	if ap.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
}

// localOf is the address that fd is bound to, or the zero value.
func localOf(fd int) netip.AddrPort {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
