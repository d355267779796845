package outbound

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

const (
	// maxSegmentsLen is what goes into an IPv6 packet, a bit less than into an IPv4
	// one, and into one UDP_SEGMENT message.
	maxSegmentsLen = 65535 - 40 - 8

	// What one sendmmsg holds at most. The call goes through the network stack up to
	// the device, or a local socket, and is not interrupted meanwhile.
	maxParcels = 32
	maxPieces  = 2 * flow.MaxSegments
	maxPosted  = 256 << 10 // bytes

	// noSegmentation is socket.gso of one that sends datagrams one by one only.
	noSegmentation = 0
)

// outbox gathers the messages of one sendmmsg. They leave from one socket, with one
// permission to fragment. It is filled and posted under the link's send lock, and
// pooled.
type outbox struct {
	s            *socket
	dontFragment bool
	n            int // parcels
	pieces       int
	bytes        int
	moved        int // bytes that left, since it was taken from the pool
	msgs         [maxParcels]mmsghdr
	parcels      [maxParcels]parcel
	envelopes    [maxParcels]envelope
	iovs         [maxPieces]unix.Iovec
	origins      [maxPieces]origin
}

// parcel is one message: a datagram, or equal ones for the kernel to cut up again.
// None of them lies in two pieces.
type parcel struct {
	peer    netip.AddrPort
	tclass  uint8
	content flow.Coupler
	first   int // piece
	end     int // of its pieces
}

// origin tells where a piece is from: the caller's number of its train, and whether
// other datagrams of that came before.
type origin struct {
	train int
	rest  bool
}

func (d *Direct) outbox() *outbox {
	if o, ok := d.outboxes.Get().(*outbox); ok {
		return o
	}
	return &outbox{}
}

// putAway returns an outbox that is empty.
func (d *Direct) putAway(o *outbox) {
	o.s, o.moved = nil, 0
	d.outboxes.Put(o)
}

// put adds the datagrams of a train, the caller's number i, as many to a message as
// the socket segments. It posts what is there already when that has to leave first:
// on an error nothing was added, and post's results are its own.
func (o *outbox) put(to way, i int, tr *flow.Train) (failed int, err error) {
	if o.n > 0 && (o.s != to.s || o.dontFragment != tr.DontFragment) {
		if failed, err := o.post(); err != nil {
			return failed, err
		}
	}
	o.s, o.dontFragment = to.s, tr.DontFragment
	size, rest := tr.Segment, tr.Payload
	if tr.Count() == 1 {
		size = len(rest)
	}
	for from := (origin{train: i}); !from.rest || len(rest) > 0; from.rest = true {
		piece := rest[:min(len(rest), to.s.together(size)*size)]
		rest = rest[len(piece):]
		if o.n > 0 && o.couple(to.peer, tr.TClass, from, piece, size) {
			continue
		}
		if o.full(len(piece)) {
			if failed, err := o.post(); err != nil {
				return failed, err
			}
		}
		o.begin(to.peer, tr.TClass, from, piece, size)
	}
	return 0, nil
}

// together is how many datagrams of size bytes the socket may send as one message.
func (s *socket) together(size int) int {
	if size == 0 || size > s.gso {
		return 1
	}
	return max(1, min(flow.MaxSegments, maxSegmentsLen/size))
}

// couple adds a piece to the last message, if that makes a train of it.
func (o *outbox) couple(peer netip.AddrPort, tclass uint8, from origin, piece []byte, size int) bool {
	p := &o.parcels[o.n-1]
	if p.peer != peer || p.tclass != tclass || p.content.Segment > o.s.gso || o.pieces == maxPieces ||
		!p.content.Couple(piece, size, maxSegmentsLen) {
		return false
	}
	o.add(p, from, piece)
	return true
}

// full reports that there is no room for another message of n bytes.
func (o *outbox) full(n int) bool {
	return o.n == maxParcels || o.pieces == maxPieces || o.n > 0 && o.bytes+n > maxPosted
}

// begin adds a message that begins with piece.
func (o *outbox) begin(peer netip.AddrPort, tclass uint8, from origin, piece []byte, size int) {
	p := &o.parcels[o.n]
	*p = parcel{peer: peer, tclass: tclass, first: o.pieces}
	p.content.Couple(piece, size, maxSegmentsLen)
	o.n++
	o.add(p, from, piece)
}

func (o *outbox) add(p *parcel, from origin, piece []byte) {
	o.origins[o.pieces] = from
	o.iovs[o.pieces].Base = unsafe.SliceData(piece)
	o.iovs[o.pieces].SetLen(len(piece))
	o.pieces++
	o.bytes += len(piece)
	p.end = o.pieces
}

