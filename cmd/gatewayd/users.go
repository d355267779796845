package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

func usersCommand(a *app) *cobra.Command {
	list := a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
		return show(ctx, a, c, "/v1/users", func(l api.UserList) []byte { return userTable(l.Users).render(a.width()) })
	})
	cmd := &cobra.Command{Use: "users", Short: "List and administer users", Args: noArgs, RunE: list}
	cmd.AddCommand(
		&cobra.Command{Use: "list", Short: "List users by name", Args: noArgs, RunE: list},
		a.userCommand("show NAME", "Show one user with its limits and usage", func(ctx context.Context, c *client.Client, name string) error {
			return show(ctx, a, c, client.UserPath(name), func(u api.User) []byte { return userText(&u) })
		}),
		addUser(a), setUser(a), deleteUser(a),
		switchUser(a, "enable", true), switchUser(a, "disable", false),
		a.userCommand("reset NAME", "Begin the user's traffic period anew", func(ctx context.Context, c *client.Client, name string) error {
			return a.changeUser(ctx, c, http.MethodPost, client.UserPath(name, "reset"), nil)
		}),
		userAmount(a, "topup NAME SIZE", "Add to what the user may move in this period, as in 5GB", "topup", "bytes"),
		userAmount(a, "extend NAME DURATION", "Give the user more time, as in 30d", "extend", "for"),
		usageCommand(a), takeUsage(a), ackUsage(a),
	)
	return cmd
}

// userCommand is a command about one user.
func (a *app) userCommand(use, short string, run func(ctx context.Context, c *client.Client, name string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(1), ValidArgsFunction: a.completing(userNames),
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, args []string) error {
			return run(ctx, c, args[0])
		}),
	}
}

// userNames are those of the first users.
func userNames(ctx context.Context, c *client.Client) (words []cobra.Completion, err error) {
	list, err := c.Users(ctx, url.Values{"limit": {strconv.Itoa(maxCompleted)}})
	for i := range list.Users {
		words = append(words, cobra.CompletionWithDesc(list.Users[i].Name, list.Users[i].State))
	}
	return words, err
}

// changeUser makes a call that answers a user, and prints it.
func (a *app) changeUser(ctx context.Context, c *client.Client, method, path string, body any) error {
	answer, err := c.Change(ctx, method, path, body)
	if err != nil {
		return err
	}
	if a.json {
		return a.print(answer)
	}
	var u api.User
	if err := json.Unmarshal(answer, &u); err != nil {
		return fmt.Errorf("answer of %s: %w", path, err)
	}
	return a.print(userTable([]api.User{u}).render(a.width()))
}

func addUser(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "add NAME", Short: "Make a user", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: a.asking(func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error {
			body, err := userPatch(cmd)
			if err != nil {
				return err
			}
			body["name"] = args[0]
			return a.changeUser(ctx, c, http.MethodPost, "/v1/users", body)
		}),
	}
	userFlags(cmd)
	return cmd
}

func setUser(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "set NAME", Short: "Change what is given, and nothing else; none takes a limit away", Args: cobra.ExactArgs(1),
		RunE: a.asking(func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error {
			body, err := userPatch(cmd)
			if err != nil {
				return err
			}
			if len(body) == 0 {
				return usage("set %s: what? see gatewayd users set --help", args[0])
			}
			return a.changeUser(ctx, c, http.MethodPatch, client.UserPath(args[0]), body)
		}),
	}
	userFlags(cmd)
	cmd.Flags().String("name", "", "another name")
	register(cmd, "name", cobra.NoFileCompletions)
	cmd.ValidArgsFunction = a.completing(userNames)
	return cmd
}

func deleteUser(a *app) *cobra.Command {
	return a.userCommand("delete NAME", "Retire a user: its flows end", func(ctx context.Context, c *client.Client, name string) error {
		if _, err := c.Change(ctx, http.MethodDelete, client.UserPath(name), nil); err != nil {
			return err
		}
		return a.done("deleted "+name, map[string]string{"deleted": name})
	})
}

// done prints what was done, or the object in its place for --json.
func (a *app) done(text string, object any) error {
	if a.json {
		return a.printJSON(object)
	}
	return a.printf("%s\n", text)
}

func switchUser(a *app, verb string, on bool) *cobra.Command {
	short := "Let the user in again"
	if !on {
		short = "Keep the user out: its flows end"
	}
	return a.userCommand(verb+" NAME", short, func(ctx context.Context, c *client.Client, name string) error {
		return a.changeUser(ctx, c, http.MethodPatch, client.UserPath(name), map[string]any{"enabled": on})
	})
}

// userAmount is a command that gives a user some more of something.
func userAmount(a *app, use, short, call, key string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(2), ValidArgsFunction: a.completing(userNames),
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, args []string) error {
			return a.changeUser(ctx, c, http.MethodPost, client.UserPath(args[0], call), map[string]string{key: args[1]})
		}),
	}
}

func usageCommand(a *app) *cobra.Command {
	query := map[string]string{
		"by": "whose series: user, device, outbound or group", "step": "length of a step: hour, day, or as in 6h or 7d",
		"from": "begin, as in 2026-01-31T00:00:00Z", "to": "end",
	}
	cmd := &cobra.Command{
		Use: "usage [NAME]", Short: "Show what a user moved over time, or all of them", Args: cobra.MaximumNArgs(1),
		RunE: a.asking(func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error {
			q := url.Values{}
			for key := range query {
				if cmd.Flags().Changed(key) {
					q.Set(key, cmd.Flag(key).Value.String())
				}
			}
			if len(args) == 1 {
				if q.Has("by") {
					return usage("usage: a name or --by, not both")
				}
				return showQuery(ctx, a, c, client.UserPath(args[0], "usage"), q, func(u api.UsageOf) []byte { return usageTable(&u).render(a.width()) })
			}
			if !q.Has("by") {
				q.Set("by", "user")
			}
			return showQuery(ctx, a, c, "/v1/usage", q, func(l api.UsageList) []byte { return sumTable(&l).render(a.width()) })
		}),
	}
	for key, what := range query {
		cmd.Flags().String(key, "", what)
		register(cmd, key, cobra.NoFileCompletions)
	}
	cmd.ValidArgsFunction = a.completing(userNames)
	return cmd
}

func takeUsage(a *app) *cobra.Command {
	return a.userCommand("take NAME", "Take what was moved since the last acknowledged take, for billing", func(ctx context.Context, c *client.Client, name string) error {
		answer, err := c.Change(ctx, http.MethodPost, client.UserPath(name, "usage", "take"), nil)
		if err != nil {
			return err
		}
		if a.json {
			return a.print(answer)
		}
		var t api.Take
		if err := json.Unmarshal(answer, &t); err != nil {
			return fmt.Errorf("take: %w", err)
		}
		return a.print(takeText(&t))
	})
}

func ackUsage(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ack NAME SEQUENCE", Short: "Acknowledge a take, once it is billed", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completing(userNames),
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, args []string) error {
			n, err := strconv.ParseUint(args[1], 10, 64)
			if err != nil {
				return usage("sequence %q: want the number that take told", args[1])
			}
			if _, err := c.Change(ctx, http.MethodPost, client.UserPath(args[0], "usage", "ack"), api.Ack{Sequence: n}); err != nil {
				return err
			}
			return a.done(fmt.Sprintf("acknowledged take %d of %s", n, args[0]), api.Ack{Sequence: n})
		}),
	}
}
