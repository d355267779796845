package gateway

import (
	"context"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/device"
	"gatewayd/netstack/wire"
	"gatewayd/route"
	"gatewayd/track"
	"gatewayd/user"
)

// follow lets live flows follow what changes of users, until the test ends.
func (r *rig) follow() {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { r.gw.settleFlows(ctx) }) //nolint:errcheck // nil when cancelled
	r.t.Cleanup(func() { cancel(); wg.Wait() })
}

// put makes or changes a user as the API does.
func (r *rig) put(s user.Spec) {
	r.t.Helper()
	if err := (registry{r.gw.users, r.gw.bindingsChanged}).Put(s); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) view(name string) user.View {
	r.t.Helper()
	v, err := r.gw.users.Get(name)
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

// relay opens the flow of the client's n-th port, by which payload goes up.
func (r *rig) relay(n uint16, accepted <-chan io.Reader, payload string) (ack uint32) {
	r.t.Helper()
	r.syn(n)
	ack = r.wantFlags(wire.SYN|wire.ACK).seq + 1
	peer := within(r.t, accepted)
	r.send(n, wire.ACK|wire.PSH, isn+1, ack, payload)
	if _, err := io.ReadFull(peer, make([]byte, len(payload))); err != nil {
		r.t.Fatal(err)
	}
	return ack
}

// readers are what dials end at, closed with the test.
func (r *rig) readers() <-chan io.Reader {
	accepted := r.dialLoopback()
	out := make(chan io.Reader, 16)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case c := <-accepted:
				defer c.Close()
				out <- c
			case <-ctx.Done():
				return
			}
		}
	})
	r.t.Cleanup(func() { cancel(); wg.Wait() })
	return out
}

// until waits for a condition.
func (r *rig) until(what string, holds func() bool) {
	r.t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			r.t.Fatalf("not within 20 s: %s", what)
		}
	}
}

const ours = "10.0.0.2" // the client's device

func TestAUsersDialHoldsASlotAndEndsWithItsUser(t *testing.T) {
	ann := user.Spec{Name: "ann", Devices: []string{ours}, Limits: user.Limits{Connections: 1}}
	for name, change := range map[string]func(r *rig){
		"disabled": func(r *rig) { s := ann; s.Disabled = true; r.put(s) },
		"removed":  func(r *rig) { r.gw.users.Delete("ann") }, //nolint:errcheck // the dial shows it
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			dialling := make(chan struct{}, 16)
			r.dial = func(ctx context.Context, _ flow.Flow) (flow.Stream, error) {
				dialling <- struct{}{}
				<-ctx.Done()
				return nil, context.Cause(ctx)
			}
			r.put(ann)
			r.syn(0)
			within(t, dialling)
			if n := r.view("ann").Connections; n != 1 {
				t.Fatalf("%d connections", n)
			}
			r.syn(1)
			r.wantFlags(wire.RST)
			if n := r.gw.drops[flow.DropUser].Load(); n != 1 {
				t.Fatalf("%d drops by the user's limit", n)
			}
			change(r)
			r.wantFlags(wire.RST)
			r.balanced()
		})
	}
}

func TestRulesSeeTheUserAndItsDevice(t *testing.T) {
	r := newRig(t, route.Rule{Name: "kids", Match: route.Match{User: []string{"ann"}}, Outbound: "reject"})
	readers := r.readers()
	r.relay(0, readers, "anonymous")
	r.put(user.Spec{Name: "ann", Devices: []string{ours}})
	r.syn(1)
	r.wantFlags(wire.RST)
	r.follow()
	r.bindingsAreFelt()
	r.wantFlags(wire.RST) // the live one's user is ann, too
	r.until("the flow ended", func() bool { return len(r.gw.tracker.Closed()) == 1 })
	if c := r.gw.tracker.Closed()[0]; c.Reason != flow.Policy || c.Device != ours || c.UserName != "ann" {
		t.Errorf("closed %+v", c)
	}
}

