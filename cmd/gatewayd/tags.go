package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

// tags are those that a gateway has, or has had since its start: a flow of an
// outbound that was removed may live on. The DNS service is dns.
type tags struct{ inbound, outbound []string }

func tagsOf(ctx context.Context, c *client.Client) (t tags, err error) {
	var st api.Status
	if err := c.Get(ctx, "/v1/status", nil, &st); err != nil {
		return t, err
	}
	var seen api.Traffic
	if err := c.Get(ctx, "/v1/traffic", url.Values{"once": {""}}, &seen); err != nil {
		return t, err
	}
	in, out := map[string]bool{}, map[string]bool{}
	for _, i := range st.Inbounds {
		in[i.Tag] = true
	}
	for tag := range seen.Inbounds {
		in[tag] = true
	}
	for _, o := range st.Outbounds {
		out[o.Tag] = true
	}
	for tag := range seen.Outbounds {
		out[tag] = true
	}
	delete(out, "")
	out["dns"] = true
	return tags{slices.Sorted(maps.Keys(in)), slices.Sorted(maps.Keys(out))}, nil
}

// unknownTag is why a selector picked nothing: a tag or a user that the gateway does
// not have. It is nil if there is no such reason, also where the gateway does not tell.
func unknownTag(ctx context.Context, c *client.Client, selector url.Values) error {
	if selector.Has("user") {
		_, err := c.User(ctx, selector.Get("user"))
		if p, ok := errors.AsType[*api.Problem](err); ok && p.Status == http.StatusNotFound {
			return fmt.Errorf("no user %q: see gatewayd users", selector.Get("user"))
		}
	}
	if !selector.Has("inbound") && !selector.Has("outbound") {
		return nil
	}
	known, err := tagsOf(ctx, c)
	if err != nil {
		return nil //nolint:nilerr // it did answer: with nothing
	}
	for _, k := range []struct {
		key  string
		tags []string
	}{{"inbound", known.inbound}, {"outbound", known.outbound}} {
		tag := selector.Get(k.key)
		if tag != "" && !slices.Contains(k.tags, tag) {
			return fmt.Errorf("no %s %q: known are %s", k.key, tag, strings.Join(k.tags, ", "))
		}
	}
	return nil
}

// completeLimit bounds how long a shell waits for completions.
const completeLimit = 2 * time.Second

type completion = func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective)

// completing asks the gateway for completions; one that does not answer has none.
func (a *app) completing(ask func(context.Context, *client.Client) ([]cobra.Completion, error)) completion {
	return func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		c, err := a.client()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), completeLimit)
		defer cancel()
		words, err := ask(ctx, c)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeTags completes the selectors whose values a gateway knows.
func completeTags(a *app, cmd *cobra.Command) {
	register(cmd, "inbound", a.completing(func(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
		t, err := tagsOf(ctx, c)
		return t.inbound, err
	}))
	register(cmd, "outbound", a.completing(func(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
		t, err := tagsOf(ctx, c)
		return t.outbound, err
	}))
	register(cmd, "user", a.completing(userNames))
	register(cmd, "device", a.completing(deviceNames))
	for _, s := range selectors {
		if !slices.Contains([]string{"inbound", "outbound", "user", "device"}, s.key) {
			register(cmd, s.key, cobra.NoFileCompletions)
		}
	}
}

// completeWith completes a flag with words that never change.
func completeWith(cmd *cobra.Command, flag string, words ...string) {
	register(cmd, flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// register panics for a flag that is not there: a mistake of ours.
func register(cmd *cobra.Command, flag string, f completion) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err)
	}
}

// maxCompleted is how many flows are offered.
const maxCompleted = 1000

// flowIDs are the live flows, each with what it is.
func flowIDs(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Connections(ctx, url.Values{"limit": {strconv.Itoa(maxCompleted)}})
	var ids []cobra.Completion
	for i := range list.Flows {
		f := &list.Flows[i]
		ids = append(ids, cobra.CompletionWithDesc(strconv.FormatUint(f.ID, 10), printable(f.Source+" > "+shownDestination(f))))
	}
	return ids, err
}
