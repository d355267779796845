package suite

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// sixFlows opens a user's flows of every kind, idle and busy; they go on until they
// are cut, or the test ends.
func (b *userBed) sixFlows(p person) {
	b.t.Helper()
	for _, network := range []string{"tcp", "udp"} { // idle
		if err := exchangeWord(b.mustDial(p.v6, network, hostPort(testnet.FarV6, quotaEcho)), "hello"); err != nil {
			b.t.Fatalf("%s of %s: %v", network, p.name, err)
		}
	}
	down, up := b.mustDial(p.v4, "tcp", hostPort(testnet.FarV4, quotaSource)), b.mustDial(p.v6, "tcp", hostPort(testnet.FarV6, quotaSink))
	udp := b.mustDial(p.v4, "udp", hostPort(testnet.FarV4, quotaSink))
	down.Write([]byte("x"))                           //nolint:errcheck // nothing would come
	go new(tally).drain(down)                         //nolint:errcheck // until it is cut
	go testnet.WritePattern(up, -1)                   //nolint:errcheck // likewise
	go gush(udp, 1000, 200_000, b.t.Context().Done()) // likewise
	ctx, cancel := context.WithCancel(b.t.Context())  // its end kills it
	b.t.Cleanup(cancel)
	cmd := b.Cli.Command(ctx, "ping", "-q", "-n", "-i", "0.2", "-I", p.v4, testnet.FarV4)
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		cancel()
		cmd.Wait() //nolint:errcheck // killed
	})
	testnet.Until(b.t, patience, "six flows of "+p.name+" live", func() bool {
		flows := b.gw.API.Flows("user=" + p.name)
		moving := 0
		for _, f := range flows {
			if f.Up+f.Down > 0 {
				moving++
			}
		}
		return moving == 6
	})
}

// usersConfig is usersBase with a line for each user, without the empty ones.
func usersConfig(lines []string, more string) string {
	config := usersBase + more
	for i, line := range slices.DeleteFunc(slices.Clone(lines), func(s string) bool { return s == "" }) {
		if i == 0 {
			config += "users:\n"
		}
		config += "  - " + line + "\n"
	}
	return config
}

// cutting is a way to end all flows of a user.
type cutting struct {
	name, reason string
	limits       string // of the user in the configuration; "-": it is made by the API
	// end has it done and returns when it was to happen.
	end func(b *userBed, p person, reload func(line string)) time.Time
	// again undoes it; nil: it can't be.
	again func(b *userBed, p person, reload func(line string))
}

// shortly is when users expire whose time a test sets.
const shortly = 400 * time.Millisecond

func iso(at time.Time) string { return at.UTC().Format("2006-01-02T15:04:05.000Z") }

var cuttings = []cutting{
	{
		name: "disabled by the API", reason: "disabled", limits: "-",
		end: func(b *userBed, p person, _ func(string)) time.Time {
			at := time.Now()
			b.edit(p.name, `{"enabled": false}`)
			return at
		},
		again: func(b *userBed, p person, _ func(string)) { b.edit(p.name, `{"enabled": true}`) },
	},
	{
		name: "disabled by a reload", reason: "disabled", limits: "limits: {bandwidth: {down: 20Mbit/s, up: 20Mbit/s}}",
		end: func(_ *userBed, p person, reload func(string)) time.Time {
			at := time.Now()
			reload(p.yaml("enabled: false"))
			return at
		},
		again: func(_ *userBed, p person, reload func(string)) { reload(p.yaml("")) },
	},
	{
		name: "expired by a date of the API", reason: "expired", limits: "-",
		end: func(b *userBed, p person, _ func(string)) time.Time {
			at := time.Now().Add(shortly)
			b.edit(p.name, fmt.Sprintf(`{"expires": {"at": %q}}`, iso(at)))
			return at
		},
		again: func(b *userBed, p person, _ func(string)) { b.edit(p.name, `{"expires": null}`) },
	},
	{
		name: "expired by a date of a reload", reason: "expired", limits: "limits: {speed: 20Mbit/s}",
		end: func(_ *userBed, p person, reload func(string)) time.Time {
			at := time.Now().Add(shortly)
			reload(p.yaml("expires: {at: " + iso(at) + "}"))
			return at
		},
		again: func(_ *userBed, p person, reload func(string)) { reload(p.yaml("")) },
	},
	{
		name: "expired after its first use", reason: "expired", limits: "-",
		end: func(b *userBed, p person, _ func(string)) time.Time {
			first := b.user(p.name).Usage.FirstUse
			if first == nil {
				b.t.Fatal("no first use")
			}
			lasts := time.Since(*first).Round(time.Second) + time.Second
			b.edit(p.name, fmt.Sprintf(`{"expires": {"after_first_use": %q}}`, lasts))
			return first.Add(lasts)
		},
		again: func(b *userBed, p person, _ func(string)) {
			if a := call(b.t, b.gw, "POST", "/v1/users/"+p.name+"/extend", `{"for": "1h"}`); a.status != 200 {
				b.t.Fatalf("extend: status %d: %s", a.status, a.body)
			}
		},
	},
	{
		name: "removed by the API", reason: "retired", limits: "-",
		end: func(b *userBed, p person, _ func(string)) time.Time {
			at := time.Now()
			if a := call(b.t, b.gw, "DELETE", "/v1/users/"+p.name, ""); a.status != 204 {
				b.t.Fatalf("DELETE: status %d: %s", a.status, a.body)
			}
			return at
		},
	},
	{
		name: "removed by a reload", reason: "retired", limits: "limits: {connections: 100}",
		end: func(_ *userBed, _ person, reload func(string)) time.Time {
			at := time.Now()
			reload("")
			return at
		},
	},
}

