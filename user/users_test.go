package user

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"gatewayd/flow"
)

func TestADisabledUserEndsAtOnceAndComesBackWithItsUsage(t *testing.T) {
	u := newUsers(t, Options{})
	key := put(t, u, Spec{Name: "alice"})
	f := admit(t, u, key)
	f.move(1000)

	put(t, u, Spec{Name: "alice", Disabled: true})
	isNot(t, f.cause(), ErrDisabled)
	_, err := u.Admit(key, client(1))
	refusedAs(t, err, RefusedDisabled)

	if again := put(t, u, Spec{Name: "alice"}); again != key {
		t.Errorf("number %d became %d", key, again)
	}
	admit(t, u, key)
	if got := get(t, u, "alice").Usage.Up; got != 1000 {
		t.Errorf("usage is %d bytes, want 1000", got)
	}
}

func TestARemovedUserIsRetiredAndUnknown(t *testing.T) {
	u := newUsers(t, Options{})
	key := put(t, u, Spec{Name: "alice"})
	f := admit(t, u, key)
	if err := u.Delete("alice"); err != nil {
		t.Fatal(err)
	}
	isNot(t, f.cause(), ErrRetired)
	_, err := u.Admit(key, client(1))
	refusedAs(t, err, RefusedUnknown)
	_, err = u.Get("alice")
	isNot(t, err, ErrUnknown)
	if again := put(t, u, Spec{Name: "alice"}); again == key {
		t.Error("the number of a deleted user was used again")
	}
}

