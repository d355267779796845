package api

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"gatewayd/internal/admit"
	"gatewayd/user"
)

// Devices is what the API needs of who the sources of flows are. All methods are safe
// for concurrent use.
type Devices interface {
	// List is every device that is known of: seen as a neighbour or in a lease, bound or
	// promoted, in the order of names.
	List() []Device
	// At is the device at an address of a client, for GET /v1/me; false: not one of ours.
	At(a netip.Addr) (Device, bool)
	// Promote puts a device under a user, with its live flows, until it is demoted, until
	// nothing moved for idle, or for session at most; 0 is no such end. It is a MAC
	// ("mac:…"), an address or a prefix. Errors are those of Users, and a user.Refusal.
	// Then nothing changed.
	Promote(device, user string, idle, session time.Duration) error
	// Demote ends a promotion; user.ErrUnknown: there is none.
	Demote(device string) error
}

// Device is one source of flows.
type Device struct {
	Device    string     `json:"device"` // its name in flows: "mac:…", an address or a prefix
	MAC       string     `json:"mac,omitzero"`
	Host      string     `json:"host,omitzero"`      // what it calls itself
	Interface string     `json:"interface,omitzero"` // that it was last heard on
	Addresses []string   `json:"addresses"`
	User      *UserRef   `json:"user"`                // null: anonymous
	Bound     string     `json:"bound,omitzero"`      // what makes it the user's: promotion, or the entry of the user's devices
	Promotion *Promotion `json:"promotion"`           // null: not promoted
	FirstSeen Time       `json:"first_seen,omitzero"` // since the start; absent: not seen
	LastSeen  Time       `json:"last_seen,omitzero"`
	LastUsed  Time       `json:"last_used,omitzero"` // source of a flow
}

// Promotion is a device's time under a user. In a request user, idle and session count.
type Promotion struct {
	User    string   `json:"user"`
	Idle    Duration `json:"idle"`    // ends after so long without a byte; null: does not
	Session Duration `json:"session"` // ends after so long; null: does not
	Since   Time     `json:"since,omitzero"`
	Until   Time     `json:"until,omitzero"` // by session; absent: no end
}

// DeviceList is the answer of GET /v1/devices.
type DeviceList struct {
	Devices []Device `json:"devices"`
	Next    string   `json:"next,omitzero"`
}

// Me is the answer of GET /v1/me: the asking device and what its user has left.
type Me struct {
	Device    string     `json:"device"`
	User      *UserRef   `json:"user"`       // null: anonymous
	State     string     `json:"state"`      // a user's, or anonymous
	Left      *Left      `json:"left"`       // null: anonymous
	Usage     *MyUsage   `json:"usage"`      // likewise
	ExpiresAt Time       `json:"expires_at"` // null: never
	PeriodEnd Time       `json:"period_end"` // null: never
	Promotion *Promotion `json:"promotion"`  // null: not promoted
}

// MyUsage is what the asking device's user moved in its period, in bytes.
type MyUsage struct {
	Up          uint64 `json:"up"`
	Down        uint64 `json:"down"`
	ChargedUp   uint64 `json:"charged_up"`
	ChargedDown uint64 `json:"charged_down"`
}

func (s *Server) devices() (Devices, error) {
	if s.opt.Devices == nil {
		return nil, fail(http.StatusServiceUnavailable, "this gateway knows no devices")
	}
	return s.opt.Devices, nil
}

// listDevices answers devices by name.
func (s *Server) listDevices(w http.ResponseWriter, r *http.Request) error {
	p := s.privacy
	if callerOf(r).role >= RoleUsers {
		p = privacyFull // whoever promotes devices has to know them
	}
	if p >= privacyNone {
		return fail(http.StatusForbidden, "devices: hidden by privacy: %s", p)
	}
	devices, err := s.devices()
	if err != nil {
		return err
	}
	pg, free, err := s.takeNames(w, r)
	if err != nil {
		return err
	}
	defer free()
	list := devices.List()
	for pg.after != "" && len(list) > 0 && list[0].Device <= pg.after {
		list = list[1:]
	}
	list, next := cut(list, pg, func(d *Device) string { return d.Device })
	return writeList(w, r, "devices", list, next, func(d *Device) any { return deviceShape(d, p) })
}

// deviceShape is the device as the API shows it under p.
func deviceShape(d *Device, p privacy) Device {
	out := *d
	out.Addresses = orEmpty(out.Addresses)
	if p >= privacyAddresses {
		out.Host, out.User, out.Bound, out.Promotion = "", nil, "", nil
	}
	return out
}

