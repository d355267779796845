package route

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// way is an outbound that knows whether it was closed, and how often.
type way struct {
	closed atomic.Int32
	err    error
}

func (w *way) DialStream(context.Context, flow.Flow) (flow.Stream, error) { return nil, w.err }

func (w *way) OpenLink(context.Context, flow.Flow, flow.Receiver) (flow.Link, error) {
	return nil, w.err
}

func (w *way) Close() error { w.closed.Add(1); return w.err }

func closes(v *Version) int { return int(v.Outbound().(*way).closed.Load()) }

func def(tag string, print int, drain Drain) Definition {
	return Definition{
		Tag: tag, Type: "direct", Fingerprint: fmt.Sprint(print), Drain: drain,
		New: func() (flow.Outbound, error) { return new(way), nil },
	}
}

var keep = Drain{Keep: true}

func unexpected(t *testing.T) func(*Version) {
	return func(v *Version) { t.Errorf("%v expired", v) }
}

func apply(tb testing.TB, o *Outbounds, defs ...Definition) {
	tb.Helper()
	c, err := o.Prepare(defs)
	if err != nil {
		tb.Fatal(err)
	}
	c.Commit()
}

func names(vs []*Version) string {
	var s []string
	for _, v := range vs {
		s = append(s, v.String())
	}
	return strings.Join(s, " ")
}

// want checks the versions that are current and draining.
func want(tb testing.TB, o *Outbounds, current, draining string) {
	tb.Helper()
	if c, d := names(o.Current()), names(o.Draining()); c != current || d != draining {
		tb.Errorf("current %q, draining %q; want %q and %q", c, d, current, draining)
	}
}

func TestAnUnchangedDefinitionKeepsItsVersion(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("a", 1, keep), def("b", 1, keep))
	a, b := o.Current()[0], o.Current()[1]
	if !a.Acquire() || !b.Acquire() {
		t.Fatal("a current version took no flow")
	}
	apply(t, o, def("c", 1, keep), def("b", 2, keep), def("a", 1, keep))
	want(t, o, "c@v1 b@v2 a@v1", "b@v1")
	if o.Current()[2] != a || a.Draining() || a.Flows() != 1 || !b.Draining() || closes(b) != 0 {
		t.Error("a has to stay as it is, b to drain")
	}
	b.Release()
	want(t, o, "c@v1 b@v2 a@v1", "")
	if closes(b) != 1 || b.Draining() || b.Acquire() {
		t.Error("the last flow has to close b@v1")
	}
	changedType := def("a", 1, keep)
	changedType.Type = "socks5"
	apply(t, o, changedType)
	want(t, o, "a@v2", "a@v1")
}

func TestAVersionWithoutFlowsClosesWhenItIsSuperseded(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("a", 1, Drain{}))
	a := o.Current()[0]
	apply(t, o)
	want(t, o, "", "")
	if closes(a) != 1 || a.Acquire() || a.Flows() != 0 {
		t.Error("a@v1 has to be closed")
	}
}

func TestNumbersAreNotReusedAfterRemoval(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("a", 1, keep))
	apply(t, o)
	apply(t, o, def("a", 1, keep))
	want(t, o, "a@v2", "")
	c, err := o.Prepare([]Definition{def("a", 2, keep)})
	if err != nil {
		t.Fatal(err)
	}
	c.Discard()
	apply(t, o, def("a", 3, keep))
	want(t, o, "a@v3", "")
}

func TestTheDNSServiceIsNamedThoughItsTagIsEmpty(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("", 1, keep))
	if v := o.Current()[0]; v.Tag() != "" || v.String() != "dns@v1" || v.Type() != "direct" || v.N() != 1 {
		t.Errorf("%q %v", v.Tag(), v)
	}
}

func TestAFailingPrepareLeavesAllAsItWas(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("a", 1, keep))
	a := o.Current()[0]
	var built way
	fine, bad := def("b", 1, keep), def("c", 1, keep)
	fine.New = func() (flow.Outbound, error) { return &built, nil }
	bad.New = func() (flow.Outbound, error) { return nil, syscall.ENODEV }
	never := def("d", 1, keep)
	never.New = func() (flow.Outbound, error) { t.Error("built after the failure"); return new(way), nil }

	_, err := o.Prepare([]Definition{def("a", 1, keep), fine, bad, never})
	if !errors.Is(err, syscall.ENODEV) || !strings.HasPrefix(err.Error(), `outbound "c": `) {
		t.Errorf("error %v", err)
	}
	if built.closed.Load() != 1 || closes(a) != 0 {
		t.Errorf("b closed %d times, a %d times", built.closed.Load(), closes(a))
	}
	want(t, o, "a@v1", "")
	if _, err := o.Prepare([]Definition{fine, fine}); err == nil || err.Error() != `outbound "b": defined twice` {
		t.Errorf("error %v", err)
	}
	apply(t, o, def("a", 1, keep), def("b", 1, keep))
	want(t, o, "a@v1 b@v1", "")
}

