package suite

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

// describe says in a few words what a packet is, without what differs from run to run.
func (w *world) describe(p []byte) string {
	src, proto, body := netip.Addr{}, 0, []byte(nil)
	if p[0]>>4 == 4 {
		src, proto, body = netip.AddrFrom4([4]byte(p[12:16])), int(p[9]), p[int(p[0]&15)*4:]
		if binary.BigEndian.Uint16(p[6:])&0x3fff != 0 {
			return "a fragment"
		}
	} else {
		src, proto, body = netip.AddrFrom16([16]byte(p[8:24])), int(p[6]), p[40:]
		if proto == 44 {
			return "a fragment"
		}
	}
	switch {
	case proto == protoTCP && len(body) >= 20:
		return segmentName(body)
	case proto == protoUDP && len(body) >= 8:
		return fmt.Sprintf("%d bytes by UDP", len(body)-8)
	case (proto == protoICMP || proto == protoICMPv6) && len(body) >= 8:
		return w.icmpName(proto == protoICMPv6, body, src)
	}
	return fmt.Sprintf("protocol %d", proto)
}

// segmentName is a TCP segment as its flags.
func segmentName(b []byte) string {
	var names []string
	for i, n := range []string{"FIN", "SYN", "RST", "", "ACK", "URG", "ECE", "CWR"} {
		if n != "" && b[13]&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	s := strings.Join(names, "+")
	if n := len(b) - int(b[12]>>4)*4; n > 0 {
		s += fmt.Sprintf(" with %d bytes", n)
	}
	return s
}

// icmpErrors names errors by family, type and code.
var icmpErrors = map[[3]int]string{
	{4, 3, 0}: "network unreachable", {4, 3, 1}: "host unreachable", {4, 3, 2}: "protocol unreachable", {4, 3, 3}: "port unreachable",
	{4, 3, 4}: "too big", {4, 3, 13}: "prohibited", {4, 11, 0}: "TTL exceeded", {4, 11, 1}: "reassembly time exceeded",
	{6, 1, 0}: "no route", {6, 1, 1}: "prohibited", {6, 1, 3}: "address unreachable", {6, 1, 4}: "port unreachable",
	{6, 2, 0}: "too big", {6, 3, 0}: "hop limit exceeded", {6, 3, 1}: "reassembly time exceeded",
	{6, 4, 0}: "parameter problem 0", {6, 4, 1}: "parameter problem 1 (next header)", {6, 4, 2}: "parameter problem 2 (option)",
}

func errorName(v6 bool, kind, code int) string {
	family := 4
	if v6 {
		family = 6
	}
	if n := icmpErrors[[3]int{family, kind, code}]; n != "" {
		return n
	}
	return fmt.Sprintf("ICMP %d/%d", kind, code)
}

func (w *world) icmpName(v6 bool, b []byte, src netip.Addr) string {
	switch {
	case !v6 && b[0] == 0, v6 && b[0] == 129:
		return fmt.Sprintf("echo reply of %d bytes from %s", len(b)-8, w.role(src))
	case !v6 && b[0] == 14:
		return "timestamp reply from " + w.role(src)
	}
	s := errorName(v6, int(b[0]), int(b[1])) + " from " + w.role(src)
	if s = strings.TrimSpace(s); strings.HasPrefix(s, "too big") {
		at := 6
		if v6 {
			at = 6 // the low half of the 32 bits
		}
		s += fmt.Sprintf(", MTU %d", binary.BigEndian.Uint16(b[at:]))
	}
	return s
}

// seg is a TCP segment to be made by hand.
type seg struct {
	sport, dport int
	seq, ack     uint32
	flags        byte
	shut         bool // a window of 0
	urgent       uint16
	options      []byte
	data         string
}

func (w *world) tcp(s seg) []byte {
	b := make([]byte, 20, 64)
	binary.BigEndian.PutUint16(b, uint16(s.sport))
	binary.BigEndian.PutUint16(b[2:], uint16(s.dport))
	binary.BigEndian.PutUint32(b[4:], s.seq)
	binary.BigEndian.PutUint32(b[8:], s.ack)
	b[12], b[13] = byte((20+len(s.options))/4<<4), s.flags
	if !s.shut {
		binary.BigEndian.PutUint16(b[14:], 0xffff)
	}
	binary.BigEndian.PutUint16(b[18:], s.urgent)
	return packet(w.raw, w.f.far, protoTCP, append(append(b, s.options...), s.data...))
}

// datagram is a UDP packet to the far side's port.
func (w *world) datagram(to string, port int, payload string) []byte {
	return udpPacket(w.raw, w.nextPort(), to, port, payload)
}

// echoRequest is a ping of n bytes.
func (w *world) echoRequest(to string, n int) []byte {
	b := []byte{8, 0, 0, 0}
	proto := protoICMP
	if w.f.name == "IPv6" {
		b[0], proto = 128, protoICMPv6
	}
	b = binary.BigEndian.AppendUint16(b, uint16(w.nextPort()))
	b = append(b, 0, 1)
	p := packet(w.raw, to, proto, append(b, bytes.Repeat([]byte{'x'}, n)...))
	return withHops(p, 64)
}

// withHops changes the TTL or hop limit.
func withHops(p []byte, hops byte) []byte {
	if p[0]>>4 == 6 {
		p[7] = hops
		return p
	}
	p[8] = hops
	return rechecked(p)
}

// rechecked sets the checksum of an IPv4 header again.
func rechecked(p []byte) []byte {
	p[10], p[11] = 0, 0
	binary.BigEndian.PutUint16(p[10:], internetSum(p[:int(p[0]&15)*4]))
	return p
}

// withProtocol changes what an IP packet says that it carries.
func withProtocol(p []byte, proto byte) []byte {
	if p[0]>>4 == 6 {
		p[6] = proto
		return p
	}
	p[9] = proto
	return rechecked(p)
}

// dontFragment sets DF; IPv6 always has it.
func dontFragment(p []byte) []byte {
	if p[0]>>4 == 6 {
		return p
	}
	p[6] |= 0x40
	return rechecked(p)
}

// behind puts an extension header, which ends with the 8-byte units given, before
// what an IPv6 packet carries.
func behind(p []byte, header byte, body ...byte) []byte {
	ext := append([]byte{p[6], byte((len(body)+2)/8 - 1)}, body...)
	out := append([]byte(nil), p[:40]...)
	out[6] = header
	binary.BigEndian.PutUint16(out[4:], uint16(len(ext)+len(p)-40))
	return append(append(out, ext...), p[40:]...)
}

// fragments cuts a packet at the offsets, in bytes of what it carries.
func fragments(p []byte, id uint32, cuts ...int) (out [][]byte) {
	head := 20
	if p[0]>>4 == 6 {
		head = 40
	}
	cuts = append(append([]int{0}, cuts...), len(p)-head)
	for i := range len(cuts) - 1 {
		out = append(out, fragmentOf(p, id, cuts[i], cuts[i+1]))
	}
	return out
}

// fragmentOf is the fragment from one offset to another.
func fragmentOf(p []byte, id uint32, from, to int) []byte {
	v6, head := p[0]>>4 == 6, 20
	if v6 {
		head = 40
	}
	src, _ := netip.AddrFromSlice(p[map[bool]int{false: 12, true: 8}[v6]:][:map[bool]int{false: 4, true: 16}[v6]])
	dst, _ := netip.AddrFromSlice(p[map[bool]int{false: 16, true: 24}[v6]:][:map[bool]int{false: 4, true: 16}[v6]])
	f := fragmentPacket(src.String(), dst.String(), id, from, to < len(p)-head, p[head+from:head+to])
	if v6 {
		f[40] = p[6]
		return f
	}
	return withProtocol(f, p[9])
}

// isErrno gives the plain words for an errno.
func errnoName(err error) string {
	for errno, name := range map[unix.Errno]string{
		unix.ECONNREFUSED: "refused", unix.EHOSTUNREACH: "host unreachable", unix.ENETUNREACH: "network unreachable",
		unix.EACCES: "prohibited", unix.ECONNRESET: "reset", unix.ETIMEDOUT: "timeout", unix.EPIPE: "broken pipe",
	} {
		if isErr(err, errno) {
			return name
		}
	}
	return err.Error()
}
