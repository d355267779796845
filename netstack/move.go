package netstack

import (
	"errors"
	"io"
	"sync"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

// metered asks the meter. 0 means: not now; if the flow has to end, End was called.
func (c *Conn) metered(d flow.Dir) int {
	n, err := c.meter.Ready(d, c.wake)
	c.inLine[d] = placeNone
	if err == nil {
		return n
	}
	if errors.Is(err, flow.ErrPaused) {
		c.inLine[d] = placeAsked
	} else {
		c.End(err)
	}
	return 0
}

// leaveLines gives up the places in line that this turn did not ask for again: those
// directions can't move now, and others wait behind them.
func (c *Conn) leaveLines() {
	for d := range c.inLine {
		switch c.inLine[d] {
		case placeAsked:
			c.inLine[d] = placeKept
		case placeKept:
			c.inLine[d] = placeNone
			c.meter.Leave(flow.Dir(d))
		}
	}
}

// moveUp moves from the client's endpoint to the socket, and reports whether it
// stopped for its budget alone.
func (c *Conn) moveUp() (again bool) {
	if c.up == dirDone {
		return false
	}
	for budget := turnBytes; budget > 0; {
		if !c.has(outWritable) || !c.flushHeld() {
			return false
		}
		if !c.has(epReadable) {
			return false
		}
		c.clear(epReadable)
		limit := c.metered(flow.Up)
		if limit == 0 {
			c.set(epReadable)
			return false
		}
		n, err := c.readClient(limit)
		budget -= n
		switch err.(type) {
		case nil:
			c.set(epReadable)
		case *tcpip.ErrWouldBlock:
			if c.failed.client { // it was given up
				c.failed.drained = true
			}
			return false
		case *tcpip.ErrClosedForReceive:
			c.clientEnded()
			return false
		default:
			c.fail(c.clientError(), true, true)
			return false
		}
	}
	return true
}

// clientEnded passes the client's FIN on, unless it is a reset in disguise.
func (c *Conn) clientEnded() {
	if c.checkClient(); c.failed.err != nil && c.failed.client {
		c.failed.drained = true
		return
	}
	c.up = dirDone
	unix.Shutdown(c.fd, unix.SHUT_WR) //nolint:errcheck // a broken socket is noticed by moveDown
}

// flushHeld writes what an earlier turn could not, and reports whether all went out.
func (c *Conn) flushHeld() bool {
	if len(c.held) == 0 {
		return true
	}
	n := c.writeSocket(c.held, nil)
	c.countUp(n)
	if c.held = c.held[n:]; len(c.held) == 0 {
		c.held = nil
	}
	return len(c.held) == 0
}

func (c *Conn) countUp(n int) {
	if n > 0 {
		c.upMoved += uint64(n)
		c.meter.Moved(flow.Up, n)
	}
}

// writeSocket makes one non-blocking write of a and then b and returns how much
// went out. When that is less than all, outWritable is cleared until the kernel
// says otherwise.
func (c *Conn) writeSocket(a, b []byte) int {
	c.clear(outWritable)
	for {
		n, errno := rawWrite(c.fd, a, b)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == 0 && n == len(a)+len(b):
			c.set(outWritable)
			return n
		case errno == 0:
			return n
		case errno != unix.EAGAIN:
			c.socketBroke(errno)
		}
		return 0
	}
}

// socketBroke notes that the socket failed, as a write or its error told. What it
// received before is still read: only then is the socket drained.
func (c *Conn) socketBroke(err error) {
	c.fail(err, false, c.down == dirDone)
	c.up, c.held = dirDone, nil
	c.set(outReadable | outEnded)
}

// readClient takes at most limit bytes from the endpoint and writes them to the
// socket. What the socket has no room for is held. An endpoint's lock is held
// while it is read, and its acknowledgements, timers and aborts wait for it:
// nothing in here may block.
func (c *Conn) readClient(limit int) (int, tcpip.Error) {
	w := uplinks.Get().(*uplink)
	w.c, w.left = c, limit
	r, err := c.ep.Read(w, tcpip.ReadOptions{})
	w.flush(nil)
	if w.n > w.off {
		c.held = append([]byte(nil), w.buf[w.off:w.n]...)
	}
	n, out := limit-w.left, w.out
	w.c, w.n, w.off, w.out, w.last = nil, 0, 0, 0, false
	uplinks.Put(w)
	c.meter.Took(flow.Up, n)
	c.countUp(out)
	if r.Count > 0 {
		c.ep.ModerateRecvBuf(r.Count)
	}
	if _, full := err.(*tcpip.ErrBadBuffer); full { // nothing taken: the socket is full
		err = nil
	}
	return n, err
}

// directBytes is from where on a piece is cheaper to write as it is than to gather.
const directBytes = 16 << 10

var errFull = errors.New("the socket or the budget is full")

var uplinks = sync.Pool{New: func() any { return new(uplink) }}