// bindingsAreFelt has what changed before felt by who follows since.
func (r *rig) bindingsAreFelt() {
	for _, v := range r.gw.users.List("", 0) {
		r.gw.userChanged(v.ID)
	}
	r.gw.bindingsChanged()
}

func TestAPromotionTakesLiveFlowsWithWhatTheyMoveFromThenOn(t *testing.T) {
	r := newRig(t)
	readers := r.readers()
	b := book{r.gw}
	r.put(user.Spec{Name: "ann"})
	ack := r.relay(0, readers, "before")
	r.until("bytes are counted", func() bool { return r.gw.tracker.Flows()[0].Up == 6 })
	if err := b.Promote(ours, "ann", 0, 0); err != nil {
		t.Fatal(err)
	}
	record := func() track.Record { return r.gw.tracker.Flows()[0] }
	if got := record(); got.UserName != "ann" || got.Up != 6 {
		t.Fatalf("the flow is %+v", got)
	}
	r.send(0, wire.ACK|wire.PSH, isn+1+6, ack, "and after")
	r.until("bytes are the user's", func() bool { return r.view("ann").Usage.Up == 9 })
	if v := r.view("ann"); v.Connections != 1 || v.Usage.Up != 9 {
		t.Errorf("the user has %+v", v)
	}
	d, ok := b.At(client.Addr())
	if !ok || d.User == nil || d.User.Name != "ann" || d.Bound != "promotion" {
		t.Errorf("the device is %+v", d)
	}
	if err := b.Demote(ours); err != nil {
		t.Fatal(err)
	}
	if got := record(); got.User != 0 {
		t.Errorf("the flow is %+v", got)
	}
	if n := r.view("ann").Connections; n != 0 {
		t.Errorf("%d connections after the demotion", n)
	}
}

func TestARefusedPromotionLeavesEverythingAsItWas(t *testing.T) {
	r := newRig(t)
	readers := r.readers()
	r.put(user.Spec{Name: "ann", Limits: user.Limits{Connections: 1}})
	r.relay(0, readers, "one")
	r.relay(1, readers, "two")
	if err := (book{r.gw}).Promote(ours, "ann", 0, 0); err != user.RefusedConnections {
		t.Fatalf("promotion: %v", err)
	}
	for _, f := range r.gw.tracker.Flows() {
		if f.User != 0 {
			t.Errorf("a flow runs under %d", f.User)
		}
	}
	if _, bound := (book{r.gw}).At(client.Addr()); bound || r.view("ann").Connections != 0 {
		t.Error("the device or a slot is the user's")
	}
}

func TestRefusedFlowsOfDatagramsAreCountedByCause(t *testing.T) {
	r := newRig(t)
	r.put(user.Spec{Name: "ann", Disabled: true, Devices: []string{"10.0.0.0/24"}})
	for i, network := range []flow.Network{flow.UDP, flow.ICMP} {
		f := flow.Flow{Inbound: "lan", Network: network, Source: client, Dest: flow.Destination{Addr: server}}
		if target := r.gw.inbounds[0].resolve(f); !target.Blocked || target.Cause != flow.DropUser {
			t.Fatalf("%v: %+v", network, target)
		}
		if n := r.gw.users.Counts().Refusals["disabled"]; n != uint64(i+1) {
			t.Errorf("%v: %d refusals are counted, want %d", network, n, i+1)
		}
	}
}

