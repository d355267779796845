package user

import (
	"math"
	"math/bits"

	"gatewayd/flow"
)

// Of one user's bytes:
//
//	reserved  by Ready, the largest transfer that it allows     balance, pending
//	taken     by Took: the rest of the reservation is given back
//	moved     by Moved: charged, times the multiplier           usage, no longer pending
//	lost      with their flow: neither charged nor pending any more
//
// Before bytes are reserved, what is charged together with what pending bytes will cost
// has to be below every limit of traffic: the transfer that crosses one is whole, and
// the last.

// reserveLocked pays a transfer of n bytes in advance.
func (a *account) reserveLocked(l *Lease, d flow.Dir, n int) {
	a.bandwidth[d].spend(uint64(n))
	a.speed.spend(uint64(n))
	a.throttle.spend(uint64(n))
	l.pending[d] += n
	a.pending[d] += n
}

// returnLocked gives n bytes back that were reserved and not taken.
func (a *account) returnLocked(l *Lease, d flow.Dir, n int) {
	if n <= 0 {
		return
	}
	a.bandwidth[d].refund(uint64(n))
	a.speed.refund(uint64(n))
	a.throttle.refund(uint64(n))
	a.settleLocked(l, d, n)
}

// settleLocked says of n bytes that they moved or never will.
func (a *account) settleLocked(l *Lease, d flow.Dir, n int) {
	n = min(n, l.pending[d]) // taken while there was no limit: nothing is pending
	l.pending[d] -= n
	a.pending[d] -= n
}

// chargeLocked charges what moved since the last time, and notes a limit reached.
func (a *account) chargeLocked() {
	u := &a.total
	for d := range a.moved {
		total := a.moved[d].Load()
		n := total - a.counted[d]
		if n == 0 {
			continue
		}
		a.counted[d] = total
		if flow.Dir(d) == flow.Up {
			u.Up = saturate(u.Up, n)
			u.ChargedUp, u.CarryUp = cost(u.ChargedUp, u.CarryUp, n, a.policy.multiplier)
		} else {
			u.Down = saturate(u.Down, n)
			u.ChargedDown, u.CarryDown = cost(u.ChargedDown, u.CarryDown, n, a.policy.multiplier)
		}
		if !a.reached {
			a.stuck = 0
		}
	}
	a.reachLocked()
}

// reachLocked finds out whether the traffic is used up, and has it told once.
func (a *account) reachLocked() {
	reached := a.policy.reached([2]uint64{a.total.ChargedUp, a.total.ChargedDown})
	a.later.crossed = a.later.crossed || reached && !a.reached
	a.reached = reached
}

// spaceLocked reports that a transfer may start for all that the limits of traffic say.
func (a *account) spaceLocked() bool {
	p := a.policy
	if !p.block || !p.quota() {
		return true
	}
	u := &a.total
	var will [2]uint64
	will[flow.Up], _ = cost(u.ChargedUp, u.CarryUp, uint64(a.pending[flow.Up]), p.multiplier)
	will[flow.Down], _ = cost(u.ChargedDown, u.CarryDown, uint64(a.pending[flow.Down]), p.multiplier)
	return !p.reached(will)
}

// cost adds n bytes, times millionths, to charged bytes and the millionths carried.
func cost(charged, carry, n, millionths uint64) (uint64, uint64) {
	if millionths == one {
		return saturate(charged, n), carry
	}
	hi, lo := bits.Mul64(n, millionths)
	lo, c := bits.Add64(lo, carry, 0)
	if hi += c; hi >= one {
		return math.MaxUint64, 0
	}
	whole, carry := bits.Div64(hi, lo, one)
	return saturate(charged, whole), carry
}
