package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
	"gatewayd/internal/config"
	"gatewayd/internal/exitcode"
	"gatewayd/internal/gateway"
)

// loadConfig reads file. Without one it reads the default file, or, where there
// is none, the embedded default; it tells which, by the path or "".
func loadConfig(file string) (c *config.Config, path string, err error) {
	if file == "" {
		if _, err := os.Stat(defaultConfig); errors.Is(err, fs.ErrNotExist) {
			return config.Default(), "", nil
		}
		file = defaultConfig
	}
	c, err = config.Load(file)
	return c, file, err
}

// fileName is how a path from loadConfig is shown.
func fileName(path string) string {
	if path == "" {
		return "embedded default"
	}
	return path
}

// checked is the answer of check in JSON.
type checked struct {
	File   string   `json:"file"`
	OK     bool     `json:"ok"`
	Errors []string `json:"errors"`
}

func checkCommand(a *app) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Tell what is wrong with a configuration file, and with the token files that it names",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			c, path, err := loadConfig(file)
			if err == nil {
				err = gateway.CheckFiles(c)
			}
			name := fileName(path)
			if !a.json {
				if err != nil {
					return err
				}
				return a.printf("%s: ok\n", name)
			}
			answer := checked{File: name, OK: err == nil, Errors: []string{}}
			if err != nil {
				answer.Errors = strings.Split(err.Error(), "\n")
			}
			if printErr := a.printJSON(answer); printErr != nil {
				return printErr
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+defaultConfig+", else the embedded one)")
	return cmd
}

func schemaCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			b, err := config.Schema()
			if err != nil {
				return err
			}
			return a.print(append(bytes.TrimRight(b, "\n"), '\n'))
		},
	}
}

func reloadCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Make the gateway read its configuration file again, all or nothing",
		Args:  noArgs,
		RunE: a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
			applied, err := c.Reload(ctx)
			if err != nil {
				return applyError(err)
			}
			if a.json {
				return a.printJSON(applied)
			}
			return a.printf("reloaded: epoch %d\n", applied.Epoch)
		}),
	}
}

// applyError gives a refused configuration the exit code that check would have.
func applyError(err error) error {
	p, ok := errors.AsType[*api.Problem](err)
	switch {
	case ok && p.Status == http.StatusUnprocessableEntity:
		return exitcode.With(exitcode.Config, err)
	case ok && p.Status == http.StatusConflict:
		return exitcode.With(exitcode.Collision, err)
	}
	return err
}

// configText is the answer of config in JSON.
type configText struct {
	ETag string `json:"etag,omitzero"` // of the running one
	Text string `json:"text"`
}

func configCommand(a *app) *cobra.Command {
	show := a.asking(func(ctx context.Context, c *client.Client, _ *cobra.Command, _ []string) error {
		text, etag, err := c.Config(ctx)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(configText{strings.Trim(etag, `"`), text})
		}
		return a.print([]byte(text))
	})
	cmd := &cobra.Command{Use: "config", Short: "Print the running configuration", Args: noArgs, RunE: show}
	cmd.AddCommand(
		&cobra.Command{Use: "show", Short: "Print the running configuration", Args: noArgs, RunE: show},
		printCommand(a, "default", "Print the embedded default", config.DefaultText),
		printCommand(a, "reference", "Print every key there is, with its default and a comment", config.ReferenceText),
	)
	return cmd
}

// printCommand prints a text that the binary carries.
func printCommand(a *app, use, short string, text func() string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: noArgs, RunE: func(*cobra.Command, []string) error {
		if a.json {
			return a.printJSON(configText{Text: text()})
		}
		return a.print([]byte(text()))
	}}
}
