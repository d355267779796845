package user

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"gatewayd/flow"
	"gatewayd/internal/shrink"
)

// Change is an edit that was found valid and kept, and can no longer fail. Other edits
// wait until Commit or Discard is called; both may be called again, to no effect.
type Change struct {
	u      *Users
	over   bool
	groups map[string]*Group // as they are to be
	puts   []putting
	remove []*entry
	keep   Edit
}

// putting is a user that is new, or defined otherwise than now.
type putting struct {
	*entry
	old, def *definition
	made     bool // the entry is in no table yet, and old is nil
}

// Prepare makes the change from what the configuration said to what it says: users and
// groups that it no longer has go. All or nothing: an *Invalid has paths into the lists.
// Numbers that users without one got are kept from then on, also if the change is
// discarded.
func (u *Users) Prepare(groups []Group, specs []Spec) (*Change, error) {
	if err := Validate(groups, specs); err != nil {
		return nil, err
	}
	u.editing.Lock()
	c := &Change{u: u, groups: u.groupsWith(groups)}
	if err := c.prepare(groups, slices.Clone(specs)); err != nil {
		u.editing.Unlock()
		return nil, err
	}
	return c, nil
}

// Commit makes the change hold: flows of users that are gone or disabled have been told
// to end when it returns.
func (c *Change) Commit() {
	if c.over {
		return
	}
	c.over = true
	defer c.u.editing.Unlock()
	c.apply()
}

// Discard leaves everything as it was.
func (c *Change) Discard() {
	if !c.over {
		c.over = true
		c.u.editing.Unlock()
	}
}

// groupsWith are the store's groups and the configuration's. What is as it was keeps
// its pointer, so that nobody's limits are looked at again.
func (u *Users) groupsWith(config []Group) map[string]*Group {
	groups := make(map[string]*Group)
	for name, g := range u.groups {
		if g.Source == FromStore {
			groups[name] = g
		}
	}
	for _, g := range config {
		made := u.group(g, FromConfig)
		if old := u.groups[g.Name]; old != nil && *old == *made {
			made = old
		}
		groups[g.Name] = made
	}
	return groups
}

// group is g as it is kept. editing is held.
func (u *Users) group(g Group, from Source) *Group {
	g.Source = from
	g.Limits = u.zoned(g.Limits)
	return &g
}

// zoned are limits whose zone is the same pointer for the same name: a zone is some
// kilobytes, and comparable so.
func (u *Users) zoned(l Limits) Limits {
	zone := &l.Traffic.Reset.Zone
	if *zone == nil {
		return l
	}
	if known := u.editing.zones[(*zone).String()]; known != nil {
		*zone = known
	} else {
		u.editing.zones[(*zone).String()] = *zone
	}
	return l
}

func (c *Change) prepare(groups []Group, specs []Spec) error {
	if err := c.clashes(groups, specs); err != nil {
		return err
	}
	c.number(specs)
	stays := make(map[flow.UserKey]bool, len(specs))
	for i := range specs {
		s := &specs[i]
		s.Source = FromConfig
		stays[s.ID] = true
		e, _ := c.u.byKey.get(s.ID)
		if err := c.put(e, s); err != nil {
			return err
		}
	}
	for key, e := range c.u.byKey.all() {
		if e.def.Load().source == FromConfig && !stays[key] {
			c.remove = append(c.remove, e)
		}
	}
	if err := c.save(); err != nil { // only numbers: they hold in memory
		c.u.opt.Log.Warn("numbers of new users are not kept over a restart", "err", err)
	}
	return nil
}

// clashes compares the configuration with what the store has.
func (c *Change) clashes(groups []Group, specs []Spec) error {
	var problems Invalid
	for i := range groups {
		if old := c.u.groups[groups[i].Name]; old != nil && old.Source == FromStore {
			problems.add(fmt.Sprintf("groups[%d]", i), fmt.Sprintf("group %q", old.Name), "name", "there is a group of that name in the store; delete it there or rename this one")
		}
	}
	stored := make(map[*entry]bool)
	for e := range c.u.stored() {
		stored[e] = true
		if d := e.def.Load(); d.group != "" && c.groups[d.group] == nil {
			problems.add("groups", fmt.Sprintf("group %q", d.group), "name", "user %q of the store is a member; keep the group or move the user", d.name)
		}
	}
	if len(stored) == 0 {
		return problems.err()
	}
	for i := range specs {
		s := &specs[i]
		if name, what := c.u.taken(s, func(e *entry) bool { return stored[e] }); what != nil {
			problems.add(fmt.Sprintf("users[%d]", i), fmt.Sprintf("user %q", s.Name), name, "that of user %q in the store; change it there or here", what.def.Load().name)
		}
	}
	return problems.err()
}

