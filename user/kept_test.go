package user

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/store"
)

// fullSpec has something in every field.
func fullSpec(t testing.TB) Spec {
	zone, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	s := Spec{
		Name: "ann", ID: 7, Group: "staff", Disabled: true, Notes: "n", ExternalID: "x",
		Limits: Limits{
			Traffic:    Traffic{1, 2, 3, Reset{Monthly, 31, zone, true}},
			Multiplier: Multiplier{Set: true, Millionths: 4}, Speed: 5, Bandwidth: Bandwidth{6, 7},
			Connections: 8, IPs: 9, WhenExhausted: Exhausted{true, 10, "slow"},
		},
		Expires: Expires{At: ledgerStart, AfterFirstUse: 11},
		Devices: []string{"host:a"}, Source: FromStore,
	}
	requireFull(t, reflect.ValueOf(s), "Spec")
	return s
}

// requireFull fails for a field that the tests above forgot; the source is given by where it is.
func requireFull(t testing.TB, v reflect.Value, path string) {
	t.Helper()
	for i := range v.NumField() {
		f, name := v.Field(i), path+"."+v.Type().Field(i).Name
		if f.IsZero() {
			t.Errorf("%s is not tried", name)
		} else if f.Kind() == reflect.Struct && f.Type() != reflect.TypeFor[time.Time]() {
			requireFull(t, f, name)
		}
	}
}

func reopen(t testing.TB, dir string, s *store.Store) (*Ledger, *store.Store, Kept) {
	t.Helper()
	s.Close(ledgerStart)
	l, s := openLedger(t, dir)
	k, err := l.Load()
	if err != nil {
		t.Fatal(err)
	}
	return l, s, k
}

func TestAnEditIsKeptWithEverythingInIt(t *testing.T) {
	dir := t.TempDir()
	l, s := openLedger(t, dir)
	spec := fullSpec(t)
	e := Edit{
		Next: 9, Names: map[string]flow.UserKey{"bob": 8},
		Users: []Spec{spec}, Groups: []Group{{Name: "staff", Limits: spec.Limits, Source: FromStore}},
		Promotions: []Promotion{{"mac:3c:22:fb:aa:bb:cc", 7, "3c:22:fb:aa:bb:cc", ledgerStart, 1, 2}},
	}
	if err := l.Save(&e); err != nil {
		t.Fatal(err)
	}
	if err := l.Save(&Edit{Names: map[string]flow.UserKey{"cid": 3}}); err != nil {
		t.Fatal(err)
	}
	l, s, k := reopen(t, dir, s)
	want := Kept{
		Committed: k.Committed, Next: 9, Names: map[string]flow.UserKey{"bob": 8, "cid": 3},
		Users: e.Users, Groups: e.Groups, Promotions: e.Promotions,
	}
	if !reflect.DeepEqual(k, want) || k.Committed.IsZero() {
		t.Errorf("kept %+v\nwant %+v", k, want)
	}
	observe(l, 7, Usage{Up: 1}, ledgerStart)
	if err := l.Save(&Edit{DeleteUsers: []flow.UserKey{7}, DeleteGroups: []string{"staff"}, DeletePromotions: []string{"mac:3c:22:fb:aa:bb:cc"}}); err != nil {
		t.Fatal(err)
	}
	l, _, k = reopen(t, dir, s)
	if len(k.Users)+len(k.Groups)+len(k.Promotions) > 0 || k.Next != 9 {
		t.Errorf("after the deletion %+v", k)
	}
	if u, _ := l.Usage(7); u != (Usage{}) {
		t.Errorf("the usage is still there: %+v", u)
	}
}

func TestWithoutADiskAnEditIsNotKept(t *testing.T) {
	l, s := openLedger(t, "")
	err := l.Save(&Edit{Users: []Spec{{Name: "ann", ID: 1}}})
	if !errors.Is(err, store.ErrNotDurable) || s.Get(store.Users, "1") != nil {
		t.Errorf("error %v", err)
	}
}

func TestARegistryGoesOnWhereItWasKilled(t *testing.T) {
	dir := t.TempDir()
	l, s := openLedger(t, dir)
	now := ledgerStart
	u := newUsers(t, Options{Keeper: l, Now: func() time.Time { return now }})
	apply(t, u, nil, []Spec{{Name: "config"}})
	key := put(t, u, Spec{Name: "stored", Limits: Limits{Traffic: Traffic{Total: 100}}})
	lease, err := u.Admit(key, Subject{})
	if err != nil {
		t.Fatal(err)
	}
	lease.Moved(flow.Up, 60)
	u.commit(false)
	if err := u.Reset("stored"); err != nil {
		t.Fatal(err)
	}
	lease.Moved(flow.Up, 30)
	u.commit(false)
	lease.Moved(flow.Up, 5) // is lost
	lease.Release()
	s.Close(now)

	l, _ = openLedger(t, dir)
	u = newUsers(t, Options{Keeper: l, Now: func() time.Time { return now }})
	apply(t, u, nil, []Spec{{Name: "config"}})
	v, err := u.Get("stored")
	if err != nil || v.ID != key || v.Usage.Up != 30 || v.Usage.Generation != 1 || v.Usage.Lifetime().Up != 90 {
		t.Errorf("user %+v, %v", v, err)
	}
	if got := seriesTotal(t, l, time.Hour, now); got.Up != 90 {
		t.Errorf("series %+v", got)
	}
	if got, err := l.Take(now, key); err != nil || got[0].Up != 90 {
		t.Errorf("take %+v, %v", got, err)
	}
}
