package hostnet

import (
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// neighbourMessage is a message of the neighbour group.
func neighbourMessage(kind uint16, msg netlink.Ndmsg, addr string, lladdr []byte) *syscall.NetlinkMessage {
	data := msg.Serialize()
	a := netip.MustParseAddr(addr)
	data = append(data, nl.NewRtAttr(ndaDst, a.AsSlice()).Serialize()...)
	if lladdr != nil {
		data = append(data, nl.NewRtAttr(ndaLladdr, lladdr).Serialize()...)
	}
	return &syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data}
}

func TestMessagesOfTheNeighbourGroupAreUnderstood(t *testing.T) {
	mac := MAC{0x3c, 0x22, 0xfb, 0xaa, 0xbb, 0xcc}
	at := func(family uint8, state uint16) netlink.Ndmsg {
		return netlink.Ndmsg{Family: family, Index: 7, State: state}
	}
	v4, v6 := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("fe80::7")
	proxy := at(unix.AF_INET, unix.NUD_REACHABLE)
	proxy.Flags = ntfProxy
	for name, c := range map[string]struct {
		m    *syscall.NetlinkMessage
		want Neighbour // of index 0: no news
	}{
		"reachable":     {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_INET, unix.NUD_REACHABLE), "192.0.2.7", mac[:]), Neighbour{v4, 7, mac, true}},
		"stale":         {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_INET6, unix.NUD_STALE), "fe80::7", mac[:]), Neighbour{v6, 7, mac, false}},
		"failed":        {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_INET, unix.NUD_FAILED), "192.0.2.7", nil), Neighbour{v4, 7, MAC{}, false}},
		"deleted":       {neighbourMessage(unix.RTM_DELNEIGH, at(unix.AF_INET, unix.NUD_REACHABLE), "192.0.2.7", mac[:]), Neighbour{v4, 7, MAC{}, false}},
		"no Ethernet":   {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_INET, unix.NUD_REACHABLE), "192.0.2.7", make([]byte, 20)), Neighbour{v4, 7, MAC{}, true}},
		"no resolution": {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_INET, unix.NUD_NOARP), "192.0.2.7", mac[:]), Neighbour{}},
		"proxy":         {neighbourMessage(unix.RTM_NEWNEIGH, proxy, "192.0.2.7", mac[:]), Neighbour{}},
		"bridge":        {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_BRIDGE, unix.NUD_REACHABLE), "192.0.2.7", mac[:]), Neighbour{}},
		"wrong family":  {neighbourMessage(unix.RTM_NEWNEIGH, at(unix.AF_INET6, unix.NUD_REACHABLE), "192.0.2.7", mac[:]), Neighbour{}},
		"another type":  {neighbourMessage(unix.RTM_NEWADDR, at(unix.AF_INET, unix.NUD_REACHABLE), "192.0.2.7", mac[:]), Neighbour{}},
		"too short":     {&syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: unix.RTM_NEWNEIGH}, Data: make([]byte, sizeofNdmsg-1)}, Neighbour{}},
	} {
		if got, ok := neighbourNews(c.m); ok != (c.want.Index != 0) || ok && got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, ok, c.want)
		}
	}
}

func FuzzNeighbour(f *testing.F) {
	m := neighbourMessage(unix.RTM_NEWNEIGH, netlink.Ndmsg{Family: unix.AF_INET, State: unix.NUD_REACHABLE}, "192.0.2.7", make([]byte, 6))
	f.Add(m.Data)
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, ok := neighbourOf(b); ok && (!n.Addr.IsValid() || n.Addr.Zone() != "") {
			t.Fatalf("neighbour %+v", n)
		}
	})
}