// An uplink is the io.Writer that an endpoint is read into: small pieces are
// gathered, a large one is written as it is, with what was gathered before it, and
// is the last: the next packet's first bytes would be written without the others.
type uplink struct {
	c    *Conn
	left int  // bytes that may still be taken
	last bool // a large piece was written
	out  int  // bytes that the socket took
	off  int
	n    int // buf[off:n] waits to be written
	buf  [chunkBytes]byte
}

// Write takes b or, with errFull, as much of it as there is room for.
func (w *uplink) Write(b []byte) (int, error) {
	want := len(b)
	b = b[:min(len(b), w.left)]
	n := len(b)
	switch {
	case w.last:
		n = 0
	case n >= directBytes:
		n = w.flush(b)
		w.last = true
	case w.room(n):
		w.n += copy(w.buf[w.n:], b)
	default:
		n = 0
	}
	w.left -= n
	w.c.stack.concede(w.c.ep.SocketOptions(), n) // before gVisor tells of the room
	if n < want {
		return n, errFull
	}
	return n, nil
}

// room makes room for n bytes more to be gathered, if need be and possible.
func (w *uplink) room(n int) bool {
	if w.n+n > len(w.buf) {
		w.flush(nil)
	}
	return w.n+n <= len(w.buf)
}

// flush writes what was gathered and then b, and returns how much of b went out.
func (w *uplink) flush(b []byte) int {
	waiting := w.n - w.off
	if waiting+len(b) == 0 || !w.c.has(outWritable) {
		return 0
	}
	n := w.c.writeSocket(w.buf[w.off:w.n], b)
	w.out += n
	if n < waiting {
		w.off += n
		return 0
	}
	w.n, w.off = 0, 0
	return n - waiting
}

// moveDown moves from the socket to the client's endpoint, and reports whether
// it stopped for its budget alone.
func (c *Conn) moveDown() (again bool) {
	if c.down == dirDone {
		return false
	}
	for budget := turnBytes; budget > 0; {
		if !c.has(outReadable) || !c.has(epWritable) {
			return false
		}
		c.clear(outReadable)
		waiting, errno := rawQueue(c.fd, unix.SIOCINQ)
		if errno != 0 || waiting == 0 {
			if c.has(outEnded) {
				c.socketEnded()
			}
			return false
		}
		limit := c.metered(flow.Down)
		if limit == 0 {
			c.set(outReadable)
			return false
		}
		n, ok := c.writeClient(min(waiting, limit, int(c.stack.chunk.Load())))
		c.meter.Took(flow.Down, n)
		if !ok {
			return false
		}
		budget -= n
		if n < waiting || c.has(outEnded) {
			c.set(outReadable)
		}
	}
	return true
}

// socketEnded finds out what stands behind the socket's last byte.
func (c *Conn) socketEnded() {
	var b [1]byte
	switch n, _, err := unix.Recvfrom(c.fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT); {
	case n > 0: // came in meanwhile
		c.set(outReadable)
		c.schedule()
	case err == unix.EAGAIN, err == unix.EINTR:
	case err != nil:
		c.fail(err, false, true)
	case c.failed.err != nil && !c.failed.client: // the error was told by a write
		c.failed.drained = true
	default:
		c.down = dirDone
		c.ep.Shutdown(tcpip.ShutdownWrite) //nolint:errcheck // a broken endpoint is noticed by its own event
	}
}

// writeClient has the endpoint take n bytes that wait in the socket. It reports
// false when it can't now, or ever.
func (c *Conn) writeClient(n int) (int, bool) {
	c.clear(epWritable)
	d := downlinks.Get().(*downlink)
	d.fd, d.left = c.fd, n
	// Without Atomic gVisor unlocks the endpoint while it reads d, and then throws
	// away what a send buffer that shrank meanwhile has no room for.
	w, terr := c.ep.Write(d, tcpip.WriteOptions{Atomic: true})
	err := d.err
	d.err = nil
	downlinks.Put(d)
	c.written += uint64(w)
	switch terr.(type) {
	case nil:
		c.set(epWritable)
	case *tcpip.ErrWouldBlock:
		c.set(outReadable)
	case *tcpip.ErrBadBuffer:
		c.fail(err, false, true)
	default:
		c.fail(c.clientError(), true, c.up == dirDone)
	}
	return int(w), terr == nil
}

var downlinks = sync.Pool{New: func() any { return new(downlink) }}

// A downlink is the tcpip.Payloader that reads a socket into an endpoint. Its
// Len is exact, as SIOCINQ told: gVisor would wait for more for ever.
type downlink struct {
	fd, left int
	err      error
}

// Len is how many bytes Read will give.
func (d *downlink) Len() int { return d.left }

// Read fills p from the socket. Read(nil) is how gVisor asks for an end.
func (d *downlink) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		n, errno := rawRead(d.fd, p)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n == 0 {
			if d.err = errno; errno == 0 {
				d.err = io.ErrUnexpectedEOF
			}
			return 0, d.err
		}
		d.left -= n
		return n, nil
	}
}
