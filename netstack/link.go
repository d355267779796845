package netstack

import (
	"net/netip"
	"sync"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"

	"gatewayd/flow"
)

// link is the stack's view of the Device. It must itself be a GSOEndpoint: an
// embedded interface hides that from gVisor, which then cuts everything into
// MSS-sized packets.
type link struct {
	dev        Device
	drops      *flow.Drops
	pending    *pendingTable
	dispatcher stack.NetworkDispatcher // set once, by Attach, before packets flow
	supers     superCounter
}

var (
	_ stack.LinkEndpoint = (*link)(nil)
	_ stack.GSOEndpoint  = (*link)(nil)
)

// SupportedGSO tells gVisor that the host cuts TCP super-packets.
func (l *link) SupportedGSO() stack.SupportedGSO {
	if l.dev.CanGSO() {
		return stack.HostGSOSupported
	}
	return stack.GSONotSupported
}

// GSOMaxSize is the largest super-packet, in bytes.
func (l *link) GSOMaxSize() uint32 { return 65535 }

// Capabilities says that received checksums were verified, by deliver. Checksums
// of what is sent are not offloaded: packets without GSO options would leave
// with none.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// WritePackets sends what the stack made.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for _, pkt := range pkts.AsSlice() {
		l.write(pkt)
	}
	return pkts.Len(), nil
}

// rooms are where write gathers the views of a packet: on the stack they would
// escape through the Device.
var rooms = sync.Pool{New: func() any { return new([8][]byte) }}

func (l *link) write(pkt *stack.PacketBuffer) {
	room := rooms.Get().(*[8][]byte)
	bufs := room[:0]
	views, offset := pkt.AsViewList()
	for v := views.Front(); v != nil; v = v.Next() {
		b := v.AsSlice()
		if offset >= len(b) {
			offset -= len(b)
			continue
		}
		bufs = append(bufs, b[offset:])
		offset = 0
	}
	c, ok := pkt.Owner.(*Conn)
	if !ok {
		l.noteAnswer(pkt)
	}
	err := l.send(pkt, bufs, c)
	*room = [8][]byte{}
	rooms.Put(room)
	if err != nil {
		l.drops.Add(flow.DropDeviceWrite, 1)
	}
	if !ok {
		return
	}
	h, repeat := header.TCP(pkt.TransportHeader().Slice()), 0
	if n := pkt.Data().Size(); n > 0 {
		seq := h.SequenceNumber()
		repeat = c.sent.note(seq, n, err == nil)
		if repeat > 0 && c.sent.super {
			l.supers.again(c.sent.second(seq, n))
		}
		c.suspect(pkt.Size(), repeat)
		c.sentSome()
	}
	if repeat > 0 || err != nil || h.Flags().Contains(header.TCPFlagFin) {
		c.listen()
	}
}

// noteAnswer tells the table of what answers a SYN.
func (l *link) noteAnswer(pkt *stack.PacketBuffer) {
	h := header.TCP(pkt.TransportHeader().Slice())
	if pkt.TransportProtocolNumber != header.TCPProtocolNumber || len(h) < header.TCPMinimumSize || !h.Flags().Contains(header.TCPFlagSyn|header.TCPFlagAck) {
		return
	}
	n := pkt.Network()
	l.pending.answered(tuple{
		client: netip.AddrPortFrom(addrOf(n.DestinationAddress()), h.DestinationPort()),
		dest:   netip.AddrPortFrom(addrOf(n.SourceAddress()), h.SourcePort()),
	}, h.SequenceNumber())
}

// offloadOf turns gVisor's GSO options into what the device is told.
func offloadOf(pkt *stack.PacketBuffer) Offload {
	gso := &pkt.GSOOptions
	if gso.Type == stack.GSONone || !gso.NeedsCsum {
		return Offload{}
	}
	o := Offload{Flags: OffloadNeedsCsum, CsumStart: gso.L3HdrLen, CsumOffset: gso.CsumOffset}
	if pkt.Data().Size() > int(gso.MSS) {
		o.GSO = GSOTCPv4
		if gso.Type == stack.GSOTCPv6 {
			o.GSO = GSOTCPv6
		}
		o.GSOSize = gso.MSS
		o.HdrLen = gso.L3HdrLen + uint16(len(pkt.TransportHeader().Slice()))
	}
	return o
}

// The rest of stack.LinkEndpoint has nothing to do for a device without a link layer.

func (l *link) MTU() uint32                             { return uint32(l.dev.MTU()) }
func (l *link) SetMTU(uint32)                           {}
func (l *link) MaxHeaderLength() uint16                 { return 0 }
func (l *link) LinkAddress() tcpip.LinkAddress          { return "" }
func (l *link) SetLinkAddress(tcpip.LinkAddress)        {}
func (l *link) Attach(d stack.NetworkDispatcher)        { l.dispatcher = d }
func (l *link) IsAttached() bool                        { return l.dispatcher != nil }
func (l *link) Wait()                                   {}
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }
func (l *link) AddHeader(*stack.PacketBuffer)           {}
func (l *link) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (l *link) Close()                                  {}
func (l *link) SetOnCloseAction(func())                 {}
