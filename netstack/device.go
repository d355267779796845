// Package netstack runs a gVisor TCP stack between a packet Device and a Handler,
// relays TCP flows without parking a goroutine on them, and carries UDP beside gVisor.
package netstack

import "context"

// Offload is what a packet's sender left for the receiver to do: the fields of
// a virtio_net_hdr (Linux include/uapi/linux/virtio_net.h) that TUN uses.
// The zero value is a plain packet whose checksums are complete.
type Offload struct {
	Flags      uint8  // OffloadNeedsCsum, OffloadDataValid
	GSO        uint8  // GSONone, GSOTCPv4, GSOTCPv6, GSOUDP
	HdrLen     uint16 // bytes of headers before the first payload byte
	GSOSize    uint16 // payload bytes of each segment
	CsumStart  uint16 // where the checksum begins to cover the packet
	CsumOffset uint16 // where the checksum is, from CsumStart
}

// Values of Offload.Flags and Offload.GSO, as in virtio_net.h.
const (
	OffloadNeedsCsum = 1 // the checksum holds the pseudo header's sum only
	OffloadDataValid = 2 // the checksum was verified

	GSONone  = 0
	GSOTCPv4 = 1
	GSOTCPv6 = 4
	GSOUDP   = 5 // UDP_L4: several datagrams of GSOSize bytes
)

// MaxPacket is the largest packet that crosses a Device, in bytes: an IPv4
// super-packet. An IPv6 packet is at most its 40 bytes of header larger.
const MaxPacket = 65535 + 40

// Device is where the packets of one Stack come from and go to.
type Device interface {
	// MTU is the largest packet, in bytes, that may be written without GSO.
	MTU() int
	// CanGSO reports whether Write takes TCP super-packets (GSOTCPv4, GSOTCPv6),
	// and CanUSO whether it takes UDP ones (GSOUDP).
	CanGSO() bool
	CanUSO() bool
	// Run reads packets into batches made by newBatch, one for each goroutine
	// that reads, until ctx ends (nil) or the device fails.
	Run(ctx context.Context, newBatch func() *Batch) error
	// Write sends the packet that bufs hold one after the other. It may be called
	// from any goroutine, does not keep bufs, and fails rather than block: after an
	// error the packet is lost, and the caller counts it. Packets with the same hash
	// are not reordered.
	Write(hash uint32, bufs [][]byte, o Offload) error
}
