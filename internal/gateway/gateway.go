// Package gateway puts the rooms together: it builds devices, outbounds, the
// plane, the tracker and the API from a configuration, carries each new flow
// through them, applies changes, and shuts all down in order.
//
// A TCP flow: limits → route → dial → register → accept → relay → close.
// A datagram: fanout finds its sub-link, or route → open → register, once.
// Both end by one mechanism: track.Flow.End with a cause.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/config"
	"gatewayd/internal/device"
	"gatewayd/internal/epoll"
	"gatewayd/internal/flowlog"
	"gatewayd/internal/hostnet"
	"gatewayd/internal/store"
	"gatewayd/internal/webhook"
	"gatewayd/route"
	"gatewayd/track"
	"gatewayd/user"
)

// Options are what a Gateway is made of.
type Options struct {
	Config  *config.Config
	Path    string // of the file that Reload reads; empty: the embedded default
	Version string
	Log     *slog.Logger
	Level   *slog.LevelVar // follows log.level of what is applied; may be nil
}

// Gateway is one running gateway. Create it with New; Run works once.
type Gateway struct {
	opt     Options
	log     *slog.Logger
	poller  *epoll.Poller
	tracker *track.Tracker
	flowLog *flowlog.Log
	hosts   *hostnet.AddrSet
	api     *api.Server
	events  *api.Events
	drops   flow.Drops
	blocked blockedEvents
	limits  *limits
	memory  *governor

	shortage shortage

	store    *store.Store
	notes    []string // of what the store found
	ledger   *user.Ledger
	users    *user.Users
	webhooks *webhook.Sender
	devices  *device.Table
	unowned  unowned
	restless restless
	managing sync.Mutex // serialises changes of live flows' users

	inbounds  []*inbound
	outbounds *route.Outbounds
	plane     atomic.Pointer[route.Plane]
	gen       atomic.Uint64 // grows with whatever decisions depend on
	closing   atomic.Bool   // no new flows

	apply struct {
		sync.Mutex // serialises applies, and guards what follows
		config     *config.Config
	}
}

// New builds everything that can fail, devices last: after an error nothing is
// left behind. Nothing is carried before Run. Errors carry exit codes.
func New(opt Options) (g *Gateway, err error) {
	g = &Gateway{opt: opt, log: opt.Log, events: api.NewEvents(), webhooks: newWebhooks(opt.Log)}
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	cfg := opt.Config
	g.apply.config = cfg
	plan := planMemory(cfg.Profile, thisMachine())
	g.memory = newGovernor(plan, g.log)
	g.limits = newLimits(cfg.Limits, plan.flows)
	g.blocked.rates = blockedRates
	if g.poller, err = epoll.New(); err != nil {
		return g, err
	}
	if g.tracker, err = track.New(track.Options{Interval: cfg.Sample}); err != nil {
		return g, err
	}
	line, err := api.ClosedLine(cfg.Privacy)
	if err != nil {
		return g, err
	}
	g.flowLog = flowlog.New(flowlog.Options{Tracker: g.tracker, Line: line, Log: g.log})
	g.flowLog.Use(flowlog.Target(cfg.FlowLog))
	if g.hosts, err = hostnet.NewAddrSet(); err != nil {
		return g, fmt.Errorf("addresses of this host: %w", err)
	}
	if err = g.openUsers(cfg); err != nil {
		return g, err
	}
	g.outbounds = route.NewOutbounds(g.expire)
	if err = g.usePlane(cfg, 1); err != nil {
		return g, err
	}
	if err = g.listen(cfg); err != nil {
		return g, err
	}
	for _, t := range cfg.TUN {
		in, err := g.openTUN(cfg, t)
		if err != nil {
			return g, err
		}
		g.inbounds = append(g.inbounds, in)
	}
	return g, g.hosts.Refresh() // the devices' own addresses
}

