// Package suite runs the real gatewayd between real clients and servers in
// namespaces: each test is a behaviour that users rely on, seen from outside.
//
// A test compares what the client saw, what the server saw and what the API
// tells of the same flows. Times of minutes are scaled down 1:20 by configuration.
package suite
