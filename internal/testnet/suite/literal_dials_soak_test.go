//go:build soak

package suite

import "testing"

// With its literal numbers: 200 dials at a time that each last 2 s, for a minute
// beside 20 connections a second.
func TestSoakB02_DeadDialsOfOneClientForAMinuteDoNotSlowAnother(t *testing.T) {
	deadDials(t, 60)
}
