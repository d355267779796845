package gateway

import (
	"context"
	"fmt"
	"reflect"
	"strings"

	"gatewayd/internal/api"
	"gatewayd/internal/config"
	"gatewayd/internal/exitcode"
	"gatewayd/internal/flowlog"
	"gatewayd/route"
	"gatewayd/track"
)

// Reload reads the configuration file again and applies it. It opens the flow log
// again even if the file is refused: whoever rotates logs asks for no more.
func (g *Gateway) Reload(context.Context) error {
	g.apply.Lock() // before reading: what was read last has to be what stays
	defer g.apply.Unlock()
	defer g.useFlowLogLocked()
	cfg := config.Default()
	if g.opt.Path != "" {
		var err error
		if cfg, err = config.Load(g.opt.Path); err != nil {
			return g.refused(err)
		}
	}
	return g.applyLocked(cfg)
}

// Apply makes text the running configuration if etag is the running one's.
func (g *Gateway) Apply(_ context.Context, text, etag string) error {
	g.apply.Lock()
	defer g.apply.Unlock()
	defer g.useFlowLogLocked()
	if etag != unquote(g.apply.config.ETag()) {
		return api.ErrStale
	}
	cfg, err := config.Parse(g.fileName(), []byte(text))
	if err != nil {
		return g.refused(err)
	}
	return g.applyLocked(cfg)
}

// Check tells what Apply would refuse, and touches nothing.
func (g *Gateway) Check(text string) error {
	cfg, err := config.Parse(g.fileName(), []byte(text))
	if err != nil {
		return err
	}
	g.apply.Lock()
	defer g.apply.Unlock()
	return needsRestart(g.apply.config, cfg)
}

// Config is the running configuration's text and etag.
func (g *Gateway) Config() (text, etag string) {
	g.apply.Lock()
	defer g.apply.Unlock()
	return g.apply.config.Text(), unquote(g.apply.config.ETag())
}

func (g *Gateway) fileName() string {
	if g.opt.Path == "" {
		return "config.yaml"
	}
	return g.opt.Path
}

func unquote(etag string) string { return strings.Trim(etag, `"`) }

// applyLocked makes cfg the running configuration, all or nothing: rules,
// outbounds, the log level, the flow log. Other changes are refused.
func (g *Gateway) applyLocked(cfg *config.Config) error {
	if err := needsRestart(g.apply.config, cfg); err != nil {
		return g.refused(err)
	}
	epoch := g.plane.Load().Epoch() + 1
	users, err := g.users.Prepare(cfg.Groups, cfg.Users)
	if err != nil {
		return g.refused(err)
	}
	defer users.Discard()
	targets, err := targetsOf(cfg.Webhooks)
	if err != nil {
		return g.refused(err)
	}
	if err := g.usePlane(cfg, epoch); err != nil {
		return g.refused(err)
	}
	users.Commit()
	g.webhooks.Use(targets)
	g.bindingsChanged()
	g.apply.config = cfg
	if g.opt.Level != nil {
		g.opt.Level.Set(cfg.Log.Level)
	}
	g.log.Info("configuration applied", "epoch", epoch, "rules", len(cfg.Route.Rules), "outbounds", len(cfg.Outbounds))
	g.publish("config.applied", api.Applied{Epoch: epoch, ETag: unquote(cfg.ETag())})
	return nil
}

// useFlowLogLocked makes the running configuration's flow log the one that is written.
func (g *Gateway) useFlowLogLocked() { g.flowLog.Use(flowlog.Target(g.apply.config.FlowLog)) }

// refused logs once why a configuration was not applied.
func (g *Gateway) refused(err error) error {
	g.log.Error("configuration refused, the old one stays", "err", err)
	g.publish("config.refused", map[string]string{"error": err.Error()})
	return err
}

// needsRestart names the sections that differ and that a running gateway does
// not change.
func needsRestart(old, next *config.Config) error {
	var changed []string
	for _, s := range []struct {
		name      string
		old, next any
	}{
		{"tun", old.TUN, next.TUN},
		{"api", old.API, next.API},
		{"timeouts", old.Timeouts, next.Timeouts},
		{"limits", old.Limits, next.Limits},
		{"log.format", old.Log.Format, next.Log.Format},
		{"privacy", old.Privacy, next.Privacy},
		{"profile", old.Profile, next.Profile},
		{"sample", old.Sample, next.Sample},
		{"sweep", old.Sweep, next.Sweep},
		{"state_dir", old.StateDir, next.StateDir},
		{"ledger", old.Ledger, next.Ledger},
		{"metrics", old.Metrics, next.Metrics},
	} {
		if !reflect.DeepEqual(s.old, s.next) {
			changed = append(changed, s.name)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	return exitcode.With(exitcode.Config, fmt.Errorf("%s: a running gateway changes only route, outbounds, users, groups, log.level and events; restart gatewayd to change the rest", strings.Join(changed, ", ")))
}

// expire ends the flows of a version whose drain period is over.
func (g *Gateway) expire(v *route.Version) {
	g.tracker.EndWhere(route.ErrDrained, func(r *track.Record) bool {
		return r.Outbound == v.Tag() && r.Version == v.N()
	})
}
