package main

import (
	"context"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/mdlayher/sdnotify"
	"github.com/spf13/cobra"

	"gatewayd/internal/config"
	"gatewayd/internal/gateway"
)

// runCommand is the daemon.
func runCommand(a *app) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "run [-c FILE]",
		Short: "Run the gateway in the foreground",
		Long: "Runs the gateway until SIGTERM or SIGINT. SIGHUP reads the configuration again.\n" +
			"It logs one line `ready` when all devices and listeners are up, and tells systemd.\n" +
			"Without -c it reads " + defaultConfig + ", or runs on an embedded default if that is not there.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runGateway(cmd.Context(), a, file) },
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file")
	return cmd
}

func runGateway(ctx context.Context, a *app, file string) error {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP) // first of all: unheard, it would end the process
	defer signal.Stop(hangups)
	cfg, path, err := loadConfig(file)
	if err != nil {
		return err
	}
	level := new(slog.LevelVar)
	log := newLogger(a.stderr, cfg.Log, level)
	g, err := gateway.New(gateway.Options{Config: cfg, Path: path, Version: version, Log: log, Level: level})
	if err != nil {
		return err
	}
	notify, err := sdnotify.New() // fails outside systemd, and then says nothing
	if err == nil {
		defer notify.Close() //nolint:errcheck
	}
	tell := func(s string) { notify.Notify(s) } //nolint:errcheck
	stop := reloadOnHangup(ctx, hangups, g)
	defer stop()
	context.AfterFunc(ctx, func() { tell(sdnotify.Stopping) })
	return g.Run(ctx, func() {
		log.Info("ready", "version", version, "devices", len(cfg.TUN), "config", fileName(path))
		tell(sdnotify.Ready)
	})
}

func newLogger(w io.Writer, c config.Log, level *slog.LevelVar) *slog.Logger {
	level.Set(c.Level)
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// reloadOnHangup applies the file at each SIGHUP; what was refused is logged there.
func reloadOnHangup(ctx context.Context, c chan os.Signal, g *gateway.Gateway) (stop func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range c {
			g.Reload(ctx) //nolint:errcheck
		}
	}()
	return func() {
		signal.Stop(c)
		close(c)
		<-done
	}
}
