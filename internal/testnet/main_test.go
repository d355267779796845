package testnet

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// TestMain also is the stand-in for gatewayd that the tests of Gateway run.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		os.Exit(standIn(os.Args[3]))
	}
	if len(os.Args) > 1 && os.Args[1] == "flows" {
		fmt.Println("flows of", os.Getenv("GATEWAYD_API"))
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// standIn has a configuration of one line, the API's address. It serves the
// answers of a gateway with one flow and exits with 7 on SIGTERM.
func standIn(config string) int {
	stop := make(chan os.Signal, 2)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGHUP)
	text, err := os.ReadFile(config)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	address, found := strings.CutPrefix(strings.TrimSpace(string(text)), "unix:")
	if !found {
		fmt.Fprintln(os.Stderr, "config: no address")
		return 3
	}
	l, err := net.Listen("unix", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	go http.Serve(l, standInAPI()) //nolint:errcheck // ends with the process
	fmt.Fprintln(os.Stderr, `time=… level=INFO msg=ready`)
	for s := range stop {
		if s == syscall.SIGTERM {
			break
		}
		fmt.Fprintln(os.Stderr, "applied")
	}
	return 7
}

func standInAPI() http.Handler {
	const record = `{"id":17,"network":"tcp","source":"10.10.0.2:5000","down":456,"reason":"killed"}`
	mux := http.NewServeMux()
	answer := func(pattern, body string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) })
	}
	answer("GET /v1/connections", `{"sessions":[],"flows":[`+record+`]}`)
	answer("GET /v1/connections/closed", `{"flows":[`+record+`]}`)
	answer("GET /v1/status", `{"epoch":1,"flows":1,"drops":{"checksum":3}}`)
	answer("GET /v1/traffic", "event: traffic\ndata: {\"tick\":7,\"total\":{\"down\":456}}\n\n")
	answer("DELETE /v1/connections", `{"closed":2}`)
	mux.HandleFunc("DELETE /v1/connections/17", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("GET /v1/connections/events", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, ": hello\n\nevent: closed\ndata: %s\n\n", record)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	return mux
}
