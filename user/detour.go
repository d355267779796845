package user

import "gatewayd/flow"

// Detour is the tag of the outbound that a user's new flows are sent to because its
// traffic is used up; empty: none. It takes no lock.
func (u *Users) Detour(key flow.UserKey) string {
	e, known := u.byKey.get(key)
	if !known || e.state() != StateExhausted {
		return ""
	}
	return e.limits().WhenExhausted.Outbound
}

// NamesDevices reports that a user is known by a MAC or a host name, or was: an address
// is not enough to tell whose a flow is then.
func (u *Users) NamesDevices() bool { return u.static.named.Load() || u.promoted.named.Load() }