func TestARenamedUserKeepsItsNumberAndFlows(t *testing.T) {
	changed := make(map[flow.UserKey]int)
	u := newUsers(t, Options{Changed: func(k flow.UserKey) { changed[k]++ }})
	key := put(t, u, Spec{Name: "alice", Devices: []string{"host:tablet"}})
	put(t, u, Spec{Name: "bob"})
	f := admit(t, u, key)
	f.move(10)
	err := u.Update("alice", func(s Spec) (Spec, error) {
		s.Name = "carol"
		return s, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if v := get(t, u, "carol"); v.ID != key || v.Usage.Up != 10 || v.Connections != 1 || f.cause() != nil {
		t.Errorf("after the new name: %+v, flow ended for %v", v, f.cause())
	}
	_, err = u.Get("alice")
	isNot(t, err, ErrUnknown)
	if name, _, _ := u.Facts(key); name != "carol" || changed[key] == 0 {
		t.Errorf("rules see %q, told %d times", name, changed[key])
	}
	if got := u.List("", 0); len(got) != 2 || got[0].Name != "bob" || got[1].Name != "carol" {
		t.Errorf("list: %v", got)
	}
}

func TestARefusedEditChangesNothing(t *testing.T) {
	u := newUsers(t, Options{})
	apply(t, u, nil, []Spec{{Name: "file", Devices: []string{"10.0.0.1"}}})
	key := put(t, u, Spec{Name: "alice", Limits: Limits{Connections: 1}, Devices: []string{"10.0.0.2"}})
	before := get(t, u, "alice")
	for _, c := range []struct {
		s    Spec
		want error
	}{
		{Spec{Name: "file"}, ErrReadOnly},
		{Spec{Name: "alice", ID: 77}, ErrClash},
		{Spec{Name: "bob", ID: key}, ErrClash},
		{Spec{Name: "bob", Devices: []string{"10.0.0.1"}}, ErrClash},
		{Spec{Name: "bob", Devices: []string{"10.0.0.2/32"}}, ErrClash},
	} {
		isNot(t, u.Put(c.s), c.want)
	}
	if err := u.Put(Spec{Name: "alice", Group: "nowhere"}); err == nil {
		t.Error("a group that does not exist was taken")
	}
	if _, err := u.Prepare(nil, []Spec{{Name: "file"}, {Name: "new", Limits: Limits{Connections: 5}}, {Name: "alice"}}); err == nil {
		t.Error("the configuration took the name of a user of the store")
	}
	if after := get(t, u, "alice"); fmt.Sprint(after) != fmt.Sprint(before) || len(u.List("", 0)) != 2 {
		t.Errorf("after refused edits: %+v", u.List("", 0))
	}
	admit(t, u, key)
	_, err := u.Admit(key, client(1))
	refusedAs(t, err, RefusedConnections)
}

func TestWhatTheConfigurationLeftOutEndsAndReturnsWithItsUsage(t *testing.T) {
	u := newUsers(t, Options{})
	apply(t, u, nil, []Spec{{Name: "a"}, {Name: "b"}})
	a := get(t, u, "a").ID
	f := admit(t, u, a)
	f.move(5)
	c, err := u.Prepare(nil, []Spec{{Name: "b"}})
	if err != nil {
		t.Fatal(err)
	}
	if f.cause() != nil {
		t.Fatal("a flow ended before the change was committed")
	}
	c.Commit()
	isNot(t, f.cause(), ErrRetired)
	apply(t, u, nil, []Spec{{Name: "b"}, {Name: "a"}})
	if v := get(t, u, "a"); v.ID != a || v.Usage.Up != 5 {
		t.Errorf("back: %+v", v)
	}
}

func TestUsersMaySwapNamesAndDevicesInOneConfiguration(t *testing.T) {
	u := newUsers(t, Options{})
	apply(t, u, nil, []Spec{{Name: "a", ID: 1, Devices: []string{"10.0.0.1"}}, {Name: "b", ID: 2, Devices: []string{"10.0.0.2"}}})
	apply(t, u, nil, []Spec{{Name: "a", ID: 2, Devices: []string{"10.0.0.1"}}, {Name: "b", ID: 1, Devices: []string{"10.0.0.2"}}})
	for name, want := range map[string]flow.UserKey{"a": 2, "b": 1} {
		if got := get(t, u, name).ID; got != want {
			t.Errorf("%s has number %d, want %d", name, got, want)
		}
	}
	for a, want := range map[string]flow.UserKey{"10.0.0.1": 2, "10.0.0.2": 1} {
		if got, _ := u.UserOf(device(a, "")); got != want {
			t.Errorf("%s belongs to %d, want %d", a, got, want)
		}
	}
}

func TestAGroupsLimitsReachItsMembers(t *testing.T) {
	u := newUsers(t, Options{})
	if err := u.PutGroup(Group{Name: "staff", Limits: Limits{Connections: 2}}); err != nil {
		t.Fatal(err)
	}
	key := put(t, u, Spec{Name: "a", Group: "staff", Limits: Limits{Connections: 5}})
	admit(t, u, key)
	admit(t, u, key)
	_, err := u.Admit(key, client(1))
	refusedAs(t, err, RefusedConnections)
	if err := u.PutGroup(Group{Name: "staff", Limits: Limits{Connections: 3}}); err != nil {
		t.Fatal(err)
	}
	admit(t, u, key)
	isNot(t, u.DeleteGroup("staff"), ErrClash)
	put(t, u, Spec{Name: "a"})
	if err := u.DeleteGroup("staff"); err != nil {
		t.Error(err)
	}
	isNot(t, u.DeleteGroup("staff"), ErrUnknown)
}

func TestTheListPages(t *testing.T) {
	u := newUsers(t, Options{})
	groups, specs := many(100)
	apply(t, u, groups, specs)
	seen, after := 0, ""
	for {
		page := u.List(after, 7)
		if len(page) == 0 {
			break
		}
		for _, v := range page {
			if v.Name <= after {
				t.Fatalf("%s after %s", v.Name, after)
			}
			after = v.Name
			seen++
		}
	}
	if seen != len(specs) {
		t.Errorf("%d users in pages, want %d", seen, len(specs))
	}
}

func TestAReachedLimitEndsFlowsAndTopUpLetsThemIn(t *testing.T) {
	u := newUsers(t, Options{})
	key := put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 100}}})
	if got := get(t, u, "a").State; got != StateUnused {
		t.Errorf("state %v, want unused", got)
	}
	f := admit(t, u, key)
	f.move(60)
	if got := get(t, u, "a").State; got != StateActive {
		t.Errorf("state %v, want active", got)
	}
	f.move(60)
	isNot(t, f.cause(), ErrQuota)
	_, err := u.Admit(key, client(1))
	refusedAs(t, err, RefusedTraffic)
	if got := get(t, u, "a").State; got != StateExhausted {
		t.Errorf("state %v, want exhausted", got)
	}
	if err := u.TopUp("a", 50); err != nil {
		t.Fatal(err)
	}
	admit(t, u, key)
	if err := u.Reset("a"); err != nil {
		t.Fatal(err)
	}
	if v := get(t, u, "a"); v.Usage.Up != 0 || v.Usage.Extra != 0 || v.Usage.Generation != 1 || v.Usage.FirstUse.IsZero() {
		t.Errorf("after the reset: %+v", v.Usage)
	}
}

func TestHowLateTheEndOfTheTrafficIsEnforcedIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newUsers(t, Options{})
		key := put(t, u, Spec{Name: "a", Limits: Limits{Traffic: Traffic{Total: 100}}})
		f, slow := admit(t, u, key), admit(t, u, key)
		if _, err := slow.Ready(flow.Down, func() {}); err != nil {
			t.Fatal(err)
		}
		slow.Took(flow.Down, 60)
		f.move(40) // allowed: 60 bytes are on their way
		slow.Moved(flow.Down, 30)
		if f.cause() != nil || u.Counts().Enforced != 0 {
			t.Fatalf("ended for %v before the limit, %+v", f.cause(), u.Counts())
		}
		slow.Moved(flow.Down, 30)
		isNot(t, f.cause(), ErrQuota)
		isNot(t, slow.cause(), ErrQuota)
		if c := u.Counts(); c.Enforced != 1 || c.Slowest > time.Second {
			t.Errorf("%+v", c)
		}
	})
}

