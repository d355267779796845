package testnet

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
)

// acceptLimit is how many connections a Server serves at once; more wait in the backlog.
const acceptLimit = 20_000

// Server is a TCP server inside a namespace. It ends with its lab, or by Close.
type Server struct {
	Accepted atomic.Uint64 // connections so far
	Received atomic.Uint64 // payload bytes that Echo and Discard servers read

	l  net.Listener
	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		closed bool
		conns  map[net.Conn]struct{}
	}
}

// Serve starts a TCP server that runs handle for each connection and closes it afterwards.
func (n *Netns) Serve(address string, handle func(*net.TCPConn)) *Server {
	n.lab.t.Helper()
	return n.serve(address, func(_ *Server, c *net.TCPConn) { handle(c) })
}

func (n *Netns) serve(address string, handle func(*Server, *net.TCPConn)) *Server {
	n.lab.t.Helper()
	l, err := n.Listen(context.Background(), "tcp", address)
	if err != nil {
		n.lab.t.Fatalf("server: %v", err)
	}
	s := &Server{l: l}
	s.mu.conns = make(map[net.Conn]struct{})
	s.wg.Go(func() { s.accept(handle) })
	n.lab.onClose(s.Close)
	return s
}

// Close stops the server, cuts its connections and waits for their handlers.
func (s *Server) Close() {
	s.l.Close()
	s.mu.Lock()
	s.mu.closed = true
	for c := range s.mu.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

func (s *Server) accept(handle func(*Server, *net.TCPConn)) {
	slots := make(chan struct{}, acceptLimit)
	for {
		slots <- struct{}{}
		c, err := s.l.Accept()
		if err != nil {
			return
		}
		s.Accepted.Add(1)
		if !s.own(c) {
			c.Close()
			return
		}
		s.wg.Go(func() {
			defer func() { <-slots }()
			defer s.disown(c)
			handle(s, c.(*net.TCPConn))
		})
	}
}

func (s *Server) own(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.mu.closed {
		s.mu.conns[c] = struct{}{}
	}
	return !s.mu.closed
}

func (s *Server) disown(c net.Conn) {
	s.mu.Lock()
	delete(s.mu.conns, c)
	s.mu.Unlock()
	c.Close()
}

// Echo starts a TCP server that sends back what it reads, and its FIN after the client's.
func (n *Netns) Echo(address string) *Server {
	n.lab.t.Helper()
	return n.counting(address, func(c *net.TCPConn, r io.Reader) {
		if _, err := io.Copy(c, r); err == nil {
			c.CloseWrite() //nolint:errcheck // the client is gone at worst
		}
	})
}

// Discard starts a TCP server that reads and throws away.
func (n *Netns) Discard(address string) *Server {
	n.lab.t.Helper()
	return n.counting(address, func(_ *net.TCPConn, r io.Reader) {
		io.Copy(io.Discard, r) //nolint:errcheck // ends with the client
	})
}

func (n *Netns) counting(address string, handle func(*net.TCPConn, io.Reader)) *Server {
	n.lab.t.Helper()
	return n.serve(address, func(s *Server, c *net.TCPConn) { handle(c, countingReader{c, &s.Received}) })
}

type countingReader struct {
	r io.Reader
	n *atomic.Uint64
}

// Read reads and counts. It hides ReadFrom and WriteTo, so that nothing is spliced past it.
func (c countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n.Add(uint64(n))
	return n, err
}

// Source starts a TCP server that sends size bytes of the pattern, then FIN, and
// waits for the client's end. A negative size has no end.
func (n *Netns) Source(address string, size int64) *Server {
	n.lab.t.Helper()
	return n.Serve(address, func(c *net.TCPConn) {
		if _, err := WritePattern(c, size); err == nil {
			c.CloseWrite()         //nolint:errcheck // the client is gone at worst
			io.Copy(io.Discard, c) //nolint:errcheck // ends with the client
		}
	})
}

// HTTP starts a web server.
func (n *Netns) HTTP(address string, h http.Handler) {
	n.lab.t.Helper()
	l, err := n.Listen(context.Background(), "tcp", address)
	if err != nil {
		n.lab.t.Fatalf("web server: %v", err)
	}
	srv := &http.Server{Handler: h}
	var wg sync.WaitGroup
	wg.Go(func() { srv.Serve(l) }) //nolint:errcheck // ends by Close
	n.lab.onClose(func() {
		srv.Close()
		wg.Wait()
	})
}

// UDPServer is a UDP socket inside a namespace that counts what it receives by source.
type UDPServer struct {
	Conn *net.UDPConn // for replies by hand, as WriteToUDPAddrPort

	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		sources map[netip.AddrPort]uint64
		bytes   uint64
	}
}

// UDPEcho starts a UDP server that sends datagrams back, empty ones too.
func (n *Netns) UDPEcho(address string) *UDPServer {
	n.lab.t.Helper()
	return n.ServeUDP(address, func(s *UDPServer, from netip.AddrPort, payload []byte) {
		s.Conn.WriteToUDPAddrPort(payload, from) //nolint:errcheck // as lossy as the network
	})
}

// UDPSink starts a UDP server that answers nothing.
func (n *Netns) UDPSink(address string) *UDPServer {
	n.lab.t.Helper()
	return n.ServeUDP(address, func(*UDPServer, netip.AddrPort, []byte) {})
}

// ServeUDP starts a UDP server that runs handle for one datagram at a time; the
// payload is valid during the call.
func (n *Netns) ServeUDP(address string, handle func(s *UDPServer, from netip.AddrPort, payload []byte)) *UDPServer {
	n.lab.t.Helper()
	c, err := n.ListenUDP(context.Background(), address)
	if err != nil {
		n.lab.t.Fatalf("UDP server: %v", err)
	}
	s := &UDPServer{Conn: c}
	s.mu.sources = make(map[netip.AddrPort]uint64)
	s.wg.Go(func() { s.receive(handle) })
	n.lab.onClose(s.Close)
	return s
}

// Close stops the server.
func (s *UDPServer) Close() {
	s.Conn.Close()
	s.wg.Wait()
}

func (s *UDPServer) receive(handle func(*UDPServer, netip.AddrPort, []byte)) {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := s.Conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // an ICMP error about a reply
			continue
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		s.mu.Lock()
		s.mu.sources[from]++
		s.mu.bytes += uint64(n)
		s.mu.Unlock()
		handle(s, from, buf[:n])
	}
}

// Sources are the datagrams received, by source address and port.
func (s *UDPServer) Sources() map[netip.AddrPort]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.mu.sources)
}

// Received is how many datagrams and payload bytes came in.
func (s *UDPServer) Received() (datagrams, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.mu.sources {
		datagrams += n
	}
	return datagrams, s.mu.bytes
}
