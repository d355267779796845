package gateway

import (
	"context"
	"testing"

	"gatewayd/flow"
	"gatewayd/track"
)

func TestADialIsNothingThatAKillFindsAndEndsWithTheShutdown(t *testing.T) {
	r := newRig(t)
	events := r.gw.tracker.Subscribe()
	defer events.Close()
	dialling, ended := make(chan struct{}), make(chan error, 1)
	r.dial = func(ctx context.Context, _ flow.Flow) (flow.Stream, error) {
		close(dialling)
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return nil, context.Cause(ctx)
	}
	r.syn(0)
	within(t, dialling)
	if r.gw.tracker.Kill(1) || r.gw.tracker.KillWhere(func(*track.Record) bool { return true }) != 0 || r.gw.tracker.Live() != 0 {
		t.Error("a dial is a flow")
	}
	if n := r.gw.pending(); n != 1 { // as the shutdown looks, which cancels it
		t.Errorf("%d dials in progress, want 1", n)
	}
	if err := within(t, ended); err != flow.ErrShutdown {
		t.Errorf("the dial ended with %v, want %v", err, flow.ErrShutdown)
	}
	r.balanced()
	first := r.gw.tracker.Open(track.Meta{}, nil)
	defer first.Close(nil)
	if first.ID() != 1 || len(r.gw.tracker.Closed()) != 0 {
		t.Error("a dial left a number or a record")
	}
	if ev, missed, err := events.Next(t.Context()); err != nil || missed != 0 || ev.Kind != track.Opened || ev.Record.ID != 1 {
		t.Errorf("the first event is %v of %v, %d missed, %v", ev.Kind, ev.Record.ID, missed, err)
	}
}
