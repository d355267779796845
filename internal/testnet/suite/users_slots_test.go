package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

const (
	slotConnections, slotIPs = 10, 2

	slotRefused = 8 // refused by a rule
	slotNobody  = 9 // nobody listens
	slotTries   = 700
	slotStorm   = 300
)

// slotModel is what a user with slots should hold.
type slotModel struct {
	b    *userBed
	user string
	live []slotFlow
}

type slotFlow struct {
	conn    net.Conn
	network string
	source  string
}

func (m *slotModel) sources() []string {
	set := map[string]bool{}
	for _, f := range m.live {
		set[f.source] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// admits tells whether a flow of source gets its slots.
func (m *slotModel) admits(source string) bool {
	held := m.sources()
	return len(m.live) < slotConnections && (slices.Contains(held, source) || len(held) < slotIPs)
}

// open opens a flow, or finds it refused, as the slots say.
func (m *slotModel) open(network, source string) {
	m.b.t.Helper()
	c, err := m.b.dial(source, network, hostPort(farOf(source), quotaEcho))
	if network == "udp" && err == nil {
		err = udpAnswer(c)
	}
	if may := m.admits(source); may != (err == nil) || !may && !isProhibited(err) && !errors.Is(err, syscall.ECONNREFUSED) {
		m.b.t.Fatalf("%s from %s: %v; beside %d flows of %v it should be admitted: %v", network, source, err, len(m.live), m.sources(), may)
	}
	if err == nil {
		m.live = append(m.live, slotFlow{c, network, source})
	} else if c != nil {
		c.Close()
	}
}

// refusedDial dials what comes to nothing.
func (m *slotModel) refusedDial(source string, port int) {
	m.b.t.Helper()
	if c, err := m.b.dial(source, "tcp", hostPort(farOf(source), port)); !errors.Is(err, syscall.ECONNREFUSED) {
		m.b.t.Fatalf("port %d from %s: %v, %v", port, source, c, err)
	}
}

// end ends a flow: by its client's end or reset, or by a kill.
func (m *slotModel) end(i, how int) {
	m.b.t.Helper()
	f := m.live[i]
	m.live = slices.Delete(m.live, i, i+1)
	tcp, stream := f.conn.(*net.TCPConn)
	switch {
	case !stream || how == 0:
		m.b.gw.API.Kill(m.b.tcpBed.live(m.b.t, f.conn.LocalAddr()).ID)
	case how == 1:
		hardClose(tcp) //nolint:errcheck // it is over
	}
	f.conn.Close()
}

// holds waits until the gauges are what the model has.
func (m *slotModel) holds() {
	m.b.t.Helper()
	want := m.sources()
	var u userView
	defer func() {
		if m.b.t.Failed() {
			m.b.t.Logf("gauges %d, %v; want %d, %v", u.Usage.Connections, u.Usage.IPs, len(m.live), want)
		}
	}()
	testnet.Until(m.b.t, patience, "the gauges are what is open", func() bool {
		u = m.b.user(m.user)
		slices.Sort(u.Usage.IPs)
		return u.Usage.Connections == len(m.live) && slices.Equal(u.Usage.IPs, want)
	})
}

func TestB50_SlotsAreExactOverAThousandOpensClosesKillsAndRefusals(t *testing.T) {
	who := people(1)[0]
	sources := []string{who.v4, "10.10.0.151", who.v6, "fd10::151"}
	config := func(rule string) string {
		line := fmt.Sprintf("{name: %s, devices: [%s, %s, %q, %q], limits: {connections: %d, ips: %d}}",
			who.name, sources[0], sources[1], sources[2], sources[3], slotConnections, slotIPs)
		return usersConfig([]string{line}, "route: {rules: [{name: "+rule+fmt.Sprintf(", port: %d, outbound: reject}]}\n", slotRefused))
	}
	b := newUserBed(t, config("before"), who)
	b.move(sources[1], sources[3])
	b.serveAll()
	m := &slotModel{b: b, user: who.name}
	random := rand.New(rand.NewPCG(5, 0))
	for i := range slotTries {
		source := sources[random.IntN(len(sources))]
		switch what := random.IntN(20); {
		case what < 9:
			m.open("tcp", source)
		case what < 10:
			m.open("udp", source)
		case what < 11:
			m.refusedDial(source, slotRefused)
		case what < 12:
			m.refusedDial(source, slotNobody)
		case len(m.live) > 0:
			m.end(random.IntN(len(m.live)), what%3)
		}
		m.holds()
		if i == slotTries/2 {
			reload(t, b.gw, b.config(config("after")), true)
			m.holds()
		}
	}
	for len(m.live) > 0 {
		m.end(0, len(m.live)%3)
	}
	m.holds()
	b.slotStorm(who.name, sources)
	m.holds()
}

// slotStorm opens and ends flows from several sources at once, while the gauges must
// not go over the limits.
func (b *userBed) slotStorm(name string, sources []string) {
	b.t.Helper()
	const clients = 12
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(6, uint64(i)))
			for range slotStorm / clients {
				source := sources[random.IntN(len(sources))]
				port := []int{quotaEcho, quotaEcho, slotRefused, slotNobody}[random.IntN(4)]
				c, err := b.dial(source, "tcp", hostPort(farOf(source), port))
				if err != nil {
					if !errors.Is(err, syscall.ECONNREFUSED) && !isReset(err) { // one that was killed at once
						b.t.Errorf("from %s: %v", source, err)
					}
					continue
				}
				if random.IntN(2) == 0 {
					hardClose(c.(*net.TCPConn)) //nolint:errcheck // it is over
					continue
				}
				c.Write([]byte("x"))            //nolint:errcheck // the read tells
				io.ReadFull(c, make([]byte, 1)) //nolint:errcheck // or it was killed
				c.Close()
			}
		})
	}
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	for kill := 0; ; kill++ {
		u := b.user(name)
		if u.Usage.Connections > slotConnections || len(u.Usage.IPs) > slotIPs {
			b.t.Errorf("%d connections from %v", u.Usage.Connections, u.Usage.IPs)
		}
		if kill%5 == 0 {
			b.gw.API.KillWhere("user=" + name)
		}
		select {
		case <-done:
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestB50_TwoUsersDoNotShareSlotsAndAFreedAddressIsOpenAtOnce(t *testing.T) {
	all := people(2)
	b := newUserBed(t, usersConfig([]string{
		all[0].yaml("limits: {connections: 2, ips: 1}"), all[1].yaml("limits: {connections: 2, ips: 1}"),
	}, ""), all...)
	b.serveAll()
	for range 20 {
		var open []net.Conn
		for _, p := range all {
			for range 2 {
				open = append(open, b.mustDial(p.v4, "tcp", hostPort(testnet.FarV4, quotaEcho)))
			}
			b.refused(p.v6, testnet.FarV6, quotaEcho, quotaEcho)
		}
		for _, c := range open {
			hardClose(c.(*net.TCPConn)) //nolint:errcheck // it is over
		}
		for _, p := range all {
			testnet.Until(t, patience, "the other address is let in", func() bool {
				c, err := b.dial(p.v6, "tcp", hostPort(testnet.FarV6, quotaEcho))
				if err == nil {
					hardClose(c.(*net.TCPConn)) //nolint:errcheck // it is over
				}
				return err == nil
			})
			testnet.Until(t, patience, "all is closed", func() bool { return b.user(p.name).Usage.Connections == 0 })
		}
	}
}

func TestB50_ADialInProgressHoldsASlotUntilItIsGivenUpOrItsUserIsDisabled(t *testing.T) {
	const silent = 10
	who := people(1)[0]
	b := newUserBed(t, usersBase, who)
	b.serveAll()
	b.create(who, `"limits": {"connections": 1}`)
	b.Srv.Filter("input", fmt.Sprintf("tcp dport %d", silent), "drop")
	connections := func(want int) {
		t.Helper()
		testnet.Until(t, patience, fmt.Sprintf("%d connections", want), func() bool { return b.user(who.name).Usage.Connections == want })
	}
	dial := func() (stop context.CancelFunc, failed <-chan error) {
		ctx, cancel := context.WithCancel(t.Context())
		out := make(chan error, 1)
		go func() {
			_, err := b.Cli.DialFrom(ctx, &net.TCPAddr{IP: net.ParseIP(who.v4)}, "tcp", hostPort(testnet.FarV4, silent))
			out <- err
		}()
		connections(1)
		b.refused(who.v4, testnet.FarV4, quotaEcho, quotaEcho)
		return cancel, out
	}
	stop, _ := dial()
	stop()
	connections(0)
	b.say(10, b.from(b.Cli, who.v6, "tcp"))
	b.gw.API.KillWhere("user=" + who.name)
	connections(0)

	stop, failed := dial()
	defer stop()
	b.edit(who.name, `{"enabled": false}`)
	connections(0)
	select {
	case err := <-failed:
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("the dial of a disabled user: %v", err)
		}
	case <-time.After(patience):
		t.Error("the dial of a disabled user goes on")
	}
}
