package suite

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// usersBase is a gateway that keeps its usage as often as it can. Users follow.
const usersBase = `version: 1
api: {listen: "$API"}
tun: [{tag: lan, device: gw0}]
timeouts: {udp: {one_way: 60s, answered: 60s}}
sample: 100ms
ledger: {commit: 1s}
state_dir: $DIR/state
`

const (
	oneTransfer = 64 << 10               // bytes that may cross a limit
	cutLimit    = 100 * time.Millisecond // from the last byte to the end of all flows
	sweepLimit  = 1100 * time.Millisecond
)

// userBed is a lab whose client's namespace is several people: each has addresses of
// his own, by which his user knows him.
type userBed struct {
	*tcpBed
	t     *testing.T
	state string // the gateway's state directory
}

// person is one with addresses of both families.
type person struct {
	name   string
	v4, v6 string
}

// people is the first n, with addresses from 10.10.0.101 and fd10::101 on.
func people(n int) (all []person) {
	for i := range n {
		all = append(all, person{fmt.Sprintf("user%d", i), fmt.Sprintf("10.10.0.%d", 101+i), fmt.Sprintf("fd10::%d", 101+i)})
	}
	return all
}

// yaml is a person's user in a configuration, with more of its keys.
func (p person) yaml(more string) string {
	if more != "" {
		more = ", " + more
	}
	return fmt.Sprintf("{name: %s, devices: [%s, %q]%s}", p.name, p.v4, p.v6, more)
}

// newUserBed starts a gateway with usersBase and more of a configuration; all have
// their addresses when it returns.
func newUserBed(t *testing.T, config string, all ...person) *userBed {
	t.Helper()
	testnet.Require(t)
	lab := testnet.New(t, testnet.Options{})
	lab.GW.Filter("output", `oifname "gw0" ip6 daddr ff00::/8`, "drop")
	b := &userBed{tcpBed: &tcpBed{Lab: lab}, t: t, state: t.TempDir()}
	for _, p := range all {
		b.move(p.v4, p.v6)
	}
	b.start(config)
	return b
}

// on is the bed for a subtest.
func (b *userBed) on(t *testing.T) *userBed {
	c := *b
	c.t = t
	return &c
}

// move gives the client's namespace more addresses.
func (b *userBed) move(addresses ...string) {
	b.t.Helper()
	for _, a := range addresses {
		if strings.Contains(a, ":") {
			b.Cli.Run("ip", "addr", "add", a+"/64", "dev", "eth0", "nodad")
			b.Cli.AwaitLocal(a)
		} else {
			b.Cli.Run("ip", "addr", "add", a+"/24", "dev", "eth0")
		}
	}
}

// start starts a gateway with the bed's state, after the one before has ended.
func (b *userBed) start(config string) {
	b.t.Helper()
	b.gw = b.Start(testnet.GatewayOptions{Config: b.config(config), Device: tcpDevice})
}

// again starts one after another that has ended: routes into the device went with it.
func (b *userBed) again(config string) {
	b.t.Helper()
	b.gw = b.Start(testnet.GatewayOptions{Config: b.config(config)})
	b.reroute(b.t)
}

func (b *userBed) config(text string) string {
	return strings.ReplaceAll(text, "$DIR/state", b.state)
}

// dial connects from an address of the client; what it returns is closed with the test.
func (b *userBed) dial(source, network, address string) (net.Conn, error) {
	var local net.Addr = &net.TCPAddr{IP: net.ParseIP(source)}
	if network == "udp" {
		local = &net.UDPAddr{IP: net.ParseIP(source)}
	}
	c, err := b.Cli.DialFrom(b.t.Context(), local, network, address)
	if err != nil {
		return nil, err
	}
	b.t.Cleanup(func() { c.Close() })
	return c, c.SetDeadline(time.Now().Add(time.Minute))
}

// mustDial is dial for what has to succeed.
func (b *userBed) mustDial(source, network, address string) net.Conn {
	b.t.Helper()
	c, err := b.dial(source, network, address)
	if err != nil {
		b.t.Fatalf("%s from %s: %v", network, source, err)
	}
	return c
}

// farOf is the server's address of a client address's family.
func farOf(address string) string {
	if netip.MustParseAddr(address).Is4() {
		return testnet.FarV4
	}
	return testnet.FarV6
}

// refused checks that new flows of an address are refused: TCP reset, UDP prohibited.
func (b *userBed) refused(source, host string, tcp, udp int) {
	b.t.Helper()
	if _, err := b.dial(source, "tcp", hostPort(host, tcp)); !errors.Is(err, syscall.ECONNREFUSED) {
		b.t.Errorf("a new connection of %s: %v, want it refused", source, err)
	}
	c := b.mustDial(source, "udp", hostPort(host, udp))
	if err := udpAnswer(c); !isProhibited(err) {
		b.t.Errorf("a new datagram of %s: %v, want administratively prohibited", source, err)
	}
}

// udpAnswer sends until there is an answer or an error: an ICMP error may be over the
// gateway's rate.
func udpAnswer(c net.Conn) error {
	buf := make([]byte, 100)
	for end := time.Now().Add(udpPatience); ; {
		if _, err := c.Write([]byte("hello?")); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(200 * time.Millisecond)) //nolint:errcheck // the read tells
		if _, err := c.Read(buf); !isTimeout(err) || time.Now().After(end) {
			return err
		}
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// passes checks that new flows of an address pass, to echo servers.
func (b *userBed) passes(source, host string, port int) {
	b.t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		c := b.mustDial(source, network, hostPort(host, port))
		if err := exchangeWord(c, "hello"); err != nil {
			b.t.Errorf("%s from %s: %v", network, source, err)
		}
		c.Close()
	}
}

