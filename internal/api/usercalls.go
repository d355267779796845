package api

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"gatewayd/internal/config"
	"gatewayd/user"
)

// listUsers answers users by name.
func (s *Server) listUsers(w http.ResponseWriter, r *http.Request) error {
	users, err := s.readableUsers(r)
	if err != nil {
		return err
	}
	pg, free, err := s.takeNames(w, r)
	if err != nil {
		return err
	}
	defer free()
	list, next := cut(users.List(pg.after, pg.ask()), pg, func(v *user.View) string { return v.Name })
	p := s.privacyFor(r)
	return writeList(w, r, "users", list, next, func(v *user.View) any { return userShape(v, p) })
}

// readableUsers is the registry for whoever may look at users: with a privacy that
// hides them, those who administer them.
func (s *Server) readableUsers(r *http.Request) (Users, error) {
	if s.privacy >= privacyAddresses && callerOf(r).role < RoleUsers {
		return nil, fail(http.StatusForbidden, "users: hidden by privacy: %s", s.privacy)
	}
	return s.users()
}

// getUser answers one user, with the etag of its definition.
func (s *Server) getUser(w http.ResponseWriter, r *http.Request) error {
	users, err := s.readableUsers(r)
	if err != nil {
		return err
	}
	return s.answerUser(w, r, users, r.PathValue("name"), http.StatusOK)
}

func (s *Server) answerUser(w http.ResponseWriter, r *http.Request, users Users, name string, status int) error {
	v, err := users.Get(name)
	if err != nil {
		return userProblem(err)
	}
	w.Header().Set("ETag", quoteTag(specTag(&v.Spec)))
	if status == http.StatusCreated {
		w.Header().Set("Location", "/v1/users/"+url.PathEscape(name))
	}
	return writeStatus(w, status, userShape(&v, s.privacyFor(r)))
}

// specTag is the strong etag of a definition; state and usage are not part of it.
func specTag(spec *user.Spec) string {
	b, err := json.Marshal(specShape(spec))
	if err != nil {
		return "" // it is text and numbers
	}
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:12])
}

// createUser makes the user of the body; its name must be new.
func (s *Server) createUser(w http.ResponseWriter, r *http.Request) error {
	u := User{UserSpec: UserSpec{Enabled: true}}
	if err := record(w, r, &u); err != nil {
		return err
	}
	return s.editUser(w, r, u.Name, func(users Users) (string, error) {
		spec, err := s.spec(&u.UserSpec)
		if err == nil {
			err = users.Create(spec)
		}
		return u.Name, err
	})
}

// putUser makes the user of the path, or replaces its definition.
func (s *Server) putUser(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("name")
	u := User{UserSpec: UserSpec{Name: name, Enabled: true}}
	if err := record(w, r, &u); err != nil {
		return err
	}
	if u.Name != name {
		return userProblem(invalid("name: it is %q in the path, and %q in the body", name, u.Name))
	}
	return s.editUser(w, r, name, func(users Users) (string, error) {
		spec, err := s.spec(&u.UserSpec)
		if err == nil {
			keepInherited(users, &spec)
			err = users.Put(spec)
		}
		return name, err
	})
}

// keepInherited leaves a multiplier, or what happens when the traffic is used up, that
// is not the user's own what it is, where the one that holds is sent back: the group's
// may change.
func keepInherited(users Users, spec *user.Spec) {
	old, err := users.Get(spec.Name)
	if err != nil || spec.Group != old.Group { // what is said of another group is meant
		return
	}
	if !old.Limits.Multiplier.Set && Multiplier(spec.Limits.Multiplier) == factorOf(&old) {
		spec.Limits.Multiplier = user.Multiplier{}
	}
	if old.Limits.WhenExhausted == (user.Exhausted{}) && exhaustedShape(spec.Limits.WhenExhausted) == exhaustedOf(&old) {
		spec.Limits.WhenExhausted = user.Exhausted{}
	}
}

// patchUser merges the body into the user's definition (RFC 7386); that may rename it.
func (s *Server) patchUser(w http.ResponseWriter, r *http.Request) error {
	patch, err := body(w, r, maxRecord)
	if err == nil {
		err = decodeRecord([]byte(patch), &UserSpec{}) // its mistakes, before it is merged
	}
	if err != nil {
		return err
	}
	name := r.PathValue("name")
	return s.editUser(w, r, name, func(users Users) (next string, err error) {
		err = users.Update(name, func(now user.Spec) (user.Spec, error) {
			spec, err := s.merge(&now, []byte(patch))
			next = spec.Name
			return spec, err
		})
		return next, err
	})
}

// merge is the definition with a merge patch applied.
func (s *Server) merge(now *user.Spec, patch []byte) (user.Spec, error) {
	text, err := patched(specShape(now), patch)
	if err != nil {
		return *now, err
	}
	u := UserSpec{Enabled: true}
	if err := decodeRecord(text, &u); err != nil {
		return *now, err
	}
	return s.spec(&u)
}

