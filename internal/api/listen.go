package api

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"gatewayd/internal/exitcode"
)

const (
	maxConns     = 256                    // open connections of one listener
	probeTimeout = 500 * time.Millisecond // for the question whether a socket's owner lives
)

// binding is one address of `listen`.
type binding struct {
	network string // "unix" or "tcp"
	addr    string
}

// parseBinding reads "unix:/path" or "tcp:host:port".
func parseBinding(s string) (binding, error) {
	network, addr, _ := strings.Cut(s, ":")
	switch {
	case network == "unix" && strings.HasPrefix(addr, "/"):
		return binding{network, addr}, nil
	case network == "tcp":
		if _, _, err := net.SplitHostPort(addr); err == nil {
			return binding{network, addr}, nil
		}
	}
	return binding{}, fmt.Errorf("api.listen %q: want unix:/path or tcp:address:port", s)
}

// loopback tells that only this host can reach the binding.
func (b binding) loopback() bool {
	host, _, _ := net.SplitHostPort(b.addr)
	a, err := netip.ParseAddr(host)
	return b.network == "unix" || host == "localhost" || err == nil && a.IsLoopback()
}

// open binds one address.
func (s *Server) open(b binding) (net.Listener, error) {
	if b.network == "unix" {
		l, err := listenUnix(b.addr, s.group)
		if err != nil {
			return nil, err
		}
		return limit(l, maxConns), nil
	}
	l, err := net.Listen("tcp", b.addr)
	if err != nil {
		return nil, bindError(b.addr, err)
	}
	l = limit(l, maxConns)
	if s.opt.TLS != nil {
		l = tls.NewListener(l, s.opt.TLS)
	}
	return l, nil
}

func bindError(addr string, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return exitcode.With(exitcode.Collision,
			fmt.Errorf("api address %s is in use by another program: stop it or change api.listen", addr))
	case errors.Is(err, fs.ErrPermission):
		return exitcode.With(exitcode.Missing, fmt.Errorf("api address %s: no permission: run as root or change api.listen", addr))
	}
	return fmt.Errorf("api address %s: %w", addr, err)
}

// socket is a Unix listener that removes its file, and the directory that it
// made for it, when it closes; not a file that somebody else put there since.
type socket struct {
	*net.UnixListener
	path    string
	file    os.FileInfo
	madeDir bool
	once    sync.Once
}

// listenUnix binds path for root and the members of group. A socket whose owner
// is dead is replaced; one in use is a collision.
func listenUnix(path string, group *uint32) (net.Listener, error) {
	if err := clearStale(path); err != nil {
		return nil, err
	}
	made, err := makeDir(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("api socket %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, bindError("unix:"+path, err)
	}
	l.SetUnlinkOnClose(false)
	sock := &socket{UnixListener: l, path: path, madeDir: made}
	if err := sock.restrict(group); err != nil {
		_ = sock.Close() // the first error tells more
		return nil, fmt.Errorf("api socket %s: %w", path, err)
	}
	return sock, nil
}

// restrict gives the file its mode and group. Until then the peer credentials,
// which are checked in any case, keep others out.
func (k *socket) restrict(group *uint32) (err error) {
	if k.file, err = os.Lstat(k.path); err != nil {
		return err
	}
	if group != nil {
		if err := os.Lchown(k.path, -1, int(*group)); err != nil {
			return err
		}
	}
	return os.Chmod(k.path, 0o660)
}

// Close ends Accept and removes the file. Later calls do nothing.
func (k *socket) Close() (err error) {
	k.once.Do(func() {
		err = k.UnixListener.Close()
		if now, e := os.Lstat(k.path); e == nil && k.file != nil && os.SameFile(now, k.file) {
			err = errors.Join(err, os.Remove(k.path))
		}
		if k.madeDir {
			_ = os.Remove(filepath.Dir(k.path)) // stays if others use it
		}
	})
	return err
}

// makeDir makes the directory if it is missing, and tells whether it did.
func makeDir(dir string) (bool, error) {
	if _, err := os.Stat(dir); err == nil {
		return false, nil
	}
	return true, os.MkdirAll(dir, 0o755)
}

// clearStale removes the socket file that a dead process left at path.
func clearStale(path string) error {
	removed, err := RemoveStale(path)
	if err == nil && !removed {
		if _, statErr := os.Lstat(path); statErr == nil {
			return exitcode.With(exitcode.Collision, fmt.Errorf(
				"api socket %s is in use by another gatewayd: stop that one or change api.listen", path))
		}
	}
	return err
}

// RemoveStale removes the Unix socket at path if nobody listens on it, and tells
// whether it did. A missing file and a socket in use are no errors; a file that
// is no socket is one, and stays. It blocks for at most half a second.
func RemoveStale(path string) (bool, error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("api socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return false, exitcode.With(exitcode.Collision,
			fmt.Errorf("api socket %s exists and is no socket: move it away or change api.listen", path))
	}
	c, err := net.DialTimeout("unix", path, probeTimeout)
	if err == nil {
		return false, c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return false, nil // busy or not ours to ask: somebody is there
	}
	if err := os.Remove(path); err != nil {
		return false, fmt.Errorf("api socket: %w", err)
	}
	return true, nil
}

// limited is a listener with at most cap(slots) open connections; further ones
// wait in the kernel's backlog.
type limited struct {
	net.Listener
	slots  chan struct{}
	closed chan struct{}
	once   sync.Once
}

func limit(l net.Listener, n int) net.Listener {
	return &limited{Listener: l, slots: make(chan struct{}, n), closed: make(chan struct{})}
}

// Accept blocks for a slot and a connection; Close ends it.
func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	free := sync.OnceFunc(func() { <-l.slots })
	if uc, ok := c.(*net.UnixConn); ok {
		return &limitedUnix{uc, free}, nil
	}
	return &limitedConn{c, free}, nil
}

// Close ends Accept.
func (l *limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type limitedConn struct {
	net.Conn
	free func()
}

// Close gives the slot back.
func (c *limitedConn) Close() error { defer c.free(); return c.Conn.Close() }

type limitedUnix struct {
	*net.UnixConn // so that its peer can be asked for
	free          func()
}

// Close gives the slot back.
func (c *limitedUnix) Close() error { defer c.free(); return c.UnixConn.Close() }
