// Package api serves the gateway over HTTP: what its flows do and did, what they
// may be told, and how the gateway fares.
//
// A request passes, in this order: a listener that knows who is asking (peer
// credentials of the Unix socket, a bearer token over TCP), the Host allow-list,
// the route table with the role that each call needs and the parameters that it
// knows, and one handler. Errors are problem details (RFC 9457). Streams are
// server-sent events that pull from the tracker's rings, so that a slow reader
// costs nothing but its own connection.
package api
