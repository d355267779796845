package api

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	"gatewayd/flow"
	"gatewayd/track"
)

// A list is in memory until its reader took it, which may be long: 400 bytes for each
// flow on it, all that there are if it has no limit. So there are few at once, of
// administrators and of others, and one more waits for a while.
const (
	maxLists = 8
	listWait = 2 * time.Second
)

// takeList waits for a list's slot, which free gives back, or refuses with 503.
func (s *Server) takeList(w http.ResponseWriter, r *http.Request) (free func(), err error) {
	slots := s.lists[1]
	if callerOf(r).role >= RoleAdmin {
		slots = s.lists[0]
	}
	wait := time.NewTimer(listWait)
	defer wait.Stop()
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-r.Context().Done():
		return nil, errBegun // nobody hears more
	case <-wait.C:
		w.Header().Set("Retry-After", "5")
		return nil, fail(http.StatusServiceUnavailable, "too many lists are being read: at most %d", maxLists)
	}
}

// listFlows answers the live flows by id, oldest first.
func (s *Server) listFlows(w http.ResponseWriter, r *http.Request) error {
	sel, pg, err := s.listing(r)
	if err != nil {
		return err
	}
	free, err := s.takeList(w, r)
	if err != nil {
		return err
	}
	defer free()
	picked, limit := sel.pick, pg.limit
	if len(sel) == 0 {
		picked = nil
	}
	if limit > 0 {
		limit++ // one tells whether there are more
	}
	flows := s.opt.Tracker.Page(flow.ID(pg.after), limit, picked)
	return s.writeFlows(w, r, `{"sessions":[],"flows":[`, flows, pg, s.privacyFor(r))
}

// listClosed answers the ring of closed flows in the order of their ends. A page
// begins after the flow with the id `after`, or at the oldest if that one is gone.
func (s *Server) listClosed(w http.ResponseWriter, r *http.Request) error {
	sel, pg, err := s.listing(r)
	if err != nil {
		return err
	}
	if err := s.privacy.check(r.URL.Query()); err != nil {
		return err
	}
	free, err := s.takeList(w, r)
	if err != nil {
		return err
	}
	defer free()
	flows := s.opt.Tracker.Closed()
	for i := range flows {
		if uint64(flows[i].ID) == pg.after {
			flows = flows[i+1:]
			break
		}
	}
	// What privacy hides of the past is hidden from administrators as well.
	return s.writeFlows(w, r, `{"flows":[`, sel.keep(flows), pg, s.privacy)
}

// listing reads selector and page of a list, and refuses what would tell hidden things.
func (s *Server) listing(r *http.Request) (selector, page, error) {
	q := r.URL.Query()
	if err := s.privacyFor(r).check(q); err != nil {
		return nil, page{}, err
	}
	sel, err := parseSelector(q)
	if err != nil {
		return nil, page{}, err
	}
	pg, err := parsePage(q)
	return sel, pg, err
}

// writeFlows writes one page, a flow at a time: a full list may be long.
func (s *Server) writeFlows(w http.ResponseWriter, r *http.Request, head string, flows []track.Record, pg page, p privacy) error {
	more := pg.limit > 0 && len(flows) > pg.limit
	if more {
		flows = flows[:pg.limit]
	}
	w.Header().Set("Content-Type", "application/json")
	out := bufio.NewWriterSize(w, 32<<10)
	_, _ = out.WriteString(head)
	for i := range flows {
		if r.Context().Err() != nil {
			return errBegun
		}
		if writeElement(out, i, flowShape(&flows[i], p)) != nil {
			return errBegun // the reader is gone, or too slow
		}
	}
	tail := "]}\n"
	if more {
		tail = `],"next":` + strconv.FormatUint(uint64(flows[len(flows)-1].ID), 10) + "}\n"
	}
	_, _ = out.WriteString(tail)
	_ = out.Flush() // whoever asked is gone
	return nil
}

func writeElement(out io.Writer, i int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if i > 0 {
		b = append([]byte{','}, b...)
	}
	_, err = out.Write(b)
	return err
}

// getFlow answers one live flow.
func (s *Server) getFlow(w http.ResponseWriter, r *http.Request) error {
	id, err := parseFlow(r)
	if err != nil {
		return err
	}
	rec, ok := s.opt.Tracker.Get(id)
	if !ok {
		return noFlow(id)
	}
	return writeJSON(w, flowShape(&rec, s.privacyFor(r)))
}

// killFlow ends one flow: 204 while it is registered, killed before or not.
func (s *Server) killFlow(w http.ResponseWriter, r *http.Request) error {
	id, err := parseFlow(r)
	if err != nil {
		return err
	}
	if !s.opt.Tracker.Kill(id) {
		return noFlow(id)
	}
	s.log.Info("flow killed", "flow", uint64(id), "by", callerOf(r).name)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func noFlow(id flow.ID) error {
	return fail(http.StatusNotFound, "no live flow %d", uint64(id))
}

// killFlows ends every flow that the selector picks; none picks all.
func (s *Server) killFlows(w http.ResponseWriter, r *http.Request) error {
	sel, err := parseSelector(r.URL.Query())
	if err != nil {
		return err
	}
	n := s.opt.Tracker.KillWhere(sel.pick)
	s.log.Info("flows killed", "count", n, "selector", r.URL.RawQuery, "by", callerOf(r).name)
	return writeJSON(w, Closed{n})
}
