package api_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/track"
)

func decode[T any](t *testing.T, data []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("%s: %v", data, err)
	}
	return v
}

func TestAFlowsEventsComeInOrderWithItsFinalCounters(t *testing.T) {
	f := start(t, nil)
	f.open(nil) // before the subscription: not told
	events := f.follow("/v1/connections/events", nil, "")
	fl := f.open(nil)
	fl.Moved(flow.Up, 7)
	fl.Moved(flow.Down, 9)
	f.tracker.Kill(fl.ID())
	fl.Close(nil)
	opened, closed := f.next(events), f.next(events)
	if opened.Name != "opened" || closed.Name != "closed" {
		t.Fatalf("events %s, %s", opened.Name, closed.Name)
	}
	got := decode[api.Flow](t, closed.Data)
	if got.ID != 2 || *got.Up != 7 || *got.Down != 9 || got.Reason != "killed" || got.Ended.IsZero() || !*got.Killed {
		t.Errorf("closed %s", closed.Data)
	}
	if got = decode[api.Flow](t, opened.Data); got.ID != 2 || got.Reason != "" || !got.Ended.IsZero() {
		t.Errorf("opened %s", opened.Data)
	}
}

func TestAnIdleStreamSendsHeartbeats(t *testing.T) {
	f := start(t, nil)
	f.server.SetTiming(5*time.Millisecond, deadline)
	c, lines := f.raw("/v1/connections/events")
	defer c.Close()
	for seen := 0; seen < 3; {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(line, ": still here") {
			seen++
		}
	}
}

// raw opens a stream by hand and reads its header.
func (f *fixture) raw(path string) (net.Conn, *bufio.Reader) {
	f.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(f.tcp, "http://"))
	if err != nil {
		f.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(deadline)); err != nil {
		f.Fatal(err)
	}
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n", path, f.tokens["read"])
	lines := bufio.NewReader(c)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			f.Fatal(err)
		}
		if line == "\r\n" {
			return c, lines
		}
	}
}

func TestASlowReaderIsDisconnectedAndOthersSeeEverything(t *testing.T) {
	f := start(t, nil)
	f.server.SetTiming(time.Minute, 50*time.Millisecond)
	slow, _ := f.raw("/v1/connections/events")
	defer slow.Close()
	if err := slow.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	f.await("the slow stream opens", func() bool { return f.server.OpenStreams() == 1 })
	f.await("the slow reader is disconnected", func() bool {
		for range 500 {
			f.open(func(m *track.Meta) { m.RuleName = strings.Repeat("x", 4096) }).Close(nil)
		}
		return f.server.OpenStreams() == 0
	})
	events := f.follow("/v1/connections/events", nil, "")
	fl := f.open(nil)
	if got := decode[api.Flow](t, f.next(events).Data); got.ID != uint64(fl.ID()) {
		t.Errorf("another reader sees %+v", got)
	}
}

func TestAReaderThatFallsBehindIsToldExactlyHowManyItMissed(t *testing.T) {
	f := start(t, nil)
	c, lines := f.raw("/v1/connections/events")
	defer c.Close()
	const flows = 30_000 // more than the socket's buffers and the ring hold
	for range flows {
		f.open(func(m *track.Meta) { m.RuleName = strings.Repeat("x", 1024) }).Close(nil)
	}
	var told, missed uint64
	name := ""
	for told+missed < 2*flows {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("after %d told and %d missed: %v", told, missed, err)
		}
		if v, ok := strings.CutPrefix(line, "event: "); ok {
			name = strings.TrimSpace(v)
		}
		if v, ok := strings.CutPrefix(line, "data: "); ok {
			if name == "lagged" {
				missed += decode[api.Lagged](t, []byte(v)).Missed
			} else {
				told++
			}
		}
	}
	if missed == 0 || told+missed != 2*flows {
		t.Errorf("%d told, %d missed", told, missed)
	}
}

