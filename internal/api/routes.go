package api

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// route is one call: what it is named, who may, which query parameters it knows.
type route struct {
	method string
	path   string // as http.ServeMux has it
	need   Role
	params []string
	stream bool // has no deadline for the whole answer
	serve  func(w http.ResponseWriter, r *http.Request) error
}

// routes is the table of all calls.
func (s *Server) routes() []route {
	byName, inTime := []string{"limit", "after"}, []string{"step", "from", "to"}
	paged := append([]string{"limit", "after"}, selectorKeys...)
	return []route{
		{method: "GET", path: "/v1/connections", need: RoleRead, params: paged, serve: s.listFlows},
		{method: "DELETE", path: "/v1/connections", need: RoleAdmin, params: selectorKeys, serve: s.killFlows},
		{method: "GET", path: "/v1/connections/{flow}", need: RoleRead, serve: s.getFlow},
		{method: "DELETE", path: "/v1/connections/{flow}", need: RoleAdmin, serve: s.killFlow},
		{method: "GET", path: "/v1/connections/closed", need: RoleRead, params: paged, serve: s.listClosed},
		{method: "GET", path: "/v1/connections/events", need: RoleRead, stream: true, serve: s.flowEvents},
		{method: "GET", path: "/v1/events", need: RoleRead, params: []string{"types"}, stream: true, serve: s.allEvents},
		{method: "GET", path: "/v1/traffic", need: RoleRead, params: []string{"once"}, stream: true, serve: s.traffic},
		{method: "GET", path: "/v1/outbounds", need: RoleRead, serve: s.listOutbounds},
		{method: "GET", path: "/v1/rules", need: RoleRead, serve: s.listRules},
		{method: "GET", path: "/v1/users", need: RoleRead, params: byName, serve: s.listUsers},
		{method: "POST", path: "/v1/users", need: RoleUsers, serve: s.createUser},
		{method: "GET", path: "/v1/users/{name}", need: RoleRead, serve: s.getUser},
		{method: "PUT", path: "/v1/users/{name}", need: RoleUsers, serve: s.putUser},
		{method: "PATCH", path: "/v1/users/{name}", need: RoleUsers, serve: s.patchUser},
		{method: "DELETE", path: "/v1/users/{name}", need: RoleUsers, serve: s.deleteUser},
		{method: "POST", path: "/v1/users/{name}/reset", need: RoleUsers, serve: s.resetUser},
		{method: "POST", path: "/v1/users/{name}/topup", need: RoleUsers, serve: s.topUpUser},
		{method: "POST", path: "/v1/users/{name}/extend", need: RoleUsers, serve: s.extendUser},
		{method: "GET", path: "/v1/users/{name}/usage", need: RoleRead, params: inTime, serve: s.userUsage},
		{method: "POST", path: "/v1/users/{name}/usage/take", need: RoleUsers, serve: s.takeUsage},
		{method: "POST", path: "/v1/users/{name}/usage/ack", need: RoleUsers, serve: s.ackUsage},
		{method: "GET", path: "/v1/usage", need: RoleRead, params: slices.Concat([]string{"by"}, inTime, byName), serve: s.usage},
		{method: "GET", path: "/v1/groups", need: RoleRead, serve: s.listGroups},
		{method: "GET", path: "/v1/groups/{name}", need: RoleRead, serve: s.getGroup},
		{method: "PUT", path: "/v1/groups/{name}", need: RoleUsers, serve: s.putGroup},
		{method: "DELETE", path: "/v1/groups/{name}", need: RoleUsers, serve: s.deleteGroup},
		{method: "GET", path: "/v1/devices", need: RoleRead, params: byName, serve: s.listDevices},
		{method: "PUT", path: "/v1/devices/{device}/user", need: RoleUsers, serve: s.promoteDevice},
		{method: "PUT", path: "/v1/devices/{device}/{bits}/user", need: RoleUsers, serve: s.promoteDevice},
		{method: "DELETE", path: "/v1/devices/{device}/user", need: RoleUsers, serve: s.demoteDevice},
		{method: "DELETE", path: "/v1/devices/{device}/{bits}/user", need: RoleUsers, serve: s.demoteDevice},
		{method: "GET", path: "/v1/me", need: RoleNone, serve: s.me},
		{method: "GET", path: "/v1/config", need: RoleAdmin, serve: s.getConfig},
		{method: "POST", path: "/v1/config", need: RoleAdmin, serve: s.applyConfig},
		{method: "POST", path: "/v1/config/check", need: RoleAdmin, serve: s.checkConfig},
		{method: "POST", path: "/v1/config/reload", need: RoleAdmin, serve: s.reloadConfig},
		{method: "GET", path: "/v1/status", need: RoleRead, serve: s.status},
		{method: "GET", path: "/v1/openapi.json", need: RoleRead, serve: s.openAPI},
		{method: "GET", path: "/healthz", need: RoleNone, serve: s.health},
		{method: "GET", path: "/metrics", need: RoleRead, serve: s.metrics},
	}
}

