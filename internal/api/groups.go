package api

import (
	"net/http"
	"slices"

	"gatewayd/user"
)

// listGroups answers all groups by name.
func (s *Server) listGroups(w http.ResponseWriter, r *http.Request) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	out := Groups{[]Group{}}
	for _, g := range users.Groups() {
		out.Groups = append(out.Groups, groupShape(&g))
	}
	return writeJSON(w, out)
}

func groupShape(g *user.Group) Group {
	out := Group{Name: g.Name, Limits: limitsShape(&g.Limits), Source: g.Source.String()}
	out.Limits.WhenExhausted = out.Limits.WhenExhausted.shown()
	return out
}

// getGroup answers one group.
func (s *Server) getGroup(w http.ResponseWriter, r *http.Request) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	g, ok := groupNow(users, r.PathValue("name"))
	if !ok {
		return fail(http.StatusNotFound, "no group %q", r.PathValue("name"))
	}
	return writeJSON(w, groupShape(&g))
}

func groupNow(users Users, name string) (g user.Group, ok bool) {
	groups := users.Groups()
	i := slices.IndexFunc(groups, func(g user.Group) bool { return g.Name == name })
	if i < 0 {
		return g, false
	}
	return groups[i], true
}

// putGroup makes the group of the path, or replaces it; its members feel it at once.
func (s *Server) putGroup(w http.ResponseWriter, r *http.Request) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	name := r.PathValue("name")
	g := Group{Name: name}
	if err := record(w, r, &g); err != nil {
		return err
	}
	if g.Name != name {
		return userProblem(invalid("name %q: a group keeps its name, %q", g.Name, name))
	}
	limits, err := limitsOf(&g.Limits)
	if err == nil {
		err = s.knownOutbound(&limits)
	}
	if err != nil {
		return userProblem(err)
	}
	s.editing.Lock()
	defer s.editing.Unlock()
	status := http.StatusOK
	if _, there := groupNow(users, name); !there {
		status = http.StatusCreated
	}
	made := user.Group{Name: name, Limits: limits, Source: user.FromStore}
	if err := users.PutGroup(made); err != nil {
		return userProblem(err)
	}
	s.log.Info("group changed", "group", name, "by", callerOf(r).name)
	return writeStatus(w, status, groupShape(&made))
}

// deleteGroup removes a group that has no members.
func (s *Server) deleteGroup(w http.ResponseWriter, r *http.Request) error {
	users, err := s.users()
	if err != nil {
		return err
	}
	name := r.PathValue("name")
	s.editing.Lock()
	defer s.editing.Unlock()
	if err := users.DeleteGroup(name); err != nil {
		return userProblem(err)
	}
	s.log.Info("group deleted", "group", name, "by", callerOf(r).name)
	w.WriteHeader(http.StatusNoContent)
	return nil
}
