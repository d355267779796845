package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is a server in memory, in the bubble of its test.
type site struct {
	conns  chan net.Conn
	done   chan struct{}
	closed sync.Once
	dialed []string // guarded by mu

	mu    sync.Mutex
	posts []post
	reply func(n int, w http.ResponseWriter, r *http.Request) // of the post number n, from 1; nil: 200
}

type post struct {
	*http.Request
	body string
}

func newSite(t *testing.T) *site {
	s := &site{conns: make(chan net.Conn), done: make(chan struct{})}
	server := &http.Server{Handler: s}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(s)
	}()
	t.Cleanup(func() {
		server.Close()
		<-served
	})
	return s
}

func (s *site) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

func (s *site) Close() error {
	s.closed.Do(func() { close(s.done) })
	return nil
}

func (s *site) Addr() net.Addr { return &net.TCPAddr{} }

func (s *site) dial(ctx context.Context, _, address string) (net.Conn, error) {
	s.mu.Lock()
	s.dialed = append(s.dialed, address)
	s.mu.Unlock()
	ours, theirs := net.Pipe()
	select {
	case s.conns <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.posts = append(s.posts, post{r, string(body)})
	n, reply := len(s.posts), s.reply
	s.mu.Unlock()
	if reply != nil {
		reply(n, w, r)
	}
}

// got are the posts so far.
func (s *site) got() []post {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.posts)
}

// start runs a sender toward the site.
func start(t *testing.T, s *site, targets ...Target) *Sender {
	sender := New(Options{Dial: s.dial, Log: slog.New(slog.DiscardHandler)})
	sender.Use(targets)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- sender.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return sender
}

func wantState(t *testing.T, s *Sender, want State) {
	t.Helper()
	if got := s.State(); got != want {
		t.Errorf("state %+v, want %+v", got, want)
	}
}

var hook = Target{URL: "http://hook.example/in", On: []string{"user", "outbound.down"}, Secret: "s3cret"}

func TestAnEventIsPostedSignedToThoseWhoWantIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		other := Target{URL: "http://other.example/", On: []string{"warning"}}
		sender := start(t, s, hook, other)
		at := time.Now()
		sender.Send("user.near", at, map[string]any{"name": "ann"})
		sender.Send("outbound.down", at, "x")
		sender.Send("outbound.up", at, "x")
		synctest.Wait()
		got := s.got()
		if len(got) != 2 || got[0].Host != "hook.example" || got[0].URL.Path != "/in" || got[0].Method != "POST" || got[0].Header.Get("Content-Type") != "application/json" {
			t.Fatalf("posts %+v", got)
		}
		var body struct {
			ID, Type string
			Time     time.Time
			Data     struct{ Name string }
		}
		if err := json.Unmarshal([]byte(got[0].body), &body); err != nil || body.Type != "user.near" || body.Data.Name != "ann" || !body.Time.Equal(at) {
			t.Errorf("body %s: %v", got[0].body, err)
		}
		if body.ID == "" || got[0].Header.Get("Gatewayd-Delivery") != body.ID || got[0].Header.Get("Gatewayd-Event") != "user.near" {
			t.Errorf("headers %v", got[0].Header)
		}
		stamp := got[0].Header.Get("Gatewayd-Timestamp")
		if got[0].Header.Get("Gatewayd-Signature") != sign("s3cret", stamp, []byte(got[0].body)) {
			t.Errorf("signature %s", got[0].Header.Get("Gatewayd-Signature"))
		}
		wantState(t, sender, State{Sent: 2})
	})
}

// The example is computed by openssl: printf '1700000000.{}' | openssl dgst -sha256 -hmac key
func TestASignatureIsTheHMACOfTimestampAndBody(t *testing.T) {
	const want = "v1=9d713ed406bb7076d4123f0dc2c39d2df5c654ed4b0cd56b52c8b4c940bd63ae"
	if got := sign("key", "1700000000", []byte("{}")); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestWhatIsNotTakenIsTriedAgainInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		began := time.Now()
		var at []time.Duration
		s.reply = func(n int, w http.ResponseWriter, _ *http.Request) {
			at = append(at, time.Since(began))
			switch n {
			case 1, 2:
				w.WriteHeader(500)
			case 3:
				w.Header().Set("Retry-After", "60")
				w.WriteHeader(429)
			}
		}
		sender := start(t, s, hook)
		sender.Send("user.a", began, nil)
		sender.Send("user.b", began, nil)
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		want := []time.Duration{0, time.Second, 3 * time.Second, 63 * time.Second, 63 * time.Second}
		var kinds []string
		for _, p := range s.got() {
			kinds = append(kinds, p.Header.Get("Gatewayd-Event"))
		}
		if !slices.Equal(at, want) || !slices.Equal(kinds, []string{"user.a", "user.a", "user.a", "user.a", "user.b"}) {
			t.Errorf("posts of %v at %v, want %v", kinds, at, want)
		}
		wantState(t, sender, State{Sent: 2})
	})
}

func TestARefusedEventIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.reply = func(n int, w http.ResponseWriter, _ *http.Request) {
			if n == 1 {
				w.WriteHeader(404)
			}
		}
		sender := start(t, s, hook)
		sender.Send("user.a", time.Now(), nil)
		sender.Send("user.b", time.Now(), nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		wantState(t, sender, State{Sent: 1, Refused: 1})
	})
}

func TestAnEventIsGivenUpAfterAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.reply = func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }
		sender := start(t, s, hook)
		sender.Send("user.a", time.Now(), nil)
		time.Sleep(maxAge - lastPause)
		synctest.Wait()
		wantState(t, sender, State{Waiting: 1})
		time.Sleep(2 * lastPause)
		synctest.Wait()
		wantState(t, sender, State{Dropped: 1})
	})
}

func TestAFullQueueDropsItsOldestAndASlowTargetHoldsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		release := make(chan struct{})
		s.reply = func(_ int, _ http.ResponseWriter, r *http.Request) {
			if r.Host == "hook.example" {
				<-release
			}
		}
		quick := hook
		quick.URL = "http://quick.example/"
		sender := start(t, s, hook, quick)
		for range queueLength + 10 {
			sender.Send("user.a", time.Now(), nil)
			synctest.Wait()
		}
		wantState(t, sender, State{Sent: queueLength + 10, Dropped: 10, Waiting: queueLength})
		close(release)
		time.Sleep(time.Minute)
		synctest.Wait()
		// The one that was being posted when it was dropped arrived anyway.
		wantState(t, sender, State{Sent: 2*queueLength + 10 + 1, Dropped: 10})
	})
}

func TestATargetThatSaysNothingIsTimedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.reply = func(n int, _ http.ResponseWriter, r *http.Request) {
			if n == 1 {
				<-r.Context().Done()
			}
		}
		sender := start(t, s, hook)
		sender.Send("user.a", time.Now(), nil)
		time.Sleep(postTimeout + firstPause)
		synctest.Wait()
		wantState(t, sender, State{Sent: 1})
	})
}

func TestRedirectsStayOnTheHostAndKeepTheMethod(t *testing.T) {
	for name, c := range map[string]struct {
		code   int
		to     string
		follow bool
	}{
		"elsewhere on the host":   {307, "/there", true},
		"always on the host":      {308, "http://hook.example/there", true},
		"to another host":         {307, "http://evil.example/", false},
		"to a host with the name": {307, "http://hook.example.evil.example/", false},
		"to another port":         {307, "http://hook.example:81/", false},
		"to another scheme":       {307, "https://hook.example/", false},
		"as a GET":                {302, "/there", false},
		"to nowhere":              {307, "/in", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSite(t)
				s.reply = func(_ int, w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/in" {
						w.Header().Set("Location", c.to)
						w.WriteHeader(c.code)
					}
				}
				sender := start(t, s, hook)
				sender.Send("user.a", time.Now(), nil)
				time.Sleep(time.Minute)
				synctest.Wait()
				synctest.Wait()
				want := State{Refused: 1}
				if c.follow {
					want = State{Sent: 1}
				}
				wantState(t, sender, want)
				got := s.got()
				for _, p := range got {
					if p.Method != "POST" || p.body != got[0].body {
						t.Errorf("%s with %q", p.Method, p.body)
					}
				}
				for _, address := range s.dialed {
					if address != "hook.example:80" {
						t.Errorf("dialed %s", address)
					}
				}
				if len(got) > maxRedirects+1 {
					t.Errorf("%d posts", len(got))
				}
			})
		})
	}
}

func TestATargetThatStaysKeepsWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		s.reply = func(n int, w http.ResponseWriter, _ *http.Request) {
			if n <= 2 {
				w.WriteHeader(503)
			}
		}
		goes := Target{URL: "http://goes.example/", On: []string{"user"}}
		comes := Target{URL: "http://comes.example/", On: []string{"user"}}
		sender := start(t, s, hook, goes)
		sender.Send("user.a", time.Now(), nil)
		synctest.Wait()
		sender.Use([]Target{comes, hook})
		sender.Send("user.b", time.Now(), nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		hosts := make(map[string]int)
		for _, p := range s.got() {
			hosts[p.Host+" "+p.Header.Get("Gatewayd-Event")]++
		}
		want := map[string]int{"hook.example user.a": 2, "goes.example user.a": 1, "hook.example user.b": 1, "comes.example user.b": 1}
		for k, n := range want {
			if hosts[k] != n {
				t.Errorf("%d posts of %s, want %d: %v", hosts[k], k, n, hosts)
			}
		}
		wantState(t, sender, State{Sent: 3})
	})
}

func TestWhatIsTooLargeOrNoJSONIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		sender := start(t, s, hook)
		sender.Send("user.a", time.Now(), strings.Repeat("x", maxBody))
		sender.Send("user.a", time.Now(), func() {})
		synctest.Wait()
		wantState(t, sender, State{Dropped: 2})
	})
}

func TestAFailedDialIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		tries := 0
		sender := New(Options{Log: slog.New(slog.DiscardHandler), Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if tries++; tries < 3 {
				return nil, errors.New("unreachable")
			}
			return s.dial(ctx, network, address)
		}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- sender.Run(ctx) }()
		sender.Use([]Target{hook})
		sender.Send("user.a", time.Now(), nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		wantState(t, sender, State{Sent: 1})
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