func TestFlowsOfAUserThatMayNotGoOnEndInTimeIdleOrBusy(t *testing.T) {
	testnet.Require(t, "ping")
	all := people(len(cuttings))
	lines := make([]string, len(cuttings))
	for i, e := range cuttings {
		if e.limits != "-" {
			lines[i] = all[i].yaml(e.limits)
		}
	}
	b := newUserBed(t, usersConfig(lines, ""), all...)
	b.serveAll()
	j := b.follow(t)
	for i, e := range cuttings {
		t.Run(e.name, func(t *testing.T) {
			b, p, limits := b.on(t), all[i], lines[i]
			if e.limits == "-" {
				b.create(p, "")
			}
			change := func(line string) {
				lines[i] = line
				reload(t, b.gw, b.config(usersConfig(lines, "")), i%2 == 0)
			}
			var late time.Duration
			for range 3 { // the machine's own slowness is not the gateway's
				if late = b.cutBy(t, j, p, e, change); late <= sweepLimit || t.Failed() || e.again == nil {
					break
				}
				change(limits)
			}
			if late > sweepLimit {
				t.Errorf("the last flow ended %v after the moment, every time", late)
			}
		})
	}
	j.sound(t)
}

// cutBy opens flows of every kind, ends them and returns how late the last one was.
func (b *userBed) cutBy(t *testing.T, j *journal, p person, e cutting, change func(string)) (late time.Duration) {
	t.Helper()
	b.sixFlows(p)
	now := b.gw.API.Flows("user=" + p.name)
	at := e.end(b, p, change)
	b.records(j, p.name, len(now))
	j.mu.Lock()
	for _, f := range now {
		r := j.closed[f.ID]
		if r.Reason != e.reason {
			t.Errorf("flow#%d of %s closed as %s, want %s", f.ID, r.Network, r.Reason, e.reason)
		}
		late = max(late, r.Ended.Sub(at))
		if r.Ended.Before(at.Add(-5 * time.Millisecond)) { // records have milliseconds
			t.Errorf("flow#%d of %s ended %v too early", f.ID, r.Network, at.Sub(r.Ended))
		}
	}
	j.mu.Unlock()
	t.Logf("the last flow ended %v after the moment", late)
	if e.again == nil { // its devices are nobody's now
		b.passes(p.v4, testnet.FarV4, quotaEcho)
		return late
	}
	b.refused(p.v4, testnet.FarV4, quotaEcho, quotaEcho)
	if state := b.user(p.name).State; state != e.reason {
		t.Errorf("the user is %s", state)
	}
	e.again(b, p, change)
	b.passes(p.v4, testnet.FarV4, quotaEcho)
	b.passes(p.v6, testnet.FarV6, quotaEcho)
	for _, f := range b.gw.API.Flows("") {
		if host, _, err := net.SplitHostPort(f.Source); err == nil && (host == p.v4 || host == p.v6) && f.User.Name != p.name {
			t.Errorf("flow#%d of %s runs under %q", f.ID, f.Source, f.User.Name)
		}
	}
	return late
}

func TestAUserOfTheConfigurationIsNotChangedByTheAPI(t *testing.T) {
	all := people(1)
	b := newUserBed(t, usersConfig([]string{all[0].yaml("")}, ""), all...)
	for _, method := range []string{"PATCH", "DELETE"} {
		if a := call(t, b.gw, method, "/v1/users/"+all[0].name, `{"enabled": false}`); a.status != 409 || !strings.Contains(a.body, "config") {
			t.Errorf("%s: status %d: %s", method, a.status, a.body)
		}
	}
	if u := b.user(all[0].name); u.State != "unused" {
		t.Errorf("the user is %s", u.State)
	}
}
