package user

import (
	"iter"
	"time"

	"gatewayd/flow"
)

// Keeper keeps over restarts what must not be lost. Calls of Load, Usage and Save
// follow each other; Commit may be called beside them.
type Keeper interface {
	// Load is called once, before anything else.
	Load() (Kept, error)
	// Usage is what was committed last for a number, zero if nothing was.
	Usage(key flow.UserKey) (Usage, error)
	// Save keeps all of an edit, or nothing when it returns an error. What it returned
	// nil for survives a crash.
	Save(e *Edit) error
	// Commit keeps the usages of the numbers that are yielded, all or nothing, and the
	// time. The usages may be read once, during the call.
	Commit(at time.Time, usages iter.Seq2[flow.UserKey, Usage]) error
}

// Kept is what a Keeper has.
type Kept struct {
	Committed  time.Time               // of the last Commit; zero: never
	Next       flow.UserKey            // no number from here on was ever given away
	Names      map[string]flow.UserKey // numbers of users that the configuration names, also of those that left it
	Users      []Spec                  // FromStore
	Groups     []Group                 // FromStore
	Promotions []Promotion
}

// Edit is what an edit changes of it.
type Edit struct {
	Next       flow.UserKey            // 0: as it is
	Names      map[string]flow.UserKey // to be added or replaced
	Users      []Spec                  // to be added or, by number, replaced
	Groups     []Group                 // to be added or, by name, replaced
	Promotions []Promotion             // to be added or, by device, replaced

	DeleteUsers      []flow.UserKey // with their usage
	DeleteGroups     []string
	DeletePromotions []string // by device
}

// empty reports that there is nothing to keep.
func (e *Edit) empty() bool {
	return e.Next == 0 && len(e.Names)+len(e.Users)+len(e.Groups)+len(e.Promotions)+
		len(e.DeleteUsers)+len(e.DeleteGroups)+len(e.DeletePromotions) == 0
}

// memory is the Keeper of a gateway that has none: everything is lost with the process.
type memory struct{}

func (memory) Load() (Kept, error)                                    { return Kept{}, nil }
func (memory) Usage(flow.UserKey) (Usage, error)                      { return Usage{}, nil }
func (memory) Save(*Edit) error                                       { return nil }
func (memory) Commit(time.Time, iter.Seq2[flow.UserKey, Usage]) error { return nil }
