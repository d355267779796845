package api

import (
	_ "embed"
	"io"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"
)

// status answers how the gateway fares.
func (s *Server) status(w http.ResponseWriter, r *http.Request) error {
	st := s.opt.Gateway.Status()
	st.Version = s.opt.Version
	st.UptimeS = milliseconds(time.Since(s.started)) / 1000
	st.Outbounds = s.outbounds(r)
	st.Flows = s.opt.Tracker.Live()
	readMemory(&st.Memory)
	st.Drops = s.opt.Drops.Map()
	st.Inbounds = orEmpty(st.Inbounds)
	for i := range st.Inbounds {
		st.Inbounds[i].Addresses = orEmpty(st.Inbounds[i].Addresses)
	}
	st.Warnings = orEmpty(st.Warnings)
	return writeJSON(w, st)
}

// health answers whether the server lives; it needs no role and tells nothing else.
func (s *Server) health(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, "ok\n") // whoever asked is gone
	return nil
}

func (s *Server) listOutbounds(w http.ResponseWriter, r *http.Request) error {
	return writeJSON(w, Outbounds{s.outbounds(r)})
}

func (s *Server) listRules(w http.ResponseWriter, r *http.Request) error {
	return writeJSON(w, Rules{orEmpty(s.opt.Gateway.Rules())})
}

// outbounds are the gateway's as the caller of r may see them. The last error names the
// destination that could not be dialled.
func (s *Server) outbounds(r *http.Request) []Outbound {
	list := s.opt.Gateway.Outbounds()
	for i := range list {
		list[i].Draining = orEmpty(list[i].Draining)
		if s.privacyFor(r) != privacyFull {
			list[i].LastError = ""
		}
	}
	return orEmpty(list)
}

// orEmpty makes a list that is written as [] and not as null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

//go:embed openapi.json
var openAPIDocument []byte

func (s *Server) openAPI(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(openAPIDocument) // whoever asked is gone
	return nil
}

// readMemory asks the runtime and the kernel for what the gateway did not fill; it
// stops nothing. The runtime's own goroutines, which come with the first collection,
// are not counted.
func readMemory(m *Memory) {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/stacks:bytes"},
		{Name: "/memory/classes/total:bytes"},
	}
	metrics.Read(samples)
	value := func(i int) uint64 {
		if samples[i].Value.Kind() != metrics.KindUint64 {
			return 0
		}
		return samples[i].Value.Uint64()
	}
	m.RSS, m.Heap, m.Stacks, m.Runtime, m.Goroutines = readRSS(), value(0), value(1), value(2), runtime.NumGoroutine()
	if limit := debug.SetMemoryLimit(-1); limit < 1<<62 {
		m.Limit = uint64(limit)
	}
}

// readRSS is the resident set in bytes, 0 where /proc does not tell.
func readRSS() uint64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(b))
	if len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil {
		return 0
	}
	return pages * uint64(os.Getpagesize())
}
