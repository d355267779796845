package gateway

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"gatewayd/internal/webhook"
	"gatewayd/user"
)

func TestAnEditIsPostedToWebhooksOnce(t *testing.T) {
	posts := make(chan string, 16)
	site := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var e struct {
			Type string
			Data struct{ User struct{ Name string } }
		}
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
			t.Error(err)
		}
		posts <- e.Type + " " + e.Data.User.Name
	}))
	defer site.Close()
	r := newRig(t)
	r.gw.webhooks.Use([]webhook.Target{{URL: site.URL, On: []string{"user"}}})
	ctx, cancel := context.WithCancel(t.Context())
	var sender sync.WaitGroup
	sender.Go(func() {
		if err := r.gw.webhooks.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer sender.Wait()
	defer cancel()

	ann := user.Spec{Name: "ann"}
	r.put(ann)
	r.put(ann) // as it is
	ann.Disabled = true
	r.put(ann)
	if err := r.gw.users.Delete("ann"); err != nil {
		t.Fatal(err)
	}
	// In this order, so that one more would be in the place of the next.
	for _, want := range []string{"user.added ann", "user.disabled ann", "user.changed ann", "user.removed ann"} {
		if got := within(t, posts); got != want {
			t.Errorf("%q was posted, want %q", got, want)
		}
	}
}
