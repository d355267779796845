package suite

import (
	"context"
	"fmt"
	"net"
	"os"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

const (
	unlimited    = "limits: {flows: 0, per_source: {flows: 0, dials: 0, associations: 0}}\n"
	openers      = 64              // clients that connect at once
	openLimit    = 3 * time.Second // of a connection that may be refused
	sipEvery     = time.Second
	sipSize      = 4 << 10
	serverBuffer = 32 << 10 // bytes: a kernel full of buffers is not what is tested
)

var rssAnon = regexp.MustCompile(`RssAnon:\s+(\d+) kB`)

// anonymous is a process' memory without its program's file, in bytes; 0 if the
// process is gone.
func anonymous(pid int) uint64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	m := rssAnon.FindSubmatch(b)
	if m == nil {
		return 0
	}
	kb, _ := strconv.ParseUint(string(m[1]), 10, 64)
	return kb << 10
}

// slowCrowd is clients that read a little now and then.
type slowCrowd struct {
	b       *tcpBed
	mu      sync.Mutex
	conns   []net.Conn
	refused atomic.Int64
	died    atomic.Int64
	read    atomic.Uint64
	closing atomic.Bool
	wg      sync.WaitGroup
}

// enough clients that are not let in show that the gateway is full.
const enough = 2 * openers

// open tries n connections, or until enough are not let in.
func (s *slowCrowd) open(t *testing.T, n int) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, openers)
	for i := 0; i < n && s.refused.Load() < enough; i++ {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(t.Context(), openLimit)
			defer cancel()
			c, err := s.b.Cli.Dial(ctx, "tcp", tcpFamilies()[i%2].addr(80))
			if err != nil {
				s.refused.Add(1)
				return
			}
			c.(*net.TCPConn).SetReadBuffer(serverBuffer) //nolint:errcheck // it sips in any case
			s.mu.Lock()
			s.conns = append(s.conns, c)
			s.mu.Unlock()
			s.wg.Go(func() { s.sip(c) })
		})
	}
	wg.Wait()
}

func (s *slowCrowd) sip(c net.Conn) {
	buf := make([]byte, sipSize)
	tick := time.NewTicker(sipEvery)
	defer tick.Stop()
	for {
		n, err := c.Read(buf)
		s.read.Add(uint64(n))
		if err != nil {
			if !s.closing.Load() {
				s.died.Add(1)
			}
			return
		}
		<-tick.C
	}
}

// leave closes all but keep of them.
func (s *slowCrowd) leave(keep int) {
	s.closing.Store(true)
	for _, c := range s.conns[keep:] {
		hardClose(c.(*net.TCPConn)) //nolint:errcheck // the gateway sees it
	}
	s.conns = s.conns[:keep]
}

// press has so many slow clients come that memory for them would be several times
// the budget, and looks whether the gateway keeps it.
func press(t *testing.T, clients int, budget uint64) {
	testnet.Require(t)
	lab := testnet.New(t, testnet.Options{})
	b := &tcpBed{lab, lab.Start(testnet.GatewayOptions{
		Config: tcpConfig(unlimited), Device: tcpDevice, Env: []string{fmt.Sprintf("GOMEMLIMIT=%d", budget)},
	})}
	for _, f := range tcpFamilies() {
		b.Srv.Echo(f.addr(honestPort))
		b.Srv.Serve(f.addr(80), func(c *net.TCPConn) {
			c.SetWriteBuffer(serverBuffer) //nolint:errcheck // it writes in any case
			testnet.WritePattern(c, -1)    //nolint:errcheck // ends with the client
		})
	}
	honest := b.connect(t, tcpFamilies()[0].addr(honestPort))
	var most atomic.Uint64
	watched, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-tick.C:
				most.Store(max(most.Load(), anonymous(b.gw.PID())))
			case <-stop:
				tick.Stop()
				return
			}
		}
	}()
	crowd := &slowCrowd{b: b}
	crowd.open(t, clients)
	testnet.Until(t, patience, "new flows are refused", func() bool { return b.gw.API.Status().Drops["memory"] > 0 })
	admitted := len(crowd.conns)
	full := b.gw.API.Status()
	t.Logf("%d slow clients were let in, %d not; %s: %d KiB of %d used", admitted, crowd.refused.Load(), full.Memory.Level, full.Memory.Used>>10, full.Memory.Budget>>10)

	// Who is in goes on: slow ones, and a small honest one at once.
	honest.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // it is open
	before := crowd.read.Load()
	for range 20 {
		begin := time.Now()
		if err := bounce(honest); err != nil || time.Since(begin) > honestLimit {
			t.Fatalf("a flow of an honest client: %v after %v", err, time.Since(begin))
		}
		time.Sleep(100 * time.Millisecond)
	}
	if n := crowd.read.Load() - before; n < uint64(admitted)*sipSize/4 {
		t.Errorf("%d slow clients got %d bytes in 2 s", admitted, n)
	}
	if s := b.gw.API.Status(); s.Flows < admitted+1 || crowd.died.Load() > 0 {
		t.Errorf("%d flows live of %d, %d broke", s.Flows, admitted+1, crowd.died.Load())
	}

	// Room comes back, for new ones too.
	crowd.leave(admitted / 4)
	if c := b.connect(t, tcpFamilies()[1].addr(honestPort)); bounce(c) != nil {
		t.Error("a new flow is not carried")
	}
	close(stop)
	<-watched
	t.Logf("at most %d KiB were resident apart from the program's file", most.Load()>>10)
	if most.Load() > budget || most.Load() == 0 {
		t.Errorf("%d KiB were resident, the budget is %d", most.Load()>>10, budget>>10)
	}
	crowd.leave(0)
	crowd.wg.Wait()
	testnet.Until(t, patience, "memory is normal again", func() bool {
		s := b.gw.API.Status()
		return s.Flows == 2 && s.Memory.Level == "normal" && len(s.Warnings) == 0
	})
	if bounce(honest) != nil {
		t.Error("the honest flow did not outlive it")
	}
}

func TestB09_ThousandsOfSlowClientsStayWithinTheMemoryBudget(t *testing.T) { press(t, 3000, 64<<20) }
