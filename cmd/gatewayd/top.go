package main

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

const (
	topFlows    = 20_000 // flows that are looked at; more are told
	topRest     = 4      // a look may take a fifth of the time
	killTimeout = 5 * time.Second
)

// topOptions are the flags of top.
type topOptions struct {
	once     bool
	interval time.Duration
	topState
}

func topCommand(a *app) *cobra.Command {
	o := topOptions{}
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show live flows, the busiest first; filter and kill them",
		Long: "Shows what moves, and keeps on doing so until q is pressed; ? shows the keys.\n" +
			"With --once, or where standard output is no terminal, it prints one screen and ends;\n" +
			"COLUMNS and LINES then say how large it is.",
		Args: noArgs,
	}
	cmd.Flags().BoolVar(&o.once, "once", false, "print one screen and end")
	cmd.Flags().DurationVar(&o.interval, "interval", time.Second, "between two looks at the gateway")
	cmd.Flags().StringVar(&o.view, "view", topViews[0], "what a row is: "+strings.Join(topViews, ", "))
	cmd.Flags().StringVar(&o.sort, "sort", topSorts[0], "what rows are sorted by: "+strings.Join(topSorts, ", "))
	cmd.Flags().StringVar(&o.filter, "filter", "", "show only rows with this text")
	for flag, words := range map[string][]string{"view": topViews, "sort": topSorts} {
		completeWith(cmd, flag, words...)
	}
	cmd.RunE = a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
		switch {
		case !slices.Contains(topViews, o.view):
			return usage("top: view %q: want %s", o.view, strings.Join(topViews, ", "))
		case !slices.Contains(topSorts, o.sort):
			return usage("top: sort %q: want %s", o.sort, strings.Join(topSorts, ", "))
		case o.interval < 100*time.Millisecond:
			return usage("top: interval %v: want at least 100ms", o.interval)
		}
		in, inOK := isTerminal(a.stdin)
		out, outOK := isTerminal(a.stdout)
		if o.once || a.json || !inOK || !outOK {
			return a.topOnce(ctx, c, &o)
		}
		return runTop(ctx, c, &o, in, out)
	})
	return cmd
}

// lookAt asks the gateway for everything that a screen may need.
func lookAt(ctx context.Context, c *client.Client, before *topData) (*topData, error) {
	d := &topData{}
	var list api.Connections
	if err := c.Get(ctx, "/v1/status", nil, &d.status); err != nil {
		return nil, err
	}
	if err := c.Get(ctx, "/v1/traffic", url.Values{"once": {""}}, &d.traffic); err != nil {
		return nil, err
	}
	if err := c.Get(ctx, "/v1/connections", url.Values{"limit": {strconv.Itoa(topFlows)}}, &list); err != nil {
		return nil, err
	}
	d.at = time.Now()
	d.flows, d.more = rated(list.Flows, d.at, before), list.Next != 0
	return d, nil
}

// topOnce prints one screen. Rates need two looks.
func (a *app) topOnce(ctx context.Context, c *client.Client, o *topOptions) error {
	before, err := lookAt(ctx, c, nil)
	if err != nil {
		return err
	}
	select {
	case <-time.After(o.interval):
	case <-ctx.Done():
		return ctx.Err()
	}
	d, err := lookAt(ctx, c, before)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(map[string]any{"flows": d.flows, "traffic": d.traffic})
	}
	var b bytes.Buffer
	width, height := a.screenSize()
	for _, l := range o.render(d, width, height, false) {
		fmt.Fprintln(&b, l.text)
	}
	return a.print(b.Bytes())
}

// screenSize is that of the terminal, or what COLUMNS and LINES say, or 80×24.
func (a *app) screenSize() (width, height int) {
	width, height = 80, 24
	if out, ok := isTerminal(a.stdout); ok {
		width, height = (&terminal{out: out}).size()
	}
	for name, v := range map[string]*int{"COLUMNS": &width, "LINES": &height} {
		if n, err := strconv.Atoi(a.getenv(name)); err == nil && n > 0 {
			*v = min(n, 1000)
		}
	}
	return width, height
}

// top is the live screen. The loop owns the state; looks and keys come to it from
// two goroutines that end with it.
type top struct {
	client *client.Client
	opt    *topOptions
	term   *terminal
	data   *topData
}

func runTop(ctx context.Context, c *client.Client, o *topOptions, in, out *os.File) error {
	first, err := lookAt(ctx, c, nil) // what fails now is an error message and no screen
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGWINCH, syscall.SIGCONT)
	defer signal.Stop(signals)
	term, err := openTerminal(in, out)
	if err != nil {
		return err
	}
	t := &top{client: c, opt: o, term: term, data: first}
	ctx, cancel := context.WithCancel(ctx)
	keys, looks := make(chan key), make(chan *topData)
	gone := make(chan error, 1)
	var helpers sync.WaitGroup
	helpers.Go(func() {
		gone <- term.readKeys(func(k key) {
			select {
			case keys <- k:
			case <-ctx.Done():
			}
		})
	})
	helpers.Go(func() { t.look(ctx, looks, first) })
	defer helpers.Wait()
	defer term.close()
	defer cancel()
	return t.loop(ctx, keys, looks, signals, gone)
}

// look sends what it finds, interval after interval, the more rarely the longer it takes.
func (t *top) look(ctx context.Context, looks chan<- *topData, before *topData) {
	pause := t.opt.interval
	for {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		begun := time.Now()
		d, err := lookAt(ctx, t.client, before)
		if err != nil {
			stale := *before
			stale.err = err.Error()
			d = &stale
		}
		pause = max(t.opt.interval, topRest*time.Since(begun))
		before = d
		select {
		case looks <- d:
		case <-ctx.Done():
			return
		}
	}
}

func (t *top) loop(ctx context.Context, keys <-chan key, looks <-chan *topData, signals <-chan os.Signal, gone <-chan error) error {
	for {
		width, height := t.term.size()
		if err := t.term.show(t.opt.render(t.data, width, height, true)); err != nil {
			return fmt.Errorf("terminal: %w", err)
		}
		select {
		case k := <-keys:
			a := t.opt.press(k, t.data, height)
			if a.quit {
				return nil
			}
			if a.kill != nil {
				t.opt.message = t.kill(ctx, a.kill)
			}
		case d := <-looks:
			if !t.opt.paused {
				t.data = d
				t.opt.settle(t.opt.rows(d), topBody(height))
			}
		case s := <-signals:
			if s == syscall.SIGCONT {
				if err := t.term.raw(); err != nil {
					return err
				}
			}
			t.term.forget()
		case err := <-gone:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// kill does what was confirmed, and tells what it did.
func (t *top) kill(ctx context.Context, k *topKill) string {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if k.id != 0 {
		if err := t.client.Kill(ctx, k.id); err != nil {
			return err.Error()
		}
		return fmt.Sprintf("killed flow %d", k.id)
	}
	n, err := t.client.KillWhere(ctx, url.Values{k.key: {k.tag}})
	if err != nil {
		return err.Error()
	}
	return killedText(n)
}
