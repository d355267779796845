package flow

import "sync/atomic"

// Drop is a cause for which the gateway throws a packet, datagram or connection
// attempt away on purpose. Every drop is counted under exactly one.
type Drop uint8

// The causes of drops.
const (
	DropMalformed       Drop = iota // truncated, bad length, bad header
	DropChecksum                    // wrong checksum
	DropFragment                    // a fragment that came twice, or of a datagram that did not become whole
	DropProtocol                    // an IP protocol that the gateway does not carry
	DropMulticast                   // multicast, broadcast or link-local destination
	DropSource                      // a source address that no client can have
	DropSelf                        // would have been dialled toward the gateway itself
	DropBlocked                     // a rule rejects or drops it
	DropSYNLimit                    // too many dials in progress, in all or of this source
	DropFlowLimit                   // too many flows or associations, in all or of this source
	DropQueueFull                   // a datagram queue was full
	DropOpenFailed                  // datagrams that waited for a sub-link that did not open
	DropSendFailed                  // the outbound's socket refused a datagram
	DropFilter                      // a reply that the association's filtering does not let in
	DropTooBig                      // larger than the way back can carry
	DropDeviceWrite                 // the device took no packet
	DropDestinationZero             // port 0
	DropTTL                         // TTL or hop limit expired
	DropICMPLimit                   // an ICMP error over the limit of its receiver or device
	DropSYNRate                     // too many connection attempts begun in too short a time by this source
	DropOpenRate                    // as many associations begun by sources that never got an answer
	DropResources                   // this host was out of descriptors, ports or memory
	DropHandshake                   // an acknowledgement that does not know what it acknowledges, as of a forged source
	DropMemory                      // a new connection or association while memory is short
	DropPaced                       // a datagram that waits for its user's rate or traffic: the queue was full, or its flow ended
	DropUser                        // its user is refused: unknown, disabled, expired, or at a limit; or who it is was not found out in time
	NumDrops                        // how many causes there are
)

var dropNames = [NumDrops]string{
	"malformed", "checksum", "fragment", "protocol", "multicast", "source", "self", "blocked",
	"syn_limit", "flow_limit", "queue_full", "open_failed", "send_failed", "filter", "too_big", "device_write", "port_zero", "ttl", "icmp_limit", "syn_rate", "open_rate", "resources", "handshake", "memory", "paced", "user",
}

// String is the cause's name in status and metrics.
func (d Drop) String() string { return dropNames[d] }

// Drops counts drops by cause. The zero value is ready; it is shared by all rooms.
type Drops [NumDrops]atomic.Uint64

// Add counts n drops of one cause.
func (d *Drops) Add(cause Drop, n int) { d[cause].Add(uint64(n)) }

// Map is a copy of the counters by name, zeros included.
func (d *Drops) Map() map[string]uint64 {
	m := make(map[string]uint64, NumDrops)
	for i := range d {
		m[Drop(i).String()] = d[i].Load()
	}
	return m
}
