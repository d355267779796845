package suite

import (
	"fmt"
	"strings"
	"time"
)

func pinging(host string, n int) func(*world) (string, error) {
	return packetProbe(func(w *world) []byte { return w.echoRequest(w.host(host), n) })
}

// echoSize pings with a raw socket, which puts fragments together.
func echoSize(n int) func(*world) (string, error) {
	return func(w *world) (string, error) {
		c, payload, id := openEcho(w.t, w.lab, w.f.client), strings.Repeat("x", n), uint16(w.nextPort())
		c.send(w.f.far, id, 7, payload)
		from, seq, got, ok := c.next(id, 3*time.Second)
		if !ok {
			return "nothing", nil
		}
		return verdict(len(got), got == payload && seq == 7 && from == w.f.far), nil
	}
}

// hops sends a packet with a TTL of 1, 2 and 3 and names who answers.
func hops(make func(w *world) []byte) func(*world) (string, error) {
	return func(w *world) (string, error) {
		var all []string
		for ttl := byte(1); ttl <= 3; ttl++ {
			s, err := w.exchange(withHops(make(w), ttl))
			if err != nil {
				return "", err
			}
			all = append(all, s)
		}
		return strings.Join(all, "; "), nil
	}
}

// icmpQuery is an ICMP message of another kind.
func icmpQuery(kind byte, size int) func(*world) []byte {
	return func(w *world) []byte {
		b := make([]byte, size)
		b[0], b[4], b[7] = kind, 9, 1
		return withHops(packet(w.raw, w.f.far, protoICMP, b), 64)
	}
}

// carrying is a packet of another protocol.
func carrying(proto byte) func(*world) (string, error) {
	return packetProbe(func(w *world) []byte { return withProtocol(w.datagram(w.f.far, 9, "sixteen bytes ..."), proto) })
}

// slowly is a probe of packets whose answer takes longer than others'.
func slowly(limit time.Duration, make func(w *world) [][]byte) func(*world) (string, error) {
	return func(w *world) (string, error) {
		w.wire.drain()
		for _, p := range make(w) {
			if err := w.wire.send(p); err != nil {
				return "", err
			}
		}
		if p := w.next(limit); p != nil {
			return w.describe(p), nil
		}
		return "nothing", nil
	}
}

// icmpBehaviours are the rows of ICMP, of hops and of other protocols.
func icmpBehaviours() (rows []behaviour) {
	const g = "ICMP and the rest"
	for _, size := range []int{0, 56, 1472, 1473, 8000} {
		rows = append(rows, behaviour{group: g, name: fmt.Sprintf("echo of %d bytes", size), probe: echoSize(size)})
	}
	return append(rows, []behaviour{
		{group: g, name: "echo to the gateway's address on the LAN", probe: pinging("lan", 56)},
		{group: g, name: "echo to the gateway's address on the WAN", probe: pinging("wan", 56)},
		{group: g, name: "echo to a silent host", probe: pinging("silent", 56)},
		{group: g, name: "echo to a neighbour that does not exist", probe: slowly(5*time.Second, func(w *world) [][]byte {
			return [][]byte{w.echoRequest(w.host("dead"), 56)}
		})},
		{group: g, name: "echo where the gateway has a prohibit route", probe: pinging("prohibited", 56)},
		{group: g, name: "echo where the gateway has an unreachable route", probe: pinging("unreachable", 56)},
		{group: g, name: "echo to a multicast group", probe: pinging("multicast", 56)},
		{group: g, name: "echo of 1,400 bytes with DF where the path takes less", probe: packetProbe(func(w *world) []byte {
			return dontFragment(w.echoRequest(w.host("narrow"), 1400))
		})},
		{group: g, name: "timestamp request", only: "IPv4", probe: packetProbe(icmpQuery(13, 20))},
		{group: g, name: "address mask request", only: "IPv4", probe: packetProbe(icmpQuery(17, 12))},
		{group: g, name: "echo, hops 1 to 3", probe: hops(func(w *world) []byte { return w.echoRequest(w.f.far, 56) })},
		{group: g, name: "UDP, hops 1 to 3", probe: hops(func(w *world) []byte { return w.datagram(w.f.far, portEcho, "x") })},
		{group: g, name: "TCP, hops 1 to 3", probe: hops(func(w *world) []byte {
			return w.tcp(seg{sport: w.nextPort(), dport: portClosed, seq: 1000, flags: tcpSYN})
		})},
		{group: g, name: "SCTP", probe: carrying(132)},
		{group: g, name: "GRE", probe: carrying(47)},
		{group: g, name: "ESP", probe: carrying(50)},
		{group: g, name: "a protocol that nobody has (253)", probe: carrying(253)},
	}...)
}

// Kinds of IPv6 extension headers.
const (
	hopByHop       = 0
	routing        = 43
	destOpts       = 60
	noNext         = 59
	optionPadN     = 1
	optionReported = 0xbe // unknown; to be dropped and told
	optionSkipped  = 0x3e // unknown; to be skipped
)

func fragmented(change func(f [][]byte, whole []byte) [][]byte) func(*world) (string, error) {
	return func(w *world) (string, error) {
		whole := w.datagram(w.f.far, portEcho, strings.Repeat("0123456789abcdef", 20))
		return w.exchange(change(fragments(whole, uint32(w.port), 96, 200), whole)...)
	}
}

