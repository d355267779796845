package api

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/config"
	"gatewayd/user"
)

// Take is what a user moved from one take for billing to the next, in bytes.
type Take struct {
	Sequence    uint64 `json:"sequence"` // what acknowledges it; 0: nothing moved
	From        Time   `json:"from"`     // null: from the beginning
	To          Time   `json:"to"`
	Up          uint64 `json:"up"`
	Down        uint64 `json:"down"`
	ChargedUp   uint64 `json:"charged_up"`
	ChargedDown uint64 `json:"charged_down"`
	WireRx      uint64 `json:"wire_rx"`
	WireTx      uint64 `json:"wire_tx"`
}

// Ack is the body of …/usage/ack.
type Ack struct {
	Sequence uint64 `json:"sequence"`
}

// Series is what was moved by or through one thing over time: a device's is what it
// moved without a user.
type Series struct {
	Name   string       `json:"name"`
	Points []UsagePoint `json:"points"`
}

// UsagePoint is what was moved within one step, in bytes. Steps without traffic are left out.
type UsagePoint struct {
	Start       Time   `json:"start"`
	Up          uint64 `json:"up"`
	Down        uint64 `json:"down"`
	ChargedUp   uint64 `json:"charged_up"`
	ChargedDown uint64 `json:"charged_down"`
}

// UsageOf is the answer of GET /v1/users/{name}/usage.
type UsageOf struct {
	User   UserRef      `json:"user"`
	Usage  UserUsage    `json:"usage"` // of this period
	Left   Left         `json:"left"`
	Step   Duration     `json:"step"`
	From   Time         `json:"from"`
	To     Time         `json:"to"`
	Points []UsagePoint `json:"series"`
}

// UsageList is the answer of GET /v1/usage. Next is what to give as `after`.
type UsageList struct {
	By     string   `json:"by"`
	Step   Duration `json:"step"`
	From   Time     `json:"from"`
	To     Time     `json:"to"`
	Series []Series `json:"series"`
	Next   string   `json:"next,omitzero"`
}

const (
	maxPoints = 10_000 // of one series
	usagePage = 1000   // series of an answer whose request has no limit
	day       = 24 * time.Hour
)

// usageBy is what series may be of.
const usageBy = "user, device, outbound, group"

// parseSeries reads step, from and to.
func parseSeries(q url.Values, now time.Time) (s user.Query, err error) {
	if s.Step, err = parseStep(q); err != nil {
		return s, err
	}
	back := day
	if s.Step >= day {
		back = 30 * day
	}
	if s.To, err = parseTime(q, "to", now); err != nil {
		return s, err
	}
	if s.From, err = parseTime(q, "from", s.To.Add(-max(back, s.Step))); err != nil {
		return s, err
	}
	if !s.From.Before(s.To) || s.To.Sub(s.From)/s.Step > maxPoints {
		return s, fail(http.StatusBadRequest, "from and to: want from before to, and at most %d steps between", maxPoints)
	}
	return s, nil
}

// parseStep reads "hour", "day", or a duration of whole hours below a day or of whole days.
func parseStep(q url.Values) (time.Duration, error) {
	words := map[string]string{"": "1h", "hour": "1h", "day": "1d"}
	text := q.Get("step")
	if word, known := words[text]; known {
		text = word
	}
	step, err := config.ParseDuration(text)
	if err != nil || step < time.Hour || step < day && step%time.Hour != 0 || step >= day && step%day != 0 {
		return 0, fail(http.StatusBadRequest, "step %q: want hour, day, whole hours below a day as in 6h, or whole days as in 7d", q.Get("step"))
	}
	return step, nil
}

func parseTime(q url.Values, key string, otherwise time.Time) (time.Time, error) {
	if !q.Has(key) {
		return otherwise, nil
	}
	t, err := time.Parse(time.RFC3339, q.Get(key))
	if err != nil {
		return t, fail(http.StatusBadRequest, "%s %q: want a time as in 2026-01-31T00:00:00Z, a + of the zone written %%2B", key, q.Get(key))
	}
	return t, nil
}

// billing is the ledger, or why there is none.
func (s *Server) billing() (Billing, error) {
	if s.opt.Billing == nil {
		return nil, fail(http.StatusServiceUnavailable, "this gateway keeps no ledger")
	}
	return s.opt.Billing, nil
}

// userUsage answers what a user moved in its period, and its series.
func (s *Server) userUsage(w http.ResponseWriter, r *http.Request) error {
	users, err := s.readableUsers(r)
	if err != nil {
		return err
	}
	billing, err := s.billing()
	if err != nil {
		return err
	}
	q, err := parseSeries(r.URL.Query(), time.Now())
	if err != nil {
		return err
	}
	v, err := users.Get(r.PathValue("name"))
	if err != nil {
		return userProblem(err)
	}
	q.Label = func(p user.Payer) (string, bool) { return v.Name, p.Kind == user.ForUser && p.User == v.ID }
	return writeJSON(w, UsageOf{
		User: UserRef{uint64(v.ID), v.Name}, Usage: usageShape(&v, s.privacyFor(r)), Left: leftOf(&v),
		Step: Duration(q.Step), From: Time(q.From), To: Time(q.To), Points: pointShapes(s.series(billing, q)[v.Name]),
	})
}

