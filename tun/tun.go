// Package tun opens the kernel's TUN device with its offloads, sets its link up,
// and moves packets between it and a netstack.
//
// A device is created by Open, never adopted: whatever has its name already is
// someone else's. It exists until Close, or the end of the process. Each of its
// queues is a non-blocking descriptor; the stages of a packet are in queue.go.
package tun

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/exitcode"
	"gatewayd/netstack"
)

// Device is an open TUN device. Its methods are safe for concurrent use; Run is
// called once.
type Device struct {
	name      string
	index     int
	mtu       atomic.Int32 // bytes
	addresses []netip.Prefix
	tcp, udp  atomic.Bool // super-packets of these
	queues    []*queue
	calls     sync.Pool // of *writeCall

	gone       atomic.Bool // it left this namespace
	closed     atomic.Bool
	closing    sync.Once
	closeError error // of the first Close; written inside closing
}

var _ netstack.Device = (*Device)(nil)

// ErrRemoved is why Run ends when the device is no longer in its namespace.
var ErrRemoved = errors.New("it was removed while in use")

// Open creates the device of cfg, sets its MTU and addresses and brings it up.
// It blocks for a few exchanges with the kernel. Errors are one line that names
// the device and the fix, and carry an exit code: Config for a bad cfg, Missing
// for a kernel piece or permission, Collision for a name or address that is
// taken. After an error nothing is left behind.
func Open(cfg Config) (*Device, error) { return open(cfg, devicePath) }

func open(cfg Config, path string) (*Device, error) {
	cfg, err := cfg.checked()
	if err != nil {
		return nil, exitcode.With(exitcode.Config, err)
	}
	addrs, err := choose(&cfg)
	if err != nil {
		return nil, chooseError(cfg.Name, err)
	}
	d := &Device{name: cfg.Name}
	d.mtu.Store(int32(cfg.MTU))
	d.calls.New = newWriteCall
	if err := d.openQueues(&cfg, path); err != nil {
		d.Close()
		return nil, err
	}
	if err := d.setup(&cfg, addrs); err != nil {
		d.Close()
		return nil, d.setupError(err)
	}
	return d, nil
}

// choose is the addresses of the device to be: those configured, or automatic ones.
func choose(cfg *Config) ([]netip.Prefix, error) {
	if len(cfg.Addresses) == 0 {
		return automatic()
	}
	return cfg.Addresses, clash(cfg.Addresses)
}

func (d *Device) openQueues(cfg *Config, path string) error {
	for i := range cfg.Queues {
		f, err := openQueue(path, cfg.Name, i == 0, cfg.Queues > 1)
		if err != nil {
			return err
		}
		raw, err := f.SyscallConn()
		if err != nil {
			f.Close()
			return fmt.Errorf("device %s: %w", cfg.Name, err)
		}
		d.queues = append(d.queues, &queue{file: f, raw: raw, closed: &d.closed, drops: cfg.Drops})
	}
	tcp, udp, err := setOffload(d.queues[0].file, cfg.Offload)
	d.tcp.Store(tcp)
	d.udp.Store(udp)
	if err != nil {
		return exitcode.With(exitcode.Missing, fmt.Errorf(
			"device %s: the kernel's TUN driver refuses offloads: set offload to auto or off: %w", cfg.Name, err))
	}
	return nil
}

// Name is the device's name.
func (d *Device) Name() string { return d.name }

// Index is the link's index.
func (d *Device) Index() int { return d.index }

// Addresses is what the device got, IPv4 first: the configured addresses, less
// IPv6 where the host has none, or automatic ones.
func (d *Device) Addresses() []netip.Prefix { return slices.Clone(d.addresses) }

// MTU is the device's MTU in bytes: what it was opened with, or what Refresh found.
func (d *Device) MTU() int { return int(d.mtu.Load()) }

// CanGSO reports whether the kernel sends TCP super-packets; it always takes them.
func (d *Device) CanGSO() bool { return d.tcp.Load() }

// CanUSO reports whether the kernel sends and takes UDP super-packets.
func (d *Device) CanUSO() bool { return d.udp.Load() }

// DropOffloads turns the offloads off while the device is in use, for good: the
// kernel sends plain packets with complete checksums from now on, and CanGSO and
// CanUSO say no. It still takes what was made for the offloads before.
func (d *Device) DropOffloads() error {
	d.tcp.Store(false)
	d.udp.Store(false)
	if _, _, err := setOffload(d.queues[0].file, OffloadOff); err != nil {
		return fmt.Errorf("device %s: turn offloads off: %w", d.name, err)
	}
	return nil
}

// Run reads packets, one goroutine for each queue, until ctx ends or the device
// is closed (nil), or it fails; that someone removed it, or moved it to another
// namespace, matches ErrRemoved. The error names the device.
// It returns when all of its goroutines did. A device that is down is silent,
// not failed.
func (d *Device) Run(ctx context.Context, newBatch func() *netstack.Batch) error {
	defer context.AfterFunc(ctx, d.interrupt)()
	ended := make(chan error, len(d.queues))
	for _, q := range d.queues {
		go func() { ended <- q.run(newBatch()) }()
	}
	var first error
	for range d.queues {
		if err := <-ended; err != nil && first == nil {
			first = fmt.Errorf("device %s: %w", d.name, err)
		}
		d.interrupt() // one that ended ends all
	}
	if first == nil && d.gone.Load() && ctx.Err() == nil {
		return fmt.Errorf("device %s: %w", d.name, ErrRemoved)
	}
	return first
}

// interrupt makes readers return, at once or when they next look for packets.
func (d *Device) interrupt() {
	for _, q := range d.queues {
		q.file.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // it fails for a closed file, whose reader ends by itself
	}
}

// Write sends a packet to the kernel. It does not block for room and keeps none
// of bufs. An error means that the packet was not sent: EAGAIN or ENOBUFS where the
// kernel has no room, EIO while the link is down, os.ErrClosed after Close, EBADFD
// when the device was removed, EINVAL for a packet or header that is malformed,
// EMSGSIZE for one in more than 1022 parts.
// The kernel may process the packet before Write returns, up to its delivery to
// a local socket.
func (d *Device) Write(hash uint32, bufs [][]byte, o netstack.Offload) error {
	w := d.calls.Get().(*writeCall)
	defer d.calls.Put(w)
	if !w.prepare(bufs, o) {
		return unix.EMSGSIZE
	}
	err := d.queues[hash%uint32(len(d.queues))].raw.Control(w.run)
	w.forget()
	if err != nil { // of the file, not of the write
		return os.ErrClosed
	}
	if w.errno != 0 {
		return w.errno
	}
	return nil
}

// Close removes the device and ends Run. It waits for calls under way, so that
// it must not be called from within a delivery, and for the link to be gone, at
// most 2 s. Further calls return what the first one did.
func (d *Device) Close() error {
	d.closing.Do(func() {
		d.closed.Store(true)
		for _, q := range d.queues {
			q.file.Close()
		}
		if d.index != 0 {
			d.closeError = awaitGone(d.name, d.index)
		}
	})
	return d.closeError
}
