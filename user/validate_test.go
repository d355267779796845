package user

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestEachMistakeIsToldWithItsPlace(t *testing.T) {
	good := Spec{
		Name: "alice", ID: MaxID, Group: "staff", Devices: []string{"mac:3c:22:fb:aa:bb:cc", "host:Tablet", "10.0.0.0/24", "10.0.0.1"},
		Limits: Limits{Traffic: Traffic{Total: 1, Reset: Reset{Every: Monthly, Day: 31, CarryOver: true}}, Multiplier: Multiplier{true, MaxMultiplier}},
	}
	groups := []Group{{Name: "staff"}}
	if err := Validate(groups, []Spec{good, {Name: "b0b"}, {Name: strings.Repeat("x", MaxName)}}); err != nil {
		t.Fatalf("good users: %v", err)
	}
	with := func(change func(*Spec)) Spec {
		s := Spec{Name: "bob"}
		change(&s)
		return s
	}
	limits := func(change func(*Limits)) Spec { return with(func(s *Spec) { change(&s.Limits) }) }
	for _, c := range []struct {
		s    Spec
		path string
	}{
		{Spec{}, "name"},
		{Spec{Name: "12"}, "name"},
		{Spec{Name: "a/b"}, "name"},
		{Spec{Name: ".."}, "name"},
		{Spec{Name: "a\tb"}, "name"},
		{Spec{Name: "a\xffb"}, "name"},
		{Spec{Name: " a"}, "name"},
		{Spec{Name: strings.Repeat("x", MaxName+1)}, "name"},
		{Spec{Name: "alice"}, "name"},
		{with(func(s *Spec) { s.ID = MaxID + 1 }), "id"},
		{with(func(s *Spec) { s.ID = MaxID }), "id"},
		{with(func(s *Spec) { s.Group = "nobody" }), "group"},
		{with(func(s *Spec) { s.Notes = strings.Repeat("x", MaxNotes+1) }), "notes"},
		{with(func(s *Spec) { s.ExternalID = "\xff" }), "external_id"},
		{with(func(s *Spec) { s.Expires.AfterFirstUse = -1 }), "expires.after_first_use"},
		{with(func(s *Spec) { s.Expires.At = time.Date(1969, 1, 1, 0, 0, 0, 0, time.UTC) }), "expires.at"},
		{with(func(s *Spec) { s.Devices = []string{"nobody's"} }), "devices[0]"},
		{with(func(s *Spec) { s.Devices = []string{"host:x", "10.0.0.1/24"} }), "devices[1]"},
		{with(func(s *Spec) { s.Devices = []string{"10.0.0.1/32"} }), "devices[0]"},
		{with(func(s *Spec) { s.Devices = []string{"MAC:3C-22-FB-AA-BB-CC"} }), "devices[0]"},
		{with(func(s *Spec) { s.Devices = []string{"mac:3C-22-FB-AA-BB-CC"} }), "devices[0]"},
		{with(func(s *Spec) { s.Devices = make([]string, MaxDevices+1) }), "devices"},
		{limits(func(l *Limits) { l.Multiplier = Multiplier{true, MaxMultiplier + 1} }), "limits.multiplier"},
		{limits(func(l *Limits) { l.Multiplier = Multiplier{false, 1} }), "limits.multiplier"},
		{limits(func(l *Limits) { l.Connections = -1 }), "limits.connections"},
		{limits(func(l *Limits) { l.IPs = -1 }), "limits.ips"},
		{limits(func(l *Limits) { l.WhenExhausted = Exhausted{Throttle: 1, Outbound: "slow"} }), "limits.when_exhausted"},
		{limits(func(l *Limits) { l.WhenExhausted = Exhausted{Block: true, Throttle: 1} }), "limits.when_exhausted"},
		{limits(func(l *Limits) { l.Traffic.Reset.Every = Monthly + 1 }), "limits.traffic.reset.every"},
		{limits(func(l *Limits) { l.Traffic.Reset = Reset{Every: Monthly, Day: 32} }), "limits.traffic.reset.day"},
		{limits(func(l *Limits) { l.Traffic.Reset = Reset{Every: Weekly, Day: 1} }), "limits.traffic.reset.day"},
		{limits(func(l *Limits) { l.Traffic.Reset = Reset{CarryOver: true} }), "limits.traffic.reset.carry_over"},
	} {
		err := Validate(groups, []Spec{good, c.s})
		wrong, ok := errors.AsType[*Invalid](err)
		if want := "users[1]." + c.path; !ok || len(wrong.Problems) != 1 || wrong.Problems[0].Path != want {
			t.Errorf("%+v: %v, want one problem at %s", c.s, err, want)
		} else if text := wrong.Problems[0].Text; !strings.Contains(text, fmt.Sprintf("user %q", c.s.Name)) || !strings.Contains(text, c.path) {
			t.Errorf("%q does not name the user and %s", text, c.path)
		}
	}
	err := Validate([]Group{{Name: "a"}, {Name: "a", Limits: Limits{IPs: -1}}}, nil)
	if wrong, ok := errors.AsType[*Invalid](err); !ok || len(wrong.Problems) != 2 || wrong.Problems[1].Path != "groups[1].limits.ips" {
		t.Errorf("groups: %v", err)
	}
}

func TestManyMistakesAreCutShort(t *testing.T) {
	err := Validate(nil, make([]Spec, 1000))
	if wrong, ok := errors.AsType[*Invalid](err); !ok || len(wrong.Problems) != maxProblems+1 {
		t.Errorf("%d problems are told", len(wrong.Problems))
	}
}
