// Package shrink gives back the room of maps that held much once: a Go map keeps
// what it grew to, however little is left in it.
package shrink

import "maps"

const (
	// keep is how many entries a map may have had and keep its room.
	keep = 128
	// part is how much less must be left than there was.
	part = 8
)

// Map is m, or a copy with the room that it needs, once m holds an eighth of what
// it held at its peak. The peak is as of the calls: its owner keeps it beside m, 0
// at first. Entries are copied a seventh of the times that they were deleted, at
// most. A range over m goes on over what it began with.
func Map[K comparable, V any](m map[K]V, peak *int) map[K]V {
	*peak = max(*peak, len(m))
	if *peak <= keep || len(m) > *peak/part {
		return m
	}
	*peak = len(m)
	fit := make(map[K]V, len(m))
	maps.Copy(fit, m)
	return fit
}
