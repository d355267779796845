package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/testnet"
)

// Ports of the server, for TCP. Those of newBehaviourBed's filters are beside them.
const (
	portEcho     = 7
	portClosed   = 81
	portFiltered = 82
	portBanner   = 90  // says a word first, then echoes
	portReset    = 91  // resets after the first byte
	portBye      = 92  // sends, ends its side, then counts what comes
	portCount    = 93  // tells how many bytes came before the client's FIN
	portTold     = 94  // tells the test how the connection ended
	portSlow     = 95  // reads nothing for a while, then counts
	portSource   = 96  // sends 1 MiB of the pattern
	portEnd      = 97  // closes at once
	portUnread   = 99  // closes with bytes unread
	portUrgentIn = 100 // says what it reads of an urgent byte
)

const mebibyte = 1 << 20

func isErr(err error, errno unix.Errno) bool { return errors.Is(err, errno) }

// serveTCP starts the servers of a world.
func (w *world) serveTCP() {
	w.lab.Srv.Echo(hostPort(w.f.far, portEcho))
	w.lab.Srv.Source(hostPort(w.f.far, portSource), mebibyte)
	count := func(c *net.TCPConn) {
		n, err := testnet.ReadPattern(c)
		fmt.Fprintf(c, "the server read %d bytes, %s", n, ending(err))
	}
	for port, handle := range map[int]func(*net.TCPConn){
		portBanner: func(c *net.TCPConn) { io.WriteString(c, "hello"); io.Copy(c, c) },
		portReset: func(c *net.TCPConn) {
			c.Read(make([]byte, 1))
			hardClose(c)
		},
		portBye: func(c *net.TCPConn) {
			io.WriteString(c, "bye")
			c.CloseWrite()
			n, err := io.Copy(io.Discard, c)
			w.seen <- fmt.Sprintf("the server then read %d bytes, %s", n, ending(err))
		},
		portCount: count,
		portTold: func(c *net.TCPConn) {
			n, err := io.Copy(io.Discard, c)
			w.seen <- fmt.Sprintf("the server read %d bytes, %s", n, ending(err))
		},
		portSlow: func(c *net.TCPConn) {
			time.Sleep(silence)
			count(c)
		},
		portEnd:    func(c *net.TCPConn) {},
		portUnread: func(c *net.TCPConn) { time.Sleep(100 * time.Millisecond) },
		portUrgentIn: func(c *net.TCPConn) {
			got, err := io.ReadAll(c)
			w.seen <- fmt.Sprintf("the server read %q in line, %s", got, ending(err))
		},
	} {
		w.lab.Srv.Serve(hostPort(w.f.far, port), handle)
	}
}

// ending is how a stream ended.
func ending(err error) string {
	switch {
	case err == nil, errors.Is(err, io.EOF):
		return "end of file"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return errnoName(err)
}

func control(c *net.TCPConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return errors.Join(cerr, err)
}

// dial connects, or says why not.
func (w *world) dial(host string, port int, limit time.Duration) (*net.TCPConn, string) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := w.lab.Cli.Dial(ctx, "tcp", hostPort(host, port))
	if err != nil {
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() && !isErr(err, unix.ETIMEDOUT) {
			return nil, "silence"
		}
		return nil, errnoName(err)
	}
	c.SetDeadline(time.Now().Add(5 * time.Second))
	return c.(*net.TCPConn), ""
}

// connecting is a row's probe: what a connection attempt tells.
func connecting(host string, port int, limit time.Duration) func(*world) (string, error) {
	return func(w *world) (string, error) {
		c, why := w.dial(w.host(host), port, limit)
		if c == nil {
			return why, nil
		}
		defer c.Close()
		return "connected", nil
	}
}

// telling is connecting with the ICMP error that the socket heard.
func telling(p probe, host string, port int) func(*world) (string, error) {
	return func(w *world) (s string, err error) {
		err = w.lab.Cli.Do(func() error {
			o, err := p.sendHere(addrPort(w.host(host), port), 5*time.Second)
			s = w.errorHeard(o)
			return err
		})
		return s, err
	}
}

