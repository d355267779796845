// Package outbound holds the ways out: direct through the host's own sockets,
// and the built-in ones that refuse.
//
// A stream (dial.go, stream.go): socket → options → connect → the poller tells →
// descriptor handed to the relay. The dialling goroutine waits; nothing else does.
//
// Datagrams up (send.go), on the caller's goroutine: peer checked → self and
// filtering (self.go, filter.go) → sendmsg, a train with UDP_SEGMENT.
// Datagrams down (receive.go), on a poller's goroutine: recvmmsg into a pooled
// buffer, coalesced by UDP_GRO → filtering → Receiver. An idle link holds a
// descriptor, and neither a goroutine nor a buffer.
//
// An echo stream (echo.go) is a link with a socket of its own toward one peer.
package outbound
