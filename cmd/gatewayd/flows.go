package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/internal/client"
	"gatewayd/internal/exitcode"
)

// selectors are the flags that pick flows; each is a key of the API's selector.
var selectors = []struct{ key, what string }{
	{"inbound", "tag of the inbound"},
	{"outbound", "tag of the outbound, over all of its versions; dns is the DNS service"},
	{"session", "id of the session"},
	{"user", "name of the user; never matches anonymous flows"},
	{"device", "MAC, address or prefix of the device"},
	{"source", "address of the client"},
	{"domain", "exact domain name"},
}

func selectorFlags(cmd *cobra.Command) {
	for _, s := range selectors {
		cmd.Flags().String(s.key, "", s.what)
	}
}

// selectorOf is the query that the flags make; without any it is empty.
func selectorOf(cmd *cobra.Command) url.Values {
	q := url.Values{}
	for _, s := range selectors {
		if !cmd.Flags().Changed(s.key) {
			continue
		}
		value := cmd.Flag(s.key).Value.String()
		if s.key == "outbound" && value == "dns" {
			value = ""
		}
		q.Set(s.key, value)
	}
	return q
}

func flowsCommand(a *app) *cobra.Command {
	var closed bool
	cmd := &cobra.Command{
		Use:   "flows",
		Short: "List live flows, or the last closed ones",
		Args:  noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, cmd *cobra.Command, _ []string) error {
			path := "/v1/connections"
			if closed {
				path += "/closed"
			}
			selector := selectorOf(cmd)
			body, _, err := c.Bytes(ctx, client.Request{Path: path, Query: selector})
			if err != nil {
				return err
			}
			var list api.Connections
			if err := json.Unmarshal(body, &list); err != nil {
				return fmt.Errorf("answer of %s: %w", path, err)
			}
			if len(list.Flows) == 0 {
				if err := unknownTag(ctx, c, selector); err != nil {
					return err
				}
			}
			if a.json {
				return a.print(body)
			}
			return a.print(flowTable(list.Flows, closed, time.Now()).render(a.width()))
		}),
	}
	cmd.Flags().BoolVar(&closed, "closed", false, "list the last closed flows, in the order of their ends")
	selectorFlags(cmd)
	completeTags(a, cmd)
	cmd.AddCommand(killCommand(a))
	return cmd
}

func flowTable(flows []api.Flow, closed bool, now time.Time) *table {
	t := &table{columns: []column{
		{head: "ID", right: true},
		{head: "PROTO"},
		{head: "SOURCE", shrink: true},
		{head: "DESTINATION", shrink: true},
		{head: "OUTBOUND", shrink: true},
		{head: "RULE", shrink: true, least: 4},
		{head: "UP", right: true},
		{head: "DOWN", right: true},
		{head: "AGE", right: true},
	}}
	if closed {
		t.columns = append(t.columns, column{head: "REASON"})
	}
	for i := range flows {
		f := &flows[i]
		age, end := "-", now
		if !f.Ended.IsZero() {
			end = time.Time(f.Ended)
		}
		if !f.Started.IsZero() {
			age = humanAge(end.Sub(time.Time(f.Started)))
		}
		row := []string{
			strconv.FormatUint(f.ID, 10), f.Network, f.Source, shownDestination(f), shownOutbound(f), shownRule(f),
			humanBytes(value(f.Up)), humanBytes(value(f.Down)), age,
		}
		if closed {
			row = append(row, f.Reason)
		}
		t.add(row...)
	}
	return t
}

func value(n *uint64) uint64 {
	if n == nil {
		return 0
	}
	return *n
}

// shownDestination prefers the name, with the port that was dialled.
func shownDestination(f *api.Flow) string {
	if _, port, err := net.SplitHostPort(f.Destination); err == nil && f.Domain != "" {
		return f.Domain + ":" + port
	}
	return f.Destination
}

func shownOutbound(f *api.Flow) string {
	if f.Outbound == "" {
		return "dns"
	}
	return f.Outbound
}

// shownRule is the rule's name, else its index, else the default route's dash.
func shownRule(f *api.Flow) string {
	switch {
	case f.RuleName != "":
		return f.RuleName
	case f.Rule != nil:
		return "#" + strconv.Itoa(*f.Rule)
	}
	return "-"
}

func killCommand(a *app) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:     "kill [ID ...]",
		Short:   "End flows at once, by id or by selector",
		Example: "  gatewayd kill 17\n  gatewayd kill --outbound vpn --source 10.0.0.2\n  gatewayd kill --all",
		RunE: a.asking(func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error {
			selector := selectorOf(cmd)
			switch {
			case len(args) > 0 && (all || len(selector) > 0), all && len(selector) > 0:
				return usage("kill: give ids, selectors or --all, not two of them")
			case len(args) > 0:
				return a.killIDs(ctx, c, args)
			case !all && len(selector) == 0:
				return usage("kill: which flows? give ids, selectors or --all")
			}
			return a.killWhere(ctx, c, selector)
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "every live flow")
	selectorFlags(cmd)
	completeTags(a, cmd)
	cmd.ValidArgsFunction = a.completing(flowIDs)
	return cmd
}

// killIDs kills the flows in turn and goes on after one that is not live.
func (a *app) killIDs(ctx context.Context, c *client.Client, args []string) error {
	ids := make([]flow.ID, len(args))
	for i, arg := range args {
		id, err := flow.ParseID(arg)
		if err != nil {
			return exitcode.With(exitcode.Usage, err)
		}
		ids[i] = id
	}
	var failed error
	killed := 0
	for _, id := range ids {
		if err := c.Kill(ctx, uint64(id)); err != nil {
			if failed != nil {
				a.complain(failed)
			}
			failed = err
			continue
		}
		killed++
	}
	if err := a.reportKilled(killed); err != nil {
		return err
	}
	return failed
}

func (a *app) killWhere(ctx context.Context, c *client.Client, selector url.Values) error {
	n, err := c.KillWhere(ctx, selector)
	if err == nil && n == 0 {
		err = unknownTag(ctx, c, selector)
	}
	if err != nil {
		return err
	}
	return a.reportKilled(n)
}

func (a *app) reportKilled(n int) error {
	if a.json {
		return a.printJSON(api.Closed{Closed: n})
	}
	return a.printf("%s\n", killedText(n))
}

func killedText(n int) string { return "killed " + counted(n, "flow") }

// counted is n things, in words.
func counted(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