func TestStreamsAreBoundedAndAFreedSlotServesAgain(t *testing.T) {
	f := start(t, nil)
	conns := make([]net.Conn, api.MaxStreams)
	for i := range conns {
		conns[i], _ = f.raw("/v1/connections/events")
		defer conns[i].Close()
	}
	resp, body := f.ask("read", "GET", "/v1/traffic", nil)
	f.wantProblem(resp, body, 503, "at most 64")
	if _, err := f.unix.Status(f.within()); err != nil {
		t.Errorf("other calls: %v", err)
	}
	if err := conns[0].Close(); err != nil {
		t.Fatal(err)
	}
	f.await("the slot is free", func() bool { return f.server.OpenStreams() < api.MaxStreams })
	c, _ := f.raw("/v1/traffic")
	_ = c.Close()
}

func TestTheStopEndsStreamsAfterTheirLastEvents(t *testing.T) {
	f := start(t, nil)
	f.server.SetDrain(deadline)
	events := f.follow("/v1/connections/events", nil, "")
	const flows = 500 // their events fit the ring
	for range flows {
		fl := f.open(nil)
		fl.End(flow.ErrShutdown)
		fl.Close(nil)
	}
	f.stop()
	closed := 0
	for ev := range events {
		if ev.Name == "closed" && decode[api.Flow](t, ev.Data).Reason == "shutdown" {
			closed++
		}
	}
	if closed != flows {
		t.Errorf("%d of %d ends were told", closed, flows)
	}
}

func TestTrafficStreamsOneEventPerTick(t *testing.T) {
	f := start(t, nil)
	fl := f.open(func(m *track.Meta) { m.User, m.UserName = 1, "alice" })
	f.tracker.Final()
	events := f.follow("/v1/traffic", nil, "")
	for tick := uint64(2); tick < 5; tick++ {
		fl.Moved(flow.Up, 100)
		f.tracker.Final()
		ev := f.next(events)
		got := decode[api.Traffic](t, ev.Data)
		if ev.Name != "traffic" || got.Tick != tick || got.Total.Up != (tick-1)*100 || got.Inbounds["lan"].Flows != 1 {
			t.Errorf("%s: %s", ev.Name, ev.Data)
		}
	}
}

func TestTrafficOnceAnswersTheLastSnapshotInTheContractsShape(t *testing.T) {
	f := start(t, nil)
	_, body := f.ask("admin", "GET", "/v1/traffic?once", nil)
	if want := `{"tick":0,"interval_ms":0,"total":{"up":0,"down":0,"up_rate":0,"down_rate":0,"flows":0},"inbounds":{},"outbounds":{},"users":[]}`; body != want+"\n" {
		t.Errorf("before the first tick: %s", body)
	}
	f.open(func(m *track.Meta) { m.Outbound = "" }).Moved(flow.Up, 5)
	f.open(func(m *track.Meta) { m.User, m.UserName = 1, "alice" }).Moved(flow.Down, 6)
	f.tracker.Final()
	_, body = f.ask("admin", "GET", "/v1/traffic?once", nil)
	got := decode[api.Traffic](t, []byte(body))
	if got.Tick != 1 || got.IntervalMS <= 0 || got.Outbounds[""].Up != 5 || got.Outbounds["direct"].Down != 6 || len(got.Users) != 1 {
		t.Errorf("snapshot %s", body)
	}
	if !strings.Contains(body, `"users":[{"user":1,"name":"alice","up":0,"down":6,"up_rate":`) {
		t.Errorf("users: %s", body)
	}
	resp, body := f.ask("read", "GET", "/v1/traffic?once=no", nil)
	f.wantProblem(resp, body, 400, "once")
}