func TestAChangeTouchesNothingUntilCommit(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("a", 1, keep))
	a := o.Current()[0]
	c, err := o.Prepare([]Definition{def("a", 2, keep)})
	if err != nil {
		t.Fatal(err)
	}
	next, ok := c.Version("a")
	if !ok || next.String() != "a@v2" || next.Outbound() == nil {
		t.Errorf("version %v, %v", next, ok)
	}
	if _, ok := c.Version("b"); ok {
		t.Error("found a version for an unknown tag")
	}
	want(t, o, "a@v1", "")
	if _, err := o.Prepare(nil); err == nil {
		t.Error("two changes at a time")
	}
	c.Discard()
	c.Commit()
	want(t, o, "a@v1", "")
	if closes(next) != 1 || closes(a) != 0 || !a.Acquire() {
		t.Error("discard has to close what is new and to leave what is old")
	}
}

func TestDrainNowExpiresAtCommit(t *testing.T) {
	var ended []*Version
	o := NewOutbounds(func(v *Version) { ended = append(ended, v) })
	apply(t, o, def("a", 1, keep))
	a := o.Current()[0]
	a.Acquire()
	apply(t, o, def("a", 2, Drain{})) // the newest definition says how
	if !slices.Equal(ended, []*Version{a}) || !a.Expired() || closes(a) != 0 {
		t.Errorf("ended %v", ended)
	}
	if a.Acquire() || a.Flows() != 1 {
		t.Error("an expired version takes no flow")
	}
	a.Release()
	if closes(a) != 1 {
		t.Error("the last flow has to close it")
	}
}

func TestADrainPeriodEndsOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Int32
		o := NewOutbounds(func(v *Version) { ended.Add(1); v.Release() })
		apply(t, o, def("a", 1, Drain{After: time.Minute}), def("b", 1, Drain{After: time.Hour}))
		a, b := o.Current()[0], o.Current()[1]
		a.Acquire()
		b.Acquire()
		apply(t, o)
		time.Sleep(time.Minute - time.Nanosecond)
		b.Release()
		want(t, o, "", "a@v1")
		if ended.Load() != 0 || !a.Acquire() {
			t.Error("a drain period ended early")
		}
		a.Release()
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		want(t, o, "", "")
		if ended.Load() != 1 || closes(a) != 1 || closes(b) != 1 {
			t.Errorf("ended %d, closed %d and %d", ended.Load(), closes(a), closes(b))
		}
		start := time.Now()
		if err := o.Close(); err != nil {
			t.Error(err)
		}
		if waited := time.Since(start); waited != 0 {
			t.Errorf("close waited %v for the timer of a version that was gone", waited)
		}
	})
}

func TestKeepNeverExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOutbounds(unexpected(t))
		apply(t, o, def("a", 1, keep))
		a := o.Current()[0]
		a.Acquire()
		apply(t, o)
		time.Sleep(1000 * time.Hour)
		want(t, o, "", "a@v1")
		a.Release()
	})
}

func TestADrainThatIsEditedAloneMakesNoVersion(t *testing.T) {
	var ended atomic.Int32
	o := NewOutbounds(func(*Version) { ended.Add(1) })
	apply(t, o, def("a", 1, keep))
	apply(t, o, def("a", 1, Drain{}))
	want(t, o, "a@v1", "")
	o.Current()[0].Acquire()
	apply(t, o)
	if ended.Load() != 1 {
		t.Error("the edited drain was not used")
	}
}

func TestCloseStopsTimersAndClosesEveryVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOutbounds(unexpected(t))
		apply(t, o, def("a", 1, Drain{After: time.Minute}), def("b", 1, keep))
		a, b := o.Current()[0], o.Current()[1]
		a.Acquire()
		b.Acquire()
		apply(t, o, def("b", 1, keep))
		c, err := o.Prepare([]Definition{def("b", 2, keep)})
		if err != nil {
			t.Fatal(err)
		}
		next, _ := c.Version("b")
		a.Outbound().(*way).err = syscall.EIO
		start := time.Now()
		if err := o.Close(); !errors.Is(err, syscall.EIO) || !strings.HasPrefix(err.Error(), "outbound a@v1: close: ") {
			t.Errorf("error %v", err)
		}
		if waited := time.Since(start); waited != 0 {
			t.Errorf("close waited %v for a drain timer", waited)
		}
		c.Commit()
		a.Release()
		b.Release()
		time.Sleep(time.Hour)
		want(t, o, "", "")
		for _, v := range []*Version{a, b, next} {
			if closes(v) != 1 || v.Acquire() {
				t.Errorf("%v was closed %d times", v, closes(v))
			}
		}
		if _, err := o.Prepare(nil); !errors.Is(err, errClosed) {
			t.Errorf("prepare after close: %v", err)
		}
	})
}

func TestCloseDuringPrepareLeavesNothingOpen(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	var first, second way
	a, b := def("a", 1, keep), def("b", 1, keep)
	a.New = func() (flow.Outbound, error) { return &first, nil }
	b.New = func() (flow.Outbound, error) { return &second, o.Close() }
	if _, err := o.Prepare([]Definition{a, b}); !errors.Is(err, errClosed) {
		t.Errorf("error %v", err)
	}
	if first.closed.Load() != 1 || second.closed.Load() != 1 {
		t.Errorf("closed %d and %d times", first.closed.Load(), second.closed.Load())
	}
}
