package api

import (
	"cmp"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"gatewayd/user"
)

// userMetrics are about all users, and about some of them where that is configured and
// whoever asks may know them.
func (s *Server) userMetrics(e *exposition, r *http.Request, st *Status) {
	if l := st.Ledger; l != nil {
		writable := 0.0
		if l.Writable {
			writable = 1
		}
		e.gauge("gatewayd_ledger_writable", "1 if usage is kept on disk, 0 if it is in memory only.", writable)
		if !l.LastCommit.IsZero() {
			e.gauge("gatewayd_ledger_last_commit_timestamp_seconds", "When usage was last written to disk.", float64(time.Time(l.LastCommit).UnixMilli())/1000)
		}
	}
	if s.opt.Users == nil {
		return
	}
	c := s.opt.Users.Counts()
	e.family("gatewayd_users", "gauge", "Users by state.")
	for _, state := range slices.Sorted(maps.Keys(c.States)) {
		metrics.WriteGaugeUint64(e, series("gatewayd_users", "state", state), uint64(c.States[state]))
	}
	e.family("gatewayd_user_refusals_total", "counter", "Flows that were refused for their user, by cause.")
	for _, cause := range slices.Sorted(maps.Keys(c.Refusals)) {
		metrics.WriteCounterUint64(e, series("gatewayd_user_refusals_total", "cause", cause), c.Refusals[cause])
	}
	e.counter("gatewayd_enforcements_total", "Users whose flows were ended: disabled, expired, out of traffic, retired.", c.Enforced)
	e.family("gatewayd_enforcement_seconds_total", "counter", "Seconds from these causes to the end of the last flow, added up.")
	metrics.WriteCounterFloat64(e, "gatewayd_enforcement_seconds_total", c.Latency.Seconds())
	e.gauge("gatewayd_enforcement_slowest_seconds", "The longest of these times since the start.", c.Slowest.Seconds())
	if s.opt.PerUser > 0 && s.privacyFor(r) == privacyFull {
		perUserMetrics(e, s.opt.Users.List("", 0), s.opt.PerUser)
	}
}

// perUserMetrics are series of the users with the lowest numbers: a user that has
// series keeps them, however many come after it.
func perUserMetrics(e *exposition, users []user.View, most int) {
	slices.SortFunc(users, func(a, b user.View) int { return cmp.Compare(a.ID, b.ID) })
	shown := users[:min(most, len(users))]
	e.gauge("gatewayd_user_series_left_out", "Users without series of their own, over metrics.per_user.", float64(len(users)-len(shown)))
	e.family("gatewayd_user_bytes_total", "counter", "Payload bytes by user, over all of its periods.")
	for i := range shown {
		name, moved := shown[i].Name, shown[i].Usage.Lifetime()
		metrics.WriteCounterUint64(e, series("gatewayd_user_bytes_total", "user", name, "direction", "up"), moved.Up)
		metrics.WriteCounterUint64(e, series("gatewayd_user_bytes_total", "user", name, "direction", "down"), moved.Down)
	}
	e.family("gatewayd_user_connections", "gauge", "Live flows by user.")
	for i := range shown {
		metrics.WriteGaugeUint64(e, series("gatewayd_user_connections", "user", shown[i].Name), uint64(shown[i].Connections))
	}
	e.family("gatewayd_user_state", "gauge", "1 for the state that the user is in.")
	for i := range shown {
		metrics.WriteGaugeUint64(e, series("gatewayd_user_state", "user", shown[i].Name, "state", shown[i].State.String()), 1)
	}
	e.family("gatewayd_user_quota_left_bytes", "gauge", "Charged bytes that are left in the user's period, by limit that it has.")
	for i := range shown {
		rest := leftOf(&shown[i])
		for _, limit := range []struct {
			name string
			left *uint64
		}{{"up", rest.Up}, {"down", rest.Down}, {"total", rest.Total}} {
			if limit.left != nil {
				metrics.WriteGaugeUint64(e, series("gatewayd_user_quota_left_bytes", "user", shown[i].Name, "limit", limit.name), *limit.left)
			}
		}
	}
}
