package suite

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// download asks for one under way, which the tally counts.
func (b *userBed) download(source string, into *arrivals) net.Conn {
	b.t.Helper()
	c := b.mustDial(source, "tcp", hostPort(farOf(source), quotaSource))
	if _, err := c.Write([]byte("x")); err != nil {
		b.t.Fatal(err)
	}
	go into.drain(c)
	return c
}

// becomes waits for a user's state.
func (b *userBed) becomes(name, state string) {
	b.t.Helper()
	testnet.Until(b.t, patience, name+" is "+state, func() bool { return b.user(name).State == state })
}

func TestWhoUsedUpHisTrafficGoesOnSlowlyIfThatIsHisUsersWay(t *testing.T) {
	const throttled = 250_000 // bytes/s
	who := people(1)[0]
	b := newUserBed(t, usersConfig([]string{who.yaml("limits: {traffic: {total: 4MB}, when_exhausted: {throttle: 2Mbit/s}}")}, ""), who)
	b.serveAll()
	var got arrivals
	c := b.download(who.v4, &got)
	b.becomes(who.name, "throttled")
	if n := got.until(time.Now()); n < 3_500_000 {
		t.Errorf("it is throttled after %d bytes", n)
	}
	var rate float64
	for range 3 { // the machine's own slowness is not the gateway's
		begin := time.Now().Add(1200 * time.Millisecond) // the burst is a second's worth
		time.Sleep(time.Until(begin.Add(2 * time.Second)))
		if rate = got.rate(begin, begin.Add(2*time.Second)); within(rate, throttled, 0.05) {
			break
		}
	}
	if !within(rate, throttled, 0.05) {
		t.Errorf("throttled it gets %.0f kB/s", rate/1000)
	}
	if f := b.runsUnder(who.name, c)[0]; f.Killed {
		t.Errorf("flow#%d was ended", f.ID)
	}
	b.passes(who.v6, testnet.FarV6, quotaEcho)
	if a := call(t, b.gw, "POST", "/v1/users/"+who.name+"/topup", `{"bytes": "1GB"}`); a.status != 200 {
		t.Fatalf("topup: status %d: %s", a.status, a.body)
	}
	before, begin := got.until(time.Now()), time.Now()
	testnet.Until(t, patience, "it is fast again", func() bool { return got.until(time.Now()) > before+20_000_000 })
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("20 MB took %v", took)
	}
}

func TestWhoUsedUpHisTrafficGetsAnotherOutboundUnlessARuleRefuses(t *testing.T) {
	who := people(1)[0]
	b := newUserBed(t, usersConfig([]string{who.yaml("limits: {traffic: {total: 1MB}, when_exhausted: {outbound: lte}}")},
		"outbounds: [{tag: wan, type: direct}, {tag: lte, type: direct}]\n"+
			"route: {default: wan, rules: [{port: 8, outbound: reject}, {port: 80, outbound: wan}]}\n"), who)
	b.serveAll()
	old := b.from(b.Cli, who.v4, "tcp")
	b.say(10, old)
	var got arrivals
	bulk := b.download(who.v4, &got)
	b.becomes(who.name, "exhausted")
	before := got.until(time.Now())
	testnet.Until(t, patience, "old flows go on", func() bool { return got.until(time.Now()) > before+5_000_000 })
	b.say(10, old)
	for _, f := range b.runsUnder(who.name, old, bulk) {
		if f.Outbound != "wan" {
			t.Errorf("an old flow is on %s", f.Outbound)
		}
	}
	var more arrivals
	fresh := []net.Conn{b.from(b.Cli, who.v4, "tcp"), b.from(b.Cli, who.v6, "udp"), b.download(who.v6, &more)}
	b.say(10, fresh[:2]...)
	for _, f := range b.runsUnder(who.name, fresh...) {
		if f.Outbound != "lte" {
			t.Errorf("a new flow to %s is on %s", f.Destination, f.Outbound)
		}
	}
	if _, err := b.dial(who.v4, "tcp", hostPort(testnet.FarV4, 8)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("what a rule rejects: %v", err)
	}
	b.gw.API.KillWhere("user=" + who.name) // what is under way would use it up again
	testnet.Until(t, patience, "all is closed", func() bool { return b.user(who.name).Usage.Connections == 0 })
	if a := call(t, b.gw, "POST", "/v1/users/"+who.name+"/reset", ""); a.status != 200 {
		t.Fatalf("reset: status %d: %s", a.status, a.body)
	}
	again := b.from(b.Cli, who.v6, "tcp")
	b.say(10, again)
	if f := b.runsUnder(who.name, again)[0]; f.Outbound != "wan" {
		t.Errorf("after a reset a flow is on %s", f.Outbound)
	}
}

