package user

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Lists, decisions that are made again, and other devices' news look up who belongs to
// a device all the time.
func TestLookingUpADeviceDoesNotKeepItsPromotionAndAFlowDoes(t *testing.T) {
	for _, c := range []struct {
		name   string
		opened bool
		want   int
	}{{"looked up", false, 0}, {"flows of no byte", true, 1}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := newUsers(t, Options{})
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- u.Run(ctx) }()
				key, d := put(t, u, Spec{Name: "ann"}), device("10.0.0.1", "")
				if _, err := u.Promote(d, "ann", 10*time.Minute, 0, nil); err != nil {
					t.Fatal(err)
				}
				for range 12 {
					if got, ok := u.UserOf(d); ok && got != key {
						t.Fatalf("it belongs to %d", got)
					}
					if c.opened {
						u.Opened(d)
					}
					time.Sleep(time.Minute)
				}
				if got := len(u.Promotions()); got != c.want {
					t.Errorf("%d promotions, want %d", got, c.want)
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
