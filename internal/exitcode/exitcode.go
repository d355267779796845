// Package exitcode ties an error to the exit code that the process ends with,
// so that a service manager can tell a bad file from a missing kernel piece.
package exitcode

import "errors"

// The exit codes of gatewayd.
const (
	OK        = 0
	Failure   = 1 // anything else
	Usage     = 2 // wrong command line
	Config    = 3 // bad configuration
	Missing   = 4 // a kernel piece or a permission is missing
	Collision = 5 // another program has what we need
)

type coded struct {
	error
	code int
}

func (c *coded) Unwrap() error { return c.error }

// With marks err with the code to exit with. A nil error stays nil.
func With(code int, err error) error {
	if err == nil {
		return nil
	}
	return &coded{err, code}
}

// Of is the code that err carries: OK for nil, Failure if it carries none.
func Of(err error) int {
	if err == nil {
		return OK
	}
	if c, ok := errors.AsType[*coded](err); ok {
		return c.code
	}
	return Failure
}
