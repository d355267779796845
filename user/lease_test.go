package user

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// unlimited is the policy of nobody's limits.
func unlimited() *policy { return &policy{up: none, down: none, total: none, multiplier: one} }

// limited is an unlimited policy, changed.
func limited(change func(p *policy)) *policy {
	p := unlimited()
	change(p)
	return p
}

// newTestAccount is an account that tells nobody.
func newTestAccount(p *policy) *account {
	return newAccount(&common{drops: new(flow.Drops)}, 1, "ann", Usage{}, p)
}

// from is a flow of a client's address.
func from(ip string) Subject {
	addr := netip.MustParseAddr(ip)
	return Subject{Source: addr, Inbound: "lan", Client: netip.AddrPortFrom(addr, 1000)}
}

func mustAdmit(t testing.TB, a *account) *Lease {
	t.Helper()
	l, err := a.admit(from("10.0.0.2"))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// move moves up to n bytes as a relay does, and returns how many, or -1 when paused.
func move(t testing.TB, l *Lease, d flow.Dir, n int, wake func()) int {
	t.Helper()
	limit, err := l.Ready(d, wake)
	if errors.Is(err, flow.ErrPaused) {
		return -1
	}
	if err != nil {
		t.Fatalf("Ready: %v", err)
	}
	n = min(n, limit)
	l.Took(d, n)
	l.Moved(d, n)
	return n
}

func TestSlotsAreTakenAndGivenBackOnce(t *testing.T) {
	a := newTestAccount(limited(func(p *policy) { p.connections, p.ips = 3, 2 }))
	first, _ := a.admit(from("10.0.0.2"))
	again, _ := a.admit(from("10.0.0.2"))
	second, _ := a.admit(from("10.0.0.3"))
	if _, err := a.admit(from("10.0.0.2")); err != RefusedConnections {
		t.Errorf("a fourth connection: %v", err)
	}
	again.Release()
	again.Release()
	if _, err := a.admit(from("10.0.0.4")); err != RefusedIPs {
		t.Errorf("a third address: %v", err)
	}
	dns, err := a.admit(Subject{Source: netip.MustParseAddr("10.0.0.9"), Free: true})
	if err != nil {
		t.Errorf("a free flow: %v", err)
	}
	if n, ips := a.gauges(); n != 2 || len(ips) != 2 {
		t.Errorf("%d connections of %v", n, ips)
	}
	first.Release()
	if _, err := a.admitAll([]Subject{from("10.0.0.4"), from("10.0.0.5")}); err != RefusedIPs {
		t.Errorf("two addresses in one's place: %v", err)
	}
	if n, ips := a.gauges(); n != 1 || len(ips) != 1 {
		t.Errorf("a refusal left %d connections of %v", n, ips)
	}
	second.Release()
	dns.Release()
	if n, ips := a.gauges(); n != 0 || len(ips) != 0 || len(a.leases) != 0 || a.live != 0 {
		t.Errorf("left are %d connections of %v, %d leases, %d live", n, ips, len(a.leases), a.live)
	}
}

func TestAnAccountEndsEveryLeaseOnceAndRefusesNewOnesUntilItIsAllowed(t *testing.T) {
	a := newTestAccount(unlimited())
	l, late := mustAdmit(t, a), mustAdmit(t, a)
	var causes []error
	l.Attach(func(cause error) { causes = append(causes, cause) })
	a.end(ErrDisabled)
	a.end(ErrRetired)
	late.Attach(func(cause error) { causes = append(causes, cause) })
	if len(causes) != 2 || causes[0] != ErrDisabled || causes[1] != ErrDisabled {
		t.Errorf("ended with %v", causes)
	}
	for _, d := range []flow.Dir{flow.Up, flow.Down} {
		if _, err := l.Ready(d, nil); err != ErrDisabled || !errors.Is(err, syscall.ECONNABORTED) {
			t.Errorf("%v: %v", d, err)
		}
	}
	if _, err := a.admit(from("10.0.0.2")); err != RefusedUnknown {
		t.Errorf("a retired user's flow: %v", err)
	}
	a.allow()
	if _, err := l.Ready(flow.Up, nil); err != ErrDisabled {
		t.Errorf("an ended flow came back: %v", err)
	}
	if fresh := mustAdmit(t, a); move(t, fresh, flow.Up, 10, nil) != 10 {
		t.Error("a new flow does not move")
	}
}

func TestWhatMovesIsChargedTimesTheMultiplierWithItsFractions(t *testing.T) {
	a := newTestAccount(limited(func(p *policy) { p.multiplier = 1_500_000 }))
	l := mustAdmit(t, a)
	for range 3 {
		move(t, l, flow.Up, 1, nil)
	}
	move(t, l, flow.Down, 7, nil)
	a.setPolicy(limited(func(p *policy) { p.multiplier = 0 }))
	move(t, l, flow.Down, 100, nil)
	u := a.usage()
	if u.Up != 3 || u.ChargedUp != 4 || u.CarryUp != 500_000 || u.Down != 107 || u.ChargedDown != 10 || u.CarryDown != 500_000 {
		t.Errorf("%+v", u)
	}
}

func TestTheFirstPayloadByteIsToldOnce(t *testing.T) {
	told := 0
	a := newAccount(&common{drops: new(flow.Drops), firstUse: func(*account) { told++ }}, 1, "ann", Usage{}, unlimited())
	l := mustAdmit(t, a)
	move(t, l, flow.Up, 0, nil)
	if told != 0 {
		t.Error("nothing was a first use")
	}
	move(t, l, flow.Down, 1, nil)
	move(t, l, flow.Up, 1, nil)
	if told != 1 {
		t.Errorf("told %d times", told)
	}
	a = newAccount(a.common, 1, "ann", Usage{FirstUse: time.Unix(1, 0)}, unlimited())
	if move(t, mustAdmit(t, a), flow.Up, 1, nil); told != 1 {
		t.Error("told of a user that was used before")
	}
}

// The transfer that crosses is whole and the last; a flow that waits is ended with it.
func TestAQuotaEndsAllFlowsWithinTheTransferThatCrossed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		crossed := 0
		a := newAccount(&common{drops: new(flow.Drops), crossed: func(*account) { crossed++ }}, 1, "ann", Usage{},
			limited(func(p *policy) { p.total, p.block = 100_000, true }))
		l, other := mustAdmit(t, a), mustAdmit(t, a)
		var causes []error
		for _, l := range []*Lease{l, other} {
			l.Attach(func(cause error) { causes = append(causes, cause) })
		}
		move(t, l, flow.Down, maxTransfer, nil)
		if n, err := l.Ready(flow.Down, nil); n != maxTransfer || err != nil {
			t.Fatalf("allowed %d, %v", n, err)
		}
		if move(t, other, flow.Up, 10, nil) != -1 {
			t.Error("a flow moved beside the transfer that may cross")
		}
		l.Took(flow.Down, maxTransfer)
		l.Moved(flow.Down, 40_000) // crossed, and goes on
		if len(causes) != 0 || crossed != 1 {
			t.Errorf("ended with %v in the middle of the transfer, told %d times", causes, crossed)
		}
		if _, err := a.admit(from("10.0.0.2")); err != RefusedTraffic {
			t.Errorf("a new flow: %v", err)
		}
		l.Moved(flow.Down, maxTransfer-40_000)
		if len(causes) != 2 || causes[0] != ErrQuota || causes[1] != ErrQuota || crossed != 1 {
			t.Errorf("ended with %v, told %d times", causes, crossed)
		}
		if u := a.usage(); u.ChargedDown != 2*maxTransfer {
			t.Errorf("charged %d", u.ChargedDown)
		}
	})
}

func TestAReleasedLeaseHoldsNobodyAndNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := unlimited()
		p.speed = 1000
		a := newTestAccount(p)
		first, second := mustAdmit(t, a), mustAdmit(t, a)
		n, err := first.Ready(flow.Up, nil)
		if err != nil {
			t.Fatal(err)
		}
		first.Took(flow.Up, n)
		first.Moved(flow.Up, n)
		woken := 0
		for ; err == nil; _, err = second.Ready(flow.Up, func() { woken++ }) {
			second.Took(flow.Up, n)
			second.Moved(flow.Up, n)
		}
		second.Release() // the flow goes on under another one, and may be about to ask this one
		if woken != 1 {
			t.Errorf("woken %d times", woken)
		}
		if _, err := second.Ready(flow.Up, nil); err != nil {
			t.Errorf("a flow between two leases: %v", err)
		}
		second.Took(flow.Up, n)
		first.Release()
		if a.pending != [2]int{} || a.lines != [2]line{} || len(a.leases) != 0 {
			t.Errorf("pending %v, lines %v, %d leases", a.pending, a.lines, len(a.leases))
		}
	})
}