// series are what could be read; what could not is in the log.
func (s *Server) series(b Billing, q user.Query) map[string][]user.Point {
	series, err := b.Series(q, time.Now())
	if err != nil {
		s.log.Error("series of usage", "error", err)
	}
	return series
}

func pointShapes(points []user.Point) []UsagePoint {
	out := make([]UsagePoint, 0, len(points))
	for _, p := range points {
		out = append(out, UsagePoint{Time(p.Start), p.Up, p.Down, p.ChargedUp, p.ChargedDown})
	}
	return out
}

// usage answers series by user, device, outbound or group.
func (s *Server) usage(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	by := query.Get("by")
	if !slices.Contains(strings.Split(usageBy, ", "), by) {
		return fail(http.StatusBadRequest, "by %q: want one of %s", by, usageBy)
	}
	if err := s.mayReadUsage(r, by); err != nil {
		return err
	}
	billing, err := s.billing()
	if err != nil {
		return err
	}
	q, err := parseSeries(query, time.Now())
	if err != nil {
		return err
	}
	pg, free, err := s.takeNames(w, r)
	if err != nil {
		return err
	}
	defer free()
	if pg.limit == 0 {
		pg.limit = usagePage
	}
	q.Label = labelBy(by, s.opt.Users)
	return writeJSON(w, seriesPage(by, q, s.series(billing, q), pg))
}

// labelBy tells whose series a payer's traffic belongs to.
func labelBy(by string, users Users) func(user.Payer) (string, bool) {
	of := func(p user.Payer, pick func(name, group string) string) (string, bool) {
		if p.Kind != user.ForUser || users == nil {
			return "", false
		}
		name, group, _ := users.Facts(p.User)
		label := pick(name, group)
		return label, label != ""
	}
	switch by {
	case "user":
		return func(p user.Payer) (string, bool) { return of(p, func(name, _ string) string { return name }) }
	case "group":
		return func(p user.Payer) (string, bool) { return of(p, func(_, group string) string { return group }) }
	case "device":
		return func(p user.Payer) (string, bool) { return p.Name, p.Kind == user.ForDevice }
	}
	return func(p user.Payer) (string, bool) { return shownTag(p.Name), p.Kind == user.ForOutbound }
}

// seriesPage is the page's part of the series, by name.
func seriesPage(by string, q user.Query, series map[string][]user.Point, pg namePage) UsageList {
	out := UsageList{By: by, Step: Duration(q.Step), From: Time(q.From), To: Time(q.To)}
	names := slices.Sorted(maps.Keys(series))
	names = slices.DeleteFunc(names, func(name string) bool { return pg.after != "" && name <= pg.after })
	names, out.Next = cut(names, pg, func(name *string) string { return *name })
	for _, name := range names {
		out.Series = append(out.Series, Series{name, pointShapes(series[name])})
	}
	out.Series = orEmpty(out.Series)
	return out
}

// mayReadUsage refuses series that would tell what privacy hides.
func (s *Server) mayReadUsage(r *http.Request, by string) error {
	hidden := map[string]privacy{"user": privacyAddresses, "device": privacyNone}
	if least, personal := hidden[by]; personal && s.privacy >= least && callerOf(r).role < RoleUsers {
		return fail(http.StatusForbidden, "by %s: hidden by privacy: %s", by, s.privacy)
	}
	return nil
}

// payer is the user of the path, whose traffic is billed.
func (s *Server) payer(r *http.Request) (key flow.UserKey, b Billing, err error) {
	users, err := s.users()
	if err != nil {
		return 0, nil, err
	}
	if b, err = s.billing(); err != nil {
		return 0, nil, err
	}
	v, err := users.Get(r.PathValue("name"))
	if err != nil {
		return 0, nil, userProblem(err)
	}
	return v.ID, b, nil
}

// takeUsage answers what was moved since the last acknowledged take.
func (s *Server) takeUsage(w http.ResponseWriter, r *http.Request) error {
	key, billing, err := s.payer(r)
	if err != nil {
		return err
	}
	now := time.Now()
	taken, err := billing.Take(now, key)
	if err != nil {
		return userProblem(err)
	}
	t := user.Taken{User: key, To: now} // of a user that moved nothing yet
	if len(taken) > 0 {
		t = taken[0]
	}
	return writeJSON(w, Take{t.Sequence, Time(t.From), Time(t.To), t.Up, t.Down, t.ChargedUp, t.ChargedDown, t.WireRx, t.WireTx})
}

// ackUsage acknowledges a take: 204, however often.
func (s *Server) ackUsage(w http.ResponseWriter, r *http.Request) error {
	key, billing, err := s.payer(r)
	if err != nil {
		return err
	}
	var a Ack
	if err := record(w, r, &a); err != nil {
		return err
	}
	if a.Sequence == 0 {
		return userProblem(invalid("sequence: want the one of the take"))
	}
	if err := billing.Ack(key, a.Sequence, time.Now()); err != nil {
		return userProblem(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
