package suite

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// Mixed traffic: bulk transfers each way, a stream of short connections, UDP back
// and forth and downloads that are killed, all at once and each counted.
const (
	// churnPorts are the local ports that short connections take in turn, from
	// shortPort on: none that the kernel chooses for others, and each comes again
	// after 84 s: TIME_WAIT takes 60.
	churnPorts = 12_600

	mixedConfig  = "timeouts: {udp: {one_way: 2s, answered: 2s}}\nsweep: 100ms\n"
	bulkSize     = 64 << 20 // bytes
	churnBatch   = 150      // short connections a second
	killEvery    = 300 * time.Millisecond
	killedAfter  = 4 << 20 // bytes
	mixedPayload = 1200    // bytes of a datagram
)

// mixedBed is a gateway with servers for mixed traffic.
type mixedBed struct {
	*tcpBed
	j       *journal
	batches int // of short connections, so far
}

// mix is mixed traffic and what its clients know of it.
type mix struct {
	*mixedBed
	t       *testing.T
	end     time.Time
	workers sync.WaitGroup

	mu      sync.Mutex // guards what follows
	ended   []ended
	fetches int               // of them, killed downloads
	rounds  map[string]uint64 // datagrams each way, by the client's socket
}

// ended is a connection that ended for its client, and how its record is checked.
type ended struct {
	source string
	check  func(testnet.FlowRecord)
}

func TestMixedTrafficIsCountedToTheByteAndLeavesNothing(t *testing.T) {
	b := newMixedBed(t)
	b.mixed(t, 2*time.Second) // pools and tables have their size
	rest := b.rest(t)
	b.mixed(t, 6*time.Second)
	b.isAsBefore(t, rest)
}

func newMixedBed(t *testing.T) *mixedBed {
	t.Helper()
	b := newTCPBed(t, mixedConfig)
	b.Cli.Run("sysctl", "-qw", fmt.Sprintf("net.ipv4.ip_local_port_range=%d 65535", shortPort+churnPorts))
	for _, f := range tcpFamilies() {
		b.Srv.Source(f.addr(80), -1)
		b.Srv.UDPEcho(f.addr(7))
		b.Srv.Serve(f.addr(81), func(c *net.TCPConn) {
			c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // the clients have limits too
			serveShort(c)
		})
	}
	return &mixedBed{tcpBed: b, j: b.follow(t)}
}

// mixed runs mixed traffic for a while and compares every flow's record with what
// its client knows. It returns what was resident meanwhile, in bytes, in order.
func (b *mixedBed) mixed(t *testing.T, while time.Duration) (resident []uint64) {
	t.Helper()
	first, _ := b.j.counts()
	m := &mix{mixedBed: b, t: t, end: time.Now().Add(while), rounds: make(map[string]uint64)}
	for _, f := range tcpFamilies() {
		m.repeat(func() { m.bulk(f, &short{way: clientEnds, up: bulkSize}) })
		m.repeat(func() { m.bulk(f, &short{way: serverEnds, down: bulkSize}) })
		m.workers.Go(func() { m.pingPong(f) })
	}
	for time.Now().Before(m.end) { // what may end the test stays on its goroutine
		due := time.Now().Add(time.Second)
		m.add(b.runShort(t, b.batches*churnBatch%churnPorts, churnBatch)...)
		b.batches++
		for time.Now().Before(due) {
			m.kill(tcpFamilies()[b.batches%2])
			time.Sleep(killEvery)
		}
		resident = append(resident, b.gw.Process().RSS)
	}
	m.workers.Wait()
	m.check(first)
	t.Logf("%d connections, %d of them killed downloads, %d sockets with datagrams", len(m.ended), m.fetches, len(m.rounds))
	return resident
}

func (m *mix) repeat(f func()) {
	m.workers.Go(func() {
		for time.Now().Before(m.end) && !m.t.Failed() {
			f()
		}
	})
}

// bulk is one large transfer.
func (m *mix) bulk(f family, s *short) {
	c, err := m.tryConnect(m.t, f.addr(81))
	if err == nil {
		s.local = c.LocalAddr()
		err = s.run(c)
	}
	if err != nil {
		m.t.Errorf("a bulk transfer of way %d: %v", s.way, err)
		return
	}
	m.add(s)
}

func (m *mix) add(all ...*short) {
	for _, s := range all {
		m.ends(s.local, func(r testnet.FlowRecord) { s.matches(m.t, r) })
	}
}

// sourceOf is a client's socket: TCP and UDP may have the same port.
func sourceOf(local net.Addr) string { return local.Network() + " " + local.String() }

