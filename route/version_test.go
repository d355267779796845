package route

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gatewayd/flow"
)

func TestReleaseWithoutAcquirePanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	(&Version{tag: "a", n: 1}).Release()
}

func TestDrainedMatchesItsReasonAndErrno(t *testing.T) {
	err := fmt.Errorf("relay: %w", ErrDrained)
	if !errors.Is(err, ErrDrained) || !errors.Is(err, syscall.ECONNABORTED) || flow.ReasonOf(err) != flow.Drained {
		t.Errorf("%v", err)
	}
}

func TestAcquireAndReleaseDoNotAllocate(t *testing.T) {
	o := NewOutbounds(unexpected(t))
	apply(t, o, def("a", 1, keep))
	a := o.Current()[0]
	if n := testing.AllocsPerRun(100, func() {
		if a.Acquire() {
			a.Release()
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Flows come and go on whatever is current, while applies supersede it, some
// with an expire that waits for nobody. Acquired means open.
func TestAnAcquiredVersionIsOpenWhileItIsHeld(t *testing.T) {
	for _, drain := range []Drain{keep, {}, {After: time.Microsecond}} {
		t.Run(fmt.Sprint(drain), func(t *testing.T) {
			o := NewOutbounds(func(*Version) {})
			apply(t, o, def("a", 0, drain))
			var all sync.Map
			var plane atomic.Pointer[Version]
			plane.Store(o.Current()[0])
			stop := make(chan struct{})
			var flows sync.WaitGroup
			for range 4 {
				flows.Go(func() { comeAndGo(t, &plane, stop) })
			}
			for i := range 2000 {
				c, err := o.Prepare([]Definition{def("a", i+1, drain)})
				if err != nil {
					t.Fatal(err)
				}
				old := plane.Load()
				all.Store(old, true)
				next, _ := c.Version("a")
				plane.Store(next)
				c.Commit()
			}
			close(stop)
			flows.Wait()
			want(t, o, "a@v2001", "")
			all.Range(func(v, _ any) bool {
				if v := v.(*Version); closes(v) != 1 || v.Flows() != 0 {
					t.Errorf("%v was closed %d times and has %d flows", v, closes(v), v.Flows())
				}
				return true
			})
			if err := o.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func comeAndGo(t *testing.T, plane *atomic.Pointer[Version], stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		v := plane.Load()
		if !v.Acquire() {
			continue
		}
		if closes(v) != 0 {
			t.Errorf("%v was acquired after it was closed", v)
		}
		v.Release()
	}
}

func TestAVainAcquireThatLeavesLastClosesTheVersion(t *testing.T) {
	o := NewOutbounds(func(*Version) {})
	apply(t, o, def("a", 1, Drain{}))
	a := o.Current()[0]
	a.Acquire()
	apply(t, o)
	knock := a.state.Add(1)
	a.Release()
	if closes(a) != 0 {
		t.Error("closed while an acquire was half done")
	}
	if a.entered(knock) || closes(a) != 1 {
		t.Errorf("closed %d times", closes(a))
	}
}

// The last flow leaves while the drain period ends and another one knocks, now in
// vain and now not: whoever comes last has to close the version.
func TestAVersionClosesHoweverItsLastFlowAndItsEndMeet(t *testing.T) {
	o := NewOutbounds(func(*Version) {})
	var door atomic.Pointer[Version]
	var done atomic.Bool
	var knocker sync.WaitGroup
	knocker.Go(func() { knock(&door, &done) })
	all := make([]*Version, 20_000)
	for i := range all {
		v := &Version{tag: "a", n: i, owner: o, outbound: new(way)}
		all[i] = v
		v.Acquire()
		v.supersede()
		door.Store(v)
		first, second := v.end, v.Release
		if i%2 == 1 {
			first, second = second, first
		}
		first()
		for range i % 1000 {
			done.Load() // let the knocks reach this version
		}
		second()
	}
	done.Store(true)
	knocker.Wait()
	for _, v := range all {
		if closes(v) != 1 || v.Flows() != 0 {
			t.Errorf("%v: closed %d times, %d flows", v, closes(v), v.Flows())
		}
	}
}

// knock comes and goes at the version that is at the door, over and over.
func knock(door *atomic.Pointer[Version], done *atomic.Bool) {
	for !done.Load() {
		if v := door.Load(); v != nil && v.Acquire() {
			v.Release()
		}
	}
}

func TestAVersionKeepsItsLastErrorAndTellsTheFirst(t *testing.T) {
	v := &Version{}
	if v.LastError() != "" {
		t.Errorf("a fresh version has the error %q", v.LastError())
	}
	if !v.Failed(errors.New("one")) || v.Failed(errors.New("two")) || v.LastError() != "two" {
		t.Errorf("last error %q", v.LastError())
	}
}