func TestExtendCountsFromTheLaterOfNowAndTheEnd(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	u := newUsers(t, Options{Now: func() time.Time { return now }})
	put(t, u, Spec{Name: "past", Expires: Expires{At: now.Add(-48 * time.Hour)}})
	put(t, u, Spec{Name: "future", Expires: Expires{At: now.Add(48 * time.Hour)}})
	put(t, u, Spec{Name: "never"})
	for name, want := range map[string]time.Time{"past": now.Add(time.Hour), "future": now.Add(49 * time.Hour)} {
		if err := u.Extend(name, time.Hour); err != nil {
			t.Fatal(err)
		}
		if v := get(t, u, name); !v.ExpiresAt.Equal(want) || v.State != StateUnused {
			t.Errorf("%s expires %v in state %v, want %v", name, v.ExpiresAt, v.State, want)
		}
	}
	if err := u.Extend("never", time.Hour); err == nil {
		t.Error("a user that never expires was extended")
	}
}

func TestAdmissionDoesNotWaitForTheSweep(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	u := newUsers(t, Options{Now: func() time.Time { return now }})
	daily := put(t, u, Spec{Name: "daily", Limits: Limits{Traffic: Traffic{Total: 100, Reset: Reset{Every: Daily}}}})
	dated := put(t, u, Spec{Name: "dated", Expires: Expires{At: now.Add(time.Hour)}})
	admit(t, u, daily).move(100)
	admit(t, u, dated)
	_, err := u.Admit(daily, client(1))
	refusedAs(t, err, RefusedTraffic)
	now = now.Add(24 * time.Hour)
	admit(t, u, daily)
	_, err = u.Admit(dated, client(1))
	refusedAs(t, err, RefusedExpired)
}

func TestAnotherEndOfTimeMakesAnExtensionVoid(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	u := newUsers(t, Options{Now: func() time.Time { return now }})
	s := Spec{Name: "a", Expires: Expires{At: now.Add(time.Hour)}}
	put(t, u, s)
	if err := u.Extend("a", time.Hour); err != nil {
		t.Fatal(err)
	}
	s.Notes = "an edit of something else"
	put(t, u, s)
	if got := get(t, u, "a").ExpiresAt; !got.Equal(now.Add(2 * time.Hour)) {
		t.Errorf("expires %v", got)
	}
	s.Expires.At = now.Add(3 * time.Hour)
	put(t, u, s)
	if got := get(t, u, "a").ExpiresAt; !got.Equal(now.Add(3 * time.Hour)) {
		t.Errorf("expires %v after another date was set", got)
	}
}

func TestAConfigurationIsRefusedThatTakesAGroupFromUsersOfTheStore(t *testing.T) {
	u := newUsers(t, Options{})
	staff := []Group{{Name: "staff"}}
	apply(t, u, staff, nil)
	key := put(t, u, Spec{Name: "a", Group: "staff", Devices: []string{"host:tablet"}})
	for path, c := range map[string]struct {
		groups []Group
		specs  []Spec
	}{
		"groups.name":         {nil, nil},
		"users[0].id":         {staff, []Spec{{Name: "b", ID: key}}},
		"users[0].devices[1]": {staff, []Spec{{Name: "b", Devices: []string{"host:x", "host:tablet"}}}},
	} {
		_, err := u.Prepare(c.groups, c.specs)
		if wrong, ok := errors.AsType[*Invalid](err); !ok || len(wrong.Problems) != 1 || wrong.Problems[0].Path != path {
			t.Errorf("%v, want one problem at %s", err, path)
		}
	}
	apply(t, u, staff, []Spec{{Name: "b"}})
}

func TestEditsAreToldOnceEach(t *testing.T) {
	var told []string
	u := newUsers(t, Options{Events: func(e Event) { told = append(told, e.Kind+" "+e.Name+" "+e.State) }})
	put(t, u, Spec{Name: "ann"})
	put(t, u, Spec{Name: "ann"}) // as it is
	put(t, u, Spec{Name: "ann", Notes: "x"})
	if err := u.Put(Spec{Name: "ann", Group: "nobody"}); err == nil {
		t.Fatal("a group that is not there was taken")
	}
	put(t, u, Spec{Name: "ann", Disabled: true})
	if err := u.Delete("ann"); err != nil {
		t.Fatal(err)
	}
	want := []string{"user.added ann unused", "user.changed ann unused", "user.disabled ann disabled", "user.changed ann disabled", "user.removed ann disabled"}
	if !slices.Equal(told, want) {
		t.Errorf("told %q\nwant %q", told, want)
	}
}
