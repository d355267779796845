package api

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"gatewayd/flow"
	"gatewayd/track"
)

// privacy is how much of its clients the gateway shows to those who need not know.
type privacy int

const (
	privacyFull      privacy = iota // everything
	privacyAddresses                // addresses, but neither domains nor users
	privacyNone                     // nothing that tells who a client is or where it went
)

func parsePrivacy(s string) (privacy, error) {
	switch s {
	case "", "full":
		return privacyFull, nil
	case "addresses":
		return privacyAddresses, nil
	case "none":
		return privacyNone, nil
	}
	return 0, fmt.Errorf("privacy %q: want full, addresses or none", s)
}

// String is the setting as the configuration has it.
func (p privacy) String() string { return [...]string{"full", "addresses", "none"}[p] }

// privacyFor is what holds for the caller of r: administrators see everything.
func (s *Server) privacyFor(r *http.Request) privacy {
	if callerOf(r).role >= RoleAdmin {
		return privacyFull
	}
	return s.privacy
}

// check refuses the selectors that would tell what p hides.
func (p privacy) check(q url.Values) error {
	hidden := []string{}
	if p >= privacyAddresses {
		hidden = append(hidden, "domain", "user")
	}
	if p >= privacyNone {
		hidden = append(hidden, "source", "device", "session")
	}
	for _, key := range hidden {
		if q.Has(key) {
			return fail(http.StatusForbidden, "%s: hidden by privacy: %s", key, p)
		}
	}
	return nil
}

// shows tells whether p shows events of that name: those of users, of their devices and
// of sessions are about nothing else.
func (p privacy) shows(event string) bool {
	kind, _, _ := strings.Cut(event, ".")
	return p == privacyFull || kind != "user" && kind != "device" && kind != "session"
}

// flowShape is the record as the API shows it under p.
func flowShape(r *track.Record, p privacy) Flow {
	killed := r.Killed
	f := Flow{
		ID: uint64(r.ID), Session: r.Session, Inbound: r.Inbound, Network: r.Network.String(),
		Source: addrPort(r.Source), Device: r.Device, Destination: r.Dest.String(),
		Domain: r.Dest.Domain, DomainFrom: r.Dest.From.String(),
		Outbound: r.Outbound, Version: r.Version, Egress: addrPort(r.Egress),
		RuleName: r.RuleName, Recorded: r.Recorded, Epoch: r.Epoch, Started: Time(r.Started),
		Up: &r.Up, Down: &r.Down, Killed: &killed,
	}
	if r.Rule >= 0 {
		f.Rule = &r.Rule
	}
	if r.User != 0 {
		f.User = &UserRef{uint64(r.User), r.UserName}
	}
	if !r.Ended.IsZero() {
		f.Ended, f.Reason = Time(r.Ended), r.Reason.String()
	}
	f.hide(r, p)
	return f
}

// ClosedLine returns what makes a line of JSON of a closed flow, as
// GET /v1/connections/closed shows it under privacy.
func ClosedLine(privacy string) (func(*track.Record) ([]byte, error), error) {
	p, err := parsePrivacy(privacy)
	return func(r *track.Record) ([]byte, error) {
		b, err := json.Marshal(flowShape(r, p))
		return append(b, '\n'), err
	}, err
}

// blockedShape is a refused flow: it has no id and no counters.
func blockedShape(r *track.Record, p privacy) Flow {
	f := flowShape(r, p)
	f.ID, f.Up, f.Down, f.Killed, f.Reason, f.Ended = 0, nil, nil, nil, "", Time{}
	return f
}

func (f *Flow) hide(r *track.Record, p privacy) {
	if p >= privacyAddresses {
		f.Domain, f.DomainFrom, f.User = "", "", nil
		f.Destination = addrPort(r.Dest.Addr) // also where a name is dialled
	}
	if p >= privacyNone {
		f.Session, f.Source, f.Device, f.Destination, f.Egress = 0, "", "", "", ""
	}
}

// addrPort is empty for an address that is not known.
func addrPort(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// trafficShape is the snapshot as the API shows it under p.
func trafficShape(s *track.Snapshot, p privacy) Traffic {
	t := Traffic{
		Tick: s.Tick, IntervalMS: milliseconds(s.Interval), Total: statsShape(s.Total),
		Inbounds: statsShapes(s.Inbounds), Outbounds: statsShapes(s.Outbounds), Users: []UserStats{},
	}
	if p == privacyFull {
		for _, u := range s.Users {
			t.Users = append(t.Users, UserStats{uint64(u.User), u.Name, statsShape(u.Stats)})
		}
	}
	return t
}

func statsShape(s track.Stats) Stats {
	return Stats{Up: s.Up, Down: s.Down, UpRate: s.UpRate, DownRate: s.DownRate, Flows: s.Flows}
}

func statsShapes(m map[string]track.Stats) map[string]Stats {
	out := make(map[string]Stats, len(m))
	for tag, s := range m {
		out[tag] = statsShape(s)
	}
	return out
}

// milliseconds keeps a tenth of a millisecond.
func milliseconds(d time.Duration) float64 {
	return math.Round(float64(d)/float64(time.Millisecond)*10) / 10
}

// parseFlow is the flow that the path names.
func parseFlow(r *http.Request) (flow.ID, error) {
	id, err := flow.ParseID(r.PathValue("flow"))
	if err != nil {
		return 0, fail(http.StatusBadRequest, "%v", err)
	}
	return id, nil
}
