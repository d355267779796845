package gateway

import (
	"bytes"
	"context"
	"log/slog"
	"math"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"gatewayd/netstack"
)

func TestTheLevelFollowsWhatIsUsedAndIsLeftFivePercentLater(t *testing.T) {
	level := pressureNormal
	for _, c := range []struct {
		used int64
		want pressure
	}{
		{0, pressureNormal},
		{59, pressureNormal},
		{60, pressureElevated},
		{74, pressureElevated},
		{75, pressureHigh},
		{70, pressureHigh}, // 5 % below where it begins it still holds
		{69, pressureElevated},
		{55, pressureElevated},
		{54, pressureNormal},
		{85, pressureSevere}, // levels are skipped
		{90, pressureFull},
		{120, pressureFull},
		{85, pressureFull},
		{84, pressureSevere},
		{10, pressureNormal},
	} {
		if level = levelOf(c.used, 100, level); level != c.want {
			t.Fatalf("%d %% used: %s, want %s", c.used, level, c.want)
		}
	}
	if got := levelOf(math.MaxInt64, 0, pressureFull); got != pressureNormal {
		t.Fatalf("without a budget memory is %s", got)
	}
}

func TestALevelIsWhatItsThresholdsSayAndWasNotLeftTooEarly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.Int64Range(1<<20, 1<<40).Draw(t, "budget")
		used := rapid.Int64Range(0, 2*budget).Draw(t, "used")
		before := pressure(rapid.IntRange(0, int(pressureFull)).Draw(t, "before"))
		cold, got := levelOf(used, budget, pressureNormal), levelOf(used, budget, before)
		if got < cold || got > max(cold, before) {
			t.Fatalf("%s after %s, %s at first", got, before, cold)
		}
		if got != levelOf(used, budget, got) {
			t.Fatalf("%s is no level to stay at", got)
		}
	})
}

func TestGarbageNeverHidesALevelNorIsCollectedForever(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.Int64Range(16<<20, 1<<36).Draw(t, "budget")
		live := rapid.Int64Range(1<<10, budget).Draw(t, "live")
		used := live + rapid.Int64Range(0, budget/8).Draw(t, "other")
		p := int64(gcPercent(live, used, budget, 200))
		garbage := live * p / 100
		if p > 200 || p < 1 {
			t.Fatalf("GOGC %d", p)
		}
		if garbage > budget/16 && used+garbage > budget*60/100 {
			t.Fatalf("%d of %d used, and up to %d of garbage", used, budget, garbage)
		}
		if p < 200 && garbage < budget/16-live/100-1 {
			t.Fatalf("%d of %d used: collected after %d bytes", used, budget, garbage)
		}
	})
	if p := gcPercent(5<<20, 8<<20, 0, 200); p != 200 {
		t.Fatalf("GOGC %d without a budget", p)
	}
}

func TestThePlanFollowsTheMachine(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	full := netstack.DefaultBuffers
	most := full // that fits 256 MiB
	most.RecvMax = 2 * mib
	half := netstack.Buffers{Recv: 64 << 10, RecvMax: 1 << 20, Send: 128 << 10, SendMax: 1 << 20}
	tiny := netstack.Buffers{Recv: 32 << 10, RecvMax: 512 << 10, Send: 64 << 10, SendMax: 512 << 10}
	least := netstack.Buffers{Recv: 32 << 10, RecvMax: 512 << 10, Send: 32 << 10, SendMax: 512 << 10}
	const files = 1 << 20
	for _, c := range []struct {
		name    string
		profile string
		m       machine
		want    memoryPlan
	}{
		{"a router of 64 MiB", "auto", machine{ram: 58 * mib, files: files}, memoryPlan{16 * mib, least, 1024, 100}},
		{"of 128 MiB", "auto", machine{ram: 120 * mib, files: files}, memoryPlan{30 * mib, least, 1920, 100}},
		{"of 256 MiB", "auto", machine{ram: 256 * mib, files: files}, memoryPlan{64 * mib, tiny, 4096, 100}},
		{"of 512 MiB", "auto", machine{ram: 512 * mib, files: files}, memoryPlan{128 * mib, half, 8192, 200}},
		{"of 1 GiB and a half", "auto", machine{ram: 1536 * mib, files: files}, memoryPlan{256 * mib, most, 16384, 200}},
		{"a server", "auto", machine{ram: 16 * gib, files: files}, memoryPlan{4 * gib, full, 262144, 200}},
		{"a server with few descriptors", "auto", machine{ram: 16 * gib, files: 4096}, memoryPlan{4 * gib, full, 3840, 200}},
		{"a server that is to be tiny", "tiny", machine{ram: 16 * gib, files: files}, memoryPlan{64 * mib, tiny, 4096, 100}},
		{"a router that is to be large", "large", machine{ram: 120 * mib, files: files}, memoryPlan{30 * mib, full, 1920, 200}},
		{"with GOMEMLIMIT", "auto", machine{ram: 16 * gib, limit: 128 * mib, files: files}, memoryPlan{128 * mib, half, 8192, 200}},
		{"with GOMEMLIMIT and GOGC", "tiny", machine{ram: 16 * gib, limit: 128 * mib, gogc: true, files: files}, memoryPlan{128 * mib, half, 8192, 0}},
		{"with GOMEMLIMIT=off", "auto", machine{ram: gib, limit: math.MaxInt64, files: files}, memoryPlan{0, most, 16384, 200}},
		{"with RAM unknown", "auto", machine{files: files}, memoryPlan{32 * mib, least, 2048, 100}},
	} {
		if p := planMemory(c.profile, c.m); p != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, p, c.want)
		}
	}
}

