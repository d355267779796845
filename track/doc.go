// Package track knows every live flow: it counts what each moved, ends one or many
// of them from outside, announces opens and closes, and publishes totals and rates.
//
// The data path never waits on an observer. A flow's way through the package:
//
//	Open    registers it in the shard of its id       (shard's lock, a few stores)
//	Ready   tells the relay how much it may take      (one atomic load)
//	Moved   counts what moved                         (one atomic compare-and-swap)
//	End     makes Ready fail from now on              (one compare-and-swap, then the owner's hook)
//	Close   takes it out, with its final counters     (shard's lock, a few stores)
//
// Observers run beside that: the sampler, lists and predicates look at a shard in
// chunks and hold its lock for one chunk at a time; subscribers read a ring that
// goes on without them. Nothing of a caller runs under a lock of this package.
package track