func TestRulesAskWhoAndChangesOfStateEndWhatTheyRefuseNow(t *testing.T) {
	const rules = `route:
  rules:
    - {name: by-user, user: user0, port: 1001, outbound: reject}
    - {name: by-group, user_group: staff, port: 1002, outbound: reject}
    - {name: by-state, user_state: [throttled, anonymous], port: 1003, outbound: reject}
    - {name: by-device, device: 10.10.0.102, port: 1004, outbound: reject}
groups: [{name: staff}]
`
	all := people(4)
	b := newUserBed(t, usersConfig([]string{
		all[0].yaml(""), all[1].yaml("group: staff"), all[2].yaml("limits: {traffic: {total: 1MB}, when_exhausted: {throttle: 8Mbit/s}}"),
	}, rules), all...) // the last one is nobody
	for port := 1001; port <= 1004; port++ {
		for _, host := range []string{testnet.FarV4, testnet.FarV6} {
			b.Srv.Echo(hostPort(host, port))
		}
	}
	b.serveAll()
	for i, want := range []map[int]bool{{1001: true}, {1002: true, 1004: true}, {}, {1003: true}} {
		for port := 1001; port <= 1004; port++ {
			p := all[i]
			sources := []string{p.v4, p.v6}
			if port == 1004 {
				sources = sources[:1] // the rule has an IPv4 address
			}
			for _, source := range sources {
				c, err := b.dial(source, "tcp", hostPort(farOf(source), port))
				if err == nil {
					b.say(1, c)
					c.Close()
				}
				if refused := errors.Is(err, syscall.ECONNREFUSED); refused != want[port] || (err != nil && !refused) {
					t.Errorf("%s, port %d: %v, want it refused: %v", source, port, err, want[port])
				}
			}
		}
	}
	p := all[2]
	j := b.follow(t)
	var doomed []net.Conn
	for _, network := range []string{"tcp", "udp"} {
		b.Srv.UDPEcho(hostPort(map[string]string{"tcp": testnet.FarV4, "udp": testnet.FarV6}[network], 1003))
		source := map[string]string{"tcp": p.v4, "udp": p.v6}[network]
		c := b.mustDial(source, network, hostPort(farOf(source), 1003))
		b.say(10, c)
		doomed = append(doomed, c)
	}
	fine := b.from(b.Cli, p.v4, "tcp")
	b.say(10, fine)
	var got arrivals
	b.download(p.v4, &got)
	b.becomes(p.name, "throttled")
	for _, c := range doomed {
		if r := j.end(t, patience, c.LocalAddr()); r.Reason != "policy" {
			t.Errorf("the flow of %s closed as %s", r.Network, r.Reason)
		}
	}
	b.say(10, fine)
	// So does an edit of who it is.
	nobody := b.from(b.Cli, all[3].v4, "tcp")
	b.say(10, nobody)
	b.createUser(fmt.Sprintf(`{"name": "late", "group": "staff", "devices": [%q]}`, all[3].v4))
	b.runsUnder("late", nobody)
	b.say(10, nobody)
	staff, err := b.dial(all[3].v4, "tcp", hostPort(testnet.FarV4, 1002))
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a new member of the group: %v, %v", staff, err)
	}
	out := call(t, b.gw, "GET", "/v1/rules", "").body
	for _, name := range []string{"by-user", "by-group", "by-state", "by-device"} {
		if !strings.Contains(out, name) {
			t.Errorf("no rule %s in %s", name, out)
		}
	}
}
