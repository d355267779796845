package api

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"gatewayd/internal/exitcode"
)

// getConfig answers the running configuration's text, with its etag.
func (s *Server) getConfig(w http.ResponseWriter, r *http.Request) error {
	text, etag := s.opt.Gateway.Config()
	w.Header().Set("ETag", quoteTag(etag))
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = io.WriteString(w, text) // whoever asked is gone
	return nil
}

// applyConfig makes the body the running configuration, if the caller saw the running one.
func (s *Server) applyConfig(w http.ResponseWriter, r *http.Request) error {
	text, err := body(w, r, maxBody)
	if err != nil {
		return err
	}
	_, current := s.opt.Gateway.Config()
	etag, err := ifMatch(r, current)
	if err != nil {
		return err
	}
	if err := s.opt.Gateway.Apply(r.Context(), text, etag); err != nil {
		return configProblem(err)
	}
	s.log.Info("configuration applied", "by", callerOf(r).name)
	return s.applied(w)
}

// checkConfig tells what applying the body would refuse: 204, or the problem.
func (s *Server) checkConfig(w http.ResponseWriter, r *http.Request) error {
	text, err := body(w, r, maxBody)
	if err != nil {
		return err
	}
	if err := s.opt.Gateway.Check(text); err != nil {
		return configProblem(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// reloadConfig reads the configuration file again.
func (s *Server) reloadConfig(w http.ResponseWriter, r *http.Request) error {
	if err := s.opt.Gateway.Reload(r.Context()); err != nil {
		return configProblem(err)
	}
	s.log.Info("configuration reloaded", "by", callerOf(r).name)
	return s.applied(w)
}

func (s *Server) applied(w http.ResponseWriter) error {
	_, etag := s.opt.Gateway.Config()
	w.Header().Set("ETag", quoteTag(etag))
	return writeJSON(w, Applied{Epoch: s.opt.Gateway.Status().Epoch, ETag: etag})
}

// body is the request's body, at most limit bytes.
func body(w http.ResponseWriter, r *http.Request, limit int64) (string, error) {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return "", fail(http.StatusRequestEntityTooLarge, "the body is larger than %d bytes", tooLarge.Limit)
	}
	if err != nil {
		return "", fail(http.StatusBadRequest, "body: %v", err)
	}
	// A read deadline would end the request's context while the handler works.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	return string(b), nil
}

// ifMatch is the current etag if the request's If-Match names it (RFC 9110, 13.1.1).
// Weak tags never match.
func ifMatch(r *http.Request, current string) (string, error) {
	header := strings.Join(r.Header.Values("If-Match"), ",")
	if strings.TrimSpace(header) == "" {
		return "", fail(http.StatusPreconditionRequired, "If-Match is needed: send the ETag of GET /v1/config, or * for whatever is running")
	}
	if namesTag(header, current) {
		return current, nil
	}
	return "", stale()
}

// namesTag tells whether a list of etags has the current one, or is *.
func namesTag(header, current string) bool {
	for tag := range strings.SplitSeq(header, ",") {
		if tag = strings.TrimSpace(tag); tag == "*" || tag == quoteTag(current) {
			return true
		}
	}
	return false
}

func stale() error {
	return fail(http.StatusPreconditionFailed, "%v: read it again and send its ETag in If-Match", ErrStale)
}

func quoteTag(etag string) string { return `"` + etag + `"` }

// configProblem tells whose fault a refused configuration is.
func configProblem(err error) error {
	var p *Problem
	switch {
	case errors.Is(err, ErrStale):
		return stale()
	case exitcode.Of(err) == exitcode.Config:
		p = fail(http.StatusUnprocessableEntity, "%v", err)
		p.Errors = strings.Split(err.Error(), "\n") // a line for each mistake
	case exitcode.Of(err) == exitcode.Collision:
		p = fail(http.StatusConflict, "%v", err)
	default: // an administrator may read why
		p = fail(http.StatusInternalServerError, "%v", err)
	}
	return p
}
