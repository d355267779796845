package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
)

// Role is what a caller may do; each role may do all that the smaller ones may.
type Role int

// The roles, smallest first.
const (
	RoleNone  Role = iota // anybody: liveness only
	RoleRead              // look
	RoleUsers             // look, and administer users
	RoleAdmin             // everything
)

var roleNames = [...]string{"none", "read", "users", "admin"}

// String is the role's name in the configuration.
func (r Role) String() string { return roleNames[r] }

// ParseRole reads "read", "users" or "admin".
func ParseRole(s string) (Role, error) {
	for r := RoleRead; r <= RoleAdmin; r++ {
		if s == r.String() {
			return r, nil
		}
	}
	return RoleNone, fmt.Errorf("role %q: want read, users or admin", s)
}

// Token names a bearer token. Its secret is the trimmed content of File.
type Token struct {
	Name string
	Role string // read, users or admin
	File string
}

// secret is a token as it is compared: by the hash, so that neither length nor
// content shows in the time that a comparison takes.
type secret struct {
	name string
	role Role
	sum  [sha256.Size]byte
}

// maxToken is the largest token file in bytes.
const maxToken = 4096

// CheckTokens tells what is wrong with the files of tokens, a line each.
func CheckTokens(tokens []Token) error {
	_, err := readTokens(tokens)
	return err
}

func readTokens(tokens []Token) (out []secret, err error) {
	var wrong []error
	for _, t := range tokens {
		s, err := readToken(t)
		if err != nil {
			wrong = append(wrong, fmt.Errorf("api token %s: %w", t.Name, err))
		}
		out = append(out, s)
	}
	return out, errors.Join(wrong...)
}

func readToken(t Token) (s secret, err error) {
	role, err := ParseRole(t.Role)
	if err != nil {
		return s, err
	}
	b, err := os.ReadFile(t.File)
	b = bytes.TrimSpace(b)
	switch fix := "write one with: (umask 077; head -c 24 /dev/urandom | base64 > " + t.File + ")"; {
	case errors.Is(err, fs.ErrNotExist):
		return s, fmt.Errorf("%w: %s", err, fix)
	case err != nil:
		return s, err
	case len(b) == 0 || len(b) > maxToken:
		return s, fmt.Errorf("%s has %d bytes: want 1 to %d, %s", t.File, len(b), maxToken, fix)
	}
	return secret{t.Name, role, sha256.Sum256(b)}, nil
}

// caller is who is asking; denied says why nobody may.
type caller struct {
	name   string
	role   Role
	denied string
}

type callerKey struct{}

// callerOf is the caller that the connection or the token told.
func callerOf(r *http.Request) caller {
	c, _ := r.Context().Value(callerKey{}).(caller)
	return c
}

// authenticate is the caller of r: the peer of a Unix socket, or a token's bearer.
func (s *Server) authenticate(r *http.Request) caller {
	if c, ok := r.Context().Value(callerKey{}).(caller); ok {
		return c
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	sum := sha256.Sum256([]byte(strings.TrimSpace(token)))
	found := caller{denied: "a bearer token is needed"}
	if strings.EqualFold(scheme, "Bearer") {
		found.denied = "the bearer token is not known"
	}
	for _, t := range s.secrets { // all of them, whichever matches
		if subtle.ConstantTimeCompare(sum[:], t.sum[:]) == 1 && strings.EqualFold(scheme, "Bearer") {
			found = caller{name: t.name, role: t.role}
		}
	}
	return found
}

// authorize lets r pass with the caller in its context, or says why not.
func (s *Server) authorize(r *http.Request, need Role) (*http.Request, error) {
	c := s.authenticate(r)
	_, unix := r.Context().Value(callerKey{}).(caller)
	switch {
	case c.role >= need:
		return r.WithContext(context.WithValue(r.Context(), callerKey{}, c)), nil
	case c.denied != "" && unix:
		return nil, fail(http.StatusForbidden, "%s", c.denied)
	case c.denied != "":
		return nil, fail(http.StatusUnauthorized, "%s", c.denied)
	}
	return nil, fail(http.StatusForbidden, "%s has the role %s: this call needs %s", c.name, c.role, need)
}

// checkHost refuses names that a hostile page could have pointed at this
// address (DNS rebinding). Addresses are safe: no page but our own has them as origin.
func (s *Server) checkHost(r *http.Request) error {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if ok && local.Network() == "unix" {
		return nil
	}
	host := hostName(r.Host)
	if host == "localhost" || s.hosts[host] {
		return nil
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if a.IsLoopback() || ok && sameAddr(local, a) {
			return nil
		}
	}
	return fail(http.StatusForbidden, "host %q is not served here: add it to api.hosts", host)
}

// hostName is the lower-case host of a Host header, without port, brackets and final dot.
func hostName(header string) string {
	host := header
	if h, _, err := net.SplitHostPort(header); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

func sameAddr(local net.Addr, a netip.Addr) bool {
	ap, err := netip.ParseAddrPort(local.String())
	return err == nil && ap.Addr().Unmap().WithZone("") == a.Unmap().WithZone("")
}