func TestNoSlotIsLostWhileDevicesChangeUsersAndFlowsComeAndGo(t *testing.T) {
	r := newRig(t)
	r.gw.limits.total, r.gw.limits.flows.Max, r.gw.limits.flows.Per = 0, 0, 0
	r.follow()
	readers := r.readers()
	b := book{r.gw}
	r.put(user.Spec{Name: "ann", Limits: user.Limits{Connections: 3}})
	r.put(user.Spec{Name: "bob", Devices: []string{"10.0.0.0/24"}})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for rng := rand.New(rand.NewPCG(1, 2)); ; {
			select {
			case <-stop:
				return
			default:
			}
			switch rng.IntN(4) {
			case 0:
				b.Promote(ours, "ann", 0, 0) //nolint:errcheck // refused at times
			case 1:
				b.Demote(ours) //nolint:errcheck // not promoted at times
			case 2:
				r.put(user.Spec{Name: "ann", Limits: user.Limits{Connections: 1 + rng.IntN(4)}})
			case 3:
				r.gw.bindingsChanged()
			}
		}
	})
	for n := range uint16(200) {
		r.syn(n)
		s := r.written()
		for s.TCPFlags&(wire.SYN|wire.RST) == 0 {
			s = r.written()
		}
		if s.TCPFlags&wire.RST != 0 {
			continue
		}
		within(t, readers)
		r.send(n, wire.RST, isn+1, s.seq+1, "")
	}
	close(stop)
	wg.Wait()
	r.gw.tracker.KillWhere(func(*track.Record) bool { return true })
	r.balanced()
}

func TestAPromotionOfAnAddressEndsWithTheDeviceThatWasSeenBehindIt(t *testing.T) {
	r := newRig(t)
	b := book{r.gw}
	r.put(user.Spec{Name: "ann"})
	if err := b.Promote(ours, "ann", 0, 0); err != nil {
		t.Fatal(err)
	}
	nobody := flow.Device{Name: ours, Addr: client.Addr()}
	behind := func(mac string) flow.Device {
		return flow.Device{Name: "mac:" + mac, MAC: mac, Addr: client.Addr()}
	}
	phone, other := behind("3c:22:fb:aa:bb:cc"), behind("3c:22:fb:dd:ee:ff")
	for _, c := range []device.Change{{Before: nobody, After: phone}, {Before: phone, After: nobody}, {Before: nobody, After: phone}} {
		r.gw.deviceChanged(c)
		if _, ok := r.gw.users.UserOf(c.After); !ok {
			t.Fatalf("%v is promoted no more after %+v", c.After, c)
		}
	}
	r.gw.deviceChanged(device.Change{Before: phone, After: nobody})
	r.gw.deviceChanged(device.Change{Before: nobody, After: other})
	if left := r.gw.users.Promotions(); len(left) != 0 {
		t.Errorf("what the phone was given is another device's: %+v", left)
	}
}

// A flow that was registered while its device was promoted is looked at twice: by the
// promotion and by who opened it.
func TestAFlowThatWasPromotedWhileItOpenedIsNotAdmittedAgain(t *testing.T) {
	r := newRig(t)
	readers := r.readers()
	r.put(user.Spec{Name: "ann", Limits: user.Limits{Connections: 1}})
	before := r.gw.partyOf(client.Addr())
	r.relay(0, readers, "anonymous")
	var m *meter
	r.gw.tracker.EachFlow(func(f *track.Flow, _ *track.Record) bool {
		m = f.Owner().(*meter)
		return true
	})
	r.gw.gen.Add(1)
	r.gw.managing.Lock()
	var opener sync.WaitGroup
	opener.Go(func() { r.gw.settle(m, &before) })
	<-time.After(20 * time.Millisecond) // it waits for the promotion by now, or finds less
	key, _ := r.gw.users.Key("ann")
	leases, err := r.gw.users.Promote(r.gw.devices.Lookup(client.Addr()), "ann", 0, 0, []user.Subject{subjectOf("lan", client)})
	if err != nil {
		t.Fatal(err)
	}
	m.hand(leases[0], track.Principal{User: key, UserName: "ann"})
	r.gw.managing.Unlock()
	opener.Wait()
	if cause := m.flow.Cause(); cause != nil || r.view("ann").Connections != 1 {
		t.Errorf("the flow ended with %v, %d connections", cause, r.view("ann").Connections)
	}
}

