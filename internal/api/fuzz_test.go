package api_test

import (
	"net/url"
	"testing"

	"gatewayd/internal/api"
	"gatewayd/track"
)

// FuzzSelector: any query is either refused with 400 or picks flows without a panic.
func FuzzSelector(f *testing.F) {
	for _, seed := range []string{"inbound=lan&outbound=", "session=session%233", "device=mac:3c:22:fb:aa:bb:cc", "source=::ffff:10.0.0.1&limit=5&after=flow%2317", "domain=a.b."} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		sel, err := api.ParseSelector(q)
		if err == nil {
			for _, holds := range sel {
				holds(&track.Record{})
			}
		} else if statusOf(err) != 400 {
			t.Errorf("%q: %v", query, err)
		}
		if page, err := api.ParsePage(q); err != nil && statusOf(err) != 400 {
			t.Errorf("%q: %v %v", query, page, err)
		}
	})
}
