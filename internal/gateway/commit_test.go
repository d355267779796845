package gateway

import (
	"testing"
	"time"
)

func TestAConfiguredCommitIntervalHoldsOnFlashToo(t *testing.T) {
	for _, c := range []struct {
		configured time.Duration
		flash      bool
		want       time.Duration
	}{
		{0, false, 30 * time.Second},
		{0, true, time.Minute},
		{30 * time.Second, true, 30 * time.Second},
		{time.Hour, true, time.Hour},
		{time.Second, false, time.Second},
	} {
		if got := commitInterval(c.configured, c.flash); got != c.want {
			t.Errorf("configured %v, flash %v: %v, want %v", c.configured, c.flash, got, c.want)
		}
	}
}
