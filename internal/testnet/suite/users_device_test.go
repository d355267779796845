package suite

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// Of the phone of these tests, and of another one.
const (
	phoneMAC, phone = "02:00:5e:00:53:01", "mac:02:00:5e:00:53:01"
	otherMAC, other = "02:00:5e:00:53:02", "mac:02:00:5e:00:53:02"
	guestV4         = "10.10.0.61"
	guestV6         = "fd10::61"
)

var phoneAddresses = []string{testnet.ClientV4, testnet.ClientV6, "fd10::a1", "fd10::a2"}

// phoneBed is a client with one IPv4 and three IPv6 addresses, and a guest beside it.
func phoneBed(t *testing.T, config string) (*userBed, *testnet.Netns) {
	t.Helper()
	testnet.Require(t)
	lab := testnet.New(t, testnet.Options{})
	lab.GW.Filter("output", `oifname "gw0" ip6 daddr ff00::/8`, "drop")
	lab.Cli.Run("ip", "link", "set", "eth0", "address", phoneMAC)
	guest := lab.Guest("guest", guestV4, guestV6)
	guest.Run("ip", "link", "set", "eth0", "address", otherMAC)
	b := &userBed{tcpBed: &tcpBed{Lab: lab}, t: t, state: t.TempDir()}
	b.move(phoneAddresses[2:]...)
	b.start(config)
	b.serveAll()
	return b, guest
}

// from connects from an address of a namespace to the echo server.
func (b *userBed) from(n *testnet.Netns, address, network string) net.Conn {
	b.t.Helper()
	var local net.Addr = &net.TCPAddr{IP: net.ParseIP(address)}
	if network == "udp" {
		local = &net.UDPAddr{IP: net.ParseIP(address)}
	}
	c, err := n.DialFrom(b.t.Context(), local, network, hostPort(farOf(address), quotaEcho))
	if err != nil {
		b.t.Fatalf("%s from %s: %v", network, address, err)
	}
	b.t.Cleanup(func() { c.Close() })
	return c
}

// say exchanges n bytes over each connection.
func (b *userBed) say(n int, over ...net.Conn) {
	b.t.Helper()
	for _, c := range over {
		up, down := b.counted(c)
		if err := exchangeWord(c, strings.Repeat("x", n)); err != nil {
			b.t.Fatalf("%s: %v", c.LocalAddr(), err)
		}
		testnet.Until(b.t, patience, "it is counted", func() bool {
			u, d := b.counted(c)
			return u == up+uint64(n) && d == down+uint64(n)
		})
	}
}

// counted is what a connection's flow has moved.
func (b *userBed) counted(c net.Conn) (up, down uint64) {
	for _, f := range b.gw.API.Flows("") {
		if f.Source == c.LocalAddr().String() {
			return f.Up, f.Down
		}
	}
	return 0, 0
}

// runsUnder waits until the flow of each connection runs under a user, "" for nobody.
func (b *userBed) runsUnder(name string, over ...net.Conn) (flows []testnet.FlowRecord) {
	b.t.Helper()
	testnet.Until(b.t, patience, fmt.Sprintf("%d flows run under %q", len(over), name), func() bool {
		all := b.gw.API.Flows("")
		flows = flows[:0]
		for _, c := range over {
			i := slices.IndexFunc(all, func(f testnet.FlowRecord) bool { return f.Source == c.LocalAddr().String() })
			if i < 0 || all[i].User.Name != name {
				return false
			}
			flows = append(flows, all[i])
		}
		return true
	})
	return flows
}

// used waits until a user's usage is what it should be.
func (b *userBed) used(name string, up, down uint64) {
	b.t.Helper()
	var u userView
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if u = b.user(name); u.Usage.Up == up && u.Usage.Down == down {
			return
		}
	}
	b.t.Errorf("%s used %d up, %d down; want %d, %d", name, u.Usage.Up, u.Usage.Down, up, down)
}

