package gateway

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/shrink"
	"gatewayd/user"
)

// unowned counts what devices move while they have no user, between ticks. A device is
// in it while it has a live flow or something to tell.
type unowned struct {
	mu   sync.Mutex
	of   map[string]*deviceTraffic // by name; guarded by mu
	peak int                       // that of had; guarded by mu
}

// deviceTraffic is one device's.
type deviceTraffic struct {
	of    *unowned
	moved [2]atomic.Uint64 // payload bytes since the last tick
	real  atomic.Bool      // whoever sends from there gets what goes there
	flows int              // live; guarded by of.mu
}

// open counts one more flow of a device.
func (u *unowned) open(device string) *deviceTraffic {
	u.mu.Lock()
	defer u.mu.Unlock()
	t := u.of[device]
	if t == nil {
		t = &deviceTraffic{of: u}
		if u.of == nil {
			u.of = make(map[string]*deviceTraffic)
		}
		u.of[device] = t
	}
	t.flows++
	return t
}

// close is open's end; what was moved is told by the next tick.
func (t *deviceTraffic) close() {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.flows--
}

// datagrams counts bytes of datagrams. Who goes on after an answer seems to have got it.
func (t *deviceTraffic) datagrams(d flow.Dir, n int) {
	t.add(d, n, d == flow.Up && t.moved[flow.Down].Load() > 0)
}

// stream counts bytes of a stream. They move once its handshake is complete.
func (t *deviceTraffic) stream(d flow.Dir, n int) { t.add(d, n, true) }

func (t *deviceTraffic) add(d flow.Dir, n int, proof bool) {
	if n <= 0 {
		return
	}
	if proof && !t.real.Load() { // to store it each time would cost every processor its copy
		t.real.Store(true)
	}
	t.moved[d].Add(uint64(n))
}

// drain tells what each device moved since the last call. Flows open and close meanwhile.
// An address that proved nothing may be forged, and answers come to forged ones too: what
// it sent is nobody's.
func (u *unowned) drain(tell func(device string, up, down uint64)) {
	for device, moved := range u.take() {
		tell(device, moved[flow.Up], moved[flow.Down])
	}
}

func (u *unowned) take() map[string][2]uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	moved := make(map[string][2]uint64)
	for device, t := range u.of {
		if t.real.Load() || strings.HasPrefix(device, "mac:") {
			if up, down := t.moved[flow.Up].Swap(0), t.moved[flow.Down].Swap(0); up|down != 0 {
				moved[device] = [2]uint64{up, down}
			}
		}
		if t.flows == 0 {
			delete(u.of, device)
		}
	}
	u.of = shrink.Map(u.of, &u.peak)
	return moved
}

// outboundTraffic is what outbounds had moved by the last tick.
type outboundTraffic map[string][2]uint64

// count gives the ledger what moved since the last tick.
func (g *Gateway) count(last outboundTraffic, now time.Time) {
	g.unowned.drain(func(device string, up, down uint64) { g.ledger.Add(user.ForDevice, device, up, down, now) })
	for tag, s := range g.tracker.Snapshot().Outbounds {
		was := last[tag]
		if up, down := s.Up-was[flow.Up], s.Down-was[flow.Down]; up|down != 0 {
			g.ledger.Add(user.ForOutbound, tag, up, down, now)
		}
		last[tag] = [2]uint64{s.Up, s.Down}
	}
}
