package suite

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// usageWatch asks for users' usage all the time.
type usageWatch struct{ stop, done chan struct{} }

// watchUsage fails the test when a counter falls while its generation stays, until end.
func (b *userBed) watchUsage(names ...string) *usageWatch {
	w := &usageWatch{stop: make(chan struct{}), done: make(chan struct{})}
	g := b.gw
	go func() {
		defer close(w.done)
		last := map[string]userView{}
		for {
			for _, name := range names {
				status, body, err := g.API.Do("GET", "/v1/users/"+name, nil)
				if err != nil || status != 200 {
					continue // it stops
				}
				var now userView
				if err := json.Unmarshal(body, &now); err != nil {
					b.t.Errorf("%v: %s", err, body)
				}
				was := last[name]
				if was.Usage.Generation == now.Usage.Generation && (now.Usage.Up < was.Usage.Up || now.Usage.Down < was.Usage.Down) {
					b.t.Errorf("%s fell from %+v to %+v", name, was.Usage, now.Usage)
				}
				last[name] = now
			}
			select {
			case <-w.stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return w
}

func (w *usageWatch) end() {
	close(w.stop)
	<-w.done
}

// transfer exchanges pieces with the echo server, and returns how many bytes each way.
func transfer(c net.Conn, pieces, size int) (uint64, error) {
	defer c.Close()
	p := make([]byte, size)
	for i := range pieces {
		if _, err := c.Write(p); err != nil {
			return uint64(i * size), err
		}
		if _, err := io.ReadFull(c, p); err != nil {
			return uint64(i * size), err
		}
	}
	return uint64(pieces * size), nil
}

func TestB46_UsageIsTheTruthOverReloadsAndARestart(t *testing.T) {
	const reloads, users, size = 20, 4, 10_000
	all := people(users)
	config := func(i int) string {
		lines := make([]string, 0, users)
		for k, p := range all[:users-1] { // the last one is made by the API
			limits := ""
			if k == 1 {
				limits = fmt.Sprintf("limits: {bandwidth: {up: %dMbit/s, down: 80Mbit/s}}", 40+i)
			}
			if k == 2 {
				limits = fmt.Sprintf("notes: \"%d\"", i)
			}
			lines = append(lines, p.yaml(limits))
		}
		return usersConfig(lines, fmt.Sprintf("outbounds: [{tag: wan, type: direct, mark: %d}]\nroute: {default: wan}\n", 1+i))
	}
	b := newUserBed(t, config(0), all...)
	b.serveAll()
	b.create(all[users-1], "")
	names := make([]string, users)
	truth := make([]uint64, users)
	for i, p := range all {
		names[i] = p.name
	}
	round := func(reloads int) {
		var clients sync.WaitGroup
		for i, p := range all {
			for k, network := range []string{"tcp", "tcp", "udp"} {
				c := b.mustDial([]string{p.v4, p.v6}[k%2], network, hostPort([]string{testnet.FarV4, testnet.FarV6}[k%2], quotaEcho))
				pieces, size := 50*(i+1), size
				if network == "udp" {
					size = 1000
				}
				truth[i] += uint64(pieces * size)
				clients.Go(func() {
					if _, err := transfer(c, pieces, size); err != nil {
						t.Errorf("%s of %s: %v", network, p.name, err)
					}
				})
			}
		}
		for i := range reloads {
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
			reload(t, b.gw, b.config(config(i+1)), i%2 == 0)
		}
		clients.Wait()
		for i, p := range all {
			b.used(p.name, truth[i], truth[i])
		}
	}
	w := b.watchUsage(names...)
	round(reloads)
	w.end()

	// What is moving when it is stopped is counted as the records say.
	j := b.follow(t)
	for _, p := range all {
		down := b.mustDial(p.v4, "tcp", hostPort(testnet.FarV4, quotaSource))
		down.Write([]byte("x"))   //nolint:errcheck // nothing would come
		go new(tally).drain(down) //nolint:errcheck // until it is cut
		up := b.mustDial(p.v6, "tcp", hostPort(testnet.FarV6, quotaSink))
		go testnet.WritePattern(up, -1) //nolint:errcheck // likewise
	}
	time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
	if code := b.gw.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	<-j.ended
	up, down := make([]uint64, users), make([]uint64, users)
	for i := range all {
		up[i], down[i] = truth[i], truth[i]
	}
	for _, r := range j.closed {
		for i, p := range all {
			if r.User.Name == p.name {
				up[i], down[i] = up[i]+r.Up, down[i]+r.Down
			}
		}
	}
	b.again(config(reloads))
	for i, p := range all {
		b.used(p.name, up[i], down[i])
		truth[i] = 0
		if a := call(t, b.gw, "POST", "/v1/users/"+p.name+"/reset", ""); a.status != 200 {
			t.Errorf("reset: status %d: %s", a.status, a.body)
		}
		if u := b.user(p.name); u.Usage.Generation != 1 || u.Usage.Up+u.Usage.Down != 0 || u.Usage.FirstUse == nil {
			t.Errorf("after the reset: %+v", u.Usage)
		}
	}
	round(2)
}

// sigkills kills a gateway so many times while a user's bytes move, and checks what the
// next one has counted: no more than arrived, and no less than at the last commit.
func sigkills(t *testing.T, times int) {
	const rate = 2_000_000 // bytes/s
	who := people(1)[0]
	config := usersConfig([]string{who.yaml(fmt.Sprintf("limits: {bandwidth: {up: %dkB/s}}", rate/1000))}, "")
	b := newUserBed(t, config, who)
	var got arrivals
	for _, host := range []string{testnet.FarV4, testnet.FarV6} {
		b.Srv.Serve(hostPort(host, quotaSink), func(c *net.TCPConn) { got.drain(c) })
	}
	counted := uint64(0) // as the gateway before had it
	late := 0
	for i := range times + 1 {
		if i > 0 {
			b.again(config)
		}
		u := b.user(who.name).Usage.Up
		if arrived := got.until(time.Now()); u > arrived {
			t.Fatalf("kill %d: %d bytes are counted, %d arrived", i, u, arrived)
		}
		if u < counted {
			t.Fatalf("kill %d: %d bytes are counted, %d were committed", i, u, counted)
		}
		lost := got.until(time.Now()) - u // of this and the kills before
		got.forget(lost)
		if i == times {
			break
		}
		began := time.Now()
		c := b.mustDial([]string{who.v4, who.v6}[i%2], "tcp", hostPort([]string{testnet.FarV4, testnet.FarV6}[i%2], quotaSink))
		go testnet.WritePattern(c, -1) //nolint:errcheck // until it is killed
		time.Sleep(300*time.Millisecond + time.Duration(rand.IntN(1500))*time.Millisecond)
		committed := b.committed()
		counted = got.until(committed.Add(-50 * time.Millisecond)) // what arrives was counted just before
		killed := time.Now()
		b.gw.Signal(syscall.SIGKILL)
		b.gw.Wait(patience)
		if killed.Sub(committed) > commitLimit && killed.Sub(began) > commitLimit { // of what moved since
			late++
		}
		hardClose(c.(*net.TCPConn)) //nolint:errcheck // nobody else would tell it
	}
	if late > times/10 { // the machine's own slowness is not the gateway's
		t.Errorf("%d of %d times the last commit was more than %v ago", late, times, commitLimit)
	}
}

// commitLimit is how old the last commit may be at most, with an interval of a second.
const commitLimit = 1200 * time.Millisecond

// committed is when usage was committed last.
func (b *userBed) committed() time.Time {
	b.t.Helper()
	var s struct {
		Ledger struct {
			Writable bool
			Last     time.Time `json:"last_commit"`
		}
	}
	if b.gw.API.Get("/v1/status", &s); !s.Ledger.Writable {
		b.t.Error("the ledger is not writable")
	}
	return s.Ledger.Last
}

// until is how many bytes came until a moment.
func (a *arrivals) until(at time.Time) (n uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, v := range a.all {
		if !v.at.After(at) {
			n += uint64(v.n)
		}
	}
	return n
}

// forget takes n bytes away, the first ones.
func (a *arrivals) forget(n uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.all {
		v := &a.all[i]
		part := min(n, uint64(v.n))
		v.n -= int(part)
		n -= part
	}
}

func TestWithoutAWritableStateUsersAreCountedInMemoryAndStatusSaysSo(t *testing.T) {
	who := people(1)[0]
	b := newUserBed(t, strings.Replace(usersConfig([]string{who.yaml("")}, ""), "$DIR/state", "/proc/gatewayd", 1), who)
	b.serveAll()
	b.say(100, b.from(b.Cli, who.v4, "tcp"))
	b.used(who.name, 100, 100)
	testnet.Until(t, patience, "the status tells", func() bool {
		var s struct {
			Ledger   *struct{ Writable bool }
			Warnings []string
		}
		b.gw.API.Get("/v1/status", &s)
		return s.Ledger != nil && !s.Ledger.Writable && strings.Contains(strings.Join(s.Warnings, "\n"), "kept in memory only")
	})
}

func TestB46_AKillLosesNothingThatWasCommittedAndCountsNothingTwice(t *testing.T) { sigkills(t, 10) }
