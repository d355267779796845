package netstack

import (
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"
	"github.com/sagernet/gvisor/pkg/waiter"
	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// A relay joins a client's endpoint and an outbound socket. It is a state
// machine that runs in turns and holds no goroutine between them:
//
//	gVisor's callback ─┐                        ┌ up:   endpoint → (held) → socket
//	epoll readiness   ─┼→ ready bits → a turn ──┤
//	meter, timer, End ─┘                        └ down: socket → endpoint → packets
//
// A turn moves bytes each way until that side would block, the meter pauses it,
// or its budget is spent. Turns of one relay never overlap (see task), so what
// is marked "turn" belongs to the turn; callbacks touch atomics only.
//
// Each direction is dirOpen until its source ended and all of it was passed on,
// then dirDone, and FIN was sent. A relay is over when both are done and every
// byte has left; or when it failed (either side reset or timed out: the other
// side first gets what was received, for at most resetDelay, then the reset); or
// when it was ended from outside, which resets both sides at once, but for a user's
// used up traffic, of which the last is delivered first.
type relay struct {
	task
	fd    int
	out   flow.Stream
	meter flow.Meter
	done  func(cause error)
	wake  func() // schedule, bound once

	ready   atomic.Uint32         // readiness bits, below
	backlog atomic.Bool           // the endpoint holds bytes that have not left
	narrow  atomic.Int32          // size in bytes that packets to the client go down to; 0: as it is
	cause   atomic.Pointer[error] // why it was ended from outside

	// turn:
	up, down dirState
	inLine   [2]place // of each direction, with the meter
	failed   failure
	over     bool
	held     []byte // taken from the client, not yet written to the socket
	written  uint64 // bytes that the endpoint took
	moved    uint64 // of these, reported to the meter
	upMoved  uint64
	marked   uint64 // upMoved + moved when the timer was armed
	timer    *time.Timer
}

type dirState uint8

const (
	dirOpen dirState = iota
	dirDone
)

// place is where a direction stands that the meter paused.
type place uint8

const (
	placeNone  place = iota // nowhere: it was not paused
	placeKept               // in line since an earlier turn
	placeAsked              // in line, as this turn was told
)

// failure says that one side broke, and since when the other is being told.
type failure struct {
	err      error
	client   bool // the client's side broke, else the outbound's
	spent    bool // neither did: the traffic is used up, and the last of it is delivered to both
	drained  bool // nothing more comes from the broken side
	deadline time.Time
}

// Readiness bits: set by callbacks, cleared by the turn before it tries, and set
// again by it when it stopped for another reason than "would block".
const (
	epReadable  = 1 << iota // the endpoint may have bytes or an end
	epWritable              // the endpoint may take bytes
	epBroken                // the endpoint may have failed
	epSilent                // the client answers nothing any more
	outReadable             // the socket may have bytes
	outWritable             // the socket may take bytes
	outEnded                // the socket has an end or an error behind its bytes; stays set
	outBroken               // the socket has an error
	timerDue                // the timer fired
)

const (
	turnBytes = 256 << 10 // moved each way in a turn, beside what the last piece is over it

	// chunkBytes are moved at once. As many segments of 1,448 bytes are the most that
	// gVisor puts into one packet; 64 KiB would end in a second, small one.
	chunkBytes = 45 * 1448
	resetDelay = 5 * time.Second
	drainCheck = 10 * time.Millisecond
)

var errNoDescriptor = errors.New("the outbound's stream has no descriptor")

// Relay joins the client to out, which it owns from now on, and returns. done is
// called once when the flow is over and both sides were told, with nil after an
// orderly end, with the cause of End, or with what broke; it must not block.
func (c *Conn) Relay(out flow.Stream, m flow.Meter, done func(cause error)) error {
	fd, err := descriptor(out)
	if err != nil {
		out.Close()
		c.ep.Abort()
		return fmt.Errorf("relay: %w", err)
	}
	c.fd, c.out, c.meter, c.done = fd, out, m, done
	c.home = c.stack.workers[fd%len(c.stack.workers)]
	c.turn, c.wake = c.takeTurn, c.schedule
	c.ready.Store(epReadable | epWritable | outWritable)
	c.hold() // a turn that ended the relay before fd is watched would have another's socket of that number watched as this one
	c.entry.Init(c, waiter.ReadableEvents|waiter.WritableEvents|waiter.EventErr|waiter.EventHUp|waiter.EventRdHUp)
	c.queue.EventRegister(&c.entry)
	if err := c.stack.cfg.Poller.Add(fd, (*socketReady)(c)); err != nil {
		c.End(fmt.Errorf("relay: %w", err))
	}
	c.release()
	return nil
}

// End resets both sides at once; done then gets the first cause given.
func (c *Conn) End(cause error) {
	if c.cause.CompareAndSwap(nil, &cause) {
		c.schedule()
	}
}

func descriptor(s flow.Stream) (int, error) {
	sc, ok := s.(syscall.Conn)
	if !ok {
		return 0, errNoDescriptor
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	fd := -1
	if err := raw.Control(func(f uintptr) { fd = int(f) }); err != nil {
		return 0, err
	}
	return fd, nil
}

// NotifyEvent is gVisor's callback. It runs under the endpoint's lock.
func (c *Conn) NotifyEvent(mask waiter.EventMask) {
	var bits uint32
	if mask&(waiter.ReadableEvents|waiter.EventRdHUp) != 0 {
		bits |= epReadable
	}
	if mask&waiter.WritableEvents != 0 {
		bits |= epWritable
	}
	if mask&(waiter.EventErr|waiter.EventHUp) != 0 {
		bits |= epReadable | epBroken
	}
	c.ready.Or(bits)
	c.schedule()
}

// sentSome is called by the link, under the endpoint's lock, when bytes left.
func (c *Conn) sentSome() {
	if c.backlog.Load() && c.backlog.CompareAndSwap(true, false) {
		c.schedule()
	}
}

// socketReady is a Conn as its descriptor's watcher.
type socketReady Conn

func (s *socketReady) Ready(ev epoll.Events) {
	c := (*Conn)(s)
	var bits uint32
	if ev.Readable() {
		bits |= outReadable
	}
	if ev&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		bits |= outEnded
	}
	if ev&unix.EPOLLERR != 0 {
		bits |= outBroken
	}
	if ev.Writable() {
		bits |= outWritable
	}
	c.ready.Or(bits)
	c.runNow()
}

func (c *Conn) has(bit uint32) bool { return c.ready.Load()&bit != 0 }
func (c *Conn) set(bit uint32)      { c.ready.Or(bit) }
func (c *Conn) clear(bit uint32)    { c.ready.And(^bit) }

// takeTurn is one turn.
func (c *Conn) takeTurn() {
	if c.has(epSilent) {
		c.giveUp()
	}
	if c.over {
		return
	}
	if cause := c.cause.Load(); cause != nil && !c.lingers(*cause) {
		c.finish(*cause, true)
		return
	}
	c.backlog.Store(false)
	if mtu := c.narrow.Swap(0); mtu != 0 {
		c.shrink(int(mtu))
	}
	if c.has(epBroken) {
		c.clear(epBroken)
		c.checkClient()
	}
	if c.has(outBroken) { // a client that does not read would keep reading from finding it
		c.clear(outBroken)
		c.checkSocket()
	}
	again := c.moveUp()
	again = c.moveDown() || again
	c.leaveLines()
	c.settle()
	if !c.isOver() && again {
		c.schedule()
	}
}

// isOver finishes the relay when it is done, and otherwise sees to what bounds it.
func (c *Conn) isOver() bool {
	due := c.has(timerDue)
	c.clear(timerDue)
	switch cause := c.cause.Load(); {
	case c.over:
	case cause != nil && !c.lingers(*cause): // the meter said so
		c.finish(*cause, true)
	case c.failed.err != nil && c.delivered():
		c.finish(c.failed.err, true)
	case c.failed.err != nil:
		c.arm(drainCheck)
	case c.up == dirDone && c.down == dirDone && c.written == c.moved:
		c.finish(nil, false)
	case (c.up == dirDone || c.down == dirDone) && c.stack.cfg.HalfClosed > 0:
		c.watchHalfClosed(due)
	}
	return c.over
}

// watchHalfClosed ends a half-closed flow that moved nothing for a whole period.
func (c *Conn) watchHalfClosed(due bool) {
	if c.timer != nil && !due {
		return
	}
	total := c.upMoved + c.moved
	if c.timer != nil && total == c.marked {
		c.finish(flow.ErrIdle, true)
		return
	}
	c.marked = total
	c.arm(c.stack.cfg.HalfClosed)
}

// arm asks for a look after d.
func (c *Conn) arm(d time.Duration) {
	if c.timer == nil {
		c.timer = time.AfterFunc(d, func() { c.set(timerDue); c.schedule() })
	} else {
		c.timer.Reset(d)
	}
}

// settle reports to the meter what has left toward the client.
func (c *Conn) settle() {
	for {
		sent := c.sent.total.Load()
		if sent > c.moved {
			c.meter.Moved(flow.Down, int(sent-c.moved))
			c.moved = sent
		}
		if c.moved == c.written {
			return
		}
		c.backlog.Store(true) // sentSome schedules a turn from here on
		if c.sent.total.Load() == sent {
			return
		}
	}
}

// fail notes that one side broke. What was received from it still goes to the other.
func (c *Conn) fail(err error, client, drained bool) {
	if c.failed.err == nil {
		c.failed = failure{err: err, client: client, deadline: time.Now().Add(resetDelay)}
	}
	if client == c.failed.client && drained {
		c.failed.drained = true
	}
}

// lingers reports that a flow which was ended still delivers what it counted: the
// transfer by which a user's traffic is used up is whole.
func (c *Conn) lingers(cause error) bool {
	if c.failed.err == nil && flow.ReasonOf(cause) == flow.Quota {
		c.failed = failure{err: cause, spent: true, deadline: time.Now().Add(resetDelay)}
	}
	return c.failed.spent && !c.delivered()
}

// delivered reports whether the side that did not break has got everything, or
// had its time.
func (c *Conn) delivered() bool {
	f, now := &c.failed, time.Now()
	switch {
	case !now.Before(f.deadline):
		return true
	case f.spent:
		return len(c.held) == 0 && unsentBytes(c.fd) == 0 && c.written == c.moved && c.acknowledged()
	case !f.drained:
		return false
	case f.client:
		return len(c.held) == 0 && unsentBytes(c.fd) == 0
	}
	return c.written == c.moved && c.acknowledged() // a reset purges what may have to be sent again
}

// acknowledged reports whether the client has all that was sent to it. gVisor
// tells only of room in the send queue, which is therefore made one byte long:
// nothing more is written to it.
func (c *Conn) acknowledged() bool {
	if c.down == dirDone { // its FIN is acknowledged last
		switch c.ep.EndpointState() {
		case tcp.StateEstablished, tcp.StateCloseWait, tcp.StateFinWait1, tcp.StateClosing, tcp.StateLastAck:
			return false
		}
		return true
	}
	c.ep.SocketOptions().SetSendBufferSize(1, true)
	return c.ep.Readiness(waiter.WritableEvents) != 0
}

// unsentBytes is what the kernel still holds of what was written to fd.
func unsentBytes(fd int) int {
	n, _ := rawQueue(fd, unix.SIOCOUTQ)
	return n
}

// checkClient looks for the reset or time-out that gVisor told of.
func (c *Conn) checkClient() {
	// After a reset in CLOSE-WAIT gVisor says closed, not error.
	if st := c.ep.EndpointState(); st == tcp.StateError || st == tcp.StateClose && c.down == dirOpen {
		c.fail(c.clientError(), true, c.up == dirDone)
	}
}

// checkSocket looks for a reset or time-out behind the socket's end.
func (c *Conn) checkSocket() {
	if n, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && n != 0 {
		c.socketBroke(syscall.Errno(n))
	}
}

func (c *Conn) clientError() error {
	if err := c.ep.LastError(); err != nil {
		return errorOf(err)
	}
	return syscall.ECONNRESET
}

// finish closes both sides, with resets or in order, and tells whoever waits.
// The outbound goes first.
func (c *Conn) finish(cause error, reset bool) {
	c.over = true
	if c.timer != nil {
		c.timer.Stop()
	}
	c.queue.EventUnregister(&c.entry)
	c.stack.cfg.Poller.Remove(c.fd)
	if reset {
		unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) //nolint:errcheck // at worst a FIN
	}
	c.out.Close() //nolint:errcheck // nothing is left to lose
	if reset {
		c.ep.Abort()
	}
	c.ep.Close()
	c.settle()
	c.held = nil
	c.done(cause)
}
