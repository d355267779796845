package user

import (
	"math"
	"math/bits"
	"time"
)

// bucket is the balance of one rate. A transfer may start while it is not negative, and
// is paid whole, even past zero: the long-run rate does not depend on sizes. Idle time
// banks one burst at most. Times are ns on the account's clock.
//
// A bucket without a rate is never in debt, and nothing is paid from it.
type bucket struct {
	rate         uint64 // bytes/s; 0: unlimited
	burst        uint64 // bytes that credit goes up to
	credit, debt uint64 // bytes, one of the two is 0
	part         uint64 // billionths of a byte, earned beyond credit or less debt
	last         int64  // when it was earned up to
}

// bandwidthBurst is what a direction's rate may bank: a tenth of a second, but a byte.
func bandwidthBurst(rate uint64) uint64 {
	n := rate / 10
	if rate%10 != 0 {
		n++
	}
	return n
}

// speedBurst is what a speed may bank: one second.
func speedBurst(rate uint64) uint64 { return rate }

// earn adds what the time until now is worth.
func (b *bucket) earn(now int64) {
	d := now - b.last
	if b.rate == 0 || d <= 0 {
		return
	}
	b.last = now
	if b.credit == b.burst {
		return
	}
	hi, lo := bits.Mul64(b.rate, uint64(d))
	lo, carry := bits.Add64(lo, b.part, 0)
	n := uint64(math.MaxUint64)
	if hi += carry; hi < uint64(time.Second) {
		n, b.part = bits.Div64(hi, lo, uint64(time.Second))
	}
	b.refund(n)
	if b.credit == b.burst {
		b.part = 0
	}
}

// spend pays n bytes.
func (b *bucket) spend(n uint64) {
	if b.rate == 0 {
		return
	}
	fromCredit := min(n, b.credit)
	b.credit -= fromCredit
	b.debt = saturate(b.debt, n-fromCredit)
}

// refund gives n bytes back.
func (b *bucket) refund(n uint64) {
	if b.rate == 0 {
		return
	}
	paid := min(n, b.debt)
	b.debt -= paid
	b.credit += min(n-paid, b.burst-b.credit)
}

// wait is how long after the last earn the debt is paid, at most a second.
func (b *bucket) wait() time.Duration {
	if b.debt == 0 {
		return 0
	}
	if b.debt > b.rate {
		return time.Second
	}
	hi, lo := bits.Mul64(b.debt, uint64(time.Second))
	lo, borrow := bits.Sub64(lo, b.part, 0)
	lo, carry := bits.Add64(lo, b.rate-1, 0) // up
	n, _ := bits.Div64(hi-borrow+carry, lo, b.rate)
	return time.Duration(n)
}

// change gives the bucket another rate from now on: what was earned at the old one
// stays, debt in bytes, and credit up to the new burst. Without a rate there is no debt;
// a new limit begins with a full burst.
func (b *bucket) change(rate, burst uint64, now int64) {
	switch {
	case rate == b.rate:
	case rate == 0:
		*b = bucket{}
	case b.rate == 0:
		*b = bucket{rate: rate, burst: burst, credit: burst, last: now}
	default:
		b.earn(now)
		b.rate, b.burst, b.credit = rate, burst, min(b.credit, burst)
	}
}

// saturate is a + b, or the largest number.
func saturate(a, b uint64) uint64 {
	if sum, carry := bits.Add64(a, b, 0); carry == 0 {
		return sum
	}
	return math.MaxUint64
}
