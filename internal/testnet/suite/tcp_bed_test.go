package suite

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// family is one of the two address families that every test of TCP runs over.
type family struct {
	name        string
	far, server string // addresses of the server; far is behind its link
	client      string
}

func tcpFamilies() []family {
	return []family{
		{"IPv4", testnet.FarV4, testnet.ServerV4, testnet.ClientV4},
		{"IPv6", testnet.FarV6, testnet.ServerV6, testnet.ClientV6},
	}
}

func (f family) addr(port int) string { return net.JoinHostPort(f.far, strconv.Itoa(port)) }

const (
	tcpDevice = "gw0"
	// prompt is for what has to happen at once: a round trip of the lab takes well
	// under a millisecond, the rest is a busy machine's.
	prompt   = 500 * time.Millisecond
	patience = 20 * time.Second // for what only has to happen
)

// tcpBed is a lab whose client reaches the server through a gateway.
type tcpBed struct {
	*testnet.Lab
	gw *testnet.Gateway
}

// newTCPBed starts a gateway with the embedded defaults and more, further
// sections of its configuration.
func newTCPBed(t *testing.T, more string) *tcpBed {
	t.Helper()
	return newTCPBedWith(t, more, testnet.Options{})
}

func newTCPBedWith(t *testing.T, more string, o testnet.Options) *tcpBed {
	t.Helper()
	testnet.Require(t)
	lab := testnet.New(t, o)
	return &tcpBed{lab, lab.Start(testnet.GatewayOptions{Config: tcpConfig(more), Device: tcpDevice})}
}

func tcpConfig(more string) string {
	return "version: 1\napi: {listen: [\"$API\"]}\ntun: [{tag: lan, device: " + tcpDevice + "}]\n" + more
}

// connect dials from the client's namespace. What it returns is closed with the test.
func (b *tcpBed) connect(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	c, err := b.tryConnect(t, address)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	return c
}

// tryConnect is connect for goroutines that are not the test's.
func (b *tcpBed) tryConnect(t *testing.T, address string) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := b.Cli.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(time.Minute))
}

// hardClose closes with a reset (SO_LINGER 0, socket(7)).
func hardClose(c *net.TCPConn) error {
	return errors.Join(c.SetLinger(0), c.Close())
}

// unacknowledged is how many bytes the far end's kernel has not acknowledged.
func unacknowledged(c *net.TCPConn) int {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1
	}
	n := -1
	if err := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); err != nil {
		return -1
	}
	return n
}

// awaitAcknowledged waits until the other end's kernel has all bytes that were
// written, for at most 10 s; for goroutines that are not the test's.
func awaitAcknowledged(c *net.TCPConn) error {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if n := unacknowledged(c); n <= 0 {
			return nil
		}
	}
	return errors.New("bytes were not acknowledged for 10 s")
}

// isBroken reports whether a connection ended by an error or on both sides; it
// takes nothing away.
func isBroken(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0 && p[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
}

func socketBroken(c *net.TCPConn) (broken bool) {
	raw, err := c.SyscallConn()
	return err != nil || raw.Control(func(fd uintptr) { broken = isBroken(fd) }) != nil || broken
}

func isReset(err error) bool { return errors.Is(err, syscall.ECONNRESET) }

// journal keeps what a gateway's event stream tells of flows.
type journal struct {
	ended chan struct{} // closed with the stream

	mu     sync.Mutex // guards what follows
	opened map[uint64]testnet.FlowRecord
	closed map[uint64]testnet.FlowRecord
	wrong  []string // events that are out of order, doubled or missed
}

// follow subscribes to the flows of a gateway from now on.
func (b *tcpBed) follow(t *testing.T) *journal {
	t.Helper()
	j := &journal{
		ended:  make(chan struct{}),
		opened: make(map[uint64]testnet.FlowRecord), closed: make(map[uint64]testnet.FlowRecord),
	}
	events := b.gw.API.Events(context.Background(), "/v1/connections/events")
	go func() {
		defer close(j.ended)
		for e := range events {
			j.take(e)
		}
	}()
	return j
}

func (j *journal) take(e testnet.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	f, err := e.Flow()
	_, opened := j.opened[f.ID]
	_, closed := j.closed[f.ID]
	switch {
	case err == nil && e.Type == "opened" && !opened && !closed:
		j.opened[f.ID] = f
	case err == nil && e.Type == "closed" && opened && !closed:
		j.closed[f.ID] = f
	default:
		j.wrong = append(j.wrong, e.Type+" "+string(e.Data))
	}
}

// counts are the flows told of so far.
func (j *journal) counts() (opened, closed int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.opened), len(j.closed)
}

// sound fails the test if the stream told anything that can't be.
func (j *journal) sound(t *testing.T) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.wrong) > 0 {
		t.Errorf("%d events out of order, doubled or missed, as %s", len(j.wrong), j.wrong[0])
	}
}

// end waits for the closed event of the flow that a client's socket was.
func (j *journal) end(t *testing.T, limit time.Duration, local net.Addr) (r testnet.FlowRecord) {
	t.Helper()
	testnet.Until(t, limit, "the closed event of "+local.String(), func() bool {
		j.mu.Lock()
		defer j.mu.Unlock()
		for _, r = range j.closed {
			if r.Source == local.String() {
				return true
			}
		}
		return false
	})
	return r
}

// live is the live flow that a client's socket is, or fails the test.
func (b *tcpBed) live(t *testing.T, local net.Addr) testnet.FlowRecord {
	t.Helper()
	for _, f := range b.gw.API.Flows("") {
		if f.Source == local.String() {
			return f
		}
	}
	t.Fatalf("no live flow of %s", local)
	return testnet.FlowRecord{}
}
