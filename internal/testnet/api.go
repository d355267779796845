package testnet

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

const apiTimeout = 10 * time.Second

// API is a client of a gateway's Unix socket, which is reached from any network namespace.
type API struct {
	t      T
	client *http.Client
	ctx    context.Context // ends streams with the lab
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// FlowRecord is a flow as the API shows it, live or closed.
type FlowRecord struct {
	ID              uint64    `json:"id"`
	Inbound         string    `json:"inbound"`
	Network         string    `json:"network"`
	Source          string    `json:"source"`
	Device          string    `json:"device"`
	Destination     string    `json:"destination"`
	Domain          string    `json:"domain"`
	Outbound        string    `json:"outbound"`
	OutboundVersion uint64    `json:"outbound_version"`
	Egress          string    `json:"egress"`
	Rule            *int      `json:"rule"`
	RuleName        string    `json:"rule_name"`
	Epoch           uint64    `json:"epoch"`
	User            UserRef   `json:"user"` // zero: anonymous
	Started         time.Time `json:"started"`
	Up              uint64    `json:"up"`
	Down            uint64    `json:"down"`
	Killed          bool      `json:"killed"`
	Ended           time.Time `json:"ended"`  // closed flows only
	Reason          string    `json:"reason"` // closed flows only
}

// UserRef is the user that a flow runs under.
type UserRef struct {
	ID   uint64 `json:"id"`
	Name string `json:"name"`
}

// Status is the part of GET /v1/status that tests look at.
type Status struct {
	Epoch        uint64            `json:"epoch"`
	Flows        int               `json:"flows"`
	Associations int               `json:"associations"`
	Drops        map[string]uint64 `json:"drops"`
	Warnings     []string          `json:"warnings"`
	Memory       struct {
		Goroutines int    `json:"goroutines"`
		Used       uint64 `json:"used"`
		Budget     uint64 `json:"budget"`
		Level      string `json:"level"`
	} `json:"memory"`
	Inbounds []struct {
		Offload string `json:"offload"`
	} `json:"inbounds"`
}

// Counters are bytes since start, bytes/s over the tick, and live flows.
type Counters struct {
	Up       uint64 `json:"up"`
	Down     uint64 `json:"down"`
	UpRate   uint64 `json:"up_rate"`
	DownRate uint64 `json:"down_rate"`
	Flows    int    `json:"flows"`
}

// Traffic is one snapshot of the sampler.
type Traffic struct {
	Tick       uint64              `json:"tick"`
	IntervalMS float64             `json:"interval_ms"`
	Total      Counters            `json:"total"`
	Inbounds   map[string]Counters `json:"inbounds"`
	Outbounds  map[string]Counters `json:"outbounds"`
}

// Event is one server-sent event.
type Event struct {
	Type string
	Data json.RawMessage
}

// Flow decodes the event's data as a flow.
func (e Event) Flow() (FlowRecord, error) {
	var f FlowRecord
	err := json.Unmarshal(e.Data, &f)
	return f, err
}

func newAPI(t T, socket string) *API {
	var d net.Dialer
	ctx, cancel := context.WithCancel(context.Background())
	return &API{t: t, ctx: ctx, cancel: cancel, client: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "unix", socket) },
	}}}
}

func (a *API) close() {
	a.cancel()
	a.wg.Wait()
	a.client.CloseIdleConnections()
}

// Do sends a request (path as "/v1/status", body may be nil) and returns status
// and body of the answer, whatever they are. It blocks at most 10 s.
func (a *API) Do(method, path string, body []byte) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(a.ctx, apiTimeout)
	defer cancel()
	resp, err := a.open(ctx, method, path, body)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

func (a *API) open(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://gatewayd"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	return a.client.Do(req)
}

// Get reads a path into v. Anything but 200 fails the test.
func (a *API) Get(path string, v any) {
	a.t.Helper()
	status, body, err := a.Do(http.MethodGet, path, nil)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("status %d: %s", status, body)
	}
	if err == nil {
		err = json.Unmarshal(body, v)
	}
	if err != nil {
		a.t.Fatalf("API: GET %s: %v", path, err)
	}
}