// userView is what the API shows of a user.
type userView struct {
	ID    uint64
	Name  string
	State string
	Usage struct {
		Up, Down    uint64
		ChargedUp   uint64 `json:"charged_up"`
		ChargedDown uint64 `json:"charged_down"`
		Generation  uint64
		FirstUse    *time.Time `json:"first_use"`
		Connections int
		IPs         []string
	}
}

func (b *userBed) user(name string) (v userView) {
	b.t.Helper()
	b.gw.API.Get("/v1/users/"+name, &v)
	return v
}

// edit changes a user by a merge patch.
func (b *userBed) edit(name, patch string) {
	b.t.Helper()
	if a := call(b.t, b.gw, "PATCH", "/v1/users/"+name, patch); a.status != 200 {
		b.t.Fatalf("PATCH %s: status %d: %s", name, a.status, a.body)
	}
}

// create makes a user by the API; fields are those of its JSON but for the name.
func (b *userBed) create(p person, fields string) {
	b.t.Helper()
	if fields != "" {
		fields = ", " + fields
	}
	body := fmt.Sprintf(`{"name": %q, "devices": [%q, %q]%s}`, p.name, p.v4, p.v6, fields)
	if a := call(b.t, b.gw, "POST", "/v1/users", body); a.status != 201 {
		b.t.Fatalf("POST: status %d: %s", a.status, a.body)
	}
}

// records waits until the journal saw at least so many of a user's flows, and all of
// them closing.
func (b *userBed) records(j *journal, name string, least int) (all []testnet.FlowRecord) {
	b.t.Helper()
	testnet.Until(b.t, patience, "the flows of "+name+" are closed", func() bool {
		all = all[:0]
		j.mu.Lock()
		defer j.mu.Unlock()
		for id, f := range j.opened {
			if f.User.Name != name {
				continue
			}
			closed, ended := j.closed[id]
			if !ended {
				return false
			}
			all = append(all, closed)
		}
		return len(all) >= least
	})
	return all
}

// tally counts what a receiver got, and when the last of it came.
type tally struct {
	bytes atomic.Int64
	last  atomic.Int64 // Unix time in ns
}

func (y *tally) add(n int) {
	if n > 0 {
		y.bytes.Add(int64(n))
		y.last.Store(time.Now().UnixNano())
	}
}

// drain reads to the end and returns why it ended.
func (y *tally) drain(r io.Reader) error {
	buf := make([]byte, 1<<16)
	for {
		n, err := r.Read(buf)
		if y.add(n); err != nil {
			return err
		}
	}
}

// Ports of the server in tests of users.
const (
	quotaEcho   = 7
	quotaSource = 80 // sends without an end, once a byte came
	quotaSink   = 81 // reads what comes, of TCP and UDP
	quotaBlast  = 82 // UDP: sends 64 datagrams for each that comes
)

// serveAll has the server offer all that tests of users ask for. What is sent up to
// all ports but that of echo is counted by family.
func (b *userBed) serveAll() *[2]tally {
	b.t.Helper()
	var up [2]tally
	for i, host := range []string{testnet.FarV4, testnet.FarV6} {
		y := &up[i]
		b.Srv.Serve(hostPort(host, quotaSource), func(c *net.TCPConn) {
			n, _ := c.Read(make([]byte, 1))
			y.add(n)
			testnet.WritePattern(c, -1) //nolint:errcheck // until its client ends
		})
		b.Srv.Serve(hostPort(host, quotaSink), func(c *net.TCPConn) { y.drain(c) }) //nolint:errcheck // likewise
		sink := b.Srv.ServeUDP(hostPort(host, quotaSink), func(_ *testnet.UDPServer, _ netip.AddrPort, p []byte) { y.add(len(p)) })
		roomy(b.t, sink.Conn)
		b.Srv.ServeUDP(hostPort(host, quotaBlast), func(s *testnet.UDPServer, from netip.AddrPort, p []byte) {
			y.add(len(p))
			for answer, i := make([]byte, 1200), 0; i < 64; i++ {
				s.Conn.WriteToUDPAddrPort(answer, from) //nolint:errcheck // as lossy as the network
			}
		})
		b.Srv.Echo(hostPort(host, quotaEcho))
		b.Srv.UDPEcho(hostPort(host, quotaEcho))
	}
	return &up
}

// roomy gives a socket a receive buffer in which nothing of a test is lost (socket(7)).
func roomy(t *testing.T, c *net.UDPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatalf("SO_RCVBUFFORCE: %v", err)
	}
}

// gush sends datagrams of size bytes at a rate in bytes/s, 0 for as fast as it can,
// until stop is closed or an error comes that is not of a full buffer.
func gush(c io.Writer, size int, rate int64, stop <-chan struct{}) (sent int64) {
	p := make([]byte, size)
	for begin := time.Now(); ; {
		select {
		case <-stop:
			return sent
		default:
		}
		if rate > 0 {
			if ahead := time.Duration(sent*int64(time.Second)/rate) - time.Since(begin); ahead > 0 {
				time.Sleep(max(ahead, time.Millisecond))
				continue
			}
		}
		n, err := c.Write(p)
		if err != nil && !errors.Is(err, syscall.ENOBUFS) {
			return sent
		}
		sent += int64(n)
	}
}

// decode reads an answer's JSON.
func (a answer) decode(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), v); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
}
