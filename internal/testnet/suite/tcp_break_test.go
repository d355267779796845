package suite

import (
	"context"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// What came before, with and after a byte of urgent data arrives, and its end.
func TestUrgentDataIsData(t *testing.T) {
	b := newTCPBed(t, "")
	for _, f := range tcpFamilies() {
		b.Srv.Serve(f.addr(7101), func(c *net.TCPConn) {
			c.Write([]byte("before")) //nolint:errcheck // the client would notice
			raw, err := c.SyscallConn()
			if err != nil {
				return
			}
			raw.Control(func(fd uintptr) { unix.SendmsgN(int(fd), []byte("U"), nil, nil, unix.MSG_OOB) }) //nolint:errcheck
			c.Write([]byte("after"))                                                                      //nolint:errcheck
		})
		c := b.connect(t, f.addr(7101))
		c.SetReadDeadline(time.Now().Add(patience)) //nolint:errcheck
		if got, err := io.ReadAll(c); string(got) != "beforeUafter" || err != nil {
			t.Errorf("%s: got %q, %v", f.name, got, err)
		}
	}
}

// A client that reads nothing hears of the server's reset within 5 s.
func TestAServersResetPassesAStalledClient(t *testing.T) {
	b := newTCPBed(t, "")
	f := tcpFamilies()[0]
	b.Srv.Serve(f.addr(7102), func(c *net.TCPConn) {
		c.SetWriteDeadline(time.Now().Add(time.Second)) //nolint:errcheck
		io.Copy(c, neverEnding{})                       //nolint:errcheck // ends by the deadline
		hardClose(c)                                    //nolint:errcheck
	})
	c := b.connect(t, f.addr(7102))
	testnet.Until(t, 10*time.Second, "the client was reset", func() bool { return socketBroken(c) })
	testnet.Until(t, patience, "the flow ended", func() bool { return b.gw.API.Status().Flows == 0 })
}

type neverEnding struct{}

func (neverEnding) Read(p []byte) (int, error) { return len(p), nil }

// Both sides said their last, and the client does not read it.
func TestAFlowWithBothEndsClosedIsBoundedToo(t *testing.T) {
	b := newTCPBed(t, "timeouts: {tcp: {half_closed: 1s}}\n")
	f := tcpFamilies()[0]
	b.Srv.Serve(f.addr(7103), func(c *net.TCPConn) {
		c.Write(make([]byte, 200<<10)) //nolint:errcheck // more than the client's window, less than the endpoint's buffer
		c.CloseWrite()                 //nolint:errcheck
		io.Copy(io.Discard, c)         //nolint:errcheck
	})
	c := b.connect(t, f.addr(7103))
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	testnet.Until(t, 10*time.Second, "the flow ended", func() bool {
		closed := b.gw.API.Closed()
		return len(closed) == 1 && closed[0].Reason == "idle"
	})
}

// A port can be used again at once after the server closed first.
func TestAPortIsUsedAgainInTimeWait(t *testing.T) {
	b := newTCPBed(t, "")
	f := tcpFamilies()[0]
	b.Srv.Serve(f.addr(7104), func(c *net.TCPConn) { c.Write([]byte("x")) }) //nolint:errcheck
	again := func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }) //nolint:errcheck
	}
	for range 3 {
		begin := time.Now()
		err := b.Cli.Do(func() error {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(f.client), Port: 45555}, Control: again}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			c, err := d.DialContext(ctx, "tcp", f.addr(7104))
			if err != nil {
				return err
			}
			io.ReadAll(c) //nolint:errcheck
			return c.Close()
		})
		if took := time.Since(begin); err != nil || took > prompt {
			t.Errorf("connected after %v, %v", took, err)
		}
		testnet.Until(t, patience, "the flow is gone", func() bool { return b.gw.API.Status().Flows == 0 })
	}
}
