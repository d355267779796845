package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

var errStreamEnded = errors.New("the gateway ended the stream: is it shutting down?")

func watchCommand(a *app) *cobra.Command {
	return group(&cobra.Command{Use: "watch", Short: "Follow what happens, until interrupted"}, watchFlows(a), watchTraffic(a), watchUsers(a))
}

func watchFlows(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "flows",
		Short: "Print flows as they open and close",
		Args:  noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
			return a.follow(ctx, c, "/v1/connections/events", nil, a.flowEvent)
		}),
	}
}

// follow calls print for each event, until the stream or ctx ends.
func (a *app) follow(ctx context.Context, c *client.Client, path string, query url.Values, print func(client.Event) error) error {
	for ev, err := range c.Stream(ctx, path, query, "") {
		if err != nil {
			return err
		}
		if err := print(ev); err != nil {
			return err
		}
	}
	return errStreamEnded
}

func (a *app) flowEvent(ev client.Event) error {
	if a.json || ev.Name == "lagged" {
		return a.anyEvent(ev)
	}
	var f api.Flow
	if err := json.Unmarshal(ev.Data, &f); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	return a.printf("%s\n", flowLine(ev.Name, &f, a.width()))
}

// anyEvent prints an event as JSON, or that some were missed.
func (a *app) anyEvent(ev client.Event) error {
	if a.json {
		return a.printJSON(map[string]any{"event": ev.Name, "data": json.RawMessage(ev.Data)})
	}
	var l api.Lagged
	if err := json.Unmarshal(ev.Data, &l); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	return a.printf("%s  lagged   %d events missed\n", clock(time.Now()), l.Missed)
}

func watchUsers(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "users",
		Short: "Print what happens to users and their devices",
		Args:  noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
			return a.follow(ctx, c, "/v1/events", url.Values{"types": {"user,device"}}, a.userEvent)
		}),
	}
}

func (a *app) userEvent(ev client.Event) error {
	if a.json || ev.Name == "lagged" {
		return a.anyEvent(ev)
	}
	var u api.UserEvent
	if err := json.Unmarshal(ev.Data, &u); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	text := u.User.Name + " is " + u.State
	if u.Device != "" {
		text += "  " + u.Device
	}
	if u.Why != "" {
		text += " (" + u.Why + ")"
	}
	return a.printf("%s  %-15s  %s\n", clock(time.Now()), ev.Name, printable(text))
}

// flowLine is one event as people read it, in width columns where that is possible;
// 0 is any number.
func flowLine(event string, f *api.Flow, width int) string {
	at := time.Time(f.Started)
	if !f.Ended.IsZero() {
		at = time.Time(f.Ended)
	}
	if at.IsZero() {
		at = time.Now()
	}
	id := ""
	if f.ID != 0 {
		id = fmt.Sprintf("#%d ", f.ID)
	}
	tail := " via " + shownOutbound(f)
	switch event {
	case "closed":
		tail += fmt.Sprintf("  %s  up %s, down %s, %s", f.Reason, humanBytes(value(f.Up)), humanBytes(value(f.Down)), humanAge(at.Sub(time.Time(f.Started))))
	case "blocked":
		tail += "  rule " + shownRule(f)
	}
	head := fmt.Sprintf("%s  %-7s  %s%s ", clock(at), event, id, f.Network)
	source, dest := printable(f.Source), printable(shownDestination(f))
	line := head + source + " > " + dest + printable(tail)
	fits := func() bool { return width == 0 || utf8.RuneCountInString(line) <= width }
	if !fits() {
		head = fmt.Sprintf("%s %s %s%s ", at.Local().Format(time.TimeOnly), event, id, f.Network)
	}
	for longest := width; longest >= least && !fits(); longest-- {
		line = head + elide(source, longest) + " > " + elide(dest, longest) + printable(tail)
	}
	return line
}

func clock(t time.Time) string { return t.Local().Format("15:04:05.000") }

func watchTraffic(a *app) *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "traffic",
		Short: "Print a line for each tick of the sampler",
		Args:  noArgs,
	}
	cmd.Flags().BoolVar(&once, "once", false, "print the last tick and end")
	cmd.RunE = a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
		if once {
			body, _, err := c.Bytes(ctx, client.Request{Path: "/v1/traffic", Query: url.Values{"once": {""}}})
			if err != nil {
				return err
			}
			return a.trafficEvent(client.Event{Data: body}, true)
		}
		lines := 0
		return a.follow(ctx, c, "/v1/traffic", nil, func(ev client.Event) error {
			head := lines%20 == 0
			lines++
			return a.trafficEvent(ev, head)
		})
	})
	return cmd
}

// trafficEvent prints one tick, in JSON as the API has it.
func (a *app) trafficEvent(ev client.Event, head bool) error {
	if a.json {
		return a.printJSON(json.RawMessage(ev.Data))
	}
	var t api.Traffic
	if err := json.Unmarshal(ev.Data, &t); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	const format = "%8s  %12s  %12s  %10s  %10s  %6s\n"
	if head {
		if err := a.printf(format, "TICK", "UP RATE", "DOWN RATE", "UP", "DOWN", "FLOWS"); err != nil {
			return err
		}
	}
	s := t.Total
	return a.printf(format, fmt.Sprint(t.Tick), humanRate(s.UpRate), humanRate(s.DownRate), humanBytes(s.Up), humanBytes(s.Down), fmt.Sprint(s.Flows))
}
