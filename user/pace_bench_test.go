package user

import (
	"fmt"
	"math"
	"testing"

	"gatewayd/flow"
)

// benchPolicies are of users whom their limits do not hold up.
func benchPolicies() map[string]*policy {
	return map[string]*policy{
		"unlimited": unlimited(),
		"quota":     limited(func(p *policy) { p.total, p.block = 1<<62, true }),
		"bandwidth": limited(func(p *policy) { p.bandwidth = [2]uint64{math.MaxUint64, math.MaxUint64} }),
		"all": limited(func(p *policy) {
			p.total, p.block, p.speed, p.throttle = 1<<62, true, math.MaxUint64, math.MaxUint64
			p.bandwidth = [2]uint64{math.MaxUint64, math.MaxUint64}
		}),
		"multiplied": limited(func(p *policy) {
			p.total, p.block, p.multiplier, p.speed, p.throttle = 1<<62, true, 3*one/2, math.MaxUint64, math.MaxUint64
			p.bandwidth = [2]uint64{math.MaxUint64, math.MaxUint64}
		}),
	}
}

// BenchmarkMeter is what an account takes of each transfer: to be compared with none.
func BenchmarkMeter(b *testing.B) {
	for name, p := range benchPolicies() {
		b.Run(name, func(b *testing.B) {
			l := mustAdmit(b, newTestAccount(p))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := l.Ready(flow.Up, nil); err != nil {
					b.Fatal(err)
				}
				l.Took(flow.Up, 16<<10)
				l.Moved(flow.Up, 16<<10)
			}
		})
	}
}

// BenchmarkDatagrams is what an account takes of a train that goes at once.
func BenchmarkDatagrams(b *testing.B) {
	for name, p := range benchPolicies() {
		b.Run(name, func(b *testing.B) {
			l := mustAdmit(b, newTestAccount(p))
			link := l.Link(new(nowhere), new(sink))
			ts := []flow.Train{train(10, 1200)}
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := link.Send(ts); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// nowhere is a link that takes everything.
type nowhere struct{ sink }

func (*nowhere) Send(ts []flow.Train) (taken, moved int, err error) {
	for i := range ts {
		moved += len(ts[i].Payload)
	}
	return len(ts), moved, nil
}

func TestNoTransferAllocates(t *testing.T) {
	policies := benchPolicies()
	policies["in debt"] = limited(func(p *policy) { p.bandwidth = [2]uint64{1, 1} })
	for name, p := range policies {
		a := newTestAccount(p)
		l, other := mustAdmit(t, a), mustAdmit(t, a)
		link := l.Link(new(nowhere), new(sink))
		ts := []flow.Train{train(10, 1200)}
		wake := func() {}
		if n := testing.AllocsPerRun(100, func() {
			for _, d := range []flow.Dir{flow.Up, flow.Down} {
				if _, err := other.Ready(d, wake); err == nil {
					other.Took(d, 5000)
					other.Moved(d, 5000)
				} else if err != flow.ErrPaused {
					t.Fatal(fmt.Errorf("%v: %w", d, err))
				}
			}
			if name != "in debt" { // then it is copied
				link.Send(ts)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
		l.Release()
		other.Release()
		if a.timer != nil {
			a.timer.Stop()
		}
	}
}
