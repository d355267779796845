package suite

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// How a short connection goes. The client's first 9 bytes tell the server.
const (
	clientEnds   = iota // the client half-closes, the server answers and closes
	serverEnds          // the server answers and closes, then the client
	clientResets        // after the answer
	serverResets        // after its answer
	bothStop            // the client resets while it sends
	ways
)

const (
	shortConnections = 1000
	shortSize        = 200_000 // bytes each way, at most
	atOnce           = 16
	shortPort        = 20_000 // first local port
)

// short is one short connection.
type short struct {
	way      byte
	up, down int64 // bytes of pattern
	local    net.Addr
}

func (s short) ask() []byte {
	return binary.BigEndian.AppendUint64([]byte{s.way}, uint64(s.down))
}

const askSize = 9 // bytes

// serveShort does what its client asks for.
func serveShort(c *net.TCPConn) {
	var ask [askSize]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return
	}
	size := int64(binary.BigEndian.Uint64(ask[1:]))
	switch ask[0] {
	case clientEnds:
		io.Copy(io.Discard, c)        //nolint:errcheck // the client looks
		testnet.WritePattern(c, size) //nolint:errcheck
	case serverEnds, clientResets:
		testnet.WritePattern(c, size) //nolint:errcheck
		c.CloseWrite()                //nolint:errcheck
		io.Copy(io.Discard, c)        //nolint:errcheck
	case serverResets:
		testnet.WritePattern(c, size)                   //nolint:errcheck
		errors.Join(awaitAcknowledged(c), hardClose(c)) //nolint:errcheck
	case bothStop:
		io.Copy(io.Discard, c) //nolint:errcheck
	}
}

// run plays the client's side. The connection is closed when it returns.
func (s *short) run(c *net.TCPConn) error {
	defer c.Close()
	if _, err := c.Write(s.ask()); err != nil {
		return err
	}
	if s.way == bothStop {
		_, err := testnet.WritePattern(c, s.up)
		return errors.Join(err, hardClose(c))
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := testnet.WritePattern(c, s.up)
		if s.way == clientEnds {
			err = errors.Join(err, c.CloseWrite())
		}
		wrote <- err
	}()
	n, err := testnet.ReadPattern(c)
	werr := <-wrote
	if s.way == serverResets && isReset(errors.Join(err, werr)) {
		err, werr = nil, nil // whichever call comes first is told of a reset
	}
	if s.way == clientResets {
		werr = errors.Join(werr, hardClose(c))
	}
	if n != s.down {
		err = errors.Join(err, fmt.Errorf("%d bytes of %d", n, s.down))
	}
	return errors.Join(err, werr)
}

func TestAThousandShortConnectionsLeaveNothing(t *testing.T) {
	b := newTCPBed(t, "sample: 100ms\n")
	for _, f := range tcpFamilies() {
		b.Srv.Serve(f.addr(81), func(c *net.TCPConn) {
			c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // the test has a limit too
			serveShort(c)
		})
	}
	j := b.follow(t)
	b.runShort(t, 0, 100) // pools and tables have their size
	b.isQuiet(t, j, 100)
	before := b.gw.Process()
	goroutines := b.goroutines(t)
	all := b.runShort(t, 100, shortConnections)
	b.isQuiet(t, j, 100+shortConnections)
	for _, s := range all {
		s.counted(t, j)
	}
	testnet.Until(t, patience, "goroutines are as before", func() bool { return b.goroutines(t) <= goroutines })
	testnet.Until(t, patience, "descriptors are as before", func() bool { return b.gw.Process().FDs <= before.FDs })
	t.Logf("%d goroutines, %d descriptors, %d KiB resident; before %d, %d, %d", b.goroutines(t), b.gw.Process().FDs,
		b.gw.Process().RSS>>10, goroutines, before.FDs, before.RSS>>10)
	j.sound(t)
	b.totalsAgree(t, j)
}

// runShort runs n random connections from local ports that no other has.
func (b *tcpBed) runShort(t *testing.T, first, n int) []*short {
	t.Helper()
	random := rand.New(rand.NewPCG(3, uint64(first)))
	all := make([]*short, n)
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for i := range all {
		f := tcpFamilies()[random.IntN(2)]
		s := &short{way: byte(random.IntN(ways)), up: random.Int64N(shortSize), down: random.Int64N(shortSize)}
		s.local = &net.TCPAddr{IP: net.ParseIP(f.client), Port: shortPort + first + i}
		all[i] = s
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			c, err := b.Cli.DialFrom(t.Context(), s.local, "tcp", f.addr(81))
			if err == nil {
				c.SetDeadline(time.Now().Add(patience)) //nolint:errcheck // the test has a limit too
				err = s.run(c.(*net.TCPConn))
			}
			if err != nil {
				t.Errorf("connection of way %d: %v", s.way, err)
			}
		})
	}
	wg.Wait()
	return all
}

// isQuiet waits until no flow is left, and all that were have been told of.
func (b *tcpBed) isQuiet(t *testing.T, j *journal, flows int) {
	t.Helper()
	testnet.Until(t, patience, "the registry is empty and every flow was told of", func() bool {
		opened, closed := j.counts()
		return b.gw.API.Status().Flows == 0 && opened == flows && closed == flows
	})
}

func (b *tcpBed) goroutines(t *testing.T) int {
	t.Helper()
	var s struct{ Memory struct{ Goroutines int } }
	b.gw.API.Get("/v1/status", &s)
	if s.Memory.Goroutines == 0 {
		t.Fatal("the status tells no number of goroutines")
	}
	return s.Memory.Goroutines
}

// counted waits for a connection's record and compares.
func (s *short) counted(t *testing.T, j *journal) {
	t.Helper()
	s.matches(t, j.end(t, patience, s.local))
}

// matches compares a connection's record with what its client knows.
func (s *short) matches(t *testing.T, r testnet.FlowRecord) {
	t.Helper()
	up, down, reason := uint64(askSize+s.up), uint64(s.down), "eof"
	switch s.way {
	case clientResets, serverResets:
		reason = "reset"
		up = min(up, r.Up) // a reset takes what was not passed on
	case bothStop:
		reason, down = "reset", 0
		up = min(up, r.Up)
	}
	if r.Reason != reason || r.Up != up || r.Down != down {
		t.Errorf("a connection of way %d closed as %s with %d up and %d down, want %s, %d and %d", s.way, r.Reason, r.Up, r.Down, reason, up, down)
	}
}
