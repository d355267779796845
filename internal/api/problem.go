package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// fail is the problem for a status.
func fail(status int, format string, args ...any) *Problem {
	return &Problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Detail: fmt.Sprintf(format, args...)}
}

// writeProblem answers with err; one that is no Problem is an internal error,
// whose text goes to the log and not to the client.
func (s *Server) writeProblem(w http.ResponseWriter, r *http.Request, err error) {
	p, ok := errors.AsType[*Problem](err)
	if !ok {
		s.log.Error("api request failed", "method", r.Method, "path", r.URL.Path, "error", err)
		p = fail(http.StatusInternalServerError, "internal error: see the log")
	}
	body, err := json.Marshal(p)
	if err != nil {
		s.log.Error("api problem", "error", err)
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // whoever asked is gone
}

// writeJSON answers 200 with v.
func writeJSON(w http.ResponseWriter, v any) error { return writeStatus(w, http.StatusOK, v) }

// writeStatus answers status with v.
func writeStatus(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // whoever asked is gone
	return nil
}
