package suite

import (
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// arrivals are bytes and when they came.
type arrivals struct {
	mu  sync.Mutex
	all []arrival
}

type arrival struct {
	at time.Time
	n  int
}

func (a *arrivals) add(n int) {
	if n > 0 {
		now := time.Now()
		a.mu.Lock()
		a.all = append(a.all, arrival{now, n})
		a.mu.Unlock()
	}
}

// drain reads to the end.
func (a *arrivals) drain(r io.Reader) {
	buf := make([]byte, 1<<16)
	for {
		n, err := r.Read(buf)
		if a.add(n); err != nil {
			return
		}
	}
}

// rate is bytes/s between two moments. What comes within a few milliseconds is one
// transfer, whose bytes are paid by the time until the next one begins.
func (a *arrivals) rate(from, to time.Time) float64 {
	const apart = 3 * time.Millisecond
	a.mu.Lock()
	defer a.mu.Unlock()
	var begin, last, before time.Time
	var sum, whole int
	for _, v := range a.all {
		if v.at.Before(from) || v.at.After(to) {
			continue
		}
		switch gap := v.at.Sub(before); {
		case before.IsZero():
			begin, last = v.at, v.at
		case gap >= apart:
			whole, last = sum, v.at
		}
		sum, before = sum+v.n, v.at
	}
	if last.Equal(begin) {
		last, whole = before, sum
	}
	return float64(whole) / max(last.Sub(begin).Seconds(), 1e-9)
}

// course is one transfer under a rate.
type course struct {
	who     person
	network string
	up      bool
	rate    int // bytes/s
	got     arrivals
}

func (c *course) String() string {
	way := "down"
	if c.up {
		way = "up"
	}
	return fmt.Sprintf("%s %s at %d kB/s", c.network, way, c.rate/1000)
}

// rateBed is a server that sends and receives at ports of their own for each course.
type rateBed struct {
	*userBed
	stop chan struct{}
	wg   sync.WaitGroup
}

func newRateBed(b *userBed) *rateBed {
	r := &rateBed{userBed: b, stop: make(chan struct{})}
	b.t.Cleanup(func() { r.end() })
	return r
}

func (b *rateBed) end() {
	select {
	case <-b.stop:
	default:
		close(b.stop)
	}
	b.wg.Wait()
}

// run begins a course: TCP as fast as it goes, UDP at half more than the rate.
func (b *rateBed) run(c *course, port int) {
	b.t.Helper()
	host, source := testnet.FarV4, c.who.v4
	if port%2 == 1 {
		host, source = testnet.FarV6, c.who.v6
	}
	address, offered := hostPort(host, port), int64(c.rate)*3/2
	if c.network == "tcp" {
		b.Srv.Serve(address, func(conn *net.TCPConn) {
			if c.up {
				c.got.drain(conn)
			} else {
				testnet.WritePattern(conn, -1) //nolint:errcheck // until the test ends
			}
		})
	} else {
		s := b.Srv.ServeUDP(address, func(s *testnet.UDPServer, from netip.AddrPort, p []byte) {
			if c.up {
				c.got.add(len(p))
			} else {
				b.wg.Go(func() { gush(toward{s, from}, tenDatagrams, offered, b.stop) })
			}
		})
		roomy(b.t, s.Conn)
		setSegment(b.t, s.Conn, tenDatagrams/10)
	}
	conn := b.mustDial(source, c.network, address)
	conn.SetDeadline(time.Time{}) //nolint:errcheck // the test ends it
	if udp, ok := conn.(*net.UDPConn); ok {
		roomy(b.t, udp)
		if c.up {
			setSegment(b.t, udp, tenDatagrams/10)
		}
	}
	b.t.Cleanup(func() { conn.Close() })
	switch {
	case !c.up:
		if c.network == "udp" {
			conn.Write([]byte("go")) //nolint:errcheck // nothing would come
		}
		go c.got.drain(conn)
	case c.network == "tcp":
		go testnet.WritePattern(conn, -1) //nolint:errcheck // until the test ends
	default:
		b.wg.Go(func() { gush(conn, tenDatagrams, offered, b.stop) })
	}
}

// tenDatagrams is what one write sends, in bytes.
const tenDatagrams = 12_000

// toward writes to one client of a server.
type toward struct {
	*testnet.UDPServer
	to netip.AddrPort
}

// Write sends a datagram.
func (w toward) Write(p []byte) (int, error) { return w.Conn.WriteToUDPAddrPort(p, w.to) }

func within(got, want, part float64) bool { return math.Abs(got-want) <= want*part }

func TestABandwidthIsWhatReceiversGet(t *testing.T) {
	const measured = 2 * time.Second
	var groups [3][]*course // those that run at the same time
	kinds := []struct {
		network string
		up      bool
	}{{"tcp", true}, {"tcp", false}, {"udp", true}, {"udp", false}}
	all := people(12)
	var lines []string
	for i, mbit := range []int{1, 10, 100} {
		for k, kind := range kinds {
			p := all[4*i+k]
			c := &course{who: p, network: kind.network, up: kind.up, rate: mbit * 125_000}
			g := 0
			if mbit == 100 {
				g = 1 + (k+k/2)%2 // one each way, one of each network
			}
			groups[g] = append(groups[g], c)
			lines = append(lines, p.yaml(fmt.Sprintf("limits: {bandwidth: {up: %dMbit/s, down: %dMbit/s}}", mbit, mbit)))
		}
	}
	b := newRateBed(newUserBed(t, usersConfig(lines, ""), all...))
	port := 1000
	run := func(cs ...*course) {
		for _, c := range cs {
			port++
			b.run(c, port)
		}
		for try := range 3 { // the machine's own slowness is not the gateway's
			begin := time.Now().Add(time.Second)
			time.Sleep(time.Until(begin.Add(measured)))
			missed := false
			for _, c := range cs {
				rate := c.got.rate(begin, begin.Add(measured))
				if !within(rate, float64(c.rate), 0.03) {
					missed = true
					if try == 2 {
						t.Errorf("%s: %.0f kB/s at its receiver", c, rate/1000)
					}
				}
			}
			if !missed {
				return
			}
		}
	}
	for _, g := range groups {
		b.stop = make(chan struct{})
		run(g...)
		b.end()
		for _, c := range g {
			b.gw.API.KillWhere("user=" + c.who.name)
		}
	}
}

func TestASpeedIsSharedByBothDirectionsAndAChangeIsFeltInASecond(t *testing.T) {
	all := people(1)
	b := newRateBed(newUserBed(t, usersConfig(nil, ""), all...))
	b.create(all[0], `"limits": {"speed": "8Mbit/s"}`)
	up, down := &course{who: all[0], network: "tcp", up: true}, &course{who: all[0], network: "tcp"}
	b.run(up, 1001)
	b.run(down, 1002)
	want := 1e6
	for i, patch := range []string{"", `{"limits": {"speed": "40Mbit/s"}}`, `{"limits": {"speed": "4Mbit/s"}}`} {
		if patch != "" {
			b.edit(all[0].name, patch)
			want = []float64{0, 5e6, 0.5e6}[i]
		}
		var each [2]float64
		for range 3 { // the machine's own slowness is not the gateway's
			begin := time.Now().Add(time.Second)
			if patch == "" {
				begin = begin.Add(time.Second) // the burst is a second's worth
			}
			time.Sleep(time.Until(begin.Add(2 * time.Second)))
			each = [2]float64{up.got.rate(begin, begin.Add(2*time.Second)), down.got.rate(begin, begin.Add(2*time.Second))}
			if within(each[0]+each[1], want, 0.05) {
				break
			}
		}
		t.Logf("up %.0f kB/s, down %.0f kB/s", each[0]/1000, each[1]/1000)
		if !within(each[0]+each[1], want, 0.05) {
			t.Errorf("from a second after %q on: %.0f kB/s in all, want %.0f", patch, (each[0]+each[1])/1000, want/1000)
		}
		if min(each[0], each[1]) < want/4 {
			t.Errorf("up %.0f kB/s, down %.0f kB/s: not shared", each[0]/1000, each[1]/1000)
		}
	}
}
