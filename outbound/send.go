package outbound

// Stages of Send: find each train's peer and socket (towardLocked) → put its
// datagrams into the outbox, equal ones to the same peer into one message, which the
// kernel cuts up again (UDP_SEGMENT) → when the outbox is full, the socket changes or
// there is no more, one sendmmsg for all. Where the kernel refuses to segment, what
// was put together is sent one by one (outbox.go). Payloads stay the caller's.

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

// errUnnamed is a name that has no address yet.
var errUnnamed = errors.New("the name was not looked up yet")

// Send sends trains in order and never blocks. Datagrams toward ourselves, and
// ones that the socket has no room for, are dropped, counted and reported as
// taken. An error is the errno of the train that follows the ones taken.
func (l *link) Send(ts []flow.Train) (taken, moved int, err error) {
	l.send.Lock()
	defer l.send.Unlock()
	return l.sendLocked(ts)
}

func (l *link) sendLocked(ts []flow.Train) (taken, moved int, err error) {
	if l.closed.Load() {
		return 0, 0, net.ErrClosed
	}
	o := l.d.outbox()
	defer l.d.putAway(o)
	var to way
	var lost error // why there is no way
	for i := range ts {
		if i == 0 || ts[i].Peer != ts[i-1].Peer {
			to, lost = l.towardLocked(&ts[i].Peer)
		}
		if lost == nil {
			taken, err = o.put(to, i, &ts[i])
		} else if taken, err = o.post(); err == nil {
			taken = i
			err = l.unsendableLocked(o, &ts[i], to.peer, lost)
		}
		if err != nil {
			return taken, o.moved, err
		}
	}
	if taken, err = o.post(); err != nil {
		return taken, o.moved, err
	}
	return len(ts), o.moved, nil
}

// way is the socket that leads to a peer.
type way struct {
	s    *socket
	peer netip.AddrPort
}

// towardLocked finds the way to a destination. It changes nothing that matters if
// it is called again.
func (l *link) towardLocked(dest *flow.Destination) (to way, err error) {
	to.peer = netip.AddrPortFrom(dest.Addr.Addr().Unmap(), dest.Addr.Port())
	if dest.From == flow.FromClient {
		var ok bool
		if to.peer, ok = l.namesLocked().peerOf(*dest); !ok {
			return to, errUnnamed
		}
	}
	if err = l.d.approve(&l.send.allowed, to.peer.Addr(), l.allowHost); err != nil {
		return to, err
	}
	if l.send.peers != nil {
		l.send.peers.add(to.peer)
	}
	to.s, err = l.socketLocked(to.peer.Addr().Is4(), netip.AddrPort{})
	return to, err
}

// unsendableLocked keeps or drops a train that has no way now, or returns why that
// is the sender's to know.
func (l *link) unsendableLocked(o *outbox, tr *flow.Train, peer netip.AddrPort, err error) error {
	switch err {
	case errUnnamed:
		o.moved += l.lookUpLocked(tr)
	case error(errSelf):
		l.d.c.Drops.Add(flow.DropSelf, tr.Count())
	default:
		return l.sendError(peer, err)
	}
	return nil
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
