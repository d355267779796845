package api

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/url"
)

// namePage is a part of a list by name: at most limit entries (0: no limit) after the name.
type namePage struct {
	limit int
	after string
}

// takeNames reads which part of a list is asked for and waits for the list's slot, which
// free gives back.
func (s *Server) takeNames(w http.ResponseWriter, r *http.Request) (p namePage, free func(), err error) {
	if p, err = parseNamePage(r.URL.Query()); err == nil {
		free, err = s.takeList(w, r)
	}
	return p, free, err
}

func parseNamePage(q url.Values) (p namePage, err error) {
	if q.Has("after") && q.Get("after") == "" {
		return p, fail(http.StatusBadRequest, "after: want a name")
	}
	p.after = q.Get("after")
	p.limit, err = parseLimit(q)
	return p, err
}

// ask is how many entries tell whether there are more than the page has.
func (p namePage) ask() int {
	if p.limit == 0 {
		return 0
	}
	return p.limit + 1
}

// cut is the page's part of list, and what the next page begins after.
func cut[T any](list []T, p namePage, name func(*T) string) (part []T, next string) {
	if p.limit == 0 || len(list) <= p.limit {
		return list, ""
	}
	return list[:p.limit], name(&list[p.limit-1])
}

// writeList writes {"kind":[…]}, an element at a time: a full list may be long.
func writeList[T any](w http.ResponseWriter, r *http.Request, kind string, list []T, next string, shape func(*T) any) error {
	w.Header().Set("Content-Type", "application/json")
	out := bufio.NewWriterSize(w, 32<<10)
	_, _ = out.WriteString(`{"` + kind + `":[`)
	for i := range list {
		if r.Context().Err() != nil || writeElement(out, i, shape(&list[i])) != nil {
			return errBegun // the reader is gone, or too slow
		}
	}
	tail := "]"
	if name, err := json.Marshal(next); err == nil && next != "" {
		tail += `,"next":` + string(name)
	}
	_, _ = out.WriteString(tail + "}\n")
	_ = out.Flush() // whoever asked is gone
	return nil
}