func (w *world) errorHeard(o heard) string {
	switch {
	case o.errno == 0:
		return "nothing"
	case !o.offender.IsValid():
		return errnoName(o.errno)
	}
	return fmt.Sprintf("%s from %s, %d bytes quoted", errorName(w.f.name == "IPv6", int(o.kind), int(o.code)), w.role(o.offender), o.quoted)
}

// talking is a probe that needs a connection.
func talking(port int, talk func(w *world, c *net.TCPConn) (string, error)) func(*world) (string, error) {
	return func(w *world) (string, error) {
		c, why := w.dial(w.f.far, port, 5*time.Second)
		if c == nil {
			return why, nil
		}
		defer c.Close()
		return talk(w, c)
	}
}

// readAll is what can be read until the end, and the end.
func readAll(c net.Conn) string {
	b, err := io.ReadAll(c)
	if len(b) > 40 {
		return fmt.Sprintf("%d bytes, %s", len(b), ending(err))
	}
	return fmt.Sprintf("%q, %s", b, ending(err))
}

// counting sends size bytes of the pattern and asks what came.
func counting(size int64, each int) func(w *world, c *net.TCPConn) (string, error) {
	return func(w *world, c *net.TCPConn) (string, error) {
		var all bytes.Buffer
		if _, err := testnet.WritePattern(&all, size); err != nil {
			return "", err
		}
		for all.Len() > 0 {
			if _, err := c.Write(all.Next(each)); err != nil {
				return "", err
			}
		}
		if err := c.CloseWrite(); err != nil {
			return "", err
		}
		b, err := io.ReadAll(c)
		return string(b), err
	}
}

// tcpConnects are what a client's sockets see of connection attempts.
func tcpConnects() []behaviour {
	const g = "TCP"
	return []behaviour{
		{group: g, name: "connect to an open port", probe: connecting("far", portEcho, 5*time.Second)},
		{group: g, name: "connect to a closed port", probe: connecting("far", portClosed, 5*time.Second)},
		{group: g, name: "connect to a port that is filtered silently", probe: connecting("far", portFiltered, 1500*time.Millisecond)},
		{group: g, name: "connect, a filter says host unreachable", probe: connecting("far", 83, 3*time.Second)},
		{group: g, name: "connect, a filter says no route", probe: connecting("far", 84, 3*time.Second)},
		{group: g, name: "connect, a filter says prohibited", probe: connecting("far", 85, 3*time.Second)},
		{group: g, name: "connect, a filter says port unreachable", probe: connecting("far", 86, 3*time.Second)},
		{group: g, name: "connect where the gateway has a prohibit route", probe: telling(probe{tcp: true}, "prohibited", 80)},
		{group: g, name: "connect where the gateway has an unreachable route", probe: telling(probe{tcp: true}, "unreachable", 80)},
		{group: g, name: "connect to a neighbour that does not exist", probe: telling(probe{tcp: true}, "dead", 80)},
		{group: g, name: "connect to the far network's broadcast address", only: "IPv4", probe: connecting("broadcast", 80, silence)},
	}
}

