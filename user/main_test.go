package user

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
)

// tester is what testing.T and rapid.T have in common.
type tester interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newUsers makes a registry; Run is not called.
func newUsers(t tester, o Options) *Users {
	t.Helper()
	u, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// apply makes a configuration hold.
func apply(t tester, u *Users, groups []Group, specs []Spec) {
	t.Helper()
	c, err := u.Prepare(groups, specs)
	if err != nil {
		t.Fatal(err)
	}
	c.Commit()
}

func put(t tester, u *Users, s Spec) flow.UserKey {
	t.Helper()
	if err := u.Put(s); err != nil {
		t.Fatal(err)
	}
	return get(t, u, s.Name).ID
}

func get(t tester, u *Users, name string) View {
	t.Helper()
	v, err := u.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// setPolicy changes the policy and nothing else.
func (a *account) setPolicy(p *policy) { a.update(func(*Usage) *policy { return p }) }

// admit is admitAll of one flow.
func (a *account) admit(s Subject) (*Lease, error) {
	leases, err := a.admitAll([]Subject{s})
	if err != nil {
		return nil, err
	}
	return leases[0], nil
}

// flowOf is a flow of a user that was admitted, with what it ended for.
type flowOf struct {
	*Lease
	mu    sync.Mutex
	ended error
}

func admit(t tester, u *Users, key flow.UserKey) *flowOf {
	t.Helper()
	l, err := u.Admit(key, client(1))
	if err != nil {
		t.Fatalf("user %d: %v", key, err)
	}
	return watch(l)
}

func watch(l *Lease) *flowOf {
	f := &flowOf{Lease: l}
	l.Attach(func(cause error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.ended = cause
	})
	return f
}

// cause is what the flow ended for; nil: it lives.
func (f *flowOf) cause() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ended
}

// move lets n bytes go up.
func (f *flowOf) move(n int) {
	if _, err := f.Ready(flow.Up, func() {}); err != nil {
		return
	}
	f.Took(flow.Up, n)
	f.Moved(flow.Up, n)
}

// from is somebody at the n-th address.
func client(n int) Subject {
	a := netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	return Subject{Source: a, Inbound: "lan", Client: netip.AddrPortFrom(a, 5000)}
}

func refusedAs(t tester, err error, want Refusal) {
	t.Helper()
	var r Refusal
	if !errors.As(err, &r) || r != want {
		t.Errorf("got %v, want a refusal: %v", err, want)
	}
}

func isNot(t tester, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got error %v, want %v", err, want)
	}
}

// at reads a time as people write it.
func at(t tester, zone *time.Location, s string) time.Time {
	t.Helper()
	for _, layout := range []string{"2006-01-02 15:04:05", "2006-01-02 15:04", "2006-01-02"} {
		if v, err := time.ParseInLocation(layout, s, zone); err == nil {
			return v
		}
	}
	t.Fatalf("no time: %q", s)
	return time.Time{}
}

func zone(t tester, name string) *time.Location {
	t.Helper()
	z, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

// many are n users of a configuration, each with a device, a group and limits.
func many(n int) ([]Group, []Spec) {
	groups := []Group{{Name: "staff", Limits: Limits{Bandwidth: Bandwidth{Down: 5_000_000}, IPs: 3}}}
	specs := make([]Spec, n)
	for i := range specs {
		specs[i] = Spec{
			Name: fmt.Sprintf("user-%06d", i), Group: "staff",
			Limits:  Limits{Traffic: Traffic{Total: 50e9, Reset: Reset{Every: Monthly, Day: 1}}, Connections: 100 + i%10},
			Devices: []string{fmt.Sprintf("mac:02:00:00:%02x:%02x:%02x", i>>16, i>>8&255, i&255)},
		}
	}
	return groups, specs
}