func TestAllAddressesOfAMACAreOneDeviceAndAnotherMACIsAnother(t *testing.T) {
	line := fmt.Sprintf("{name: kid, devices: [%q], limits: {ips: 4}}", phone)
	b, guest := phoneBed(t, usersConfig([]string{line}, ""))
	var flows, strangers []net.Conn
	for _, a := range phoneAddresses {
		flows = append(flows, b.from(b.Cli, a, "udp"))
	}
	for _, a := range []string{guestV4, guestV6} {
		strangers = append(strangers, b.from(guest, a, "udp"))
	}
	b.say(100, append(strangers, flows...)...)
	testnet.Until(t, patience, "both devices are known", func() bool {
		return len(b.device(phone).Addresses) >= len(phoneAddresses) && len(b.device(other).Addresses) >= 2
	})
	b.runsUnder("kid", flows...)
	base := b.user("kid").Usage
	for _, a := range phoneAddresses {
		c := b.from(b.Cli, a, "tcp")
		b.say(100, c)
		flows = append(flows, c)
		if f := b.runsUnder("kid", c)[0]; f.Device != phone {
			t.Errorf("the flow of %s is of device %q", f.Source, f.Device)
		}
	}
	b.say(100, flows...)
	b.used("kid", base.Up+1200, base.Down+1200)
	u := b.user("kid")
	slices.Sort(u.Usage.IPs)
	if want := slices.Sorted(slices.Values(phoneAddresses)); u.Usage.Connections != 8 || !slices.Equal(u.Usage.IPs, want) {
		t.Errorf("%d connections from %v", u.Usage.Connections, u.Usage.IPs)
	}
	strangers = append(strangers, b.from(guest, guestV4, "tcp"), b.from(guest, guestV6, "tcp"))
	b.say(100, strangers...)
	for _, f := range b.runsUnder("", strangers...)[2:] {
		if f.Device != other {
			t.Errorf("the guest's flow is of device %q", f.Device)
		}
	}
	b.used("kid", base.Up+1200, base.Down+1200)
	// Further addresses get no slot, however new they are: who has one is found out first.
	for i := range 10 {
		fresh := fmt.Sprintf("fd10::a%d", 3+i)
		b.move(fresh)
		if _, err := b.dial(fresh, "tcp", hostPort(testnet.FarV6, quotaEcho)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("the first connection of a fifth address: %v", err)
		}
	}
	if n := len(b.user("kid").Usage.IPs); n != 4 {
		t.Errorf("%d addresses hold slots", n)
	}
}

// device is what the API shows of one.
type deviceView struct {
	Device    string
	Addresses []string
	User      *testnet.UserRef
	Promotion *struct{ User string }
}

func (b *userBed) device(name string) (d deviceView) {
	b.t.Helper()
	var list struct{ Devices []deviceView }
	b.gw.API.Get("/v1/devices", &list)
	for _, d := range list.Devices {
		if d.Device == name {
			return d
		}
	}
	return d
}

// promote asks for a promotion and wants a status.
func (b *userBed) promote(device, body string, status int) answer {
	b.t.Helper()
	a := call(b.t, b.gw, "PUT", "/v1/devices/"+device+"/user", body)
	if a.status != status {
		b.t.Fatalf("promotion of %s to %s: status %d, want %d: %s", device, body, a.status, status, a.body)
	}
	return a
}

func (b *userBed) demote(device string, status int) {
	b.t.Helper()
	if a := call(b.t, b.gw, "DELETE", "/v1/devices/"+device+"/user", ""); a.status != status {
		b.t.Fatalf("demotion: status %d, want %d: %s", a.status, status, a.body)
	}
}

func (b *userBed) createUser(body string) {
	b.t.Helper()
	if a := call(b.t, b.gw, "POST", "/v1/users", body); a.status != 201 {
		b.t.Fatalf("POST: status %d: %s", a.status, a.body)
	}
}

