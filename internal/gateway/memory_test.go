package gateway

import "testing"

func TestARushIsOverOnceWhenLittleOfItIsLeft(t *testing.T) {
	peak, times := 0, 0
	for _, held := range []int{0, 100, 0, 400, 2000, 900, 501, 400, 100, 0, 0, 600, 150, 0} {
		var over bool
		if peak, over = rushed(peak, held); over {
			times++
			if held != 400 && held != 150 {
				t.Errorf("over with %d left", held)
			}
		}
	}
	if times != 2 {
		t.Errorf("over %d times, want twice", times)
	}
}
