//go:build soak

package suite

import "testing"

func TestSoakB46_FiftyKillsLoseNothingThatWasCommitted(t *testing.T) { sigkills(t, 50) }