// spec is the definition that a request wrote, which must name no outbound that there
// is not.
func (s *Server) spec(u *UserSpec) (user.Spec, error) {
	spec, err := specOf(u)
	if err == nil {
		err = s.knownOutbound(&spec.Limits)
	}
	return spec, err
}

func (s *Server) knownOutbound(l *user.Limits) error {
	tag := l.WhenExhausted.Outbound
	var tags []string
	for _, o := range s.opt.Gateway.Outbounds() {
		if o.Version > 0 { // 0: it was removed
			tags = append(tags, o.Tag)
		}
	}
	if tag == "" || slices.Contains(tags, tag) {
		return nil
	}
	return invalid("limits.when_exhausted.outbound: no outbound %q: known are %s", tag, strings.Join(tags, ", "))
}

// editUser changes the user of that name, or makes it, and answers the user, whose name
// edit returns. Edits follow each other, so that nothing changes between
// If-Match and the edit.
func (s *Server) editUser(w http.ResponseWriter, r *http.Request, name string, edit func(Users) (string, error)) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	s.editing.Lock()
	defer s.editing.Unlock()
	now, err := userNow(users, name)
	if err != nil {
		return err
	}
	if err := precondition(r, now); err != nil {
		return err
	}
	next, err := edit(users)
	if err != nil {
		return userProblem(err)
	}
	status, what := http.StatusOK, "changed"
	if now == nil {
		status, what = http.StatusCreated, "added"
	}
	s.log.Info("user "+what, "user", next, "by", callerOf(r).name)
	return s.answerUser(w, r, users, next, status)
}

// userNow is the user, nil if there is none.
func userNow(users Users, name string) (*user.View, error) {
	v, err := users.Get(name)
	switch {
	case errors.Is(err, user.ErrUnknown):
		return nil, nil //nolint:nilnil // none is no error
	case err != nil:
		return nil, userProblem(err)
	}
	return &v, nil
}

// precondition refuses a request whose If-Match, if it has one, names another definition.
func precondition(r *http.Request, now *user.View) error {
	header := strings.Join(r.Header.Values("If-Match"), ",")
	switch {
	case strings.TrimSpace(header) == "":
		return nil
	case now == nil:
		return fail(http.StatusPreconditionFailed, "If-Match: there is no such user")
	case !namesTag(header, specTag(&now.Spec)):
		return fail(http.StatusPreconditionFailed, "the user changed meanwhile: read it again and send its ETag in If-Match")
	}
	return nil
}

// deleteUser retires a user.
func (s *Server) deleteUser(w http.ResponseWriter, r *http.Request) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	name := r.PathValue("name")
	s.editing.Lock()
	defer s.editing.Unlock()
	now, err := userNow(users, name)
	if err != nil {
		return err
	}
	if err := precondition(r, now); err != nil {
		return err
	}
	if err := users.Delete(name); err != nil {
		return userProblem(err)
	}
	s.log.Info("user deleted", "user", name, "by", callerOf(r).name)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// TopUp is the body of …/topup.
type TopUp struct {
	Bytes config.Size `json:"bytes"` // as an integer or as in "5GB"
}

// Extend is the body of …/extend.
type Extend struct {
	For Duration `json:"for"`
}

// resetUser begins the user's period anew.
func (s *Server) resetUser(w http.ResponseWriter, r *http.Request) error {
	return s.changeUsage(w, r, "reset", Users.Reset)
}

// topUpUser adds to what the user may move in this period.
func (s *Server) topUpUser(w http.ResponseWriter, r *http.Request) error {
	var t TopUp
	if err := record(w, r, &t); err != nil {
		return err
	}
	if t.Bytes == 0 {
		return userProblem(invalid(`bytes: want more than 0, as in "5GB"`))
	}
	return s.changeUsage(w, r, "topped up", func(users Users, name string) error { return users.TopUp(name, uint64(t.Bytes)) })
}

// extendUser moves the time at which the user expires.
func (s *Server) extendUser(w http.ResponseWriter, r *http.Request) error {
	var e Extend
	if err := record(w, r, &e); err != nil {
		return err
	}
	if e.For == 0 {
		return userProblem(invalid(`for: want a duration, as in "30d"`))
	}
	return s.changeUsage(w, r, "extended", func(users Users, name string) error { return users.Extend(name, time.Duration(e.For)) })
}

// changeUsage changes what is kept of a user, and answers the user.
func (s *Server) changeUsage(w http.ResponseWriter, r *http.Request, what string, change func(Users, string) error) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := change(users, name); err != nil {
		return userProblem(err)
	}
	s.log.Info("user "+what, "user", name, "by", callerOf(r).name)
	return s.answerUser(w, r, users, name, http.StatusOK)
}