func TestEventsOfTheAskedTypesComeWithIds(t *testing.T) {
	f := start(t, nil)
	events := f.follow("/v1/events", url.Values{"types": {"config,warning"}}, "")
	f.open(nil)
	f.events.Publish("user.near", map[string]string{"user": "alice"})
	f.events.Publish("config.applied", api.Applied{Epoch: 2})
	f.events.Publish("warning", map[string]string{"text": "clock"})
	first, second := f.next(events), f.next(events)
	if first.Name != "config.applied" || second.Name != "warning" || first.ID == "" || first.ID == second.ID {
		t.Errorf("events %+v, %+v", first, second)
	}
	resumed := f.follow("/v1/events", url.Values{"types": {"config,warning"}}, first.ID)
	if ev := f.next(resumed); ev.ID != second.ID {
		t.Errorf("resumed at %+v", ev)
	}
	again := f.follow("/v1/events", url.Values{"types": {"config"}}, "otherrun-99")
	if ev := f.next(again); ev.ID != first.ID {
		t.Errorf("after a restart: %+v", ev)
	}
	for query, header := range map[string]string{"?types=flows": "", "?types=": "", "?types=config,,flow": "", "": "x"} {
		if err := f.streamError("/v1/events"+query, header); statusOf(err) != 400 {
			t.Errorf("%s, id %q: %v", query, header, err)
		}
	}
}

// streamError is how opening a stream fails.
func (f *fixture) streamError(path, lastID string) error {
	p, query, _ := strings.Cut(path, "?")
	q, err := url.ParseQuery(query)
	if err != nil {
		f.Fatal(err)
	}
	for _, err := range f.unix.Stream(f.within(), p, q, lastID) {
		return err
	}
	return nil
}

func TestFlowEventsJoinTheCommonStream(t *testing.T) {
	f := start(t, nil)
	events := f.follow("/v1/events", url.Values{"types": {"flow"}}, "")
	fl := f.open(nil)
	fl.Close(nil)
	opened, closed := f.next(events), f.next(events)
	if opened.Name != "flow.opened" || closed.Name != "flow.closed" || decode[api.Flow](t, closed.Data).ID != uint64(fl.ID()) {
		t.Errorf("events %+v, %+v", opened, closed)
	}
}

func TestAReaderWhoWantsNothingOfWhatHappensHearsHeartbeatsAlone(t *testing.T) {
	f := start(t, nil)
	f.server.SetTiming(200*time.Millisecond, deadline)
	c, lines := f.raw("/v1/events?types=config")
	defer c.Close()
	stop := make(chan struct{})
	var busy sync.WaitGroup
	busy.Go(func() { // always something, and never for this reader
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				f.events.Publish("warning", 1)
				f.events.Publish("lagged", api.Lagged{Missed: 424242}) // flows
			case <-stop:
				return
			}
		}
	})
	defer busy.Wait()
	defer close(stop)
	for heard := 0; heard < 3; {
		line, err := lines.ReadString('\n')
		if err != nil || strings.Contains(line, "424242") {
			t.Fatalf("%d heartbeats, then %q, %v", heard, line, err)
		}
		if strings.Contains(line, "still here") {
			heard++
		}
	}
}

func TestAResumedReaderIsToldWhatTheRingLost(t *testing.T) {
	f := start(t, nil)
	events := f.follow("/v1/events", url.Values{"types": {"warning"}}, "")
	f.events.Publish("warning", 0)
	first := f.next(events)
	for i := range api.KeptEvents + 10 {
		f.events.Publish("warning", i+1)
	}
	resumed := f.follow("/v1/events", url.Values{"types": {"warning"}}, first.ID)
	if ev := f.next(resumed); ev.Name != "lagged" || decode[api.Lagged](t, ev.Data).Missed != 10 {
		t.Errorf("resumed with %s %s", ev.Name, ev.Data)
	}
	if ev := f.next(resumed); string(ev.Data) != "11" {
		t.Errorf("oldest kept: %s", ev.Data)
	}
}

func TestAReaderThatLeavesFreesItsSlot(t *testing.T) {
	f := start(t, nil)
	c, _ := f.raw("/v1/traffic")
	f.await("open", func() bool { return f.server.OpenStreams() == 1 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	f.await("freed", func() bool { return f.server.OpenStreams() == 0 })
}

func TestAHeadRequestOpensNoStream(t *testing.T) {
	f := start(t, nil)
	resp, body := f.ask("read", "HEAD", "/v1/connections/events", nil)
	if resp.StatusCode != 200 || body != "" || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Errorf("%d %q %v", resp.StatusCode, body, resp.Header)
	}
	f.await("no slot is held", func() bool { return f.server.OpenStreams() == 0 })
}
