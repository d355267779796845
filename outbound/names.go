package outbound

import (
	"context"
	"net/netip"
	"slices"

	"gatewayd/flow"
)

const (
	maxNames   = 64 // names that a link knows the addresses of
	maxUnnamed = 16 // trains that wait for a look-up
)

// names are the destinations of a link that the client knows by name alone: its
// datagrams go to the address that the name had first, and what comes from there
// comes from the address that the client used. Guarded by the link's send lock.
type names struct {
	known   []named // oldest first
	looking bool    // one goroutine looks up what waits
	waiting []flow.Train
	ctx     context.Context // ends with the link
	stop    context.CancelFunc
}

type named struct {
	dest flow.Destination
	peer netip.AddrPort
}

func (l *link) namesLocked() *names {
	if l.send.names == nil {
		n := &names{}
		n.ctx, n.stop = context.WithCancel(context.Background())
		l.send.names = n
		l.plain.Store(false)
	}
	return l.send.names
}

func (n *names) learn(dest flow.Destination, peer netip.AddrPort) {
	if len(n.known) == maxNames {
		n.known = slices.Delete(n.known, 0, 1)
	}
	n.known = append(n.known, named{dest, peer})
}

// peerOf is the address that dest's name stands for.
func (n *names) peerOf(dest flow.Destination) (netip.AddrPort, bool) {
	for i := range n.known {
		if n.known[i].dest == dest {
			return n.known[i].peer, true
		}
	}
	return netip.AddrPort{}, false
}

// destOf is what the client calls peer.
func (n *names) destOf(peer netip.AddrPort) flow.Destination {
	for i := range slices.Backward(n.known) {
		if n.known[i].peer == peer {
			return n.known[i].dest
		}
	}
	return flow.Destination{Addr: peer}
}

// lookUpLocked keeps a train until its peer's name has an address. When too many
// wait, the newest is dropped. What waits counts as moved: it leaves when nobody
// asks any more.
func (l *link) lookUpLocked(tr *flow.Train) (moved int) {
	n := l.namesLocked()
	if len(n.waiting) == maxUnnamed {
		l.d.c.Drops.Add(flow.DropQueueFull, tr.Count())
		return 0
	}
	kept := *tr
	kept.Payload = slices.Clone(tr.Payload)
	n.waiting = append(n.waiting, kept)
	if !n.looking {
		n.looking = true
		go l.lookUp()
	}
	return len(tr.Payload)
}

// lookUp resolves one name after the other until nothing waits or the link is
// closed, which ends the look-up under way.
func (l *link) lookUp() {
	for {
		l.send.Lock()
		n := l.send.names
		if len(n.waiting) == 0 || l.closed.Load() {
			n.looking, n.waiting = false, nil
			l.send.Unlock()
			return
		}
		dest := n.waiting[0].Peer
		l.send.Unlock()

		f := flow.Flow{Network: flow.UDP, Dest: dest, AllowHost: l.allowHost}
		ctx, cancel := context.WithTimeout(n.ctx, l.d.c.DialTimeout)
		addrs, err := l.d.resolve(ctx, &f)
		cancel()
		l.release(dest, addrs, err)
	}
}

// release sends what waited for dest, or drops it.
func (l *link) release(dest flow.Destination, addrs []netip.Addr, err error) {
	l.send.Lock()
	defer l.send.Unlock()
	n := l.send.names
	if err == nil {
		n.learn(dest, netip.AddrPortFrom(addrs[0], dest.Addr.Port()))
	}
	n.waiting = slices.DeleteFunc(n.waiting, func(tr flow.Train) bool {
		if tr.Peer != dest {
			return false
		}
		failed := err
		if failed == nil {
			_, _, failed = l.sendLocked([]flow.Train{tr})
		}
		if failed != nil {
			l.d.c.Drops.Add(flow.DropSendFailed, tr.Count())
		}
		return true
	})
}
