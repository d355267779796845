package route

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"gatewayd/flow"
)

// Drain is what happens to the flows of a superseded version. The zero value
// ends them at once.
type Drain struct {
	Keep  bool          // they live on until they end by themselves
	After time.Duration // else they end after this time
}

// Definition is what a version of an outbound is made from.
type Definition struct {
	Tag         string // unique in an apply
	Type        string
	Fingerprint string                        // equal, with the same type: unchanged
	New         func() (flow.Outbound, error) // may block; its result belongs to the version, which closes an io.Closer
	Drain       Drain                         // of versions of this tag that drain from this apply on
}

// Outbounds holds the current version of each outbound and those that drain. An
// apply is Prepare, which builds; then, when everything else is ready too, the
// new plane is put in place; then Commit, which drains what is no longer used.
type Outbounds struct {
	expire func(*Version)
	locked struct {
		sync.Mutex
		current  []*Version     // in the order of the definitions
		draining []*Version     // in the order in which they were superseded; each has a flow
		numbers  map[string]int // last number of each tag ever applied
		change   *Change        // prepared, and neither committed nor discarded
		closed   bool
	}
	timers sync.WaitGroup // drain timers that run or whose expire is running
}

var errClosed = errors.New("outbounds: closed")

// NewOutbounds makes an empty one. expire is called, with no lock held and once
// for each version at most, when the drain period of a version ends: it has to end
// the flows that are registered on it with ErrDrained, and must not call Close.
func NewOutbounds(expire func(*Version)) *Outbounds {
	o := &Outbounds{expire: expire}
	o.locked.numbers = make(map[string]int)
	return o
}

// Change is a prepared apply. Commit or Discard ends it; what comes second does nothing.
type Change struct {
	owner       *Outbounds
	definitions []Definition
	versions    []*Version // one for each definition, kept or new
	built       []*Version // the new ones whose outbound exists; guarded by owner.locked while it is the owner's change
	byTag       map[string]*Version
}

// Prepare builds a new version for each definition that is new or changed, and
// touches nothing that lives. An error leaves everything as it was and closes what
// was built. One change at a time: until it is committed or discarded, another
// Prepare fails. It blocks as the definitions' New do.
func (o *Outbounds) Prepare(defs []Definition) (*Change, error) {
	c, err := o.begin(defs)
	if err != nil {
		return nil, err
	}
	if err := c.build(); err != nil {
		c.Discard()
		return nil, err
	}
	return c, nil
}

func (o *Outbounds) begin(defs []Definition) (*Change, error) {
	o.locked.Lock()
	defer o.locked.Unlock()
	switch {
	case o.locked.closed:
		return nil, errClosed
	case o.locked.change != nil:
		return nil, errors.New("outbounds: another change is in progress")
	}
	c := &Change{owner: o, definitions: slices.Clone(defs), byTag: make(map[string]*Version, len(defs))}
	for i := range defs {
		d := &defs[i]
		if _, ok := c.byTag[d.Tag]; ok {
			return nil, fmt.Errorf("outbound %q: defined twice", d.Tag)
		}
		v := o.versionLocked(d)
		c.byTag[d.Tag] = v
		c.versions = append(c.versions, v)
	}
	o.locked.change = c
	return c, nil
}

// versionLocked is the current version if d leaves it unchanged, else the next
// one, which has no outbound yet.
func (o *Outbounds) versionLocked(d *Definition) *Version {
	for _, v := range o.locked.current {
		if v.tag == d.Tag && v.kind == d.Type && v.fingerprint == d.Fingerprint {
			return v
		}
	}
	return &Version{
		tag: d.Tag, kind: d.Type, n: o.locked.numbers[d.Tag] + 1,
		fingerprint: d.Fingerprint, owner: o,
	}
}

func (c *Change) build() (err error) {
	for i, v := range c.versions {
		if v.outbound != nil {
			continue
		}
		if v.outbound, err = c.definitions[i].New(); err != nil {
			return fmt.Errorf("outbound %q: %w", v.tag, err)
		}
		if !c.keep(v) {
			_ = v.shut() // Close was called meanwhile; that is the error
			return errClosed
		}
	}
	return nil
}

// keep files v as built, unless Close ended the change.
func (c *Change) keep(v *Version) bool {
	l := &c.owner.locked
	l.Lock()
	defer l.Unlock()
	if l.change != c {
		return false
	}
	c.built = append(c.built, v)
	return true
}

