package hostnet

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// settle is the least time between two calls of a watch's function: a burst of
// changes becomes one or two of them.
const settle = 50 * time.Millisecond

// Watch calls changed once when it listens, and then after links or addresses of
// this host changed, at most every 50 ms. Calls don't overlap. What changed is
// not told: events can be lost, so the receiver asks anew. It blocks until ctx
// ends (nil) or netlink fails.
func Watch(ctx context.Context, changed func()) error {
	return watch(ctx, func(netip.Prefix) {}, changed)
}

// watch is Watch that also tells each address that is added, at once, on a
// goroutine of its own.
func watch(ctx context.Context, added func(netip.Prefix), changed func()) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return fmt.Errorf("netlink subscription: %w", err)
	}
	events := make(chan struct{}, 1) // one place: more news is no news
	failed := make(chan error, 1)
	go func() { failed <- listen(s, added, events) }()

	err = tell(ctx, events, failed, changed)
	s.Close()
	if err == nil {
		<-failed
	}
	return err
}

// listen turns messages into events until the socket fails or is closed.
func listen(s *nl.NetlinkSocket, added func(netip.Prefix), events chan<- struct{}) error {
	for {
		// An overrun (ENOBUFS) means that something changed, too. The kernel
		// clears it, so that the next read waits.
		msgs, _, err := s.Receive()
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
			return err
		}
		for i := range msgs {
			if a, ok := newAddress(&msgs[i]); ok {
				added(a)
			}
		}
		select {
		case events <- struct{}{}:
		default:
		}
	}
}

// newAddress is the address that a message says was added, with the length of its
// network. IFA_LOCAL is the host's own where there is one: on a point-to-point
// link IFA_ADDRESS is the far end.
func newAddress(m *syscall.NetlinkMessage) (p netip.Prefix, ok bool) {
	if m.Header.Type != unix.RTM_NEWADDR || len(m.Data) < unix.SizeofIfAddrmsg {
		return p, false
	}
	var a netip.Addr
	for kind, value := range attributes(m.Data[unix.SizeofIfAddrmsg:]) {
		if kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !a.IsValid() {
			a, _ = netip.AddrFromSlice(value)
		}
	}
	p = netip.PrefixFrom(a, int(m.Data[1])) // ifa_prefixlen
	return p, p.IsValid()
}

// attributes are the kinds and values of a message's route attributes. One that does
// not fit ends them.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		native := nl.NativeEndian()
		for len(b) >= unix.SizeofRtAttr {
			n := int(native.Uint16(b))
			if n < unix.SizeofRtAttr || n > len(b) || !yield(native.Uint16(b[2:]), b[unix.SizeofRtAttr:n]) {
				return
			}
			const align = unix.RTA_ALIGNTO
			b = b[min((n+align-1)/align*align, len(b)):]
		}
	}
}

// tell calls changed for events until ctx ends, or the listener failed.
func tell(ctx context.Context, events <-chan struct{}, failed <-chan error, changed func()) error {
	pause := time.NewTimer(settle)
	defer pause.Stop()
	for {
		changed()
		pause.Reset(settle)
		var next <-chan struct{} // nil, thus never ready, until the pause is over
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return nil
			case err := <-failed:
				return fmt.Errorf("netlink subscription: %w", err)
			case <-pause.C:
				next = events
			case <-next:
				waiting = false
			}
		}
	}
}