// stored are the users of the store, if there are any.
func (u *Users) stored() iter.Seq[*entry] {
	return func(yield func(*entry) bool) {
		for _, e := range u.byKey.all() {
			if e.def.Load().source == FromStore && !yield(e) {
				return
			}
		}
	}
}

// taken is the field in which s claims what another user has, of those that count.
func (u *Users) taken(s *Spec, counts func(*entry) bool) (name string, other *entry) {
	u.mu.RLock()
	i, found := u.place(s.Name)
	if found && counts(u.sorted[i]) {
		defer u.mu.RUnlock()
		return "name", u.sorted[i]
	}
	u.mu.RUnlock()
	if e, found := u.byKey.get(s.ID); found && counts(e) {
		return "id", e
	}
	for i, d := range deviceSets(s.Devices) {
		key, _ := u.static.get(d)
		if e, found := u.byKey.get(key); found && counts(e) {
			return fmt.Sprintf("devices[%d]", i), e
		}
	}
	return "", nil
}

// number gives numbers to users without one: that which the name has or had, unless it
// is somebody else's by now, or a new one.
func (c *Change) number(specs []Spec) {
	u := c.u
	taken := make(map[flow.UserKey]bool, len(specs))
	next := u.editing.next
	for i := range specs {
		taken[specs[i].ID] = true // 0, too
		next = max(next, specs[i].ID+1)
	}
	take := func(s *Spec, id flow.UserKey) {
		if s.ID == 0 && !taken[id] {
			s.ID = id
			taken[id] = true
		}
	}
	for i := range specs {
		if e, err := u.named(specs[i].Name); err == nil {
			take(&specs[i], e.key)
		}
	}
	c.keep.Names = make(map[string]flow.UserKey)
	for i := range specs {
		s := &specs[i]
		known := u.editing.names[s.Name]
		if _, other := u.byKey.get(known); !other {
			take(s, known)
		}
		if s.ID == 0 {
			take(s, next)
			next++
		}
		if e, used := u.byKey.get(s.ID); known != s.ID && (!used || e.def.Load().name != s.Name) {
			c.keep.Names[s.Name] = s.ID
		}
	}
	if next != u.editing.next {
		c.keep.Next = next
	}
}

// put plans that the user is defined by s from now on, if that is otherwise than now; e
// is nil for a new one.
func (c *Change) put(e *entry, s *Spec) error {
	def := c.u.define(s)
	if e != nil {
		if old := e.def.Load(); !old.same(def) {
			c.puts = append(c.puts, putting{e, old, def, false})
		}
		return nil
	}
	e, err := c.u.make(s.ID, def, c.groups[s.Group])
	if err == nil {
		c.puts = append(c.puts, putting{e, nil, def, true})
	}
	return err
}

// make is a user that is in no table yet, with the usage that its number had.
func (u *Users) make(key flow.UserKey, def *definition, g *Group) (*entry, error) {
	usage, returns := u.editing.left[key]
	if !returns {
		var err error
		if usage, err = u.keeper.Usage(key); err != nil {
			return nil, fmt.Errorf("usage of user %q: %w", def.name, err)
		}
	}
	e := &entry{key: key, committed: usage.payload()}
	e.def.Store(def)
	e.group.Store(g)
	e.now.Store(uint32(numStates))
	e.expires.Store(never)
	e.alarm.at.Store(never)
	e.settled.calendar = e.calendar()
	if usage != (Usage{}) {
		e.idle = &usage
	}
	return e, nil
}

// save keeps what the change has to keep, and then the numbers that it gave away.
func (c *Change) save() error {
	var err error
	if !c.keep.empty() {
		err = c.u.save(&c.keep)
	}
	ed := &c.u.editing
	ed.next = max(ed.next, c.keep.Next)
	maps.Copy(ed.names, c.keep.Names)
	return err
}

func (u *Users) save(e *Edit) error {
	u.saving.Lock()
	defer u.saving.Unlock()
	return u.keeper.Save(e)
}

// apply makes everybody see the change. editing is held.
func (c *Change) apply() {
	u := c.u
	for _, p := range c.puts {
		if p.made {
			delete(u.editing.left, p.key)
			delete(u.editing.names, p.def.name)
			u.settle(p.entry) // nobody sees it yet
		}
	}
	u.editing.names = shrink.Map(u.editing.names, &u.editing.peak)
	u.mu.Lock()
	touched := c.regroup()
	c.sort()
	u.groups = c.groups
	c.publish()
	u.mu.Unlock()

	for _, p := range c.puts {
		if !p.made {
			u.redefined(p.entry, p.old, p.def)
		}
	}
	for _, e := range touched {
		u.settle(e)
	}
	for _, e := range c.remove {
		e.retired.Store(true)
		u.settle(e)
	}
	c.keepRemoved()
}