// deviceOf is the device that the path names, in its canonical form.
func deviceOf(r *http.Request) (string, error) {
	text := r.PathValue("device")
	if bits := r.PathValue("bits"); bits != "" {
		text += "/" + bits
	}
	name, ok := canonicalDevice(text)
	if !ok {
		return "", fail(http.StatusBadRequest, "device %q: %s", text, deviceWant)
	}
	return name, nil
}

// promoteDevice puts a device under a user, with its live flows.
func (s *Server) promoteDevice(w http.ResponseWriter, r *http.Request) error {
	devices, err := s.devices()
	if err != nil {
		return err
	}
	device, err := deviceOf(r)
	if err != nil {
		return err
	}
	var p Promotion
	if err := record(w, r, &p); err != nil {
		return err
	}
	if p.User == "" {
		return userProblem(invalid("user: want the name of one"))
	}
	if err := devices.Promote(device, p.User, time.Duration(p.Idle), time.Duration(p.Session)); err != nil {
		return promotionProblem(err)
	}
	s.log.Info("device promoted", "device", device, "user", p.User, "by", callerOf(r).name)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// promotionProblem is userProblem, but for a user that does not exist: that is a
// refusal like the others, and not the path's fault.
func promotionProblem(err error) error {
	if errors.Is(err, user.ErrUnknown) {
		p := fail(http.StatusUnprocessableEntity, "%v", err)
		p.Refusal = "unknown"
		return p
	}
	return userProblem(err)
}

// demoteDevice ends a promotion.
func (s *Server) demoteDevice(w http.ResponseWriter, r *http.Request) error {
	devices, err := s.devices()
	if err != nil {
		return err
	}
	device, err := deviceOf(r)
	if err != nil {
		return err
	}
	if err := devices.Demote(device); err != nil {
		return userProblem(err)
	}
	s.log.Info("device demoted", "device", device, "by", callerOf(r).name)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// asking limits the calls that need no token.
type asking struct {
	mu    sync.Mutex
	rates admit.Rates // guarded by mu
}

// newAsking lets every device of a network keep a page open that asks now and then.
func newAsking() *asking {
	return &asking{rates: admit.Rates{
		Address: admit.Rate{PerSecond: 2, Burst: 20}, Network: admit.Rate{PerSecond: 50, Burst: 200}, All: admit.Rate{PerSecond: 100, Burst: 500},
	}}
}

func (a *asking) allow(source netip.Addr, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rates.Allow(source, now)
}

// me answers the user of the asking device, and what it has left. The device is told
// by the address that it asks from and by nothing else.
func (s *Server) me(w http.ResponseWriter, r *http.Request) error {
	devices, err := s.devices()
	if err != nil {
		return err
	}
	source, ok := sourceOf(r)
	if !ok {
		return fail(http.StatusNotFound, "no device asks over this socket: ask over TCP, from the device")
	}
	if !s.asking.allow(source, time.Now()) {
		w.Header().Set("Retry-After", "1")
		return fail(http.StatusTooManyRequests, "too many questions")
	}
	d, ok := devices.At(source)
	if !ok {
		return fail(http.StatusNotFound, "%s is no device of this gateway", source)
	}
	out := Me{Device: d.Device, State: "anonymous", Promotion: d.Promotion}
	if d.User == nil || s.opt.Users == nil {
		return writeJSON(w, out)
	}
	v, err := s.opt.Users.Get(d.User.Name)
	if err != nil { // retired meanwhile, or bound to one that is not there
		out.State = "unknown"
		return writeJSON(w, out)
	}
	rest := leftOf(&v)
	out.User, out.State, out.Left = &UserRef{uint64(v.ID), v.Name}, v.State.String(), &rest
	out.Usage = &MyUsage{v.Usage.Up, v.Usage.Down, v.Usage.ChargedUp, v.Usage.ChargedDown}
	out.ExpiresAt, out.PeriodEnd = Time(v.ExpiresAt), Time(v.PeriodEnd)
	return writeJSON(w, out)
}

// sourceOf is the address that a request over TCP came from.
func sourceOf(r *http.Request) (netip.Addr, bool) {
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); !ok || local.Network() != "tcp" {
		return netip.Addr{}, false
	}
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	return ap.Addr().Unmap().WithZone(""), err == nil
}
