package client_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// parse reads a whole stream.
func parse(text string) (events []client.Event, err error) {
	for ev, e := range client.Events(strings.NewReader(text)) {
		if e != nil {
			return events, e
		}
		events = append(events, ev)
	}
	return events, nil
}

func TestEventStreamsAreReadAsTheStandardHasThem(t *testing.T) {
	for text, want := range map[string][]string{
		"":                               {},
		": comment\n\n":                  {},
		"data: 1\n\n":                    {"message||1"},
		"event: opened\ndata: {}\n\n":    {"opened||{}"},
		"event:opened\r\ndata:x\r\n\r\n": {"opened||x"},
		"id: a-1\nevent: x\ndata: 1\n\ndata: 2\n\n": {"x|a-1|1", "message|a-1|2"},
		"data: a\ndata: b\n\n":                      {"message||a\nb"},
		"data\n\n":                                  {"message||"},
		"event: nothing\n\ndata: 1\n\n":             {"message||1"},
		"retry: 5\nunknown: 6\ndata: 1\n\n":         {"message||1"},
		"data:1\r\rdata:2\r\r":                      {"message||1", "message||2"},
		"data: cut off":                             {},
		"data: 1\n: in between\ndata: 2\n\n":        {"message||1\n2"},
	} {
		events, err := parse(text)
		got := []string{}
		for _, ev := range events {
			got = append(got, ev.Name+"|"+ev.ID+"|"+string(ev.Data))
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %v: want %q", text, got, err, want)
		}
	}
}

func TestAnEndlessLineEndsTheStream(t *testing.T) {
	if _, err := parse("data: " + strings.Repeat("x", 5<<20)); err == nil {
		t.Error("a line of 5 MiB was read")
	}
	if _, err := parse(strings.Repeat("data: "+strings.Repeat("x", 1<<20)+"\n", 5)); err == nil {
		t.Error("an event of 5 MiB was read")
	}
}

// FuzzEvents: no stream panics, and what was read is read again from its rewriting.
func FuzzEvents(f *testing.F) {
	f.Add("id: 1\nevent: opened\ndata: {\"id\":1}\n\n: x\n\ndata: 2\n\n")
	f.Add("event: lagged\r\ndata: {\"missed\":3}\r\n\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		events, err := parse(text)
		if err != nil {
			return
		}
		var again strings.Builder
		for _, ev := range events {
			fmt.Fprintf(&again, "id: %s\nevent: %s\ndata: %s\n\n", ev.ID, ev.Name, strings.ReplaceAll(string(ev.Data), "\n", "\ndata: "))
		}
		second, err := parse(again.String())
		if err != nil || len(second) != len(events) {
			t.Fatalf("%d events, then %d, %v", len(events), len(second), err)
		}
		for i := range events {
			if events[i].Name != second[i].Name || events[i].ID != second[i].ID || string(events[i].Data) != string(second[i].Data) {
				t.Errorf("%+v, then %+v", events[i], second[i])
			}
		}
	})
}

func TestAGatewayThatIsNotThereIsOneHelpfulLine(t *testing.T) {
	for _, where := range []string{"unix:" + filepath.Join(t.TempDir(), "api.sock"), "tcp:127.0.0.1:1", "http://127.0.0.1:1"} {
		c := connect(t, where, "")
		_, err := c.Status(t.Context())
		want := "cannot reach gatewayd at " + where + ": is it running? start it with: gatewayd run -c FILE"
		if err == nil || err.Error() != want {
			t.Errorf("%v: want %s", err, want)
		}
	}
}

func connect(t *testing.T, where, token string) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{API: where, Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestBadAddressesAreRefused(t *testing.T) {
	for _, where := range []string{"unix:relative", "tcp:", "tcp:host", "http://", "https:", "ftp://x", "/run/api.sock", "unix:"} {
		if _, err := client.New(client.Options{API: where}); err == nil {
			t.Errorf("%s is taken", where)
		}
	}
}

func TestTheTokenGoesWithEachCallAndNowhereElse(t *testing.T) {
	var leaked string
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { leaked = r.Header.Get("Authorization") }))
	defer other.Close()
	var seen string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = r.Header.Get("Authorization")
		http.Redirect(w, r, other.URL, http.StatusFound)
	}))
	defer s.Close()
	if _, err := connect(t, s.URL, "secret").Status(t.Context()); err == nil {
		t.Error("a redirect is no error")
	}
	if seen != "Bearer secret" || leaked != "" {
		t.Errorf("sent %q, leaked %q", seen, leaked)
	}
}

func TestAnAnswerThatIsNoProblemIsStillAnError(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	_, err := connect(t, s.URL, "").Status(t.Context())
	p, ok := err.(*api.Problem)
	if !ok || p.Status != 404 || !strings.Contains(p.Detail, "404 Not Found") {
		t.Errorf("%#v", err)
	}
}

func TestAStreamEndsWithItsContext(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() { _ = s.Close(); <-served }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	events := 0
	for _, err := range connect(t, "tcp:"+l.Addr().String(), "").Stream(ctx, "/", nil, "") {
		if err != nil {
			if err != context.Canceled {
				t.Errorf("ended with %v", err)
			}
			break
		}
		events++
		cancel()
	}
	if events != 1 {
		t.Errorf("%d events", events)
	}
}
