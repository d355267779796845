package outbound

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stream is a connected socket. A relay takes its descriptor from SyscallConn
// and moves the bytes itself, until Close. Only who calls Read, Write or sets a
// deadline makes it a net.Conn, over a duplicate of the descriptor.
type stream struct {
	remote netip.AddrPort

	mu    sync.Mutex // guards what follows
	fd    int        // -1: closed
	local netip.AddrPort
	conn  net.Conn
}

var (
	_ syscall.Conn    = (*stream)(nil)
	_ syscall.RawConn = (*rawStream)(nil)
)

// adopted is the stream as a net.Conn.
func (s *stream) adopted() (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil, net.ErrClosed
	}
	if s.conn != nil {
		return s.conn, nil
	}
	dup, err := unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor: %w", err)
	}
	file := os.NewFile(uintptr(dup), "stream")
	defer file.Close()
	s.conn, err = net.FileConn(file)
	return s.conn, err
}

// Read reads as net.Conn does.
func (s *stream) Read(p []byte) (int, error) {
	c, err := s.adopted()
	if err != nil {
		return 0, err
	}
	return c.Read(p)
}

// Write writes as net.Conn does.
func (s *stream) Write(p []byte) (int, error) {
	c, err := s.adopted()
	if err != nil {
		return 0, err
	}
	return c.Write(p)
}

// Close closes the connection and ends blocked calls.
func (s *stream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	if s.conn != nil {
		s.conn.Close()
	}
	err := unix.Close(s.fd)
	s.fd = -1
	return err
}

// CloseWrite sends FIN; reading goes on.
func (s *stream) CloseWrite() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	return unix.Shutdown(s.fd, unix.SHUT_WR)
}

// LocalAddrPort is the address that the connection left from, asked once.
func (s *stream) LocalAddrPort() netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.local.IsValid() && s.fd >= 0 {
		s.local = localOf(s.fd)
	}
	return s.local
}

// RemoteAddrPort is the address that was dialled.
func (s *stream) RemoteAddrPort() netip.AddrPort { return s.remote }

// LocalAddr is LocalAddrPort as a *net.TCPAddr.
func (s *stream) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(s.LocalAddrPort()) }

// RemoteAddr is RemoteAddrPort as a *net.TCPAddr.
func (s *stream) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(s.remote) }

// SetDeadline sets both deadlines.
func (s *stream) SetDeadline(t time.Time) error {
	c, err := s.adopted()
	if err != nil {
		return err
	}
	return c.SetDeadline(t)
}

// SetReadDeadline ends reads at t.
func (s *stream) SetReadDeadline(t time.Time) error {
	c, err := s.adopted()
	if err != nil {
		return err
	}
	return c.SetReadDeadline(t)
}

// SetWriteDeadline ends writes at t.
func (s *stream) SetWriteDeadline(t time.Time) error {
	c, err := s.adopted()
	if err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SyscallConn gives the non-blocking descriptor to the relay. It stays the
// stream's: only Close closes it.
func (s *stream) SyscallConn() (syscall.RawConn, error) { return (*rawStream)(s), nil }

// rawStream is a stream as a syscall.RawConn.
type rawStream stream

// Control calls f with the descriptor, which stays open meanwhile.
func (r *rawStream) Control(f func(fd uintptr)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd < 0 {
		return net.ErrClosed
	}
	f(uintptr(r.fd))
	return nil
}

// Read calls f until it reports that it is done, and blocks between.
func (r *rawStream) Read(f func(fd uintptr) (done bool)) error {
	raw, err := r.adopted()
	if err != nil {
		return err
	}
	return raw.Read(f)
}

// Write calls f until it reports that it is done, and blocks between.
func (r *rawStream) Write(f func(fd uintptr) (done bool)) error {
	raw, err := r.adopted()
	if err != nil {
		return err
	}
	return raw.Write(f)
}

func (r *rawStream) adopted() (syscall.RawConn, error) {
	c, err := (*stream)(r).adopted()
	if err != nil {
		return nil, err
	}
	return c.(syscall.Conn).SyscallConn()
}
