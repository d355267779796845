package user

import (
	"testing"
	"time"
)

func TestOfUserAndGroupTheSmallestLimitHolds(t *testing.T) {
	half := Multiplier{Set: true, Millionths: one / 2}
	monthly := Reset{Every: Monthly, Day: 1}
	g := &Group{Limits: Limits{
		Traffic: Traffic{Up: 10, Total: 100, Reset: monthly}, Multiplier: half, Speed: 5, Bandwidth: Bandwidth{Up: 7},
		Connections: 3, IPs: 4, WhenExhausted: Exhausted{Throttle: 9},
	}}
	if got := effective(Limits{}, g); got != g.Limits {
		t.Errorf("without limits of its own: %+v, want the group's", got)
	}
	block := Limits{WhenExhausted: Exhausted{Block: true}}
	if got := effective(block, g); !policyOf(&got, &Usage{}).block {
		t.Errorf("the group's throttle holds for a user that says block: %+v", got)
	}
	if got := effective(g.Limits, nil); got != g.Limits {
		t.Errorf("without a group: %+v, want its own", got)
	}
	own := Limits{
		Traffic: Traffic{Up: 20, Down: 1, Total: 50, Reset: Reset{Every: Daily}}, Multiplier: Multiplier{Set: true}, Speed: 6, Bandwidth: Bandwidth{Up: 6, Down: 1},
		Connections: 2, IPs: 9, WhenExhausted: Exhausted{Outbound: "slow"},
	}
	want := Limits{
		Traffic: Traffic{Up: 10, Down: 1, Total: 50, Reset: Reset{Every: Daily}}, Multiplier: Multiplier{Set: true}, Speed: 5, Bandwidth: Bandwidth{Up: 6, Down: 1},
		Connections: 2, IPs: 4, WhenExhausted: Exhausted{Outbound: "slow"},
	}
	if got := effective(own, g); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestThePolicyFollowsFromLimitsAndUsage(t *testing.T) {
	l := Limits{Traffic: Traffic{Total: 100}, WhenExhausted: Exhausted{Throttle: 10}}
	for _, c := range []struct {
		usage    Usage
		throttle uint64
		state    State
	}{
		{Usage{}, 0, StateUnused},
		{Usage{FirstUse: time.Now(), ChargedUp: 99}, 0, StateActive},
		{Usage{FirstUse: time.Now(), ChargedUp: 50, ChargedDown: 50}, 10, StateThrottled},
		{Usage{FirstUse: time.Now(), ChargedUp: 100, Extra: 1}, 0, StateActive},
	} {
		p := policyOf(&l, &c.usage)
		if p.throttle != c.throttle || p.block {
			t.Errorf("%+v: throttle %d, block %v; want %d", c.usage, p.throttle, p.block, c.throttle)
		}
		if got := stateOf(&definition{}, &c.usage, &p, false); got != c.state {
			t.Errorf("%+v: %v, want %v", c.usage, got, c.state)
		}
	}
	l.WhenExhausted = Exhausted{Outbound: "slow"}
	if p := policyOf(&l, &Usage{ChargedUp: 100}); p.throttle != 0 || p.block {
		t.Errorf("sent elsewhere: %+v", p)
	}
	l.WhenExhausted = Exhausted{}
	if p := policyOf(&l, &Usage{ChargedUp: 100}); !p.block || p.up != none || p.total != 100 || p.multiplier != one {
		t.Errorf("blocked: %+v", p)
	}
}
