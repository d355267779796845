package main

import (
	"encoding/binary"
	"net"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Trains: the sender hands up to 64 equal datagrams to the kernel with one sendmsg
// (UDP_SEGMENT), the receiver takes them as the kernel coalesced them (UDP_GRO). Up,
// the client sends to the sink. Down, it asks the source on each of its sockets for a
// rate and a time, and counts what comes. Bytes are bytes of payload.

const (
	udpTrainSink   = 7102
	udpTrainSource = 7103

	udpSegment, udpGRO = 103, 104
	maxTrain           = 65535 - 20 - 8
)

// trainSize is the payload of a full train of datagrams of size bytes.
func trainSize(size int) int { return min(64, maxTrain/size) * size }

// segmented has every send on a socket cut into datagrams of size bytes.
func segmented(c *net.UDPConn, size int) {
	control(c, func(fd int) { die(unix.SetsockoptInt(fd, unix.IPPROTO_UDP, udpSegment, size)) })
}

func control(c *net.UDPConn, f func(fd int)) {
	raw, err := c.SyscallConn()
	die(err)
	die(raw.Control(func(fd uintptr) { f(int(fd)) }))
}

// receive counts the bytes that come, whole trains at once where the kernel has them.
// Nothing is copied: the kernel tells the length of what it cut off (MSG_TRUNC).
func receive(c *net.UDPConn, got *atomic.Uint64) {
	c.SetReadBuffer(4 << 20)
	control(c, func(fd int) { die(unix.SetsockoptInt(fd, unix.IPPROTO_UDP, udpGRO, 1)) })
	raw, err := c.SyscallConn()
	die(err)
	b := make([]byte, 16)
	for {
		err := raw.Read(func(fd uintptr) bool {
			for {
				n, _, errno := unix.Syscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_TRUNC, 0, 0)
				if errno != 0 {
					return errno != unix.EAGAIN
				}
				got.Add(uint64(n))
			}
		})
		if err != nil {
			return
		}
	}
}

// pace sends trains of size-byte datagrams at gbps for dur, one socket after the other
// in turn, and returns the bytes that the kernel took.
func pace(gbps float64, size int, dur time.Duration, sends []func([]byte) error) (sent uint64) {
	train := make([]byte, trainSize(size))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	setSlack()
	due := func(at time.Duration) uint64 { return uint64(at.Seconds() * gbps * 1e9 / 8) }
	start := time.Now()
	for i := 0; ; {
		at := time.Since(start)
		if at >= dur {
			return sent
		}
		if sent+uint64(len(train)) > due(at) {
			ts := unix.Timespec{Nsec: 30000}
			unix.Nanosleep(&ts, nil)
			continue
		}
		if sends[i%len(sends)](train) == nil {
			sent += uint64(len(train))
		}
		i++
	}
}

type trainServer struct{ got, sent atomic.Uint64 }

func serveTrains(bind string) *trainServer {
	s := &trainServer{}
	sink, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(bind), Port: udpTrainSink})
	die(err)
	go receive(sink, &s.got)
	source, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(bind), Port: udpTrainSource})
	die(err)
	source.SetWriteBuffer(4 << 20)
	go s.source(source)
	return s
}

// order is what a client asks the source for: one run over all sockets that ordered
// within the same tenth of a second.
type order struct {
	Mbps, Size, Ms uint32
}

func (s *trainServer) source(c *net.UDPConn) {
	b := make([]byte, 64)
	var to []*net.UDPAddr
	var o order
	for {
		if len(to) > 0 {
			c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		} else {
			c.SetReadDeadline(time.Time{})
		}
		n, from, err := c.ReadFromUDP(b)
		if err == nil {
			if _, err := binary.Decode(b[:n], binary.BigEndian, &o); err == nil {
				to = append(to, from)
			}
			continue
		}
		if len(to) == 0 {
			return
		}
		segmented(c, int(o.Size))
		var sends []func([]byte) error
		for _, addr := range to {
			sends = append(sends, func(p []byte) error { _, err := c.WriteToUDP(p, addr); return err })
		}
		s.sent.Add(pace(float64(o.Mbps)/1000, int(o.Size), time.Duration(o.Ms)*time.Millisecond, sends))
		to = nil
	}
}

type trainBench struct {
	addr, sock  string
	size, flows int
	down        bool
}

type trainResult struct {
	Offered float64 `json:"offered_gbps"`
	Sent    float64 `json:"sent_gbps"`
	Got     float64 `json:"gbps"`
	Loss    float64 `json:"loss"`
	Bytes   uint64  `json:"bytes"`
}

// run moves trains at a rate for a time.
func (t *trainBench) run(gbps float64, dur time.Duration) trainResult {
	port := udpTrainSink
	if t.down {
		port = udpTrainSource
	}
	var got atomic.Uint64
	var cs []*net.UDPConn
	var sends []func([]byte) error
	for range t.flows {
		c, err := net.DialUDP("udp", nil, &net.UDPAddr{IP: net.ParseIP(t.addr), Port: port})
		die(err)
		defer c.Close()
		c.SetWriteBuffer(4 << 20)
		cs = append(cs, c)
		if t.down {
			go receive(c, &got)
			continue
		}
		c.Write([]byte("x")) // open the association first, and let the gateway dial it
		segmented(c, t.size)
		sends = append(sends, func(p []byte) error { _, err := c.Write(p); return err })
	}
	time.Sleep(100 * time.Millisecond)
	before := counters(t.sock)
	var sent, arrived uint64
	if t.down {
		b, _ := binary.Append(nil, binary.BigEndian, order{uint32(gbps * 1000), uint32(t.size), uint32(dur.Milliseconds())})
		for _, c := range cs {
			c.Write(b)
		}
		time.Sleep(dur + 500*time.Millisecond)
		after := counters(t.sock)
		sent, arrived = after[2]-before[2], got.Load()
	} else {
		sent = pace(gbps, t.size, dur, sends)
		time.Sleep(250 * time.Millisecond)
		after := counters(t.sock)
		arrived = after[1] - before[1]
	}
	rate := func(n uint64) float64 { return float64(n) * 8 / 1e9 / dur.Seconds() }
	return trainResult{gbps, rate(sent), rate(arrived), 1 - float64(arrived)/float64(max(sent, 1)), arrived}
}

// search finds the highest rate with a loss below 1 %, as udpSearch does.
func (t *trainBench) search() trainResult {
	ok := func(r trainResult) bool { return r.Loss < 0.01 && r.Sent > 0.97*r.Offered }
	var best trainResult
	lo, hi := 0.0, 0.0
	for r := 1.0; r < 200; r *= 1.6 {
		x := t.run(r, 450*time.Millisecond)
		if !ok(x) {
			x = t.run(r, 450*time.Millisecond)
		}
		if !ok(x) {
			hi = r
			break
		}
		lo, best = r, x
	}
	for i := 0; i < 3 && hi > 0; i++ {
		mid := (lo + hi) / 2
		if x := t.run(mid, 700*time.Millisecond); ok(x) {
			lo, best = mid, x
		} else {
			hi = mid
		}
	}
	return best
}
