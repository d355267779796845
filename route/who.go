package route

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"gatewayd/flow"
	"gatewayd/route/match"
)

// Who is behind a flow. It is a comparable value; the zero value is an anonymous flow of an unknown device.
type Who struct {
	User   string // name; empty: anonymous
	Group  string // of the user; empty: none
	State  string // of the user, as in active; empty for an anonymous flow
	Device flow.Device
}

// Anonymous is the state of a flow without a user, as rules name it.
const Anonymous = "anonymous"

func (w *Who) state() string {
	if w.User == "" {
		return Anonymous
	}
	return w.State
}

// nameSet is a sorted list; an empty one is no condition.
type nameSet []string

func nameSetOf(list []string) nameSet {
	sorted := nameSet(slices.Clone(list))
	slices.Sort(sorted)
	return slices.Compact(sorted)
}

func (n nameSet) has(s string) bool {
	_, found := slices.BinarySearch(n, s)
	return found
}

// whose is the compiled conditions on user and device. Most rules have none, so
// that they stand behind one pointer.
type whose struct {
	users, groups, states nameSet
	devices               *devices // nil: any
}

// devices is a set of devices. A prefix holds for the client's address, whatever
// else is known of it.
type devices struct {
	macs, hosts nameSet
	prefixes    *match.Prefixes // nil: none
}

// failing is the first condition that does not hold, nothing if all do.
func (w *whose) failing(f *facts) condition {
	switch {
	case len(w.states) > 0 && !w.states.has(f.who.state()):
		return onUserState
	case len(w.users) > 0 && !w.users.has(f.who.User):
		return onUser
	case len(w.groups) > 0 && !w.groups.has(f.who.Group):
		return onUserGroup
	case w.devices != nil && !w.devices.contain(f):
		return onDevice
	}
	return nothing
}

func (d *devices) contain(f *facts) bool {
	return d.macs.has(f.who.Device.MAC) || d.hosts.has(f.who.Device.Host) || d.prefixes != nil && d.prefixes.Contains(f.source)
}

// compileWho is nil, without an error, if s has no condition on user and device.
// No list has an empty name: what is unknown is in none.
func compileWho(s *Match, at string) (*whose, error) {
	if len(s.User)+len(s.UserGroup)+len(s.UserState)+len(s.Device) == 0 {
		return nil, nil
	}
	w := &whose{users: nameSetOf(s.User), groups: nameSetOf(s.UserGroup), states: nameSetOf(s.UserState)}
	for _, c := range []struct {
		key  string
		list nameSet
	}{{"user", w.users}, {"user_group", w.groups}, {"user_state", w.states}} {
		if c.list.has("") {
			return nil, fmt.Errorf("%s%s: name is empty", at, c.key)
		}
	}
	if len(s.Device) == 0 {
		return w, nil
	}
	var err error
	if w.devices, err = compileDevices(s.Device); err != nil {
		return nil, fmt.Errorf("%sdevice: %w", at, err)
	}
	return w, nil
}

func compileDevices(list []flow.DeviceSet) (*devices, error) {
	d := &devices{}
	var sources []netip.Prefix
	for _, s := range list {
		switch {
		case s.MAC != "":
			d.macs = append(d.macs, s.MAC)
		case s.Host != "":
			d.hosts = append(d.hosts, s.Host)
		case !s.Prefix.IsValid():
			return nil, errors.New("names nothing")
		default:
			sources = append(sources, s.Prefix)
		}
	}
	d.macs, d.hosts = nameSetOf(d.macs), nameSetOf(d.hosts)
	var err error
	d.prefixes, err = prefixes(sources)
	return d, err
}

// why puts the condition that fails into words.
func (w *Who) why(c condition, source netip.Addr) string {
	key, value := "user", w.User
	switch c {
	case onUserState:
		return "user_state is " + w.state()
	case onDevice:
		return w.whyDevice(source)
	case onUserGroup:
		key, value = "user_group", w.Group
	}
	switch {
	case w.User == "":
		return key + ": the flow is anonymous"
	case value == "":
		return key + ": the user has none"
	}
	return fmt.Sprintf("%s is %q", key, value)
}

func (w *Who) whyDevice(source netip.Addr) string {
	name := w.Device.Name
	if name == "" {
		name = source.String()
	}
	if w.Device.Host != "" {
		name += ", host " + w.Device.Host
	}
	return "device is " + name
}