// post sends what is there, in order, and empties the outbox. What there is no room
// for, or is too big for the path, is lost and counted; and so is what the socket
// refuses otherwise of a train that left in part. Another refusal is returned with
// the number of the train; what was to follow it was not sent.
func (o *outbox) post() (failed int, err error) {
	if o.n == 0 {
		return 0, nil
	}
	defer o.empty()
	o.s.discover(o.dontFragment)
	for i := range o.n {
		o.write(i)
	}
	for i := 0; i < o.n; {
		n, errno := o.call(i)
		for range n {
			o.moved += o.parcels[i].content.Bytes
			i++
		}
		if errno == 0 {
			continue
		}
		p := &o.parcels[i]
		if p.content.Count > 1 && o.s.refusesTrains(errno, p.content.Segment) {
			failed, err = o.onebyone(p)
		} else {
			failed, err = o.origins[p.first].train, o.lost(p, errno)
		}
		if err != nil {
			return failed, err
		}
		i++
	}
	return 0, nil
}

// empty forgets the messages and the sender's buffers.
func (o *outbox) empty() {
	clear(o.iovs[:o.pieces])
	o.n, o.pieces, o.bytes = 0, 0, 0
}

// write makes message i's header.
func (o *outbox) write(i int) {
	p, h := &o.parcels[i], &o.msgs[i].hdr
	segment := 0
	if p.content.Count > 1 {
		segment = p.content.Segment
	}
	o.envelopes[i].address(h, p.peer)
	o.envelopes[i].controls(h, segment, p.tclass, o.s.v4)
	h.Iov = &o.iovs[p.first]
	h.SetIovlen(p.end - p.first)
}

// call sends the messages from i on, and tells how many the kernel took; errno is of
// the one after these, if it is known. An error that the socket had pending from an
// ICMP message is returned once by the kernel: the send is tried again.
func (o *outbox) call(i int) (n int, errno unix.Errno) {
	for range 2 {
		r, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(o.s.fd), uintptr(unsafe.Pointer(&o.msgs[i])),
			uintptr(o.n-i), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		if errno = e; errno == 0 {
			return int(r), 0
		}
		switch errno {
		case unix.EAGAIN, unix.ENOBUFS, unix.EINVAL, unix.EIO:
			return 0, errno
		}
	}
	return 0, errno
}

// refusesTrains reports that errno, of a message of several datagrams, means that
// these are to be sent one by one, and remembers it: the device can't complete
// checksums, or they are too large for it.
func (s *socket) refusesTrains(errno unix.Errno, size int) bool {
	switch errno {
	case unix.EIO, unix.ENOPROTOOPT, unix.EOPNOTSUPP:
		s.gso = noSegmentation
	case unix.EINVAL, unix.EMSGSIZE:
		s.gso = min(s.gso, size-1)
	default:
		return false
	}
	return true
}

// onebyone sends the datagrams of a message that the kernel refused to cut up.
func (o *outbox) onebyone(p *parcel) (failed int, err error) {
	single := o.s.l.d.outbox()
	defer o.s.l.d.putAway(single)
	defer func() { o.moved += single.moved }()
	single.s, single.dontFragment = o.s, o.dontFragment
	for i := p.first; i < p.end; i++ {
		from := o.origins[i]
		for rest := unsafe.Slice(o.iovs[i].Base, int(o.iovs[i].Len)); len(rest) > 0; from.rest = true {
			n := min(len(rest), p.content.Segment)
			if single.full(n) {
				if failed, err := single.post(); err != nil {
					return failed, err
				}
			}
			single.begin(p.peer, p.tclass, from, rest[:n], n)
			rest = rest[n:]
		}
	}
	return single.post()
}

// lost counts a message that there was no room for, that is too big for the path (of
// which the sender hears by the error queue), or whose train left in part. Any other
// error is the sender's.
func (o *outbox) lost(p *parcel, errno unix.Errno) error {
	if errno == unix.EMSGSIZE {
		o.s.tooBig = p.peer
	}
	if !isLoss(errno) && !o.origins[p.first].rest {
		return o.s.l.sendError(p.peer, errno)
	}
	o.s.l.d.c.Drops.Add(flow.DropSendFailed, p.content.Count)
	return nil
}

// isLoss reports that there was no room for a datagram, or that it is too big for
// the path.
func isLoss(err error) bool {
	return err == unix.EAGAIN || err == unix.ENOBUFS || err == unix.EMSGSIZE
}
