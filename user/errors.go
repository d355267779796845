package user

import (
	"errors"
	"fmt"
	"strings"

	"gatewayd/internal/store"
)

// Errors of edits. A refused edit changed nothing.
var (
	// ErrUnknown: there is no user, or no group, of that name.
	ErrUnknown = errors.New("unknown")
	// ErrReadOnly: it is defined by the configuration file, which has to be edited.
	ErrReadOnly = errors.New("defined in the configuration file; edit it there and reload")
	// ErrNotKept: the disk does not take it.
	ErrNotKept = store.ErrNotDurable
	// ErrClash: a name, number or device is taken, or a group is in use.
	ErrClash = errors.New("in use")
)

// Invalid is an error about definitions that are refused: each problem in them.
type Invalid struct{ Problems []Problem }

// Problem is one mistake in a definition.
type Problem struct {
	Path string // where it is, as in "users[3].limits.traffic.reset.day"
	Text string // names the user or group, the field and what would be right
}

// maxProblems bounds what one error tells; somebody reads it.
const maxProblems = 50

// Error is all problems, a line each.
func (e *Invalid) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.Text
	}
	return strings.Join(lines, "\n")
}

// add keeps a problem. what is `user "alice"`, list `users[3]`, field `limits.ips`.
func (e *Invalid) add(list, what, field, format string, args ...any) {
	switch len(e.Problems) {
	case maxProblems + 1:
	case maxProblems:
		e.Problems = append(e.Problems, Problem{Text: "and more problems than these"})
	default:
		e.Problems = append(e.Problems, Problem{Path: strings.TrimPrefix(list+"."+field, "."), Text: what + ": " + field + ": " + fmt.Sprintf(format, args...)})
	}
}

// err is e, or nil if there is no problem.
func (e *Invalid) err() error {
	if len(e.Problems) == 0 {
		return nil
	}
	return e
}
