package main

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestAShowIsCleanedUpHoweverItEnds(t *testing.T) {
	for name, c := range map[string]struct {
		show func(*session)
		want string // of the error
	}{
		"well":        {func(*session) {}, ""},
		"failing":     {func(s *session) { s.Fatalf("no %s", "luck") }, "no luck"},
		"interrupted": {func(s *session) { s.ctx.(interruptible).stop() }, "interrupted"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var cleaned []int
		s := &session{ctx: interruptible{ctx, cancel}}
		err := s.play(func(s *session) {
			for i := range 3 {
				s.Cleanup(func() { cleaned = append(cleaned, i) })
			}
			c.show(s)
		})
		if !slices.Equal(cleaned, []int{2, 1, 0}) {
			t.Errorf("%s: cleaned up %v", name, cleaned)
		}
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
}

type interruptible struct {
	context.Context
	stop func()
}

func TestAnInterruptEndsAWait(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := &session{ctx: ctx}
	begin := time.Now()
	err := s.play(func(s *session) {
		testnet.Until(s, time.Minute, "something that never comes", func() bool { cancel(); return false })
	})
	if err == nil || err.Error() != "interrupted" || time.Since(begin) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
}

func TestAPanicIsNotHiddenByTheCleanup(t *testing.T) {
	cleaned := false
	defer func() {
		if r := recover(); r != "bug" || !cleaned {
			t.Errorf("recovered %v, cleaned up %v", r, cleaned)
		}
	}()
	s := &session{ctx: t.Context()}
	s.play(func(s *session) { //nolint:errcheck // it panics
		s.Cleanup(func() { cleaned = true })
		panic("bug")
	})
}