func TestAPromotedDeviceGoesOnUnderItsUserAndADemotedOneUnderNobody(t *testing.T) {
	b, guest := phoneBed(t, usersBase)
	for _, user := range []string{`{"name": "ann"}`, `{"name": "bob"}`, `{"name": "few", "limits": {"connections": 3}}`} {
		b.createUser(user)
	}
	var flows []net.Conn
	for i, a := range phoneAddresses {
		flows = append(flows, b.from(b.Cli, a, []string{"tcp", "udp"}[i%2]))
	}
	stranger := b.from(guest, guestV4, "tcp")
	b.say(1000, append(flows, stranger)...)
	before := b.runsUnder("", flows...)

	b.promote(testnet.ClientV4, `{"user": "ann"}`, 204)
	b.runsUnder("ann", flows...)
	b.used("ann", 0, 0)
	b.say(500, append(flows, stranger)...)
	b.used("ann", 2000, 2000)
	b.promote(phone, `{"user": "ann"}`, 204) // the same again
	b.runsUnder("", stranger)

	// Refusals change nothing.
	for user, refusal := range map[string]string{"few": "connections", "nobody": "unknown"} {
		if out, err := b.gw.CLI("devices", "set-user", phone, user); err == nil || !strings.Contains(out, refusal) {
			t.Errorf("the command for %s says %q, %v", user, out, err)
		}
		var p struct{ Refusal string }
		if b.promote(phone, fmt.Sprintf(`{"user": %q}`, user), 422).decode(t, &p); p.Refusal != refusal {
			t.Errorf("a promotion to %s is refused by %q, want %s", user, p.Refusal, refusal)
		}
	}
	if u := b.user("few"); u.Usage.Connections != 0 {
		t.Errorf("a refused promotion holds %d connections", u.Usage.Connections)
	}
	b.runsUnder("ann", flows...)
	b.say(10, flows...)

	if out, err := b.gw.CLI("devices", "set-user", testnet.ClientV6, "bob"); err != nil {
		t.Errorf("%s, %v", out, err)
	}
	b.say(100, flows...)
	b.runsUnder("bob", flows...)
	b.used("ann", 2040, 2040)
	b.used("bob", 400, 400)
	if u := b.user("ann"); u.Usage.Connections != 0 || len(u.Usage.IPs) != 0 {
		t.Errorf("ann still holds %d connections, %v", u.Usage.Connections, u.Usage.IPs)
	}

	if out, err := b.gw.CLI("devices", "unset-user", phone); err != nil {
		t.Errorf("%s, %v", out, err)
	}
	b.demote(phone, 404)
	b.say(1, flows...)
	testnet.Until(t, patience, "every flow is the same and has all its bytes", func() bool {
		for i, f := range b.runsUnder("", flows...) {
			if f.ID != before[i].ID || f.Up != 1611 || f.Down != 1611 {
				return false
			}
		}
		return true
	})
	b.used("ann", 2040, 2040)
	b.used("bob", 400, 400)
}

func TestBytesOfABusyFlowAreChargedFromItsPromotionToItsDemotion(t *testing.T) {
	b, _ := phoneBed(t, usersBase)
	b.createUser(`{"name": "ann", "limits": {"bandwidth": {"down": "40Mbit/s"}}}`)
	c := b.from(b.Cli, testnet.ClientV4, "udp") // makes the device known
	b.say(10, c)
	down := b.mustDial(testnet.ClientV4, "tcp", hostPort(testnet.FarV4, quotaSource))
	down.Write([]byte("x")) //nolint:errcheck // nothing would come
	var got tally
	go got.drain(down) //nolint:errcheck // until the test ends
	moved := func() uint64 { return b.tcpBed.live(t, down.LocalAddr()).Down }
	testnet.Until(t, patience, "it is under way", func() bool { return moved() > 10<<20 })
	for range 10 {
		before, had := moved(), b.user("ann").Usage.Down
		b.promote(phone, `{"user": "ann"}`, 204)
		begun := moved()
		testnet.Until(t, patience, "the user pays", func() bool { return b.user("ann").Usage.Down > had+100_000 })
		last := moved()
		b.demote(phone, 204)
		ended := moved()
		paid := b.user("ann").Usage.Down - had
		if least, most := last-begun, ended-before; paid > most || paid+oneTransfer < least {
			t.Errorf("%d to %d bytes moved meanwhile, %d are the user's", least, most, paid)
		}
		testnet.Until(t, patience, "it goes on under nobody", func() bool { return moved() > ended+1<<20 })
	}
}

