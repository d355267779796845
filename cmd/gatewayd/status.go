package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

func statusCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show how the gateway fares",
		Args:  noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
			return show(ctx, a, c, "/v1/status", func(s api.Status) []byte { return statusText(&s, a.width()) })
		}),
	}
}

func outboundsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "outbounds",
		Short: "List outbounds with their versions and flows",
		Args:  noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
			return show(ctx, a, c, "/v1/outbounds", func(o api.Outbounds) []byte { return outboundTable(o.Outbounds).render(a.width()) })
		}),
	}
}

// show prints the answer at path: as it is for --json, else as text makes it.
func show[T any](ctx context.Context, a *app, c *client.Client, path string, text func(T) []byte) error {
	return showQuery(ctx, a, c, path, nil, text)
}

// showQuery is show of an answer that depends on a query.
func showQuery[T any](ctx context.Context, a *app, c *client.Client, path string, query url.Values, text func(T) []byte) error {
	body, _, err := c.Bytes(ctx, client.Request{Path: path, Query: query})
	if err != nil {
		return err
	}
	if a.json {
		return a.print(body)
	}
	var v T
	if err := json.Unmarshal(body, &v); err != nil {
		return fmt.Errorf("answer of %s: %w", path, err)
	}
	return a.print(text(v))
}

func statusText(s *api.Status, width int) []byte {
	var b bytes.Buffer
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-13s %s\n", name, printable(fmt.Sprintf(format, args...)))
	}
	line("version", "%s", s.Version)
	line("uptime", "%s", humanAge(time.Duration(s.UptimeS*float64(time.Second))))
	line("epoch", "%d", s.Epoch)
	line("flows", "%d", s.Flows)
	line("associations", "%d", s.Associations)
	line("memory", "%s resident, %s heap, %d goroutines", humanBytes(s.Memory.RSS), humanBytes(s.Memory.Heap), s.Memory.Goroutines)
	if s.Memory.Budget > 0 {
		line("budget", "%s of %s in use, %s", humanBytes(s.Memory.Used), humanBytes(s.Memory.Budget), s.Memory.Level)
	}
	line("drops", "%s", dropText(s.Drops))
	if l := s.Ledger; l != nil {
		line("ledger", "%s", ledgerText(l))
	}
	if l := s.FlowLog; l != nil {
		line("flow log", "%s: %d flows written, %d dropped", l.File, l.Written, l.Dropped)
	}
	for _, w := range s.Warnings {
		line("warning", "%s", w)
	}
	fmt.Fprintln(&b)
	b.Write(inboundTable(s.Inbounds).render(width))
	fmt.Fprintln(&b)
	b.Write(outboundTable(s.Outbounds).render(width))
	return b.Bytes()
}

func ledgerText(l *api.Ledger) string {
	text := "on disk"
	if !l.Writable {
		text = "in memory only, nothing can be written"
	}
	if l.LastCommit.IsZero() {
		return text
	}
	return text + ", last commit " + timeText(l.LastCommit)
}

// dropText names the causes that occurred.
func dropText(drops map[string]uint64) string {
	var parts []string
	for _, cause := range slices.Sorted(maps.Keys(drops)) {
		if n := drops[cause]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", cause, n))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func inboundTable(list []api.Inbound) *table {
	t := &table{columns: []column{{head: "INBOUND"}, {head: "TYPE"}, {head: "DEVICE"}, {head: "MTU", right: true}, {head: "ADDRESSES", shrink: true}}}
	for _, in := range list {
		t.add(in.Tag, in.Type, in.Device, strconv.Itoa(in.MTU), strings.Join(in.Addresses, " "))
	}
	return t
}

func outboundTable(list []api.Outbound) *table {
	t := &table{columns: []column{{head: "OUTBOUND", shrink: true}, {head: "TYPE"}, {head: "HEALTH"}, {head: "FLOWS", right: true}, {head: "DRAINING"}, {head: "LAST ERROR", shrink: true}}}
	for _, o := range list {
		var draining []string
		for _, d := range o.Draining {
			draining = append(draining, fmt.Sprintf("v%d (%d)", d.Version, d.Flows))
		}
		t.add(versionName(&o), o.Type, health(o.Healthy), strconv.Itoa(o.Flows), orDash(strings.Join(draining, " ")), orDash(o.LastError))
	}
	return t
}

// versionName is the current version; an outbound that was removed has none.
func versionName(o *api.Outbound) string {
	tag := o.Tag
	if tag == "" {
		tag = "dns"
	}
	if o.Version == 0 {
		return tag
	}
	return fmt.Sprintf("%s@v%d", tag, o.Version)
}

func health(ok *bool) string {
	switch {
	case ok == nil:
		return "-"
	case *ok:
		return "up"
	}
	return "down"
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
