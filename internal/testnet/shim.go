package testnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Stages of the shim, for each direction: a reader takes frames from one packet
// socket, decides their fate and queues them by the time at which they are due;
// a writer sends them to the other socket. The queue owns a frame in between.
// Frames keep their virtio header, so that unfinished checksums stay the kernel's.

const (
	shimQueue  = 20_000               // frames in one direction; the newest is dropped
	shimFrame  = 10 + 14 + 4 + 65_575 // virtio header, Ethernet, VLAN, super-packet: bytes
	shimBuffer = 8 << 20              // bytes of a packet socket's receive buffer
)

// Link says what a direction of the shim does to packets. The zero value passes
// them on as they come.
type Link struct {
	Delay   time.Duration // one way
	Jitter  time.Duration // added evenly from 0; keeps the order
	Loss    float64       // share of packets lost, 0 to 1
	Reorder float64       // share of packets that overtake all that wait out their delay
	Seed    uint64        // the same seed decides the same for the same sequence of packets
}

// LinkCounts are what a direction did, in packets.
type LinkCounts struct{ Passed, Lost, Reordered, Overflowed uint64 }

// Shim joins a device of the gateway and its peer's in userspace, and can delay,
// lose and reorder packets.
type Shim struct {
	up, down *shimWay
	wg       sync.WaitGroup
}

type shimWay struct {
	from, to *os.File
	link     atomic.Pointer[shimLink]
	queue    shimTimes

	passed, lost, reordered, overflowed atomic.Uint64
}

type shimLink struct {
	Link
	random *rand.Rand // used by the reader alone
}

// newShim starts a shim between two devices of a namespace. The left one is
// toward the client.
func newShim(n *Netns, left, right string) (*Shim, error) {
	l, err := in(n, func() (*os.File, error) { return packetSocket(left) })
	if err != nil {
		return nil, err
	}
	r, err := in(n, func() (*os.File, error) { return packetSocket(right) })
	if err != nil {
		l.Close()
		return nil, err
	}
	s := &Shim{up: newWay(l, r), down: newWay(r, l)}
	for _, w := range []*shimWay{s.up, s.down} {
		s.wg.Go(w.read)
		s.wg.Go(w.write)
	}
	return s, nil
}

func packetSocket(device string) (*os.File, error) {
	dev, err := net.InterfaceByName(device)
	if err != nil {
		return nil, fmt.Errorf("shim: device %s: %w", device, err)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("shim: packet socket: %w", err)
	}
	// Bound last: until then it receives nothing.
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, shimBuffer),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: dev.Index}))
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("shim: packet socket on %s: %w", device, err)
	}
	return os.NewFile(uintptr(fd), "packet:"+device), nil
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func newWay(from, to *os.File) *shimWay {
	w := &shimWay{from: from, to: to}
	w.queue.changed = make(chan struct{}, 1)
	w.set(Link{})
	return w
}

// Set changes both directions: up is toward the server. It holds from the next
// packet on; what is queued keeps its time.
func (s *Shim) Set(up, down Link) {
	s.up.set(up)
	s.down.set(down)
}

// SetBoth gives both directions the same link.
func (s *Shim) SetBoth(l Link) { s.Set(l, l) }

// Counts are what the directions did so far.
func (s *Shim) Counts() (up, down LinkCounts) { return s.up.counts(), s.down.counts() }

func (s *Shim) close() {
	s.up.from.Close()
	s.up.to.Close()
	s.up.queue.close()
	s.down.queue.close()
	s.wg.Wait()
}

func (w *shimWay) set(l Link) {
	w.link.Store(&shimLink{Link: l, random: rand.New(rand.NewPCG(l.Seed, 1))})
}

func (w *shimWay) counts() LinkCounts {
	return LinkCounts{w.passed.Load(), w.lost.Load(), w.reordered.Load(), w.overflowed.Load()}
}

func (w *shimWay) read() {
	buf := make([]byte, shimFrame)
	for {
		n, err := w.from.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil { // ENETDOWN while a device is down
			continue
		}
		w.decide(buf[:n], time.Now())
	}
}

func (w *shimWay) decide(frame []byte, now time.Time) {
	l := w.link.Load()
	// Always three draws, so that one knob does not change what another decides.
	loss, reorder, jitter := l.random.Float64(), l.random.Float64(), l.random.Float64()
	if loss < l.Loss {
		w.lost.Add(1)
		return
	}
	due := now.Add(l.Delay + time.Duration(jitter*float64(l.Jitter)))
	overtakes := reorder < l.Reorder
	if overtakes {
		w.reordered.Add(1)
		due = now
	}
	if !w.queue.push(append([]byte(nil), frame...), due, overtakes) {
		w.overflowed.Add(1)
	}
}

func (w *shimWay) write() {
	for {
		frame, ok := w.queue.pop()
		if !ok {
			return
		}
		if _, err := w.to.Write(frame); errors.Is(err, os.ErrClosed) {
			return
		}
		w.passed.Add(1)
	}
}

// shimTimes is a queue of frames in order of the time at which they are due.
// Only those that overtake do not go to its end.
type shimTimes struct {
	changed chan struct{} // the first frame is another one, or the queue closed

	mu     sync.Mutex // guards what follows
	first  []shimItem // overtaking, in order of arrival
	items  []shimItem
	closed bool
}

type shimItem struct {
	frame []byte
	due   time.Time
}

func (q *shimTimes) push(frame []byte, due time.Time, overtakes bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items)+len(q.first) >= shimQueue {
		return false
	}
	if overtakes {
		q.first = append(q.first, shimItem{frame, due})
	} else {
		if n := len(q.items); n > 0 && due.Before(q.items[n-1].due) {
			due = q.items[n-1].due
		}
		q.items = append(q.items, shimItem{frame, due})
	}
	q.wakeLocked()
	return true
}

// pop waits for the first frame to be due; false means that the queue closed.
func (q *shimTimes) pop() ([]byte, bool) {
	for {
		frame, wait, ok := q.next(time.Now())
		if !ok || frame != nil {
			return frame, ok
		}
		q.sleep(wait)
	}
}

// next is the first frame if it is due, else how long until then; under 0 for an empty queue.
func (q *shimTimes) next(now time.Time) (frame []byte, wait time.Duration, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	from := &q.items
	if len(q.first) > 0 {
		from = &q.first
	}
	switch {
	case q.closed:
		return nil, 0, false
	case len(*from) == 0:
		return nil, -1, true
	}
	item := (*from)[0]
	if wait := item.due.Sub(now); wait > 0 {
		return nil, wait, true
	}
	(*from)[0].frame = nil
	*from = (*from)[1:]
	return item.frame, 0, true
}

func (q *shimTimes) sleep(wait time.Duration) {
	if wait < 0 {
		<-q.changed
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-q.changed:
	}
}

func (q *shimTimes) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.wakeLocked()
}

func (q *shimTimes) wakeLocked() {
	select {
	case q.changed <- struct{}{}:
	default:
	}
}
