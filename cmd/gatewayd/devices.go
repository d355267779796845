package main

import (
	"context"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

func devicesCommand(a *app) *cobra.Command {
	list := a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
		return show(ctx, a, c, "/v1/devices", func(l api.DeviceList) []byte { return deviceTable(l.Devices).render(a.width()) })
	})
	cmd := &cobra.Command{Use: "devices", Short: "List devices, and put them under users", Args: noArgs, RunE: list}
	cmd.AddCommand(&cobra.Command{Use: "list", Short: "List devices", Args: noArgs, RunE: list}, promoteDevice(a), demoteDevice(a))
	return cmd
}

func deviceTable(devices []api.Device) *table {
	t := &table{columns: []column{
		{head: "DEVICE", shrink: true, least: 21},
		{head: "HOST", shrink: true, least: 4},
		{head: "ADDRESSES", shrink: true, least: 9},
		{head: "USER", shrink: true, least: 4},
		{head: "BY", shrink: true, least: 9},
	}}
	for i := range devices {
		d := &devices[i]
		name := "-"
		if d.User != nil {
			name = d.User.Name
		}
		t.add(d.Device, orDash(d.Host), orDash(strings.Join(d.Addresses, " ")), name, orDash(d.Bound))
	}
	return t
}

func promoteDevice(a *app) *cobra.Command {
	limits := map[string]string{"idle": "the promotion ends after so long without traffic, as in 10m", "session": "it ends after so long, as in 8h"}
	cmd := &cobra.Command{
		Use: "set-user DEVICE USER", Short: "Put a device (a MAC, an address or a prefix) with its live flows under a user", Args: cobra.ExactArgs(2),
		RunE: a.asking(func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error {
			body := map[string]string{"user": args[1]}
			for key := range limits {
				if cmd.Flags().Changed(key) {
					body[key] = cmd.Flag(key).Value.String()
				}
			}
			if _, err := c.Change(ctx, http.MethodPut, client.DevicePath(args[0]), body); err != nil {
				return err
			}
			return a.done(args[0]+" is a device of "+args[1], body)
		}),
	}
	for key, what := range limits {
		cmd.Flags().String(key, "", what)
		register(cmd, key, cobra.NoFileCompletions)
	}
	names, users := a.completing(deviceNames), a.completing(userNames)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return users(cmd, args, word)
		}
		return names(cmd, args, word)
	}
	return cmd
}

func demoteDevice(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "unset-user DEVICE", Short: "End what set-user began", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completing(deviceNames),
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, args []string) error {
			if _, err := c.Change(ctx, http.MethodDelete, client.DevicePath(args[0]), nil); err != nil {
				return err
			}
			return a.done(args[0]+" is no longer promoted", map[string]string{"device": args[0]})
		}),
	}
}

func deviceNames(ctx context.Context, c *client.Client) (words []cobra.Completion, err error) {
	var list api.DeviceList
	err = c.Get(ctx, "/v1/devices", nil, &list)
	for i := range list.Devices {
		words = append(words, cobra.CompletionWithDesc(list.Devices[i].Device, printable(list.Devices[i].Host)))
	}
	return words, err
}

func meCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "me", Short: "Show whose device this is and what is left; --api is the gateway's TCP address", Args: noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
			return show(ctx, a, c, "/v1/me", func(m api.Me) []byte { return meText(&m) })
		}),
	}
}
