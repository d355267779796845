package outbound

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
	"gatewayd/internal/epoll"
)

// minDial is what each address of a name gets at least, while time is left.
const minDial = 2 * time.Second

// DialStream connects to f.Dest, to the addresses of a name one after the other.
// It blocks until the far side answered, the dial timed out, or ctx ended.
func (d *Direct) DialStream(ctx context.Context, f flow.Flow) (flow.Stream, error) {
	deadline := time.Now().Add(d.c.DialTimeout)
	if f.Dest.From == flow.FromClient {
		return d.dialName(ctx, &f, deadline)
	}
	addr := netip.AddrPortFrom(f.Dest.Addr.Addr().Unmap(), f.Dest.Addr.Port())
	if err := d.check(addr.Addr(), f.AllowHost); err != nil {
		if err == error(errSelf) {
			d.c.Drops.Add(flow.DropSelf, 1)
		}
		return nil, d.dialError(f.Dest, err)
	}
	s, err := d.dialChecked(ctx, addr, f.AllowHost, deadline)
	if err != nil {
		return nil, d.dialError(f.Dest, err)
	}
	return s, nil
}

func (d *Direct) dialError(dest flow.Destination, err error) error {
	return fmt.Errorf("dial %s %s: %w", d.c.Name, dest, err)
}

func (d *Direct) dialName(ctx context.Context, f *flow.Flow, deadline time.Time) (flow.Stream, error) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	addrs, err := d.resolve(ctx, f)
	if err != nil {
		return nil, d.dialError(f.Dest, err)
	}
	for i, addr := range addrs {
		share := max(time.Until(deadline)/time.Duration(len(addrs)-i), minDial)
		until := time.Now().Add(min(share, time.Until(deadline)))
		var s *stream
		if s, err = d.dialChecked(ctx, netip.AddrPortFrom(addr, f.Dest.Addr.Port()), f.AllowHost, until); err == nil {
			return s, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, d.dialError(f.Dest, err)
}

// dial connects to one address.
func (d *Direct) dial(ctx context.Context, addr netip.AddrPort, deadline time.Time) (*stream, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	fd, err := d.streamSocket(addr.Addr().Is4())
	if err != nil {
		return nil, err
	}
	hearICMP(fd, addr.Addr().Is4(), true)
	switch err = unix.Connect(fd, sockaddr(addr)); err {
	case unix.EINPROGRESS:
		err = d.await(ctx, fd, deadline)
	case unix.EADDRNOTAVAIL: // over IPv6 also that there is no address to leave from
		if addr.Addr().Is4() || d.source(false).IsValid() {
			err = fmt.Errorf("no port is free: %w", unix.EADDRINUSE)
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	hearICMP(fd, addr.Addr().Is4(), false)
	return &stream{fd: fd, remote: addr}, nil
}

// hearICMP has the kernel queue ICMP messages about a connecting socket: errno
// alone does not tell them all apart, and is not set by those that come while the
// kernel is still inside connect. A connected one must not hear them: they would
// end it, where TCP goes on trying (RFC 1122, 4.2.3.9).
func hearICMP(fd int, v4, on bool) {
	level, option, value := unix.IPPROTO_IP, unix.IP_RECVERR, 0
	if !v4 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	if on {
		value = 1
	}
	unix.SetsockoptInt(fd, level, option, value) //nolint:errcheck // errno tells most of it
}

// streamSocket opens a socket with the options of outbound legs.
func (d *Direct) streamSocket(v4 bool) (int, error) {
	fd, err := d.socket(v4, unix.SOCK_STREAM)
	if err != nil {
		return -1, err
	}
	if err := d.tune(fd, v4); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (d *Direct) tune(fd int, v4 bool) error {
	set := func(level, option, value int) { unix.SetsockoptInt(fd, level, option, value) } //nolint:errcheck // a lack of these is no reason to fail
	set(unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	set(unix.SOL_SOCKET, unix.SO_OOBINLINE, 1) // else SIOCINQ and reads stop at urgent data (tcp(7))
	if k := d.c.Keepalive; k.Idle > 0 || k.Interval > 0 || k.Probes > 0 {
		set(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
		if s := int(k.Idle / time.Second); s > 0 {
			set(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, s)
		}
		if s := int(k.Interval / time.Second); s > 0 {
			set(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, s)
		}
		if k.Probes > 0 {
			set(unix.IPPROTO_TCP, unix.TCP_KEEPCNT, k.Probes)
		}
	}
	source := d.source(v4)
	if !source.IsValid() {
		return nil
	}
	set(unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(source, 0))); err != nil {
		return fmt.Errorf("source %v: %w", source, err)
	}
	return nil
}

// waiter hears that a socket is connected, or failed to.
type waiter chan epoll.Events

// Ready keeps the first event.
func (w waiter) Ready(ev epoll.Events) {
	if ev.Writable() {
		select {
		case w <- ev:
		default:
		}
	}
}

// await waits until fd is connected. The descriptor is watched by nobody afterwards.
func (d *Direct) await(ctx context.Context, fd int, deadline time.Time) error {
	w := make(waiter, 1)
	if err := d.c.Poller.Add(fd, w); err != nil {
		return err
	}
	defer d.c.Poller.Remove(fd)
	timer := d.timer(time.Until(deadline))
	defer func() {
		timer.Stop()
		d.timers.Put(timer)
	}()
	select {
	case ev := <-w:
		return verdict(fd, ev)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return unix.ETIMEDOUT
	}
}

func (d *Direct) timer(after time.Duration) *time.Timer {
	timer, ok := d.timers.Get().(*time.Timer)
	if !ok {
		return time.NewTimer(after)
	}
	timer.Reset(after)
	return timer
}

// verdict is how the connect ended; the socket is asked only when it went wrong.
// An ICMP message that came while the kernel was still inside connect is in the
// queue alone, and the socket goes on trying.
func verdict(fd int, ev epoll.Events) error {
	if ev&(unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		return nil
	}
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if code == 0 && ev&unix.EPOLLOUT != 0 {
		return nil // an earlier message did not prevent it
	}
	if errno := queuedError(fd); errno != 0 {
		return errno
	}
	if code != 0 {
		return unix.Errno(code)
	}
	return nil
}

// queuedError is what the ICMP message in a socket's error queue (ip(7),
// IP_RECVERR) says, 0 if there is none. Of administratively prohibited, which the
// kernel calls unreachable over IPv4, it makes what IPv6 calls it.
func queuedError(fd int) unix.Errno {
	var data [1]byte
	var control [128]byte
	_, n, _, _, err := unix.Recvmsg(fd, data[:], control[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	if err != nil {
		return 0
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil {
		return 0
	}
	for _, m := range messages {
		v4 := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR
		v6 := m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_RECVERR
		if !v4 && !v6 || len(m.Data) < 16 {
			continue
		}
		if v4 && m.Data[4] == originICMP && m.Data[5] == icmpUnreachable && slices.Contains(prohibited4[:], m.Data[6]) {
			return unix.EACCES
		}
		return unix.Errno(binary.NativeEndian.Uint32(m.Data))
	}
	return 0
}

// icmpUnreachable is an ICMP type; prohibited4 are codes of it (RFC 1812, 5.2.7.1).
const icmpUnreachable = 3

var prohibited4 = [...]uint8{9, 10, 13}
