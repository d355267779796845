package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/config"
	"gatewayd/internal/device"
	"gatewayd/internal/exitcode"
	"gatewayd/internal/store"
	"gatewayd/internal/webhook"
	"gatewayd/track"
	"gatewayd/user"
)

// openUsers makes the registry of users with what the state directory has, and the
// table of devices.
func (g *Gateway) openUsers(cfg *config.Config) error {
	now := time.Now()
	s, notes, err := store.Open(cfg.StateDir, now)
	if errors.Is(err, store.ErrInUse) {
		return exitcode.With(exitcode.Collision, err)
	}
	if err != nil {
		return exitcode.With(exitcode.Config, fmt.Errorf("state_dir %s: %w", cfg.StateDir, err))
	}
	g.store = s
	g.notes = notes
	if g.ledger, err = user.NewLedger(user.LedgerOptions{Store: s, Hourly: cfg.Ledger.Hourly, Daily: cfg.Ledger.Daily}); err != nil {
		return fmt.Errorf("state_dir %s: %w", cfg.StateDir, err)
	}
	g.devices = device.New(device.Options{Leases: device.DefaultLeases(), Changed: g.deviceChanged, Log: g.log})
	g.restless.init()
	g.users, err = user.New(user.Options{
		Keeper: g.ledger, Log: g.log, Drops: &g.drops, Sweep: cfg.Sweep, Commit: commitInterval(cfg.Ledger.Commit, s.Flash()),
		Changed: g.userChanged, Events: g.userEvent, Activity: g.activity,
		Demoted: func(user.Promotion) { g.bindingsChanged() },
	})
	if err != nil {
		return fmt.Errorf("state_dir %s: %w", cfg.StateDir, err)
	}
	change, err := g.users.Prepare(cfg.Groups, cfg.Users)
	if err != nil {
		return exitcode.With(exitcode.Config, err)
	}
	change.Commit()
	targets, err := targetsOf(cfg.Webhooks)
	g.webhooks.Use(targets)
	return err
}

// tellState logs what was found of the state. It waits until nothing else can fail: who
// can't start is told why, in one line.
func (g *Gateway) tellState() {
	for _, n := range g.notes {
		g.log.Warn(n)
	}
	if err := g.store.Trouble(); err != nil {
		g.log.Warn("users and usage are kept in memory only", "err", err)
	}
}

// The commit interval is another one on flash, unless the configuration has its own.
const (
	defaultCommit = 30 * time.Second
	flashCommit   = time.Minute
)

func commitInterval(configured time.Duration, flash bool) time.Duration {
	switch {
	case configured != 0:
		return configured
	case flash:
		return flashCommit
	}
	return defaultCommit
}

// restless is what changed and live flows were not compared with yet.
type restless struct {
	signal chan struct{} // something is in here

	mu       sync.Mutex
	users    map[flow.UserKey]bool // whose state is another one; guarded by mu
	bindings bool                  // devices may have other users; guarded by mu
}

func (r *restless) init() { r.signal, r.users = make(chan struct{}, 1), make(map[flow.UserKey]bool) }

// userChanged is called when a user's state changed: rules may decide otherwise. It
// does not wait.
func (g *Gateway) userChanged(key flow.UserKey) {
	g.stir(func(r *restless) { r.users[key] = true })
}

// bindingsChanged is called when devices got other users, or addresses other devices.
// It does not wait.
func (g *Gateway) bindingsChanged() {
	g.stir(func(r *restless) { r.bindings = true })
}

func (g *Gateway) stir(note func(*restless)) {
	g.gen.Add(1) // before a flow can be decided with what was
	r := &g.restless
	r.mu.Lock()
	note(r)
	r.mu.Unlock()
	select {
	case r.signal <- struct{}{}:
	default:
	}
}

