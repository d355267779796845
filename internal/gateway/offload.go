package gateway

import (
	"context"
	"time"

	"gatewayd/netstack"
	"gatewayd/tun"
)

// Some drivers behind a TUN device lose or spoil the super-packets that they are
// given to cut. What a client then gets of its flows is what is sent again, in
// plain packets: nearly every byte that left in a super-packet. A link that loses
// packets by itself loses a few in a hundred, and a client that vanished has its
// first bytes sent again and no others.
const (
	offloadLook = 500 * time.Millisecond
	offloadFade = 16 // looks after which half of what was seen is forgotten
	manyLosses  = 8  // packets sent again
	manyLossy   = 4  // looks that found some
	lostPart    = 2  // of the bytes in super-packets that were lost, as 1/lostPart
)

// superWatch tells whether the super-packets of a device arrive. It is used by one
// goroutine.
type superWatch struct {
	before             netstack.SuperPackets
	sent, lost, losses uint64 // of late
	lossy, looks       int
}

// look takes the present numbers, and reports whether super-packets are to be
// given up.
func (w *superWatch) look(now netstack.SuperPackets) bool {
	w.sent += now.Sent - w.before.Sent
	w.lost += now.Lost - w.before.Lost
	if d := now.Losses - w.before.Losses; d > 0 {
		w.losses += d
		w.lossy++
	}
	w.before = now
	bad := w.losses >= manyLosses && w.lossy >= manyLossy && w.sent > 0 && w.lost >= w.sent/lostPart
	if w.looks++; w.looks%offloadFade == 0 {
		w.sent, w.lost, w.losses, w.lossy = w.sent/2, w.lost/2, w.losses/2, w.lossy/2
	}
	return bad
}

// watchOffloads gives up the offloads of devices whose super-packets get lost,
// where they are automatic, until ctx ends.
func (g *Gateway) watchOffloads(ctx context.Context) error {
	watches := map[*inbound]*superWatch{}
	for _, in := range g.inbounds {
		if in.dev.conf.Offload == tun.OffloadAuto && in.dev.CanGSO() {
			watches[in] = new(superWatch)
		}
	}
	tick := time.NewTicker(offloadLook)
	defer tick.Stop()
	for len(watches) > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		for in, w := range watches {
			if !w.look(in.stack.SuperPackets()) {
				continue
			}
			delete(watches, in)
			err := in.dev.giveUpOffloads()
			g.log.Warn("offloads were turned off: super-packets to clients get lost, as by the driver of their link",
				"device", in.dev.Name(), "sent", w.sent, "lost", w.lost)
			if err != nil { // those of clients still come
				g.log.Error("the kernel's offloads stay on", "err", err)
			}
		}
	}
	<-ctx.Done()
	return nil
}
