package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"gatewayd/flow"
	"gatewayd/track"
)

const (
	headerTimeout = 5 * time.Second
	bodyTimeout   = 30 * time.Second
	answerTimeout = 60 * time.Second // for a whole answer that is no stream
	idleTimeout   = 2 * time.Minute
	maxHeader     = 16 << 10 // bytes
	maxBody       = 1 << 20  // bytes
)

// ErrStale is what Gateway.Apply returns for an etag that is not the running
// configuration's; the answer is 412.
var ErrStale = errors.New("the configuration changed meanwhile")

// Gateway is what the API needs of the gateway. All methods are safe for
// concurrent use. An error with exitcode.Config is the text's fault (422), one
// with exitcode.Collision a clash (409), any other the gateway's (500).
type Gateway interface {
	// Status has Epoch, Inbounds, Associations, Ledger, FlowLog, BlockedSuppressed and Warnings.
	Status() Status
	// Outbounds lists the current version of each tag, with those that drain.
	Outbounds() []Outbound
	// Rules lists the rules of the plane in order, the default route last.
	Rules() []Rule
	// Config is the running configuration's text and its strong etag, unquoted.
	Config() (text, etag string)
	// Apply makes text the running configuration, all or nothing, if etag is the
	// running one's, else ErrStale. It blocks until the new plane serves.
	Apply(ctx context.Context, text, etag string) error
	// Check tells what Apply would refuse, and touches nothing.
	Check(text string) error
	// Reload reads the configuration file again and applies it. It blocks as Apply does.
	Reload(ctx context.Context) error
}

// Options are what a Server is made of. Tracker, Gateway and Drops are needed.
type Options struct {
	Listen      []string    // "unix:/path" or "tcp:address:port"
	SocketGroup string      // group that may use the Unix socket; "" or an unknown one: root alone
	Tokens      []Token     // of TCP callers; every TCP listener needs one
	TLS         *tls.Config // of every TCP listener; needed off loopback
	Hosts       []string    // names that a Host header may have, besides loopback names and the listener's address
	Privacy     string      // full, addresses or none; "" is full
	Version     string      // of the program
	Log         *slog.Logger
	Tracker     *track.Tracker
	Gateway     Gateway
	Drops       *flow.Drops
	Events      *Events // where /v1/events comes from; nil: flow events only
	Users       Users   // nil: calls about users answer 503
	Billing     Billing // nil: calls about takes and series answer 503
	Devices     Devices // nil: calls about devices answer 503
	PerUser     int     // users that get metrics of their own; 0: none
}

// Server serves the API. New makes it, Listen binds, Serve runs until its context ends.
type Server struct {
	opt       Options
	log       *slog.Logger
	bindings  []binding
	secrets   []secret
	hosts     map[string]bool
	group     *uint32
	privacy   privacy
	events    *Events
	handler   http.Handler
	started   time.Time
	listeners []net.Listener

	editing   sync.Mutex       // held from a look at a definition to its change
	streams   chan struct{}    // one slot per open stream
	lists     [2]chan struct{} // likewise of lists of flows: administrators', others'
	timing    timing
	flowPump  sync.Once
	watching  watching
	asking    *asking
	tasks     sync.WaitGroup // what streams started beside themselves
	stopping  context.Context
	beginStop context.CancelFunc
}

// timing are the durations that streams live by.
type timing struct {
	drain     time.Duration // for requests in progress when the server stops
	heartbeat time.Duration // a comment after so long without an event
	write     time.Duration // a reader that takes longer for one write is disconnected
}

// New checks the options and reads the token files. It binds and starts nothing.
func New(o Options) (*Server, error) {
	if o.Tracker == nil || o.Gateway == nil || o.Drops == nil {
		return nil, errors.New("api: tracker, gateway and drops are needed")
	}
	s := &Server{
		opt: o, log: o.Log, group: lookupGroup(o.SocketGroup), events: o.Events, started: time.Now(),
		hosts: map[string]bool{}, streams: make(chan struct{}, maxStreams),
		lists:  [2]chan struct{}{make(chan struct{}, maxLists), make(chan struct{}, maxLists)},
		asking: newAsking(),
		timing: timing{drain: 2 * time.Second, heartbeat: 15 * time.Second, write: 10 * time.Second},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.events == nil {
		s.events = NewEvents()
	}
	s.stopping, s.beginStop = context.WithCancel(context.Background())
	if err := s.configure(); err != nil {
		return nil, err
	}
	s.handler = s.router()
	return s, nil
}

// configure turns the option's texts into what requests are compared with.
func (s *Server) configure() (err error) {
	if s.privacy, err = parsePrivacy(s.opt.Privacy); err != nil {
		return err
	}
	if s.secrets, err = readTokens(s.opt.Tokens); err != nil {
		return err
	}
	for _, h := range s.opt.Hosts {
		s.hosts[hostName(h)] = true
	}
	for _, text := range s.opt.Listen {
		b, err := parseBinding(text)
		if err != nil {
			return err
		}
		if b.network == "tcp" && len(s.secrets) == 0 {
			return fmt.Errorf("api.listen %s: a TCP listener needs a token: add api.tokens", text)
		}
		if !b.loopback() && s.opt.TLS == nil {
			return fmt.Errorf("api.listen %s: tokens off loopback need TLS: add api.tls or listen on 127.0.0.1", text)
		}
		if b.network == "tcp" {
			s.hosts[hostName(b.addr)] = true
		}
		s.bindings = append(s.bindings, b)
	}
	delete(s.hosts, "") // "tcp::8690" names no host
	return nil
}

// Listen binds every address, all or none, so that a failure comes before
// devices open. Errors carry exitcode.Collision or exitcode.Missing.
func (s *Server) Listen() error {
	if s.opt.SocketGroup != "" && s.group == nil {
		s.log.Warn("api socket group does not exist: only root may use the socket", "group", s.opt.SocketGroup)
	}
	for _, b := range s.bindings {
		l, err := s.open(b)
		if err != nil {
			s.Close()
			return err
		}
		s.listeners = append(s.listeners, l)
	}
	return nil
}

// Addrs are the bound addresses in the order of Options.Listen.
func (s *Server) Addrs() []net.Addr {
	var out []net.Addr
	for _, l := range s.listeners {
		out = append(out, l.Addr())
	}
	return out
}

// Close gives up what Listen bound; for a Server that will not Serve.
func (s *Server) Close() {
	for _, l := range slices.Backward(s.listeners) {
		_ = l.Close() // nothing was served yet
	}
	s.listeners = nil
	s.beginStop()
}

// Serve answers requests on what Listen bound until ctx ends, then ends the
// streams, lets requests in progress finish for two seconds, and returns nil.
// It may be called once.
func (s *Server) Serve(ctx context.Context) error {
	srv := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ConnContext: s.connContext, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, len(s.listeners))
	var serving sync.WaitGroup
	for _, l := range s.listeners {
		serving.Go(func() { failed <- srv.Serve(l) })
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("api: %w", err)
	}
	s.beginStop()
	s.shutdown(srv)
	serving.Wait()
	s.tasks.Wait()
	return err
}

// shutdown closes listeners and connections. ctx of Serve is over already, so the
// time for it is counted from here.
func (s *Server) shutdown(srv *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), s.timing.drain)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil {
		_ = srv.Close() // whoever is left had their time
	}
	for _, l := range s.listeners {
		_ = l.Close() // closed already, unless Serve never came to it
	}
}