func TestAPromotionOutlivesARestart(t *testing.T) {
	b, _ := phoneBed(t, usersBase)
	b.createUser(`{"name": "ann", "limits": {"connections": 10}}`)
	b.say(100, b.from(b.Cli, testnet.ClientV4, "tcp"))
	b.promote(testnet.ClientV4, `{"user": "ann", "session": "1h"}`, 204)
	c := b.from(b.Cli, testnet.ClientV6, "tcp")
	b.say(100, c)
	b.used("ann", 100, 100)
	if code := b.gw.Stop(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	b.again(usersBase)
	b.used("ann", 100, 100)
	if d := b.device(phone); d.Promotion == nil || d.Promotion.User != "ann" {
		t.Errorf("after the restart: %+v", d)
	}
	again := []net.Conn{b.from(b.Cli, testnet.ClientV4, "tcp"), b.from(b.Cli, testnet.ClientV6, "udp")}
	b.say(100, again...)
	b.runsUnder("ann", again...)
	b.used("ann", 300, 300)
	b.demote(phone, 204)
	b.runsUnder("", again...)
}

func TestAPromotionEndsByItsLimitsOfTime(t *testing.T) {
	const limit = 1500 * time.Millisecond
	b, guest := phoneBed(t, usersBase)
	b.createUser(`{"name": "ann"}`)
	busy, idle := b.from(b.Cli, testnet.ClientV4, "tcp"), b.from(guest, guestV4, "tcp")
	b.say(10, busy, idle)
	begin := time.Now()
	b.promote(phone, fmt.Sprintf(`{"user": "ann", "session": %q}`, 2*limit), 204)
	b.promote(other, fmt.Sprintf(`{"user": "ann", "idle": %q}`, limit), 204)
	b.runsUnder("ann", busy, idle)
	ended := map[net.Conn]time.Duration{}
	for begun := time.Now(); len(ended) < 2 && time.Since(begun) < patience; time.Sleep(20 * time.Millisecond) {
		b.say(10, busy)
		if _, over := ended[idle]; !over && time.Since(begin) < limit {
			b.say(10, idle) // not idle yet
		}
		for _, f := range b.gw.API.Flows("") {
			for _, c := range []net.Conn{busy, idle} {
				if f.Source == c.LocalAddr().String() && f.User.Name == "" && ended[c] == 0 {
					ended[c] = time.Since(begin)
				}
			}
		}
	}
	// Both were to end after twice the limit; an idle one is looked at every second.
	for c, after := range ended {
		if after < 2*limit-100*time.Millisecond || after > 2*limit+4*time.Second {
			t.Errorf("the promotion of %s ended after %v, want %v", c.LocalAddr(), after, 2*limit)
		}
	}
	if len(ended) != 2 {
		t.Errorf("of two promotions %d ended", len(ended))
	}
	b.say(10, busy, idle) // the flows go on
}

func TestAnotherMACBehindAnAddressIsNotPromoted(t *testing.T) {
	b, _ := phoneBed(t, usersBase)
	b.createUser(`{"name": "ann"}`)
	c := b.from(b.Cli, testnet.ClientV4, "tcp")
	b.say(10, c)
	b.promote(testnet.ClientV4, `{"user": "ann"}`, 204)
	b.say(10, c)
	b.runsUnder("ann", c)
	b.Cli.Run("ip", "link", "set", "eth0", "address", "02:00:5e:00:53:03")
	// The kernel of the gateway hears of it from the new one's own words.
	b.Cli.Run("ip", "neigh", "flush", "all")
	b.Cli.Run("ping", "-c", "1", "-W", "1", "-I", testnet.ClientV4, testnet.LANV4)
	b.say(10, c)
	b.runsUnder("", c)
	again := b.from(b.Cli, testnet.ClientV4, "tcp")
	b.say(10, again)
	if f := b.runsUnder("", again)[0]; f.Device != "mac:02:00:5e:00:53:03" {
		t.Errorf("the flow is of device %q", f.Device)
	}
	if u := b.user("ann"); u.Usage.Connections != 0 {
		t.Errorf("the user still holds %d connections", u.Usage.Connections)
	}
}