// router dispatches on the table, with problems where ServeMux writes text.
func (s *Server) router() http.Handler {
	mux := http.NewServeMux()
	for _, rt := range s.routes() {
		mux.Handle(rt.method+" "+rt.path, s.endpoint(rt))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Cache-Control", "no-store")
		header.Set("X-Content-Type-Options", "nosniff")
		if r.Body != http.NoBody { // refused or not, it is read; whoever reads it for good lifts this
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
		}
		if err := s.admit(r); err != nil {
			s.refuse(w, r, err)
			return
		}
		if h, pattern := mux.Handler(r); pattern == "" {
			s.refuse(w, r, s.unrouted(h, w, r))
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// admit is what every request has to pass, whatever it asks for.
func (s *Server) admit(r *http.Request) error {
	if s.stopping.Err() != nil {
		return fail(http.StatusServiceUnavailable, "the gateway is shutting down")
	}
	return s.checkHost(r)
}

// unrouted tells why ServeMux has no handler, after asking who wants to know.
func (s *Server) unrouted(h http.Handler, w http.ResponseWriter, r *http.Request) error {
	if _, err := s.authorize(r, RoleRead); err != nil {
		return err
	}
	probe := &statusProbe{header: http.Header{}}
	h.ServeHTTP(probe, r)
	if probe.status == http.StatusMethodNotAllowed {
		allow := probe.header.Get("Allow")
		w.Header().Set("Allow", allow)
		return fail(http.StatusMethodNotAllowed, "%s %s: the path takes %s", r.Method, r.URL.Path, allow)
	}
	return fail(http.StatusNotFound, "no call %s: see /v1/openapi.json", r.URL.Path)
}

// endpoint wraps a route: caller, parameters, deadlines, errors.
func (s *Server) endpoint(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r, err := s.prepare(rt, w, r)
		if err == nil {
			err = rt.serve(w, r)
		}
		if err != nil {
			s.refuse(w, r, err)
		}
	})
}

func (s *Server) prepare(rt route, w http.ResponseWriter, r *http.Request) (*http.Request, error) {
	ok, err := s.authorize(r, rt.need)
	if err != nil {
		return r, err
	}
	if _, err := query(ok, rt.params); err != nil {
		return r, err
	}
	if !rt.stream {
		// Best effort: recorders of tests have no deadline.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTimeout))
	}
	return ok, nil
}

// refuse answers with a problem, unless the answer has begun.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if err == errBegun {
		return
	}
	if p, ok := err.(*Problem); ok && p.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="gatewayd"`)
	}
	s.writeProblem(w, r, err)
}

// query parses the query strictly: known keys, each at most once.
func query(r *http.Request, known []string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, fail(http.StatusBadRequest, "query: %v", err)
	}
	for key, values := range q {
		if !slices.Contains(known, key) {
			return nil, fail(http.StatusBadRequest, "query: unknown key %q: %s", key, knownKeys(known))
		}
		if len(values) > 1 {
			return nil, fail(http.StatusBadRequest, "query: %s is given twice", key)
		}
	}
	return q, nil
}

func knownKeys(known []string) string {
	if len(known) == 0 {
		return "this call takes none"
	}
	return "known are " + strings.Join(known, ", ")
}

// statusProbe hears which status and headers a handler would have sent.
type statusProbe struct {
	header http.Header
	status int
}

// Header is where the handler puts its headers.
func (p *statusProbe) Header() http.Header { return p.header }

// WriteHeader notes the status.
func (p *statusProbe) WriteHeader(status int) { p.status = status }

// Write swallows the body.
func (p *statusProbe) Write(b []byte) (int, error) { return len(b), nil }
