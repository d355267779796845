package track

import (
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/flow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newTracker makes a tracker that ticks every second, with small rings if told.
func newTracker(t testing.TB, o Options) *Tracker {
	t.Helper()
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	tr, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// over is the Meta of a flow from inbound over outbound, of a user who may be 0.
func over(inbound, outbound string, user flow.UserKey) Meta {
	return Meta{
		Inbound: inbound, Outbound: outbound, Version: 1, User: user, Rule: -1,
		Network: flow.TCP,
		Source:  netip.MustParseAddrPort("10.0.0.2:51234"),
		Dest:    flow.Destination{Addr: netip.MustParseAddrPort("203.0.113.5:443")},
	}
}