// Flows are the live flows that match the selector, as "outbound=direct"; "" is all.
func (a *API) Flows(selector string) []FlowRecord {
	a.t.Helper()
	var list struct{ Flows []FlowRecord }
	a.Get("/v1/connections?"+selector, &list)
	return list.Flows
}

// Closed are the records of the last closed flows.
func (a *API) Closed() []FlowRecord {
	a.t.Helper()
	var list struct{ Flows []FlowRecord }
	a.Get("/v1/connections/closed", &list)
	return list.Flows
}

// Status is the gateway's status.
func (a *API) Status() (s Status) {
	a.t.Helper()
	a.Get("/v1/status", &s)
	return s
}

// Traffic is the last snapshot.
func (a *API) Traffic() Traffic {
	a.t.Helper()
	status, body, err := a.Do(http.MethodGet, "/v1/traffic?once", nil)
	if err != nil || status != http.StatusOK {
		a.t.Fatalf("API: traffic: status %d: %v: %s", status, err, body)
	}
	// As JSON, or as the only event of a stream.
	if e, err := readEvent(bufio.NewReader(bytes.NewReader(body))); err == nil && e.Data != nil {
		body = e.Data
	}
	var t Traffic
	if err := json.Unmarshal(body, &t); err != nil {
		a.t.Fatalf("API: traffic: %v: %s", err, body)
	}
	return t
}

// Kill ends one flow and returns the answer's status: 204, or 404 for none.
func (a *API) Kill(id uint64) int {
	a.t.Helper()
	status, body, err := a.Do(http.MethodDelete, fmt.Sprintf("/v1/connections/%d", id), nil)
	if err != nil {
		a.t.Fatalf("API: kill %d: %v: %s", id, err, body)
	}
	return status
}

// KillWhere ends the flows that a selector picks and returns how many.
func (a *API) KillWhere(selector string) int {
	a.t.Helper()
	status, body, err := a.Do(http.MethodDelete, "/v1/connections?"+selector, nil)
	var answer struct{ Closed int }
	if err == nil && status == http.StatusOK {
		err = json.Unmarshal(body, &answer)
	}
	if err != nil || status != http.StatusOK {
		a.t.Fatalf("API: kill %q: status %d: %v: %s", selector, status, err, body)
	}
	return answer.Closed
}

// Events subscribes to a stream, as "/v1/connections/events", and returns once
// the subscription holds. The channel takes 4,096 events and closes with the
// stream; it ends with ctx or the gateway.
func (a *API) Events(ctx context.Context, path string) <-chan Event {
	a.t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(a.ctx, cancel)
	resp, err := a.open(ctx, http.MethodGet, path, nil)
	if err == nil && resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		err = fmt.Errorf("status %d", resp.StatusCode)
	}
	if err != nil {
		cancel()
		a.t.Fatalf("API: %s: %v", path, err)
	}
	events := make(chan Event, 4096)
	a.wg.Go(func() {
		defer stop()
		defer cancel()
		defer resp.Body.Close()
		defer close(events)
		for r := bufio.NewReader(resp.Body); ; {
			e, err := readEvent(r)
			if err != nil {
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
				return
			}
		}
	})
	return events
}

// readEvent reads one event of a text/event-stream (HTML, section 9.2); comments
// and events without data are skipped.
func readEvent(r *bufio.Reader) (Event, error) {
	e := Event{Type: "message"}
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return Event{}, err
		}
		line = strings.TrimRight(line, "\r\n")
		if line == "" {
			if e.Data != nil {
				return e, nil
			}
			e = Event{Type: "message"}
			continue
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "event":
			e.Type = value
		case "data":
			if e.Data != nil {
				e.Data = append(e.Data, '\n')
			}
			e.Data = append(e.Data, value...)
		}
	}
}
