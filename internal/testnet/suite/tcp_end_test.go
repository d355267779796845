package suite

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

const (
	halfOpen    = 90 * time.Second / 20 // how long one direction lives on alone
	halfLimit   = 5 * time.Minute / 20  // timeouts.tcp.half_closed
	replySize   = 20 << 20              // bytes of a reply after a half-close
	requestSize = 1000                  // bytes
)

// told is what a server's handler tells the test about one connection.
type told struct {
	n       int64     // pattern bytes that it read
	eof     time.Time // when the client's FIN came
	sentFIN time.Time
	err     error
}

// serveOnce runs handle for connections to an address and hands on what each told.
func (b *tcpBed) serveOnce(address string, handle func(*net.TCPConn) told) <-chan told {
	out := make(chan told, 8)
	b.Srv.Serve(address, func(c *net.TCPConn) {
		c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // the test has a limit too
		out <- handle(c)
	})
	return out
}

func await(t *testing.T, ch <-chan told) told {
	t.Helper()
	select {
	case r := <-ch:
		return r
	case <-time.After(patience):
		t.Fatal("the server's side did not end")
		return told{}
	}
}

func TestB05_AReplyAfterTheClientsHalfCloseIsWhole(t *testing.T) {
	b := newTCPBed(t, fmt.Sprintf("timeouts: {tcp: {half_closed: %v}}\n", halfLimit))
	j := b.follow(t)
	t.Run("families", func(t *testing.T) {
		for _, f := range tcpFamilies() {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				server := b.serveOnce(f.addr(81), func(c *net.TCPConn) (r told) {
					r.n, r.err = testnet.ReadPattern(c)
					r.eof = time.Now()
					time.Sleep(halfOpen)
					_, err := testnet.WritePattern(c, replySize)
					r.err = errors.Join(r.err, err)
					return r
				})
				c := b.connect(t, f.addr(81))
				if _, err := testnet.WritePattern(c, requestSize); err != nil {
					t.Fatal(err)
				}
				fin := time.Now()
				if err := c.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				n, err := testnet.ReadPattern(c)
				if n != replySize || err != nil {
					t.Errorf("the reply has %d bytes, want %d; %v", n, replySize, err)
				}
				r := await(t, server)
				if r.n != requestSize || r.err != nil {
					t.Errorf("the server got %d bytes, want %d; %v", r.n, requestSize, r.err)
				}
				soon(t, "the client's FIN reached the server", r.eof.Sub(fin))
				j.wants(t, c.LocalAddr(), "eof", requestSize, replySize)
			})
		}
	})
}

func TestB05_AnUploadAfterTheServersHalfCloseIsWhole(t *testing.T) {
	const pieces, piece = 45, 512 << 10 // bytes
	b := newTCPBed(t, fmt.Sprintf("timeouts: {tcp: {half_closed: %v}}\n", halfLimit))
	j := b.follow(t)
	t.Run("families", func(t *testing.T) {
		for _, f := range tcpFamilies() {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				server := b.serveOnce(f.addr(82), func(c *net.TCPConn) (r told) {
					_, err := testnet.WritePattern(c, requestSize)
					r.sentFIN = time.Now()
					err = errors.Join(err, c.CloseWrite())
					r.n, r.err = testnet.ReadPattern(c)
					r.err = errors.Join(r.err, err)
					return r
				})
				c := b.connect(t, f.addr(82))
				n, err := testnet.ReadPattern(c)
				eof := time.Now()
				if n != requestSize || err != nil {
					t.Errorf("the client got %d bytes, want %d; %v", n, requestSize, err)
				}
				slow := everyWrite{c, halfOpen / pieces}
				if _, err := testnet.WritePattern(slow, pieces*piece); err != nil {
					t.Errorf("upload: %v", err)
				}
				c.CloseWrite() //nolint:errcheck // the server would not see the end
				r := await(t, server)
				if r.n != pieces*piece || r.err != nil {
					t.Errorf("the server got %d bytes, want %d; %v", r.n, pieces*piece, r.err)
				}
				soon(t, "the server's FIN reached the client", eof.Sub(r.sentFIN))
				j.wants(t, c.LocalAddr(), "eof", pieces*piece, requestSize)
			})
		}
	})
}

// everyWrite spreads 512 KiB over a pause: the pattern comes in pieces of 64 KiB.
type everyWrite struct {
	io.Writer
	pause time.Duration
}

func (w everyWrite) Write(p []byte) (int, error) {
	time.Sleep(w.pause / 8)
	return w.Writer.Write(p)
}

func soon(t *testing.T, what string, took time.Duration) {
	t.Helper()
	if took > prompt {
		t.Errorf("%s after %v, want at once", what, took)
	}
}

