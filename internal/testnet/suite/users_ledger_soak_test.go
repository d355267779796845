//go:build soak

package suite

import "testing"

func TestB46_FiftyKillsLoseNothingThatWasCommitted(t *testing.T) { sigkills(t, 50) }
