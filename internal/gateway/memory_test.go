package gateway

import "testing"

func TestARushIsOverOnceWhenLittleOfItIsLeftAndThatGoesNoMore(t *testing.T) {
	var r rushes
	for i, look := range []struct {
		held int
		over bool
	}{
		{0, false},
		{100, false},
		{100, false}, // never was a rush
		{400, false},
		{2000, false},
		{900, false},
		{900, false}, // much is left
		{400, false}, // little, but it goes
		{100, false},
		{0, false},
		{0, true},
		{0, false}, // once
		{600, false},
		{140, false},
		{149, true}, // little, among it what came meanwhile
		{149, false},
	} {
		if over := r.over(look.held); over != look.over {
			t.Errorf("look %d: over is %v with %d held", i, over, look.held)
		}
	}
}