// wants fails the test unless a client's flow ended with a reason and counters.
func (j *journal) wants(t *testing.T, local net.Addr, reason string, up, down uint64) {
	t.Helper()
	r := j.end(t, patience, local)
	if r.Reason != reason || r.Up != up || r.Down != down {
		t.Errorf("the closed event says %s with %d bytes up and %d down, want %s, %d, %d", r.Reason, r.Up, r.Down, reason, up, down)
	}
}

const (
	beforeReset = 1 << 20 // bytes that arrive before a reset
	slowReader  = time.Second
)

func TestB07_AServersResetReachesTheClientBehindItsBytes(t *testing.T) {
	b := newTCPBed(t, "")
	j := b.follow(t)
	for _, f := range tcpFamilies() {
		for _, pause := range []time.Duration{0, slowReader} {
			server := b.serveOnce(f.addr(83+int(pause/slowReader)), func(c *net.TCPConn) (r told) {
				_, err := testnet.WritePattern(c, beforeReset)
				r.err = errors.Join(err, awaitAcknowledged(c), hardClose(c))
				return r
			})
			c := b.connect(t, f.addr(83+int(pause/slowReader)))
			time.Sleep(pause) // the reset comes while the client reads, or long before
			n, err := testnet.ReadPattern(c)
			if n != beforeReset || !isReset(err) {
				t.Errorf("%s, pause %v: the client got %d bytes, want %d, then %v, want a reset", f.name, pause, n, beforeReset, err)
			}
			if r := await(t, server); r.err != nil {
				t.Error(r.err)
			}
			j.wants(t, c.LocalAddr(), "reset", 0, beforeReset)
		}
	}
}

func TestB07_AClientsResetReachesTheServerBehindItsBytes(t *testing.T) {
	b := newTCPBed(t, "")
	j := b.follow(t)
	for _, f := range tcpFamilies() {
		for _, pause := range []time.Duration{0, slowReader} {
			server := b.serveOnce(f.addr(85+int(pause/slowReader)), func(c *net.TCPConn) (r told) {
				time.Sleep(pause)
				r.n, r.err = testnet.ReadPattern(c)
				return r
			})
			c := b.connect(t, f.addr(85+int(pause/slowReader)))
			local := c.LocalAddr()
			if _, err := testnet.WritePattern(c, beforeReset); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(awaitAcknowledged(c), hardClose(c)); err != nil {
				t.Fatal(err)
			}
			if r := await(t, server); r.n != beforeReset || !isReset(r.err) {
				t.Errorf("%s, pause %v: the server got %d bytes, want %d, then %v, want a reset", f.name, pause, r.n, beforeReset, r.err)
			}
			j.wants(t, local, "reset", beforeReset, 0)
		}
	}
}

const (
	wholeReply = 2 << 20               // bytes
	sip        = 10 * time.Millisecond // a reader's pause, so that much is on its way when the reset comes
)

func TestB07_AResetAfterAnEndTakesNothingAway(t *testing.T) {
	b := newTCPBed(t, "")
	j := b.follow(t)
	for _, f := range tcpFamilies() {
		server := b.serveOnce(f.addr(87), func(c *net.TCPConn) (r told) {
			_, err := testnet.WritePattern(c, wholeReply)
			r.err = errors.Join(err, c.CloseWrite(), awaitAcknowledged(c), hardClose(c))
			return r
		})
		c := b.connect(t, f.addr(87))
		n, err := testnet.ReadPattern(slowRead{c, sip})
		if n != wholeReply || err != nil && !isReset(err) {
			t.Errorf("%s: the client got %d bytes, want %d; %v", f.name, n, wholeReply, err)
		}
		if r := await(t, server); r.err != nil {
			t.Errorf("%s: the server: %v", f.name, r.err)
		}
		j.wants(t, c.LocalAddr(), "reset", 0, wholeReply)
	}
}

func TestB07_AResetAfterAnUploadsEndTakesNothingAway(t *testing.T) {
	b := newTCPBed(t, "")
	j := b.follow(t)
	for _, f := range tcpFamilies() {
		server := b.serveOnce(f.addr(88), func(c *net.TCPConn) (r told) {
			r.n, r.err = testnet.ReadPattern(slowRead{c, sip})
			return r
		})
		c := b.connect(t, f.addr(88))
		local := c.LocalAddr()
		_, err := testnet.WritePattern(c, wholeReply)
		if err := errors.Join(err, c.CloseWrite(), awaitAcknowledged(c), hardClose(c)); err != nil {
			t.Errorf("%s: the client: %v", f.name, err)
		}
		if r := await(t, server); r.n != wholeReply || r.err != nil && !isReset(r.err) {
			t.Errorf("%s: the server got %d bytes, want %d; %v", f.name, r.n, wholeReply, r.err)
		}
		j.wants(t, local, "reset", wholeReply, 0)
	}
}

// slowRead pauses before each read.
type slowRead struct {
	io.Reader
	pause time.Duration
}

func (r slowRead) Read(p []byte) (int, error) {
	time.Sleep(r.pause)
	return r.Reader.Read(p)
}
