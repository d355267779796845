package gateway

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"gatewayd/flow"
)

// A lack of descriptors is the host's, and passes: the client hears nothing and
// tries again. It is counted each time and warned of once.
func TestADialForWhichTheHostLacksResourcesIsSilentAndCounted(t *testing.T) {
	r := newRig(t)
	var log bytes.Buffer
	r.gw.log = slog.New(slog.NewTextHandler(&log, nil))
	dialled := make(chan struct{})
	r.dial = func(context.Context, flow.Flow) (flow.Stream, error) {
		dialled <- struct{}{}
		return nil, fmt.Errorf("dial: %w", syscall.EMFILE)
	}
	for n := range 3 {
		r.syn(uint16(n))
		within(t, dialled)
		r.balanced()
	}
	r.silent()
	if n := r.gw.drops[flow.DropResources].Load(); n != 3 {
		t.Errorf("%d drops", n)
	}
	if n := bytes.Count(log.Bytes(), []byte("dial failed")); n != 1 {
		t.Errorf("%d warnings: %s", n, log.String())
	}
	if text := r.gw.outbounds.Current()[0].LastError(); text != "" {
		t.Errorf("it is the outbound's fault: %s", text)
	}
}

func TestAShortageIsWarnedOfOnceAMinute(t *testing.T) {
	var s shortage
	now := time.Now()
	for _, c := range []struct {
		after time.Duration
		want  bool
	}{{0, true}, {time.Second, false}, {59 * time.Second, false}, {time.Minute, true}, {61 * time.Second, false}, {5 * time.Minute, true}} {
		if got := s.due(now.Add(c.after)); got != c.want {
			t.Errorf("after %v: %v", c.after, got)
		}
	}
}
