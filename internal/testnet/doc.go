// Package testnet builds network labs out of namespaces: a client, a gateway and
// a server, with links, routes, servers and a link that delays and loses packets.
//
// The bed, always both families:
//
//	cli 10.10.0.2   fd10::2        - gw lan0 10.10.0.1   fd10::1
//	gw wan0 192.0.2.2 2001:db8:1::2 - srv 192.0.2.10 2001:db8:1::10, behind it 203.0.113.10 2001:db8:cb::10
//	gw wan1 198.51.100.2 2001:db8:2::2 - srv 198.51.100.10 2001:db8:2::10 (if asked for)
//
// A lab belongs to a test and goes with it. What a test could not clean up (a
// time-out, a kill) the next lab of any process removes, since names of
// namespaces tell which process made them.
package testnet