// tcpStreams are what a client's sockets see of a connection's life.
func tcpStreams() []behaviour {
	const g = "TCP"
	return []behaviour{
		{group: g, name: "the server speaks first", probe: talking(portBanner, func(w *world, c *net.TCPConn) (string, error) {
			b := make([]byte, 5)
			_, err := io.ReadFull(c, b)
			return fmt.Sprintf("%q", b), err
		})},
		{group: g, name: "the server stays silent", probe: talking(portTold, func(w *world, c *net.TCPConn) (string, error) {
			c.SetReadDeadline(time.Now().Add(silence))
			s := readAll(c)
			c.Close()
			return s + "; " + w.told(), nil
		})},
		{group: g, name: "1 MiB up, byte-exact", probe: talking(portCount, counting(mebibyte, mebibyte))},
		{group: g, name: "1 MiB down, byte-exact", probe: talking(portSource, func(w *world, c *net.TCPConn) (string, error) {
			n, err := testnet.ReadPattern(c)
			return fmt.Sprintf("%d bytes, %s", n, ending(err)), nil
		})},
		{group: g, name: "300 writes of one byte without Nagle", probe: talking(portCount, counting(300, 1))},
		{group: g, name: "half-close by the client", probe: talking(portCount, counting(100, 100))},
		{group: g, name: "half-close by the server", probe: talking(portBye, func(w *world, c *net.TCPConn) (string, error) {
			s := readAll(c)
			c.Write(make([]byte, 1000))
			c.CloseWrite()
			return s + "; " + w.told(), nil
		})},
		{group: g, name: "the server closes at once", probe: talking(portEnd, func(w *world, c *net.TCPConn) (string, error) {
			return readAll(c), nil
		})},
		{group: g, name: "the server resets", probe: talking(portReset, func(w *world, c *net.TCPConn) (string, error) {
			c.Write([]byte("x"))
			return readAll(c), nil
		})},
		{group: g, name: "the server closes with bytes unread", probe: talking(portUnread, func(w *world, c *net.TCPConn) (string, error) {
			c.Write([]byte("nobody reads this"))
			return readAll(c), nil
		})},
		{group: g, name: "the client resets", probe: talking(portTold, func(w *world, c *net.TCPConn) (string, error) {
			c.Write([]byte("some bytes"))
			time.Sleep(silence / 4) // the server has them: a reset would overtake them
			hardClose(c)
			return w.told(), nil
		})},
		{group: g, name: "the server's window is closed for a while", probe: talking(portSlow, counting(8*mebibyte, mebibyte))},
		{group: g, name: "an urgent byte up", probe: talking(portUrgentIn, func(w *world, c *net.TCPConn) (string, error) {
			io.WriteString(c, "ab")
			control(c, func(fd int) error { return unix.Sendto(fd, []byte("!"), unix.MSG_OOB, nil) })
			io.WriteString(c, "cd")
			c.CloseWrite()
			return w.told(), nil
		})},
		{group: g, name: "keepalive probes on an idle connection", probe: talking(portEcho, func(w *world, c *net.TCPConn) (string, error) {
			err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 1})
			c.SetReadDeadline(time.Now().Add(2200 * time.Millisecond))
			return readAll(c), err
		})},
		{group: g, name: "20 connections at the same time", probe: manyAtOnce},
		{group: g, name: "the 4-tuple is used again a moment after a reset", probe: func(w *world) (string, error) {
			local := &net.TCPAddr{IP: net.ParseIP(w.f.client), Port: 1000}
			var all []string
			for range 2 {
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
				c, err := w.lab.Cli.DialFrom(ctx, local, "tcp", hostPort(w.f.far, portBanner))
				cancel()
				if err != nil {
					return "", err
				}
				b := make([]byte, 5)
				c.SetDeadline(time.Now().Add(3 * time.Second))
				io.ReadFull(c, b)
				hardClose(c.(*net.TCPConn))
				time.Sleep(silence / 4)
				all = append(all, fmt.Sprintf("%q", b))
			}
			return counted(all), nil
		}},
		{group: g, name: "segment size that the client may send", probe: talking(portEcho, func(w *world, c *net.TCPConn) (string, error) {
			mss := 0
			err := control(c, func(fd int) (err error) {
				mss, err = unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
				return err
			})
			return fmt.Sprintf("%d bytes", mss), err
		})},
	}
}

// manyAtOnce is 20 connections that each send and count.
func manyAtOnce(w *world) (string, error) {
	type end struct {
		text string
		err  error
	}
	ends := make(chan end)
	for range 20 {
		go func() {
			s, err := talking(portCount, counting(5000, 1000))(w)
			ends <- end{s, err}
		}()
	}
	var all []string
	for range 20 {
		e := <-ends
		if e.err != nil {
			return "", e.err
		}
		all = append(all, e.text)
	}
	return counted(all), nil
}