// settleFlows compares live flows with what changed, until ctx ends.
func (g *Gateway) settleFlows(ctx context.Context) error {
	r := &g.restless
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.signal:
		}
		r.mu.Lock()
		users, bindings := maps.Clone(r.users), r.bindings
		clear(r.users)
		r.bindings = false
		r.mu.Unlock()
		if bindings {
			g.rebind(func(*track.Record) bool { return true })
		}
		if len(users) > 0 {
			g.endForbidden(users)
		}
	}
}

// deviceChanged is called when an address belongs to another device than before. Whether
// it is another one than the address was promoted with, its promotion knows: between two
// devices there may have been a time without any.
func (g *Gateway) deviceChanged(c device.Change) {
	g.users.DeviceChanged(c.After)
	g.bindingsChanged()
}

// activity is what live flows of a device moved: for promotions, which end when nothing
// moves.
func (g *Gateway) activity(name string) (bytes uint64) {
	set, err := flow.ParseDeviceSet(name)
	if err != nil {
		return 0
	}
	g.tracker.Each(func(r *track.Record) bool {
		if set.Has(g.devices.Lookup(r.Source.Addr())) {
			bytes += r.Up + r.Down
		}
		return true
	})
	return bytes
}

// countUsage gives the ledger what devices without a user and outbounds moved, every
// interval and once more when ctx ends, and has it commit them as often as usage. That
// it could not is told by whoever commits the usage.
func (g *Gateway) countUsage(ctx context.Context, interval, commit time.Duration) error {
	last := make(outboundTraffic)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for committed := time.Now(); ; {
		select {
		case now := <-tick.C:
			g.count(last, now)
			if now.Sub(committed) >= commit {
				committed = now
				g.ledger.Flush(now) //nolint:errcheck // see above
			}
		case <-ctx.Done():
			g.count(last, time.Now())
			return g.ledger.Flush(time.Now())
		}
	}
}

// userEvent tells whoever listens of something that happened to a user or a promotion.
func (g *Gateway) userEvent(e user.Event) { g.publish(e.Kind, api.UserEventOf(e)) }

// publish tells the API's streams and the webhooks of an event.
func (g *Gateway) publish(kind string, data any) {
	g.events.Publish(kind, data)
	g.webhooks.Send(kind, time.Now(), data)
}

// newWebhooks makes the sender of events. Its connections are like any of this host's.
func newWebhooks(log *slog.Logger) *webhook.Sender {
	var d net.Dialer
	return webhook.New(webhook.Options{Dial: d.DialContext, Log: log})
}

// targetsOf reads the secrets of webhooks. The error names the file.
func targetsOf(hooks []config.Webhook) (targets []webhook.Target, err error) {
	for _, h := range hooks {
		t := webhook.Target{URL: h.URL, On: h.On}
		if h.SecretFile != "" {
			secret, err := os.ReadFile(h.SecretFile)
			if t.Secret = strings.TrimSpace(string(secret)); err == nil && t.Secret == "" {
				err = errors.New(h.SecretFile + " is empty")
			}
			if err != nil {
				return nil, exitcode.With(exitcode.Config, fmt.Errorf("events.webhooks %s: secret: %w", h.URL, err))
			}
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// ledgerStatus tells whether usage is durable, and what an operator should know of it.
func (g *Gateway) ledgerStatus() (l *api.Ledger, warnings []string) {
	l = &api.Ledger{Writable: g.store.Writable(), LastCommit: api.Time(g.store.LastCommit())}
	if err := g.store.Trouble(); err != nil {
		warnings = append(warnings, fmt.Sprintf("users and usage are kept in memory only: %v", err))
	}
	if n := g.store.Lost(); n > 0 {
		warnings = append(warnings, fmt.Sprintf("%d entries of the series of usage were given up while the disk took none", n))
	}
	if !g.users.Plausible() {
		warnings = append(warnings, "the clock cannot be right: nobody expires by date and no period of traffic ends")
	}
	return l, warnings
}