func TestAFlowThatChangesItsUserIsDecidedAgain(t *testing.T) {
	kids := route.Match{User: []string{"kid"}}
	nobody := route.Match{UserState: []string{"anonymous"}}
	for name, c := range map[string]struct {
		refuses       route.Match
		before, after func(r *rig) error
	}{
		"promoted": {kids, nil, func(r *rig) error { return (book{r.gw}).Promote(ours, "kid", 0, 0) }},
		"demoted": {
			nobody, func(r *rig) error { return (book{r.gw}).Promote(ours, "kid", 0, 0) },
			func(r *rig) error { return (book{r.gw}).Demote(ours) },
		},
		"bound": {kids, nil, func(r *rig) error {
			return registry{r.gw.users, r.gw.bindingsChanged}.Put(user.Spec{Name: "kid", Devices: []string{ours}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, route.Rule{Name: "refuses", Match: c.refuses, Outbound: "reject"})
			readers := r.readers()
			r.put(user.Spec{Name: "kid"})
			if c.before != nil {
				if err := c.before(r); err != nil {
					t.Fatal(err)
				}
			}
			r.relay(0, readers, "allowed")
			r.follow()
			if err := c.after(r); err != nil {
				t.Fatal(err)
			}
			r.wantFlags(wire.RST)
			r.until("the flow ended", func() bool { return len(r.gw.tracker.Closed()) == 1 })
			if f := r.gw.tracker.Closed()[0]; f.Reason != flow.Policy {
				t.Errorf("closed %+v", f)
			}
		})
	}
}

func TestFlowsOpenAndCloseWhileDevicesAreToldOf(t *testing.T) {
	var u unowned
	const a, b, forged = "mac:3c:22:fb:aa:bb:cc", "10.0.0.2", "10.0.0.3"
	const connected = "10.0.0.4"
	for _, device := range []string{a, b, connected, forged} {
		f := u.open(device)
		f.datagrams(flow.Up, 2)
		f.datagrams(flow.Down, 1) // answers come to a forged address too
		f.close()
	}
	u.of[b].datagrams(flow.Up, 1)
	u.of[connected].stream(flow.Down, 1)
	told := make(map[string]uint64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		u.drain(func(device string, up, _ uint64) {
			told[device] += up
			u.open(device).close()
		})
	}()
	within(t, done)
	if len(told) != 3 || told[a] != 2 || told[b] != 3 || told[connected] != 2 {
		t.Errorf("told of %v", told)
	}
	u.drain(func(device string, up, _ uint64) { t.Errorf("told of %d of %s again", up, device) })
	if len(u.of) != 0 {
		t.Errorf("%d devices without flows are kept", len(u.of))
	}
}

func TestAPromotedPrefixLeavesItsPromotedDevicesAlone(t *testing.T) {
	r := newRig(t)
	readers := r.readers()
	b := book{r.gw}
	r.put(user.Spec{Name: "ann"})
	r.put(user.Spec{Name: "bob", Limits: user.Limits{Connections: 1}})
	if err := b.Promote(ours, "ann", 0, 0); err != nil {
		t.Fatal(err)
	}
	r.relay(0, readers, "one")
	r.relay(1, readers, "two")
	if err := b.Promote("10.0.0.0/24", "bob", 0, 0); err != nil {
		t.Errorf("the flows are ann's, and bob is told: %v", err)
	}
	for _, f := range r.gw.tracker.Flows() {
		if f.UserName != "ann" {
			t.Errorf("a flow of ann's device runs under %q", f.UserName)
		}
	}
	if err := b.Demote("10.0.0.0/24"); err != nil {
		t.Fatal(err)
	}
	if err := b.Promote(ours, "bob", 0, 0); err != user.RefusedConnections {
		t.Errorf("two flows under a user of one: %v", err)
	}
}
