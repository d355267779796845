package tun

import (
	"encoding/binary"

	"gatewayd/netstack"
)

// headerSize is the size in bytes of the virtio_net_hdr before each packet.
const headerSize = 10

// The header's fields are in the processor's byte order: that is what TUN uses
// unless TUNSETVNETLE asks for another (Linux drivers/net/tun.c,
// tun_legacy_is_little_endian).

func encode(h *[headerSize]byte, o netstack.Offload) {
	h[0], h[1] = o.Flags, o.GSO
	binary.NativeEndian.PutUint16(h[2:], o.HdrLen)
	binary.NativeEndian.PutUint16(h[4:], o.GSOSize)
	binary.NativeEndian.PutUint16(h[6:], o.CsumStart)
	binary.NativeEndian.PutUint16(h[8:], o.CsumOffset)
}

func decode(h *[headerSize]byte) netstack.Offload {
	return netstack.Offload{
		Flags:      h[0],
		GSO:        h[1],
		HdrLen:     binary.NativeEndian.Uint16(h[2:]),
		GSOSize:    binary.NativeEndian.Uint16(h[4:]),
		CsumStart:  binary.NativeEndian.Uint16(h[6:]),
		CsumOffset: binary.NativeEndian.Uint16(h[8:]),
	}
}
