// The demo shows a gateway at work: it builds a lab with a client, a gateway and
// a server, sends real traffic through gatewayd, shows the flows while they live,
// kills one, and removes everything again.
//
// Stages: plain transfers over both families, a refusal, then two long downloads
// that are listed; one of them is killed and its record compared with what its
// client got; the gateway's shutdown ends the other.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"gatewayd/internal/testnet"
)

// limit is how long the demonstration may take after the build.
const limit = 28 * time.Second

func main() { os.Exit(run()) }

func run() int {
	if missing := testnet.Missing(); missing != "" {
		fmt.Fprintf(os.Stderr, "demo: this host lacks %s; `sudo tools/install-deps` installs programs\n", missing)
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Println("building gatewayd …")
	if _, err := testnet.Binary(false); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	start := time.Now()
	s := &session{ctx: ctx}
	done := make(chan error, 1)
	go func() { done <- s.play(show) }()
	if err := <-done; err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
	fmt.Printf("\nDone in %.1f s; nothing is left behind.\n", time.Since(start).Seconds())
	return 0
}

// session is the testnet.T of a program that is no test. It belongs to the
// goroutine that plays it.
type session struct {
	ctx     context.Context
	cleanup []func()
	failed  bool
}

// failure is the panic with which Fatalf ends play.
type failure struct{ error }

// play runs a show and cleans up after it, however it ended.
func (s *session) play(show func(*session)) (err error) {
	defer func() {
		if r := recover(); r != nil {
			f, ours := r.(failure)
			if !ours {
				s.clean()
				panic(r)
			}
			err = f.error
		}
		if errors.Is(s.ctx.Err(), context.Canceled) {
			err = errors.New("interrupted")
		}
		s.clean()
	}()
	show(s)
	return nil
}

func (s *session) clean() {
	for i := range s.cleanup {
		s.cleanup[len(s.cleanup)-1-i]()
	}
}

// Cleanup has f run at the end, last in, first out.
func (s *session) Cleanup(f func()) { s.cleanup = append(s.cleanup, f) }

// Context ends on an interrupt and at the time limit.
func (s *session) Context() context.Context { return s.ctx }

// Failed reports whether Fatalf was called.
func (s *session) Failed() bool { return s.failed && !errors.Is(s.ctx.Err(), context.Canceled) }

// Fatalf ends the show.
func (s *session) Fatalf(format string, args ...any) {
	s.failed = true
	panic(failure{fmt.Errorf(format, args...)})
}

// Helper does nothing: there are no lines to attribute.
func (s *session) Helper() {}

// Logf prints.
func (s *session) Logf(format string, args ...any) { fmt.Printf(format+"\n", args...) }