func TestThisMachineHasMemory(t *testing.T) {
	if m := thisMachine(); m.ram < 1<<20 || m.files < 1 {
		t.Errorf("%+v", m)
	}
}

func TestTheGovernorSeesWhatLives(t *testing.T) {
	g := newGovernor(memoryPlan{}, slog.New(slog.DiscardHandler))
	for i := range g.samples {
		if g.look(time.Now()); g.samples[i].Value.Kind() == 0 {
			t.Errorf("the runtime has no %s", g.samples[i].Name)
		}
	}
	const size = 32 << 20
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // collected when the test says
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64))
	runtime.GC()
	before := g.look(time.Now())
	b := make([]byte, size)
	stale := g.look(time.Now())
	g.level.Store(int32(pressureElevated))
	g.refresh(g.fresh.Add(time.Hour))
	held := g.look(time.Now())
	runtime.KeepAlive(b)
	if stale.used > before.used+size/2 || stale.resident < before.resident+size/2 {
		t.Errorf("%+v, then %+v with %d bytes that no collection saw", before, stale, size)
	}
	if held.live < before.live+size/2 || held.used <= held.live {
		t.Errorf("%+v, then %+v with %d bytes that live", before, held, size)
	}
}

func TestALevelIsLoggedOnceAndAFlickeringOneRarely(t *testing.T) {
	var out bytes.Buffer
	g := newGovernor(memoryPlan{budget: 100 << 20}, slog.New(slog.NewTextHandler(&out, nil)))
	now := time.Now()
	at := func(after time.Duration, p pressure) int {
		now = now.Add(after)
		g.level.Store(int32(p))
		before := out.Len()
		g.tell(now)
		return strings.Count(out.String()[before:], "\n")
	}
	for i, c := range []struct {
		after time.Duration
		level pressure
		lines int
	}{
		{0, pressureNormal, 0},
		{time.Second, pressureHigh, 1},
		{time.Second, pressureHigh, 0},
		{time.Second, pressureElevated, 0}, // flickers
		{time.Second, pressureFull, 0},
		{7 * time.Second, pressureFull, 1}, // told when it stayed
		{20 * time.Second, pressureFull, 0},
		{0, pressureNormal, 1},
	} {
		if n := at(c.after, c.level); n != c.lines {
			t.Errorf("step %d: %d lines", i, n)
		}
	}
	if !strings.Contains(out.String(), "level=WARN msg=memory pressure=full before=high") {
		t.Errorf("the log says\n%s", out.String())
	}
}

func TestTheStatusWarnsWhileNewFlowsAreRefused(t *testing.T) {
	g := newGovernor(memoryPlan{budget: 64 << 20, buffers: netstack.DefaultBuffers}, nil)
	if g.full() || g.warning() != "" || g.status().Level != "normal" {
		t.Fatalf("%+v %q", g.status(), g.warning())
	}
	g.used.Store(60 << 20)
	g.level.Store(int32(pressureFull))
	if s := g.status(); !g.full() || s.Level != "full" || s.Used != 60<<20 || s.Budget != 64<<20 {
		t.Errorf("%+v", s)
	}
	if w := g.warning(); w != "memory: 60 MiB of a budget of 64 MiB are in use: new flows are refused" {
		t.Errorf("the warning is %q", w)
	}
}

func TestACrowdOfNewFlowsIsLookedAtBeforeTheNextCalmLook(t *testing.T) {
	g := newGovernor(memoryPlan{}, nil)
	for n := range 3 * crowded {
		if g.full(); len(g.crowd) != b2i(n+1 >= crowded) {
			t.Fatalf("after %d: %d looks are due", n+1, len(g.crowd))
		}
	}
	synctest.Test(t, func(t *testing.T) {
		g := newGovernor(memoryPlan{}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		looks := 0
		done := make(chan error, 1)
		go func() { done <- g.run(ctx, nil, func() int { looks++; return 0 }) }()
		for range 100 { // as often as it may look, for 100 times tenseLook
			synctest.Wait()
			g.counted = time.Time{} // every look counts
			for range crowded {
				g.full()
			}
			time.Sleep(tenseLook)
		}
		cancel()
		<-done
		if looks < 90 || looks > 110 {
			t.Errorf("it looked %d times beside a crowd, %d times would be calm", looks, 100*tenseLook/calmLook)
		}
	})
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestARushIsOverOnceWhenLittleOfItIsLeftAndThatGoesNoMore(t *testing.T) {
	var r rushes
	for i, look := range []struct {
		held int
		over bool
	}{
		{0, false},
		{100, false},
		{100, false}, // never was a rush
		{400, false},
		{2000, false},
		{900, false},
		{900, false}, // much is left
		{400, false}, // little, but it goes
		{100, false},
		{0, false},
		{0, true},
		{0, false}, // once
		{600, false},
		{140, false},
		{149, true}, // little, among it what came meanwhile
		{149, false},
	} {
		if over := r.over(look.held); over != look.over {
			t.Errorf("look %d: over is %v with %d held", i, over, look.held)
		}
	}
}