// regroup gives members their group as it is to be, and returns those, and all that are
// defined otherwise. u.mu is held.
func (c *Change) regroup() (touched []*entry) {
	if !maps.Equal(c.u.groups, c.groups) {
		for _, e := range c.u.sorted {
			if g := c.groups[e.def.Load().group]; e.group.Load() != g {
				e.group.Store(g)
				touched = append(touched, e)
			}
		}
	}
	for _, p := range c.puts {
		if !p.made {
			p.group.Store(c.groups[p.def.group])
			touched = append(touched, p.entry)
		}
	}
	return touched
}

// few is how many places in a sorted list are better found one by one.
const few = 32

// sort brings the definitions and the list by name up to date. u.mu is held.
func (c *Change) sort() {
	u := c.u
	var leaves, comes []*entry
	for _, p := range c.puts {
		renamed := !p.made && p.old.name != p.def.name
		if renamed {
			leaves = append(leaves, p.entry)
		}
		if renamed || p.made {
			comes = append(comes, p.entry)
		}
	}
	u.unlist(append(leaves, c.remove...))
	for _, p := range c.puts {
		p.entry.def.Store(p.def)
	}
	u.list(comes)
}

// unlist takes users out of the list by name.
func (u *Users) unlist(leaves []*entry) {
	if len(leaves) <= few {
		for _, e := range leaves {
			i, _ := u.place(e.def.Load().name)
			u.sorted = slices.Delete(u.sorted, i, i+1)
		}
		return
	}
	gone := make(map[*entry]bool, len(leaves))
	for _, e := range leaves {
		gone[e] = true
	}
	u.sorted = slices.DeleteFunc(u.sorted, func(e *entry) bool { return gone[e] })
}

// list puts users into the list by name.
func (u *Users) list(comes []*entry) {
	if len(comes) <= few {
		for _, e := range comes {
			i, _ := u.place(e.def.Load().name)
			u.sorted = slices.Insert(u.sorted, i, e)
		}
		return
	}
	u.sorted = append(slices.Grow(u.sorted, len(comes)), comes...)
	slices.SortFunc(u.sorted, func(a, b *entry) int { return strings.Compare(a.def.Load().name, b.def.Load().name) })
}

// publish makes the data path see who there is and whose the devices are. What moves
// from one user to another is never nobody's.
func (c *Change) publish() {
	keys, devices := c.u.byKey.draft(), c.u.static.edit()
	for _, p := range c.puts {
		keys.set(p.key, p.entry)
		for _, d := range deviceSets(p.def.devices) {
			devices.set(d, p.key)
		}
	}
	free := func(texts []string, key flow.UserKey, keeps []flow.DeviceSet) {
		for _, d := range deviceSets(texts) {
			if owner, _ := devices.get(d); owner == key && !slices.Contains(keeps, d) {
				devices.delete(d)
			}
		}
	}
	for _, p := range c.puts {
		if !p.made {
			free(p.old.devices, p.key, deviceSets(p.def.devices))
		}
	}
	for _, e := range c.remove {
		free(e.def.Load().devices, e.key, nil)
		keys.delete(e.key)
	}
	keys.publish()
	devices.publish()
}

// keepRemoved keeps the usage of users that left the configuration: a user that comes
// back under the same number goes on with it.
func (c *Change) keepRemoved() {
	u := c.u
	var left []*entry
	for _, e := range c.remove {
		if d := e.def.Load(); d.source == FromConfig {
			left = append(left, e)
			u.editing.names[d.name] = e.key
		}
		u.event("user.removed", e)
	}
	for _, e := range left[:min(len(left), maxLeft-len(u.editing.left))] { // the keeper has them all
		u.editing.left[e.key] = e.usage()
	}
	if len(left) > 0 {
		u.unkept(u.commitOf(left))
	}
}

// maxLeft bounds what is remembered of users that are gone.
const maxLeft = 10_000

// deviceSets are the devices of a valid definition.
func deviceSets(texts []string) []flow.DeviceSet {
	if len(texts) == 0 {
		return nil
	}
	sets := make([]flow.DeviceSet, 0, len(texts))
	for _, text := range texts {
		if d, err := flow.ParseDeviceSet(text); err == nil {
			sets = append(sets, d)
		}
	}
	return sets
}

// same reports that two definitions say the same.
func (d *definition) same(o *definition) bool {
	return d.name == o.name && d.group == o.group && d.disabled == o.disabled && d.notes == o.notes &&
		d.externalID == o.externalID && d.source == o.source && *d.limits == *o.limits &&
		d.expires == o.expires && slices.Equal(d.devices, o.devices)
}
