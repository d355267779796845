package netstack

import (
	"net/netip"
	"syscall"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
	"github.com/sagernet/gvisor/pkg/waiter"
)

// Conn is an accepted connection of a client. It is the client's half of a
// relay: Relay joins it to an outbound stream. Until then only Abort may be called.
type Conn struct {
	relay
	stack *Stack
	tuple tuple
	ep    *tcp.Endpoint
	queue waiter.Queue
	entry waiter.Entry
	sent  sentCounter

	silence silence
}

// Client is the client's address, and Dest the one that it dialled.
func (c *Conn) Client() netip.AddrPort { return c.tuple.client }

// Dest is the address that the client dialled.
func (c *Conn) Dest() netip.AddrPort { return c.tuple.dest }

// Abort resets the client. It must not be called after Relay.
func (c *Conn) Abort() { c.ep.Abort() }

func (c *Conn) setOptions(k Keepalive) {
	c.ep.LockUser() // data that came with the handshake may be being acknowledged
	c.ep.SetOwner(c)
	c.ep.UnlockUser()
	if k.Idle == 0 {
		return
	}
	idle, interval := tcpip.KeepaliveIdleOption(k.Idle), tcpip.KeepaliveIntervalOption(k.Interval)
	c.ep.SetSockOpt(&idle)                                   //nolint:errcheck // fail for no valid value
	c.ep.SetSockOpt(&interval)                               //nolint:errcheck
	c.ep.SetSockOptInt(tcpip.KeepaliveCountOption, k.Probes) //nolint:errcheck
	c.ep.SocketOptions().SetKeepAlive(true)
}

// KUID makes a Conn the owner of its endpoint's packets, so that the link can
// tell whose they are. The user it would name is not used.
func (c *Conn) KUID() uint32 { return 0 }

// KGID is the group to KUID.
func (c *Conn) KGID() uint32 { return 0 }

// errorOf turns what gVisor says into the errno of a kernel socket.
func errorOf(err tcpip.Error) error {
	switch err.(type) {
	case nil:
		return nil
	case *tcpip.ErrTimeout:
		return syscall.ETIMEDOUT
	case *tcpip.ErrHostUnreachable, *tcpip.ErrHostDown:
		return syscall.EHOSTUNREACH
	case *tcpip.ErrNetworkUnreachable:
		return syscall.ENETUNREACH
	}
	return syscall.ECONNRESET
}
