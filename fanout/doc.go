// Package fanout gives each UDP client socket one association that sends every
// datagram through the sub-link of the outbound it is routed to.
//
// Stages of a datagram going up, all on the device reader's goroutine and under
// the association's lock:
//
//	Handle    find or make the association        (table.go, one lock of 16)
//	choose    decision of this destination        (association.go, cached, ≤ 64)
//	carry     send, or queue while opening        (sub.go, ≤ 16 datagrams copied)
//
// Coming down, on the link's goroutine and without the association's lock:
//
//	Sub.Receive → the flow's meter → Sub.Down → Config.Reply
//
// Opening happens on at most 256 goroutines (open.go), closing on the one of Run,
// which also looks for what is idle (sweep.go). Payloads are borrowed from the
// caller; only what waits for an opening is copied.
package fanout
