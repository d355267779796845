package api

import (
	"net/http"
	"time"
)

// SetTiming shortens what streams live by.
func (s *Server) SetTiming(heartbeat, write time.Duration) {
	s.timing.heartbeat, s.timing.write = heartbeat, write
}

// SetDrain is how long a stop may take.
func (s *Server) SetDrain(limit time.Duration) { s.timing.drain = limit }

// OpenStreams is how many stream slots are taken.
func (s *Server) OpenStreams() int { return len(s.streams) }

// MaxStreams is the bound.
const MaxStreams = maxStreams

// MaxLists is how many lists of flows are written at once to one kind of callers.
const MaxLists = maxLists

// KeptEvents is the size of the ring behind /v1/events.
const KeptEvents = keptEvents

// Handler answers without a listener.
func (s *Server) Handler() http.Handler { return s.handler }

// RouteTable lists "METHOD path" of all routes, with the role that each needs.
func (s *Server) RouteTable() map[string]string {
	table := map[string]string{}
	for _, r := range s.routes() {
		table[r.method+" "+r.path] = r.need.String()
	}
	return table
}

// RouteParams lists the query parameters of one route.
func (s *Server) RouteParams(call string) []string {
	for _, r := range s.routes() {
		if r.method+" "+r.path == call {
			return r.params
		}
	}
	return nil
}

// Judge is what the peer credentials of a Unix connection lead to.
func Judge(uid uint32, groups []uint32, own uint32, group *uint32, name string) (role, denied string) {
	c := peer{uid, groups}.judge(own, group, name)
	return c.role.String(), c.denied
}

// Labelled is a metric's name with labels.
var Labelled = series

// ParseSelector and ParsePage are what list calls read.
var (
	ParseSelector = parseSelector
	ParsePage     = parsePage
)
