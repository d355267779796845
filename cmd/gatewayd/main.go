// Command gatewayd is the gateway and its command line: it runs the daemon, checks
// configurations, and asks a running gateway what it does.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"gatewayd/internal/exitcode"
)

// version is stamped by the build: -ldflags "-X main.version=v1.2.3".
var version = "dev"

func main() {
	os.Exit(execute(&app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}, os.Args[1:]))
}

// execute runs one command line and returns the exit code. The first SIGINT or
// SIGTERM ends the command's context, a second one the process.
func execute(a *app, args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	root := newRoot(a)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !a.started { // flags and arguments are read before anything starts
		err = exitcode.With(exitcode.Usage, err)
	}
	if err != nil {
		a.complain(err)
	}
	return exitcode.Of(err)
}

// complain prints an error once. Mistakes of a configuration begin with their
// place, so that editors find it.
func (a *app) complain(err error) {
	text := err.Error()
	if exitcode.Of(err) != exitcode.Config {
		text = "gatewayd: " + text
	}
	fmt.Fprintln(a.stderr, strings.TrimRight(text, "\n"))
	if exitcode.Of(err) == exitcode.Usage {
		fmt.Fprintln(a.stderr, "see: gatewayd help")
	}
}

// app is what commands share: where they read and write, and the global flags.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string
	started        bool // the command line was understood

	api       string // --api
	tokenFile string // --token-file
	json      bool   // --json
}
