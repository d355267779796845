package flow

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"syscall"
)

// Reason is why a flow closed.
type Reason uint8

// The reasons, in the order of the documentation.
const (
	EOF         Reason = iota // both sides finished
	Reset                     // either side reset the connection
	Killed                    // an operator ended this flow
	Drained                   // the outbound version it was opened on was drained
	Retired                   // its user, session or device was removed
	Quota                     // its user's traffic is used up
	Expired                   // its user's time is up
	Disabled                  // its user was disabled
	Policy                    // a rule rejects it now
	Timeout                   // the far side stopped answering
	Idle                      // nothing moved for too long
	AddressLost               // its source address left the host
	Evicted                   // a limit needed its place
	Shutdown                  // the gateway stopped
	Error                     // anything else; the log has it
)

var reasonNames = [...]string{
	"eof", "reset", "killed", "drained", "retired", "quota", "expired", "disabled",
	"policy", "timeout", "idle", "address-lost", "evicted", "shutdown", "error",
}

// String is the reason's name in records, events and logs.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return "reason(" + strconv.Itoa(int(r)) + ")"
}

// MarshalText makes a Reason its name in JSON.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Cause is an error that ends a flow from outside its relay. Each is a package
// variable of the room that uses it (track.ErrKilled, route.ErrDrained, …) and
// matches itself and ECONNABORTED under errors.Is.
type Cause struct {
	Reason Reason
	Text   string
}

// Error is the cause's text.
func (c *Cause) Error() string { return c.Text }

// Is makes every cause match ECONNABORTED.
func (c *Cause) Is(target error) bool { return target == syscall.ECONNABORTED }

// Causes that belong to no single room.
var (
	ErrShutdown = &Cause{Shutdown, "the gateway is shutting down"}
	ErrIdle     = &Cause{Idle, "the flow was idle for too long"}
	ErrEvicted  = &Cause{Evicted, "the flow was evicted by a limit"}
	ErrPolicy   = &Cause{Policy, "a rule rejects the flow now"}
	ErrLimit    = &Cause{Evicted, "too many flows, in all or of this source"}
)

// ErrPaused is what Meter.Ready returns when its flow has to wait.
var ErrPaused = errors.New("the flow is paused")

// ReasonOf tells which reason an error stands for: nil and io.EOF are EOF, a
// Cause is its own, errno are sorted into Reset and Timeout, the rest is Error.
func ReasonOf(err error) Reason {
	if err == nil || errors.Is(err, io.EOF) {
		return EOF
	}
	if c, ok := errors.AsType[*Cause](err); ok {
		return c.Reason
	}
	switch {
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNREFUSED):
		return Reset
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return Timeout
	}
	return Error
}

// Scarce reports that err is this host's lack of something that others may give
// back soon: descriptors, ports, memory. Nothing is wrong with who asked or with
// where it leads, so that VerdictOf has silence for it: the client tries again.
func Scarce(err error) bool {
	return slices.ContainsFunc(scarcities, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// scarcities: EAGAIN and EADDRINUSE are of ports, ENOSPC is of epoll's watches.
var scarcities = []syscall.Errno{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EAGAIN, syscall.EADDRINUSE, syscall.ENOSPC,
}

// DropOf is what something is counted as that was given up for err; otherwise is
// its cause where err tells no better one.
func DropOf(err error, otherwise Drop) Drop {
	var r *Refusal
	switch {
	case errors.As(err, &r) && r.Drop != 0:
		return r.Drop
	case errors.Is(err, ErrLimit):
		return DropFlowLimit
	case Scarce(err):
		return DropResources
	}
	return otherwise
}

// Verdict is how a client learns that it gets no connection.
type Verdict uint8

// The verdicts.
const (
	VerdictReset           Verdict = iota // TCP reset; port unreachable for datagrams
	VerdictSilent                         // nothing, as a dead host
	VerdictNetUnreachable                 // ICMP network unreachable, no route
	VerdictHostUnreachable                // ICMP host unreachable, address unreachable
	VerdictProhibited                     // ICMP administratively prohibited
	VerdictProtocol                       // ICMP protocol unreachable, unrecognized next header
)

// Refusal is an error of an outbound that refuses on purpose, with the verdict
// that the client gets.
type Refusal struct {
	Verdict Verdict
	Text    string
	Drop    Drop // what it is counted as; 0: as who counts it thinks
}

// Error is the refusal's text.
func (r *Refusal) Error() string { return r.Text }

// VerdictOf tells what a direct path would have shown the client for a dial
// that failed with err.
func VerdictOf(err error) Verdict {
	var r *Refusal
	var dns *net.DNSError
	switch {
	case errors.As(err, &r):
		return r.Verdict
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return VerdictReset
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ENETDOWN), errors.Is(err, syscall.EADDRNOTAVAIL):
		return VerdictNetUnreachable
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EHOSTDOWN), errors.As(err, &dns):
		return VerdictHostUnreachable
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return VerdictProhibited
	case errors.Is(err, syscall.ENOPROTOOPT), errors.Is(err, syscall.EPROTO):
		return VerdictProtocol
	}
	return VerdictSilent
}