// Run carries traffic until ctx ends, then ends every flow and returns nil; or
// returns what failed: a device that was removed for good, a listener. ready is called
// once everything serves.
func (g *Gateway) Run(ctx context.Context, ready func()) error {
	defer g.close()
	g.tellState()
	// Each stage outlives the one before it: flows end, are counted for the last
	// time, are shown for the last time, and only then the devices go.
	devices, stopDevices := context.WithCancelCause(context.Background())
	datagrams, stopDatagrams := context.WithCancel(context.Background())
	ledger, stopLedger := context.WithCancel(context.Background())
	keeping, stopKeeping := context.WithCancel(context.Background())
	counting, stopCounting := context.WithCancel(context.Background())
	serving, stopServing := context.WithCancel(context.Background())
	failed := make(chan error, 1)
	start := func(ctx context.Context, what string, run func(context.Context) error) *errgroup.Group {
		var e errgroup.Group
		e.Go(func() error {
			err := run(ctx)
			if err != nil {
				err = fmt.Errorf("%s: %w", what, err)
				select {
				case failed <- err:
				default:
				}
			}
			return err
		})
		return &e
	}
	poll := start(devices, "poller", g.poller.Run)
	hosts := start(devices, "addresses of this host", g.hosts.Run)
	links := start(devices, "links of this host", g.followDevices)
	memory := start(devices, "memory", func(ctx context.Context) error { return g.memory.run(ctx, g.press, g.held) })
	offloads := start(devices, "offloads", g.watchOffloads)
	known := start(devices, "devices", g.devices.Run)
	settling := start(datagrams, "users", g.settleFlows)
	usage := start(ledger, "usage", func(ctx context.Context) error {
		return g.countUsage(ctx, max(g.opt.Config.Sample, time.Second), commitInterval(g.opt.Config.Ledger.Commit, g.store.Flash()))
	})
	users := start(keeping, "users", g.users.Run)
	webhooks := start(keeping, "webhooks", g.webhooks.Run)
	sampler := start(counting, "sampler", g.tracker.Run)
	flowLog := start(counting, "flow log", g.flowLog.Run)
	server := start(serving, "api", g.api.Serve)
	var tables, stacks []*errgroup.Group
	for _, in := range g.inbounds {
		tables = append(tables, start(datagrams, in.tag, in.udp.Run))
		stacks = append(stacks, start(devices, in.tag, in.stack.Run))
	}
	ready()

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	g.closing.Store(true)
	g.endFlows(stopDatagrams)
	wait(tables...)
	stopCounting()
	wait(sampler, flowLog, settling)
	stopLedger()
	wait(usage)
	stopKeeping()
	wait(users, webhooks)
	g.logTotals()
	stopServing()
	wait(server)
	stopDevices(flow.ErrShutdown)
	wait(stacks...)
	wait(poll, hosts, links, memory, offloads, known)
	return err
}

func wait(gs ...*errgroup.Group) {
	for _, e := range gs {
		e.Wait() //nolint:errcheck // the first failure was taken from the channel
	}
}

// endFlows ends every flow with the shutdown's cause and waits until they are
// gone, at most timeouts.grace.
func (g *Gateway) endFlows(stopDatagrams func()) {
	deadline := time.NewTimer(max(g.opt.Config.Timeouts.Grace, 100*time.Millisecond))
	defer deadline.Stop()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	stopDatagrams()
	for {
		g.tracker.EndWhere(flow.ErrShutdown, func(*track.Record) bool { return true })
		if g.tracker.Live() == 0 && g.pending() == 0 {
			return
		}
		select {
		case <-look.C:
		case <-deadline.C:
			g.log.Warn("flows did not end within the grace", "flows", g.tracker.Live())
			return
		}
	}
}

func (g *Gateway) pending() int {
	n := 0
	for _, in := range g.inbounds {
		in.stack.CancelPending(flow.ErrShutdown)
		n += in.stack.Pending()
	}
	return n
}

func (g *Gateway) logTotals() {
	t := g.tracker.Snapshot().Total
	g.log.Info("stopped", "up", t.Up, "down", t.Down)
}

// close frees what New made.
func (g *Gateway) close() {
	var errs []error
	for _, in := range g.inbounds {
		errs = append(errs, in.dev.Close())
	}
	if g.outbounds != nil {
		errs = append(errs, g.outbounds.Close())
	}
	if g.api != nil {
		g.api.Close()
	}
	if g.poller != nil {
		g.poller.Close()
	}
	if g.store != nil {
		kept := g.store.Writable() // else it was told
		if err := g.store.Close(time.Now()); kept {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		g.log.Warn("closing", "err", err)
	}
}
