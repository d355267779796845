package user

import (
	"context"
	"errors"
	"iter"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

// running is a registry that runs, in a bubble, from some time in 2026, and what stops
// it.
func running(t testing.TB, o Options) (*Users, func()) {
	t.Helper()
	if o.Now == nil {
		begin := time.Now()
		o.Now = func() time.Time { return day1.Add(time.Since(begin)) }
	}
	u := newUsers(t, o)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := u.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	return u, func() {
		cancel()
		wg.Wait()
	}
}

var day1 = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// shelf keeps in memory what it is given, as a store does.
type shelf struct {
	mu      sync.Mutex
	kept    Kept
	usage   map[flow.UserKey]Usage
	commits int
	err     error
}

func newShelf() *shelf {
	return &shelf{kept: Kept{Names: make(map[string]flow.UserKey)}, usage: make(map[flow.UserKey]Usage)}
}

func (s *shelf) Load() (Kept, error) { return s.kept, s.err }

func (s *shelf) Usage(key flow.UserKey) (Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usage[key], s.err
}

func (s *shelf) Save(e *Edit) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.kept.Next = max(s.kept.Next, e.Next)
	maps.Copy(s.kept.Names, e.Names)
	s.kept.Users = replaced(s.kept.Users, e.Users, e.DeleteUsers, func(u Spec) flow.UserKey { return u.ID })
	s.kept.Groups = replaced(s.kept.Groups, e.Groups, e.DeleteGroups, func(g Group) string { return g.Name })
	s.kept.Promotions = replaced(s.kept.Promotions, e.Promotions, e.DeletePromotions, func(p Promotion) string { return p.Device })
	for _, key := range e.DeleteUsers {
		delete(s.usage, key)
	}
	return nil
}

func replaced[T any, K comparable](all, by []T, gone []K, key func(T) K) (after []T) {
	drop := make(map[K]bool)
	for _, k := range gone {
		drop[k] = true
	}
	for _, v := range by {
		drop[key(v)] = true
	}
	for _, v := range all {
		if !drop[key(v)] {
			after = append(after, v)
		}
	}
	return append(after, by...)
}

func (s *shelf) Commit(at time.Time, usages iter.Seq2[flow.UserKey, Usage]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.commits++
	if s.err != nil {
		return s.err
	}
	s.kept.Committed = at
	maps.Insert(s.usage, usages)
	return nil
}

func TestNumbersUsageAndPromotionsOutliveTheProcess(t *testing.T) {
	s := newShelf()
	config := []Spec{{Name: "file"}, {Name: "numbered", ID: 40}}
	keys := make(map[string]flow.UserKey)
	for run := range 3 {
		u, err := New(Options{Keeper: s})
		if err != nil {
			t.Fatal(err)
		}
		if run == 1 {
			apply(t, u, nil, nil) // a user may be away for a while
			apply(t, u, nil, []Spec{{Name: "other"}})
		}
		apply(t, u, nil, config)
		if run == 0 {
			put(t, u, Spec{Name: "stored", Limits: Limits{Connections: 1}, Devices: []string{"10.0.0.9"}})
			if err := u.PutGroup(Group{Name: "g"}); err != nil {
				t.Fatal(err)
			}
			promote(t, u, device("10.0.0.5", macA), "file")
		}
		for _, v := range u.List("", 0) {
			if run == 0 {
				keys[v.Name] = v.ID
				admit(t, u, v.ID).move(100)
			} else if v.ID != keys[v.Name] || v.Usage.Up != 100 || v.Usage.FirstUse.IsZero() {
				t.Errorf("run %d: %s has number %d and usage %+v, want %d", run, v.Name, v.ID, v.Usage, keys[v.Name])
			}
		}
		if len(u.List("", 0)) != 3 || len(u.Groups()) != 1 {
			t.Errorf("run %d: %d users, groups %v", run, len(u.List("", 0)), u.Groups())
		}
		belongs(t, u, device("10.0.0.5", macA), keys["file"])
		belongs(t, u, device("10.0.0.9", ""), keys["stored"])
		u.commit(true)
	}
}