// ends notes a connection when it ended.
func (m *mix) ends(local net.Addr, check func(testnet.FlowRecord)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ended = append(m.ended, ended{sourceOf(local), check})
}

// pingPong has one datagram at a time on its way, so that none is lost.
func (m *mix) pingPong(f family) {
	c, err := m.Cli.Dial(m.t.Context(), "udp", f.addr(7))
	if err != nil {
		m.t.Errorf("UDP: %v", err)
		return
	}
	defer c.Close()
	buf := make([]byte, 2*mixedPayload)
	var n uint64
	for time.Now().Before(m.end) && err == nil {
		_, werr := c.Write(buf[:mixedPayload])
		derr := c.SetReadDeadline(time.Now().Add(udpPatience))
		_, rerr := c.Read(buf)
		err = errors.Join(werr, derr, rerr)
		n++
	}
	if err != nil {
		m.t.Errorf("datagram %d: %v", n, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rounds[sourceOf(c.LocalAddr())] = n
}

// kill has a download run into a kill. It is called by the test's goroutine alone.
func (m *mix) kill(f family) {
	m.t.Helper()
	d := startFetch(m.connect(m.t, f.addr(80)), 0)
	d.local = d.conn.LocalAddr()
	testnet.Until(m.t, patience, "the download is on its way", func() bool { return d.got.Load() > killedAfter })
	if status := m.gw.API.Kill(m.live(m.t, d.local).ID); status != 204 {
		m.t.Errorf("the kill answered %d", status)
	}
	d.wait(m.t)
	if !isReset(d.err) {
		m.t.Errorf("a killed download ended with %v", d.err)
	}
	m.fetches++
	m.ends(d.local, func(r testnet.FlowRecord) {
		if r.Reason != "killed" || r.Up != 0 || r.Down != uint64(d.got.Load()) {
			m.t.Errorf("a killed download of %d bytes closed as %s with %d up and %d down", d.got.Load(), r.Reason, r.Up, r.Down)
		}
	})
}

// check compares all records of flows after the first ones with what clients know.
// A source that came again has its records in the order of its connections.
func (m *mix) check(first int) {
	m.t.Helper()
	flows := first + len(m.ended) + len(m.rounds)
	testnet.Until(m.t, patience, "every flow ended and was told of", func() bool {
		opened, closed := m.j.counts()
		return m.gw.API.Status().Flows == 0 && opened == flows && closed == flows
	})
	of := m.j.bySource(uint64(first))
	take := func(source string) (r testnet.FlowRecord) {
		if len(of[source]) == 0 {
			m.t.Fatalf("no record of %s", source)
		}
		r, of[source] = of[source][0], of[source][1:]
		return r
	}
	for _, e := range m.ended {
		e.check(take(e.source))
	}
	for source, n := range m.rounds {
		if r := take(source); r.Up != n*mixedPayload || r.Down != n*mixedPayload {
			m.t.Errorf("%d datagrams each way closed with %d up and %d down", n, r.Up, r.Down)
		}
	}
	m.j.sound(m.t)
	m.totalsAgree(m.t, m.j)
}

// bySource are the closed flows with larger ids, oldest first for each source, named as by sourceOf.
func (j *journal) bySource(after uint64) map[string][]testnet.FlowRecord {
	j.mu.Lock()
	defer j.mu.Unlock()
	of := make(map[string][]testnet.FlowRecord)
	for _, r := range j.closed {
		if r.ID > after {
			source := r.Network + " " + netip.MustParseAddrPort(r.Source).String()
			of[source] = append(of[source], r)
		}
	}
	for _, records := range of {
		slices.SortFunc(records, func(a, b testnet.FlowRecord) int { return cmp.Compare(a.ID, b.ID) })
	}
	return of
}

// resting is a gateway without traffic.
type resting struct {
	goroutines, fds int
}

func (b *mixedBed) rest(t *testing.T) resting {
	t.Helper()
	testnet.Until(t, patience, "no association is left", func() bool { return b.gw.API.Status().Associations == 0 })
	return resting{b.goroutines(t), b.gw.Process().FDs}
}

// isAsBefore wants goroutines and descriptors as they were.
func (b *mixedBed) isAsBefore(t *testing.T, before resting) {
	t.Helper()
	testnet.Until(t, patience, "goroutines are as before", func() bool { return b.goroutines(t) <= before.goroutines })
	testnet.Until(t, patience, "descriptors are as before", func() bool { return b.gw.Process().FDs <= before.fds })
}
