package api

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"gatewayd/track"
)

// selectorKeys are the query parameters that pick flows.
var selectorKeys = []string{"inbound", "outbound", "session", "user", "device", "source", "domain"}

// selector picks flows; all of its conditions must hold. The zero value picks all.
type selector []func(*track.Record) bool

// pick tells whether the flow is one of the selector's.
func (s selector) pick(r *track.Record) bool {
	for _, holds := range s {
		if !holds(r) {
			return false
		}
	}
	return true
}

// keep drops, in place, the flows that are not the selector's.
func (s selector) keep(flows []track.Record) []track.Record {
	return slices.DeleteFunc(flows, func(r track.Record) bool { return !s.pick(&r) })
}

// parseSelector reads the selector keys of q. Malformed and empty values are
// 400, except outbound's, whose empty tag is the DNS service.
func parseSelector(q url.Values) (selector, error) {
	var s selector
	for _, key := range selectorKeys {
		if !q.Has(key) {
			continue
		}
		value := q.Get(key)
		if value == "" && key != "outbound" {
			return nil, fail(http.StatusBadRequest, "%s: empty value", key)
		}
		condition, err := parseCondition(key, value)
		if err != nil {
			return nil, err
		}
		s = append(s, condition)
	}
	return s, nil
}

func parseCondition(key, value string) (func(*track.Record) bool, error) {
	switch key {
	case "inbound":
		return func(r *track.Record) bool { return r.Inbound == value }, nil
	case "outbound":
		return func(r *track.Record) bool { return r.Outbound == value }, nil
	case "session":
		return sessionIs(value)
	case "user":
		return userIs(value)
	case "device":
		return deviceIs(value)
	case "source":
		return sourceIs(value)
	}
	return domainIs(value)
}

func sessionIs(value string) (func(*track.Record) bool, error) {
	id, err := strconv.ParseUint(strings.TrimPrefix(value, "session#"), 10, 64)
	if err != nil || id == 0 {
		return nil, fail(http.StatusBadRequest, "session %q: want a number from 1", value)
	}
	return func(r *track.Record) bool { return r.Session == id }, nil
}

// userIs never picks anonymous flows. A name of digits alone cannot exist.
func userIs(value string) (func(*track.Record) bool, error) {
	if strings.Trim(value, "0123456789") == "" {
		return nil, fail(http.StatusBadRequest, "user %q: want a name, which is not all digits", value)
	}
	return func(r *track.Record) bool { return r.User != 0 && r.UserName == value }, nil
}

func sourceIs(value string) (func(*track.Record) bool, error) {
	a, err := netip.ParseAddr(value)
	if err != nil || a.Zone() != "" {
		return nil, fail(http.StatusBadRequest, "source %q: want an IP address", value)
	}
	a = a.Unmap()
	return func(r *track.Record) bool { return r.Source.Addr().Unmap() == a }, nil
}

// deviceIs takes a MAC, with or without "mac:", an address or a prefix; those two pick
// what comes from there, also where the device goes by its MAC.
func deviceIs(value string) (func(*track.Record) bool, error) {
	name, ok := canonicalDevice(value)
	if !ok {
		return nil, fail(http.StatusBadRequest, "device %q: %s", value, deviceWant)
	}
	p, err := netip.ParsePrefix(name)
	if a, e := netip.ParseAddr(name); e == nil {
		p, err = a.Prefix(a.BitLen())
	}
	if err != nil {
		return func(r *track.Record) bool { return r.Device == name }, nil
	}
	return func(r *track.Record) bool { return p.Contains(r.Source.Addr().Unmap()) }, nil
}

const deviceWant = "want a MAC, an address or a prefix without host bits"

func canonicalDevice(value string) (string, bool) {
	if a, err := netip.ParseAddr(value); err == nil {
		return a.Unmap().String(), true
	}
	if p, err := netip.ParsePrefix(value); err == nil {
		return p.String(), p == p.Masked()
	}
	mac, err := net.ParseMAC(strings.TrimPrefix(value, "mac:"))
	return "mac:" + mac.String(), err == nil && len(mac) == 6
}

func domainIs(value string) (func(*track.Record) bool, error) {
	name := strings.ToLower(strings.TrimSuffix(value, "."))
	if name == "" || len(name) > 253 || strings.ContainsAny(name, " /:*@\\") {
		return nil, fail(http.StatusBadRequest, "domain %q: want a full domain name", value)
	}
	return func(r *track.Record) bool { return strings.EqualFold(r.Dest.Domain, name) }, nil
}

// maxPage is the largest `limit`.
const maxPage = 100_000

// page is a part of a list: at most limit entries (0: no limit) after the one numbered after.
type page struct {
	limit int
	after uint64
}

// parseLimit is the page's limit, 0 without one.
func parseLimit(q url.Values) (int, error) {
	if !q.Has("limit") {
		return 0, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > maxPage {
		return 0, fail(http.StatusBadRequest, "limit %q: want 1 to %d", q.Get("limit"), maxPage)
	}
	return n, nil
}

func parsePage(q url.Values) (p page, err error) {
	if p.limit, err = parseLimit(q); err != nil {
		return p, err
	}
	if q.Has("after") {
		text := strings.TrimPrefix(q.Get("after"), "flow#")
		if p.after, err = strconv.ParseUint(text, 10, 64); err != nil {
			return p, fail(http.StatusBadRequest, "after %q: want the id of a flow", q.Get("after"))
		}
	}
	return p, nil
}