// Version is the version that tag stands for after Commit.
func (c *Change) Version(tag string) (*Version, bool) {
	v, ok := c.byTag[tag]
	return v, ok
}

// Commit makes the change's versions the current ones and begins to drain the
// others: those without a flow close here, those that drain at once expire here.
// The plane that uses the new versions must be in place before, so that whoever
// finds an old version expired finds a new one on the plane.
func (c *Change) Commit() {
	for _, v := range c.commit() {
		v.supersede()
		c.owner.startDrain(v)
	}
}

func (c *Change) commit() (old []*Version) {
	l := &c.owner.locked
	l.Lock()
	defer l.Unlock()
	if l.change != c {
		return nil
	}
	l.change = nil
	for _, v := range l.current {
		next, ok := c.byTag[v.tag]
		if ok {
			v.drain = c.drainOf(v.tag)
		}
		if next != v {
			old = append(old, v)
		}
	}
	for _, v := range c.built {
		l.numbers[v.tag] = v.n
		v.drain = c.drainOf(v.tag)
	}
	l.current = c.versions
	l.draining = append(l.draining, old...)
	return old
}

func (c *Change) drainOf(tag string) Drain {
	i := slices.IndexFunc(c.definitions, func(d Definition) bool { return d.Tag == tag })
	return c.definitions[i].Drain
}

// Discard closes what the change built. The numbers of its versions are free again.
func (c *Change) Discard() {
	l := &c.owner.locked
	l.Lock()
	mine := l.change == c
	if mine {
		l.change = nil
	}
	l.Unlock()
	if mine {
		// The change failed for another reason, which the caller knows.
		_ = c.close()
	}
}

// close closes what was built, the newest first.
func (c *Change) close() error {
	var errs []error
	for _, v := range slices.Backward(c.built) {
		errs = append(errs, v.shut())
	}
	return errors.Join(errs...)
}

// startDrain begins the drain period of a superseded version.
func (o *Outbounds) startDrain(v *Version) {
	o.locked.Lock()
	d := v.drain
	if !d.Keep && d.After > 0 && slices.Contains(o.locked.draining, v) {
		o.timers.Add(1)
		v.timer = time.AfterFunc(d.After, func() {
			defer o.timers.Done()
			v.end()
		})
	}
	o.locked.Unlock()
	if !d.Keep && d.After <= 0 {
		v.end()
	}
}

// forget takes a version that closed off the list.
func (o *Outbounds) forget(v *Version) {
	o.locked.Lock()
	defer o.locked.Unlock()
	o.locked.draining = slices.DeleteFunc(o.locked.draining, func(w *Version) bool { return w == v })
	o.stopTimerLocked(v)
}

func (o *Outbounds) stopTimerLocked(v *Version) {
	if v.timer != nil && v.timer.Stop() {
		o.timers.Done()
	}
	v.timer = nil
}

// Find is the current version of a tag.
func (o *Outbounds) Find(tag string) (*Version, bool) {
	for _, v := range o.Current() {
		if v.tag == tag {
			return v, true
		}
	}
	return nil, false
}

// Current is the versions of the newest apply, in the order of its definitions.
func (o *Outbounds) Current() []*Version {
	o.locked.Lock()
	defer o.locked.Unlock()
	return slices.Clone(o.locked.current)
}

// Draining is the superseded versions that flows still live on, oldest first.
func (o *Outbounds) Draining() []*Version {
	o.locked.Lock()
	defer o.locked.Unlock()
	return slices.Clone(o.locked.draining)
}

// Close closes every version, a prepared change's too, whatever lives on them:
// end the flows first. It waits for expire calls that drain timers made, and
// returns the errors of the outbounds' Close.
func (o *Outbounds) Close() error {
	l := &o.locked
	l.Lock()
	l.closed = true
	all := slices.Concat(l.current, l.draining)
	if l.change != nil {
		all = append(all, l.change.built...)
	}
	for _, v := range l.draining {
		o.stopTimerLocked(v)
	}
	l.current, l.draining, l.change = nil, nil, nil
	l.Unlock()

	o.timers.Wait()
	var errs []error
	for _, v := range all {
		if err := v.shut(); err != nil {
			errs = append(errs, fmt.Errorf("outbound %v: close: %w", v, err))
		}
	}
	return errors.Join(errs...)
}
