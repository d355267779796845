package main

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// userFlag is a flag that writes one field of a user, in a merge patch.
type userFlag struct {
	name, what string
	path       string                               // in the user, with dots
	value      func(name, text string) (any, error) // as JSON has it; nil removes
	words      []string                             // for completion
}

// userFields are the flags of add and set. Sizes, rates, times and durations are left
// to the gateway, which says what is wrong with them.
func userFields() []userFlag {
	return []userFlag{
		{"group", "group that gives limits; none: no group", "group", plain, nil},
		{"notes", "anything", "notes", plain, nil},
		{"external-id", "name in another system", "external_id", plain, nil},
		{"traffic", "bytes of both directions in a period, as in 50GB", "limits.traffic.total", plain, nil},
		{"traffic-up", "bytes up in a period", "limits.traffic.up", plain, nil},
		{"traffic-down", "bytes down in a period", "limits.traffic.down", plain, nil},
		{"reset", "when the period begins anew: hour, day, week, month or none", "limits.traffic.reset.every", plain, []string{"hour", "day", "week", "month", "none"}},
		{"reset-day", "day of the month", "limits.traffic.reset.day", number, nil},
		{"reset-zone", "time zone, as in Europe/Berlin", "limits.traffic.reset.zone", plain, nil},
		{"carry-over", "true: what is left is added to the next period, once", "limits.traffic.reset.carry_over", truth, []string{"true", "false"}},
		{"speed", "rate of both directions together, as in 20Mbit/s", "limits.speed", plain, nil},
		{"bandwidth-up", "rate up", "limits.bandwidth.up", plain, nil},
		{"bandwidth-down", "rate down", "limits.bandwidth.down", plain, nil},
		{"connections", "live flows at once", "limits.connections", number, nil},
		{"ips", "source addresses at once", "limits.ips", number, nil},
		{"multiplier", "factor of what is charged, as in 0.5", "limits.multiplier", number, nil},
		{"when-exhausted", "block, throttle=RATE or outbound=TAG", "limits.when_exhausted", exhausted, []string{"block", "throttle=", "outbound="}},
		{"expires", "time, as in 2026-12-31T00:00:00Z", "expires.at", plain, nil},
		{"after-first-use", "time from the first byte, as in 30d", "expires.after_first_use", plain, nil},
	}
}

func userFlags(cmd *cobra.Command) {
	for _, f := range userFields() {
		cmd.Flags().String(f.name, "", f.what)
		register(cmd, f.name, cobra.FixedCompletions(f.words, cobra.ShellCompDirectiveNoFileComp))
	}
	cmd.Flags().StringArray("device", nil, "mac:…, host:…, an address or a prefix; again for more, none for no device")
	register(cmd, "device", cobra.NoFileCompletions)
}

// userPatch is the merge patch that the flags make.
func userPatch(cmd *cobra.Command) (map[string]any, error) {
	patch := map[string]any{}
	for _, f := range userFields() {
		if !cmd.Flags().Changed(f.name) {
			continue
		}
		text, path := cmd.Flag(f.name).Value.String(), f.path
		value, err := f.value(f.name, text)
		if err != nil {
			return nil, err
		}
		if f.name == "reset" && value == nil {
			path = strings.TrimSuffix(path, ".every")
		}
		put(patch, strings.Split(path, "."), value)
		if f.name == "reset" && value != nil && value != "month" { // no day that was set for months
			put(patch, strings.Split("limits.traffic.reset.day", "."), nil)
		}
	}
	if cmd.Flags().Changed("device") {
		devices, err := cmd.Flags().GetStringArray("device")
		if err != nil {
			return nil, usage("device: %v", err)
		}
		patch["devices"] = slices.DeleteFunc(append([]string{}, devices...), func(d string) bool { return d == "none" || d == "" })
	}
	if cmd.Flags().Changed("name") {
		patch["name"] = cmd.Flag("name").Value.String()
	}
	return patch, nil
}

// put sets the value at path; an object that is removed as a whole stays removed.
func put(patch map[string]any, path []string, value any) {
	for _, key := range path[:len(path)-1] {
		inner, _ := patch[key].(map[string]any)
		if inner == nil {
			inner = map[string]any{}
			patch[key] = inner
		}
		patch = inner
	}
	patch[path[len(path)-1]] = value
}

// none is how the command line writes that there is no such limit.
func none(text string) bool { return text == "" || text == "none" }

func plain(_, text string) (any, error) {
	if none(text) {
		return nil, nil
	}
	return text, nil
}

var decimal = regexp.MustCompile(`^(0|[1-9][0-9]*)(\.[0-9]+)?$`)

func number(name, text string) (any, error) {
	switch {
	case none(text):
		return nil, nil
	case decimal.MatchString(text):
		return json.Number(text), nil
	}
	return nil, usage("%s %q: want a number", name, text)
}

func truth(name, text string) (any, error) {
	if none(text) || text == "true" || text == "false" {
		return text == "true", nil
	}
	return nil, usage("%s %q: want true or false", name, text)
}

// exhausted names both ways, so that the one that held before goes.
func exhausted(name, text string) (any, error) {
	key, value, found := strings.Cut(text, "=")
	switch {
	case none(text):
		return nil, nil
	case text == "block":
		return text, nil
	case found && key == "throttle":
		return map[string]any{"throttle": value, "outbound": nil}, nil
	case found && key == "outbound":
		return map[string]any{"throttle": nil, "outbound": value}, nil
	}
	return nil, usage("%s %q: want block, throttle=RATE or outbound=TAG", name, text)
}
