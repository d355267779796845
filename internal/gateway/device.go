package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"gatewayd/internal/hostnet"
	"gatewayd/netstack"
	"gatewayd/tun"
)

// tunDevice is a TUN device that is created again when someone removes it. Flows
// live on meanwhile, as on a cable that is pulled: nothing about them depends on
// the link, and routes into it may come back. Who made those routes has to make
// them again, since they went with the link.
type tunDevice struct {
	conf tun.Config
	log  *slog.Logger
	open func(tun.Config) (*tun.Device, error)
	now  atomic.Pointer[tun.Device]

	plain atomic.Bool // offloads were given up
}

var _ netstack.Device = (*tunDevice)(nil)

func openDevice(conf tun.Config, log *slog.Logger) (*tunDevice, error) {
	d := &tunDevice{conf: conf, log: log, open: tun.Open}
	t, err := d.open(conf)
	if err != nil {
		return nil, err
	}
	d.now.Store(t)
	d.conf.Addresses = t.Addresses() // others are not chosen again
	return d, nil
}

// Name is the device's name.
func (d *tunDevice) Name() string { return d.now.Load().Name() }

// Addresses is what the device got.
func (d *tunDevice) Addresses() []netip.Prefix { return d.conf.Addresses }

// MTU is the link's present MTU in bytes.
func (d *tunDevice) MTU() int { return d.now.Load().MTU() }

// CanGSO reports whether the device takes TCP super-packets.
func (d *tunDevice) CanGSO() bool { return d.now.Load().CanGSO() }

// CanUSO reports whether the device takes UDP super-packets.
func (d *tunDevice) CanUSO() bool { return d.now.Load().CanUSO() }

// giveUpOffloads turns the offloads off, also those of a device that is created again.
func (d *tunDevice) giveUpOffloads() error {
	d.plain.Store(true)
	return d.now.Load().DropOffloads()
}

// Write sends a packet; between a removal and the new device it fails.
func (d *tunDevice) Write(hash uint32, bufs [][]byte, o netstack.Offload) error {
	return d.now.Load().Write(hash, bufs, o)
}

// Close removes the device. Run has ended.
func (d *tunDevice) Close() error { return d.now.Load().Close() }

// Run carries packets until ctx ends (nil), or the device was removed and can't be
// created again.
func (d *tunDevice) Run(ctx context.Context, newBatch func() *netstack.Batch) error {
	for {
		err := d.now.Load().Run(ctx, newBatch)
		if err == nil || ctx.Err() != nil || !errors.Is(err, tun.ErrRemoved) {
			return err
		}
		if err := d.create(ctx, err); err != nil {
			return err
		}
	}
}

// createAfter are the pauses before each attempt to create a device again.
var createAfter = [...]time.Duration{50 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second}

// create makes the device anew. It blocks for a few seconds at most, and logs
// once when it succeeds.
func (d *tunDevice) create(ctx context.Context, why error) error {
	if err := d.Close(); err != nil { // of one that was moved: it goes with its descriptors
		return err
	}
	conf := d.conf
	if d.plain.Load() {
		conf.Offload = tun.OffloadOff
	}
	var err error
	for i, pause := range createAfter {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
		var t *tun.Device
		if t, err = d.open(conf); err == nil {
			d.now.Store(t)
			d.log.Warn("device was created again: its routes went with the old one", "device", d.conf.Name, "attempts", i+1, "cause", why)
			return nil
		}
	}
	return fmt.Errorf("%w, and can't be created again: %w", why, err)
}

// followDevices keeps devices up to date with what others do to their links, until
// ctx ends or netlink fails.
func (g *Gateway) followDevices(ctx context.Context) error {
	told := make([]string, len(g.inbounds)) // the trouble of each, told once
	return hostnet.Watch(ctx, func() {
		for i, in := range g.inbounds {
			trouble := ""
			if err := in.dev.now.Load().Refresh(); err != nil {
				trouble = err.Error()
			}
			if trouble != "" && trouble != told[i] {
				g.log.Warn("device can't be followed", "err", trouble)
			}
			told[i] = trouble
		}
	})
}
