package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
	"gatewayd/internal/exitcode"
)

// defaultConfig is the file that commands read unless -c names another.
const defaultConfig = "/etc/gatewayd/gatewayd.yaml"

// newRoot is the command tree.
func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:           "gatewayd",
		Short:         "A userspace gateway: every flow routed, metered, visible and killable",
		Args:          cobra.NoArgs,
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentPreRun = func(*cobra.Command, []string) { a.started = true }
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	flags := root.PersistentFlags()
	flags.StringVar(&a.api, "api", "", "API address (default $GATEWAYD_API, else the Unix socket)")
	flags.StringVar(&a.tokenFile, "token-file", "", "file with the bearer token (default $GATEWAYD_TOKEN)")
	flags.BoolVar(&a.json, "json", false, "print JSON")
	root.AddCommand(
		runCommand(a), checkCommand(a), schemaCommand(a), versionCommand(a), doctorCommand(a), cleanupCommand(a),
		reloadCommand(a), configCommand(a), statusCommand(a), outboundsCommand(a),
		flowsCommand(a), killCommand(a), topCommand(a), watchCommand(a),
		usersCommand(a), devicesCommand(a), meCommand(a),
	)
	return root
}

// noArgs refuses arguments, and guesses what was meant.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	if cmd.Flags().Lookup("config") != nil {
		hint = "; did you mean -c " + args[0] + "?"
	}
	return fmt.Errorf("%s takes no arguments, got %q%s", cmd.CommandPath(), args[0], hint)
}

// usage is an error of the command line that only the command itself can see.
func usage(format string, args ...any) error {
	return exitcode.With(exitcode.Usage, fmt.Errorf(format, args...))
}

// group is a command that only has others below it.
func group(cmd *cobra.Command, below ...*cobra.Command) *cobra.Command {
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		names := make([]string, 0, len(below))
		for _, b := range below {
			names = append(names, b.Name())
		}
		if len(args) > 0 {
			return usage("%s %q: want one of %s", cmd.Name(), args[0], strings.Join(names, ", "))
		}
		return usage("%s what? one of %s", cmd.Name(), strings.Join(names, ", "))
	}
	cmd.AddCommand(below...)
	return cmd
}

// client is how to reach the gateway that the flags and the environment name.
func (a *app) client() (*client.Client, error) {
	token := a.getenv("GATEWAYD_TOKEN")
	if a.tokenFile != "" {
		b, err := os.ReadFile(a.tokenFile)
		if err != nil {
			return nil, fmt.Errorf("token file: %w", err)
		}
		token = string(b)
	}
	address := a.api
	if address == "" {
		address = a.getenv("GATEWAYD_API")
	}
	c, err := client.New(client.Options{API: address, Token: strings.TrimSpace(token)})
	return c, exitcode.With(exitcode.Usage, err)
}

// asking wraps a command that needs a gateway.
func (a *app) asking(run func(ctx context.Context, c *client.Client, cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		err = run(cmd.Context(), c, cmd, args)
		if errors.Is(err, context.Canceled) && cmd.Context().Err() != nil {
			return nil // interrupted, as one ends what would go on for ever
		}
		if p, ok := errors.AsType[*api.Problem](err); ok && p.Status == http.StatusUnauthorized {
			return fmt.Errorf("%w: set GATEWAYD_TOKEN or give --token-file", err)
		}
		return err
	}
}

// printJSON prints v on one line.
func (a *app) printJSON(v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return a.print(b.Bytes())
}

// print writes to standard output; a reader that left is an error.
func (a *app) print(b []byte) error {
	if _, err := a.stdout.Write(b); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

func (a *app) printf(format string, args ...any) error {
	return a.print(fmt.Appendf(nil, format, args...))
}
