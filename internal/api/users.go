package api

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"gatewayd/flow"
	"gatewayd/user"
)

// Users is what the API needs of the registry of users; *user.Users is one. All methods
// are safe for concurrent use; those that change something return once it holds and is
// kept. Errors are user.ErrUnknown (404), user.ErrReadOnly and user.ErrClash (409), or a
// *user.Invalid that names fields and fixes (422).
type Users interface {
	// List is at most limit users (0: all of them) by name, those after the name.
	List(after string, limit int) []user.View
	// Get is the user of that name, or of that number.
	Get(name string) (user.View, error)
	// Facts are a user's name, group and state; the name is empty if there is none.
	Facts(key flow.UserKey) (name, group, state string)
	// Create makes a new user of the store.
	Create(user.Spec) error
	// Put makes a user of the store, or replaces its definition; what the user moved,
	// owes and has open stays. An ID of 0 keeps the one it has.
	Put(user.Spec) error
	// Update replaces the definition of a user of the store by what f makes of it.
	Update(name string, f func(user.Spec) (user.Spec, error)) error
	// Delete retires a user of the store.
	Delete(name string) error

	// Groups lists all groups by name.
	Groups() []user.Group
	// PutGroup makes or replaces a group of the store.
	PutGroup(user.Group) error
	// DeleteGroup removes a group of the store; ErrClash while it has members.
	DeleteGroup(name string) error

	// Reset begins the user's traffic period anew.
	Reset(name string) error
	// TopUp adds bytes to what the user may move in this period, in each direction and in all.
	TopUp(name string, bytes uint64) error
	// Extend gives the user more time.
	Extend(name string, by time.Duration) error

	// Counts are for the metrics.
	Counts() user.Counts
}

// Billing is what the API needs of the ledger; *user.Ledger is one. All methods are safe
// for concurrent use, and wait for the disk.
type Billing interface {
	// Take is what each of the users moved since the last acknowledged take. Until that
	// take is acknowledged, every call returns the same, also after a crash. A user that
	// never moved anything is left out; Sequence is 0 if there is nothing new.
	Take(now time.Time, keys ...flow.UserKey) ([]user.Taken, error)
	// Ack acknowledges the last take: nil also if it is acknowledged already, and
	// user.ErrSequence for any other.
	Ack(key flow.UserKey, sequence uint64, now time.Time) error
	// Series are points in the order of time by label; what could be read is there
	// beside an error.
	Series(q user.Query, now time.Time) (map[string][]user.Point, error)
}

// users is the registry, or why there is none.
func (s *Server) users() (Users, error) {
	if s.opt.Users == nil {
		return nil, fail(http.StatusServiceUnavailable, "this gateway keeps no users")
	}
	return s.opt.Users, nil
}

// userProblem tells whose fault a refused edit is.
func userProblem(err error) error {
	invalid, isInvalid := errors.AsType[*user.Invalid](err)
	refused, isRefusal := errors.AsType[user.Refusal](err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, user.ErrUnknown):
		return fail(http.StatusNotFound, "%v", err)
	case errors.Is(err, user.ErrNotKept):
		return fail(http.StatusServiceUnavailable, "%v", err)
	case errors.Is(err, user.ErrReadOnly), errors.Is(err, user.ErrClash), errors.Is(err, user.ErrSequence), errors.Is(err, flow.ErrLimit):
		return fail(http.StatusConflict, "%v", err)
	case isRefusal:
		p := fail(http.StatusUnprocessableEntity, "%v", err)
		p.Refusal = string(refused)
		return p
	case isInvalid:
		p := fail(http.StatusUnprocessableEntity, "%v", invalid)
		p.Errors = strings.Split(invalid.Error(), "\n") // a line for each mistake
		return p
	}
	if p, ok := errors.AsType[*Problem](err); ok {
		return p
	}
	return fail(http.StatusInternalServerError, "%v", err) // whoever edits users may read why
}