// extended is a datagram behind an extension header.
func extended(header byte, body ...byte) func(*world) (string, error) {
	return packetProbe(func(w *world) []byte { return behind(w.datagram(w.f.far, portEcho, "x"), header, body...) })
}

// optioned is a datagram with IPv4 options, a multiple of four bytes.
func optioned(options ...byte) func(*world) (string, error) {
	return packetProbe(func(w *world) []byte {
		p := w.datagram(w.f.far, portEcho, "x")
		out := append(append(append([]byte(nil), p[:20]...), options...), p[20:]...)
		out[0] = byte(0x40 | (20+len(options))/4)
		out[3] += byte(len(options))
		return rechecked(out)
	})
}

// headerBehaviours are the rows of fragments, options and extension headers.
func headerBehaviours() []behaviour {
	const g, six = "Fragments and headers", "IPv6"
	pad := []byte{optionPadN, 4, 0, 0, 0, 0}
	return []behaviour{
		{group: g, name: "a datagram in three fragments", probe: fragmented(func(f [][]byte, _ []byte) [][]byte { return f })},
		{group: g, name: "fragments in reverse order", probe: fragmented(func(f [][]byte, _ []byte) [][]byte { return [][]byte{f[2], f[1], f[0]} })},
		{group: g, name: "a fragment twice", probe: fragmented(func(f [][]byte, _ []byte) [][]byte { return [][]byte{f[0], f[1], f[1], f[2]} })},
		{group: g, name: "fragments that overlap", probe: fragmented(func(f [][]byte, whole []byte) [][]byte {
			return [][]byte{f[0], fragmentOf(whole, fragmentID(f[0]), 88, 200), f[2]}
		})},
		{group: g, name: "fragments that never get complete", probe: slowly(4*time.Second, func(w *world) [][]byte {
			return fragments(w.datagram(w.f.far, portEcho, strings.Repeat("x", 300)), uint32(w.port), 96)[:1]
		})},
		{group: g, name: "an atomic fragment", only: six, probe: fragmented(func(_ [][]byte, whole []byte) [][]byte {
			return [][]byte{fragmentOf(whole, 5, 0, len(whole)-40)}
		})},
		{group: g, name: "option: no operation", only: "IPv4", probe: optioned(1, 1, 1, 1)},
		{group: g, name: "option: record route", only: "IPv4", probe: optioned(7, 7, 4, 0, 0, 0, 0, 0)},
		{group: g, name: "option: loose source route", only: "IPv4", probe: optioned(131, 7, 4, 203, 0, 113, 10, 0)},
		{group: g, name: "option: router alert", only: "IPv4", probe: optioned(148, 4, 0, 0)},
		{group: g, name: "option of a wrong length", only: "IPv4", probe: optioned(7, 99, 4, 0)},
		{group: g, name: "hop-by-hop header, padding", only: six, probe: extended(hopByHop, pad...)},
		{group: g, name: "hop-by-hop header, unknown option to be reported", only: six, probe: extended(hopByHop, optionReported, 4, 0, 0, 0, 0)},
		{group: g, name: "destination options, padding", only: six, probe: extended(destOpts, pad...)},
		{group: g, name: "destination options, unknown option to be skipped", only: six, probe: extended(destOpts, optionSkipped, 4, 0, 0, 0, 0)},
		{group: g, name: "destination options, unknown option to be reported", only: six, probe: extended(destOpts, optionReported, 4, 0, 0, 0, 0)},
		{group: g, name: "routing header, no segments left", only: six, probe: extended(routing, 0, 0, 0, 0, 0, 0)},
		{group: g, name: "routing header of type 0, one segment left", only: six, probe: extended(routing, 0, 1, 0, 0, 0, 0)},
		{group: g, name: "a hop-by-hop header behind another", only: six, probe: packetProbe(func(w *world) []byte {
			return behind(behind(w.datagram(w.f.far, portEcho, "x"), hopByHop, pad...), destOpts, pad...)
		})},
		{group: g, name: "a fragment of an odd size", only: six, probe: packetProbe(func(w *world) []byte {
			return fragmentOf(w.datagram(w.f.far, portEcho, strings.Repeat("x", 100)), 6, 0, 41)
		})},
		{group: g, name: "an extension header that ends beyond the packet", only: six, probe: packetProbe(func(w *world) []byte {
			p := behind(w.datagram(w.f.far, portEcho, "x"), destOpts, pad...)
			p[41] = 200
			return p
		})},
		{group: g, name: "no next header", only: six, probe: carrying(noNext)},
		{group: g, name: "an unknown next header behind destination options", only: six, probe: packetProbe(func(w *world) []byte {
			return behind(withProtocol(w.datagram(w.f.far, 9, "x"), 253), destOpts, pad...)
		})},
	}
}

// fragmentID is the identification of a fragment.
func fragmentID(p []byte) uint32 {
	if p[0]>>4 == 6 {
		return uint32(p[44])<<24 | uint32(p[45])<<16 | uint32(p[46])<<8 | uint32(p[47])
	}
	return uint32(p[4])<<8 | uint32(p[5])
}