func TestAnEditThatCanNotBeKeptIsRefused(t *testing.T) {
	s := newShelf()
	u := newUsers(t, Options{Keeper: s})
	key := put(t, u, Spec{Name: "a"})
	s.err = errors.New("disk full")
	isNot(t, u.Put(Spec{Name: "a", Disabled: true}), s.err)
	isNot(t, u.Put(Spec{Name: "b"}), s.err)
	isNot(t, u.Delete("a"), s.err)
	isNot(t, u.PutGroup(Group{Name: "g"}), s.err)
	if _, err := u.Promote(device("10.0.0.1", ""), "a", 0, 0, []Subject{client(1)}); !errors.Is(err, s.err) {
		t.Errorf("promotion: %v", err)
	}
	belongs(t, u, device("10.0.0.1", ""), 0)
	if v := get(t, u, "a"); v.Disabled || v.Connections != 0 || len(u.List("", 0)) != 1 || len(u.Groups()) != 0 {
		t.Errorf("after refused edits: %+v", u.List("", 0))
	}
	f := admit(t, u, key) // forwarding goes on
	f.move(10)
	u.commit(false)
	s.err = nil
	u.commit(false)
	if got := s.usage[key].Up; got != 10 {
		t.Errorf("%d bytes are kept after the disk came back, want 10", got)
	}
}

func TestAUserExpiresOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, stop := running(t, Options{})
		defer stop()
		dated := put(t, u, Spec{Name: "dated", Expires: Expires{At: day1.Add(90 * time.Minute)}})
		used := put(t, u, Spec{Name: "used", Expires: Expires{AfterFirstUse: time.Hour}})
		f, g := admit(t, u, dated), admit(t, u, used)
		time.Sleep(time.Hour)
		g.move(1)
		time.Sleep(30*time.Minute - 10*time.Millisecond)
		synctest.Wait()
		if f.cause() != nil || g.cause() != nil {
			t.Fatal("a flow ended too early")
		}
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		isNot(t, f.cause(), ErrExpired)
		_, err := u.Admit(dated, client(1))
		refusedAs(t, err, RefusedExpired)
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		isNot(t, g.cause(), ErrExpired)
		if got := get(t, u, "used").State; got != StateExpired {
			t.Errorf("state %v", got)
		}
		if c := u.Counts(); c.Enforced != 2 || c.Slowest > 10*time.Millisecond {
			t.Errorf("enforcement: %+v", c)
		}
		if err := u.Extend("used", time.Minute); err != nil {
			t.Fatal(err)
		}
		admit(t, u, used)
	})
}

func TestAPeriodBeginsAnewOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, stop := running(t, Options{})
		defer stop()
		day := Reset{Every: Daily}
		key := put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 100, Reset: day}}})
		f := admit(t, u, key)
		f.move(100)
		isNot(t, f.cause(), ErrQuota)
		time.Sleep(11 * time.Hour)
		_, err := u.Admit(key, client(1))
		refusedAs(t, err, RefusedTraffic)
		if got := get(t, u, "a").PeriodEnd; !got.Equal(day1.Add(12 * time.Hour)) {
			t.Errorf("the period ends %v", got)
		}
		time.Sleep(time.Hour + 10*time.Millisecond)
		synctest.Wait()
		v := get(t, u, "a")
		if v.State != StateActive || v.Usage.Generation != 1 || v.Usage.Up != 0 || v.Usage.Lifetime().Up != 100 {
			t.Errorf("after midnight: %v %+v", v.State, v.Usage)
		}
		admit(t, u, key)

		// Another calendar lets the period that was begun go on.
		f = admit(t, u, key)
		f.move(50)
		day.Every = Hourly
		time.Sleep(3 * time.Hour)
		put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 100, Reset: day}}})
		if v := get(t, u, "a"); v.Usage.Up != 50 || v.Usage.Generation != 1 {
			t.Errorf("the edit began a period: %+v", v.Usage)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if v := get(t, u, "a"); v.Usage.Up != 0 || v.Usage.Generation != 2 {
			t.Errorf("the new calendar begins none: %+v", v.Usage)
		}
	})
}

func TestWhileTheClockIsNotSetNobodyExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin, offset := time.Now(), time.Duration(0)
		var mu sync.Mutex
		u, stop := running(t, Options{Now: func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return time.Unix(1000, 0).Add(offset + time.Since(begin))
		}})
		defer stop()
		old := put(t, u, Spec{Name: "old", Expires: Expires{At: time.Unix(2000, 0)}})
		used := put(t, u, Spec{Name: "used", Expires: Expires{AfterFirstUse: time.Hour}, Limits: Limits{Traffic: Traffic{Total: 100, Reset: Reset{Every: Daily}}}})
		f, g := admit(t, u, old), admit(t, u, used)
		g.move(10)
		time.Sleep(48 * time.Hour)
		synctest.Wait()
		if f.cause() != nil || g.cause() != nil || u.Plausible() {
			t.Fatalf("ended: %v, %v; plausible %v", f.cause(), g.cause(), u.Plausible())
		}
		mu.Lock()
		offset = day1.Sub(time.Unix(1000, 0))
		mu.Unlock()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		isNot(t, f.cause(), ErrExpired)
		if v := get(t, u, "used"); g.cause() != nil || v.Usage.Generation != 0 || v.Usage.FirstUse.Year() != 2026 || v.State != StateActive {
			t.Errorf("what was begun before the clock was set: ended for %v, %v %+v", g.cause(), v.State, v.Usage)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		isNot(t, g.cause(), ErrExpired)
	})
}

func TestAClockThatGoesBackBringsNobodyBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		step := make(chan time.Duration, 1)
		step <- 0
		u, stop := running(t, Options{Now: func() time.Time {
			d := <-step
			step <- d
			return day1.Add(d + time.Since(begin))
		}})
		defer stop()
		key := put(t, u, Spec{Name: "a", Expires: Expires{At: day1.Add(time.Hour)}})
		time.Sleep(2 * time.Hour)
		put(t, u, Spec{Name: "other"})
		u.commit(true)
		<-step
		step <- -90 * time.Minute
		_, err := u.Admit(key, client(1))
		refusedAs(t, err, RefusedExpired)
	})
}

func TestAResetIsNoTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, stop := running(t, Options{Keeper: newShelf()})
		defer stop()
		key := put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 1000, Reset: Reset{Every: Hourly}}}})
		admit(t, u, key).move(10)
		time.Sleep(time.Minute)
		seen := get(t, u, "a").Usage.LastSeen
		time.Sleep(2 * time.Hour) // the calendar's
		if err := u.Reset("a"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if v := get(t, u, "a"); !v.Usage.LastSeen.Equal(seen) || v.Usage.Generation < 2 {
			t.Errorf("last seen %v in generation %d, want %v", v.Usage.LastSeen, v.Usage.Generation, seen)
		}
	})
}

func TestUsageIsCommittedInTimeAndAtTheEdges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShelf()
		var events []string
		u, stop := running(t, Options{Keeper: s, Events: func(e Event) { events = append(events, e.Kind) }})
		key := put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 1000}}})
		kept := func() uint64 {
			synctest.Wait()
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.usage[key].Up
		}
		f := admit(t, u, key)
		f.move(950)
		time.Sleep(30 * time.Second)
		if got := kept(); got != 950 {
			t.Errorf("%d bytes are kept after 30 s, want 950", got)
		}
		if v := get(t, u, "a"); !v.Usage.LastSeen.Equal(day1.Add(30 * time.Second)) {
			t.Errorf("last seen %v", v.Usage.LastSeen)
		}
		f.move(60)
		time.Sleep(1100 * time.Millisecond)
		if got := kept(); got != 1010 {
			t.Errorf("%d bytes are kept after the limit was reached, want 1010", got)
		}
		if v := get(t, u, "a"); !v.Usage.LastSeen.After(day1.Add(30 * time.Second)) {
			t.Errorf("after the limit was reached last seen %v, as before", v.Usage.LastSeen)
		}
		before := s.commits
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if s.commits != before {
			t.Errorf("%d commits of nothing", s.commits-before)
		}
		near, exhausted := 0, 0
		for _, e := range events {
			switch e {
			case "user.near":
				near++
			case "user.exhausted":
				exhausted++
			}
		}
		if near != 1 || exhausted != 1 {
			t.Errorf("events: %v", events)
		}
		stop()
		if !s.kept.Committed.After(day1.Add(5 * time.Minute)) {
			t.Errorf("at the end, the last commit is of %v", s.kept.Committed)
		}
	})
}

func TestWhoIsDeletedAtTheEndOfTheTrafficLeavesNoUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShelf()
		u, stop := running(t, Options{Keeper: s})
		defer stop()
		key := put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 1000}}})
		time.Sleep(1500 * time.Millisecond) // between two sweeps
		f := admit(t, u, key)
		f.move(1000)
		if err := u.Delete("a"); err != nil {
			t.Fatal(err)
		}
		f.Release()
		time.Sleep(time.Minute)
		synctest.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if left, ok := s.usage[key]; ok {
			t.Errorf("of a user who is gone %+v is kept", left)
		}
	})
}

func TestAnEditIsNotUndoneByWhatChangesTheUsageMeanwhile(t *testing.T) {
	u := newUsers(t, Options{})
	key := put(t, u, Spec{Name: "a", Limits: Limits{Speed: 1000}})
	admit(t, u, key).Release()
	e, _ := u.byKey.get(key)
	s := e.spec()
	s.Limits.Speed = 2000
	p := u.amend(e, func(*Usage) {
		u.editing.Lock()
		defer u.editing.Unlock()
		e.def.Store(u.define(&s)) // as an edit does, before it asks for a policy
	})
	if p.speed != 2000 || e.account.Load().policy.speed != 2000 {
		t.Errorf("the speed is %d, want that of the edit, 2000", p.speed)
	}
}
