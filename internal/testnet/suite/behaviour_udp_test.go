package suite

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"gatewayd/internal/testnet"
)

// Ports of the server, for UDP.
const (
	portSees      = 110 // and the next one: answer with the port that they see
	portElsewhere = 112 // answers from another port
	portOther     = 113 // answers from another address
	portLarge     = 114 // answers a byte with 3,000
	portMarked    = 115 // echoes; a filter counts what comes marked
)

// serveUDP starts the servers of a world.
func (w *world) serveUDP() {
	srv := w.lab.Srv
	srv.UDPEcho(hostPort(w.f.far, portEcho))
	srv.UDPEcho(hostPort(w.f.far, portMarked))
	for port := portSees; port < portSees+2; port++ {
		srv.ServeUDP(hostPort(w.f.far, port), func(s *testnet.UDPServer, from netip.AddrPort, _ []byte) {
			s.Conn.WriteToUDPAddrPort([]byte(strconv.Itoa(int(from.Port()))), from)
		})
	}
	elsewhere, other := srv.UDPSink(hostPort(w.f.far, 212)), srv.UDPSink(hostPort(w.f.near, 212))
	for port, from := range map[int]*testnet.UDPServer{portElsewhere: elsewhere, portOther: other} {
		srv.ServeUDP(hostPort(w.f.far, port), func(s *testnet.UDPServer, to netip.AddrPort, _ []byte) {
			s.Conn.WriteToUDPAddrPort([]byte("from myself"), to)
			from.Conn.WriteToUDPAddrPort([]byte("from elsewhere"), to)
		})
	}
	srv.ServeUDP(hostPort(w.f.far, portLarge), func(s *testnet.UDPServer, from netip.AddrPort, _ []byte) {
		s.Conn.WriteToUDPAddrPort(make([]byte, 3000), from)
	})
}

// socket is a UDP socket of the client.
func (w *world) socket(use func(c *net.UDPConn) (string, error)) (string, error) {
	c, err := w.lab.Cli.ListenUDP(w.t.Context(), hostPort(w.f.client, 0))
	if err != nil {
		return "", err
	}
	defer c.Close()
	return use(c)
}

// heardBy is what a socket receives until silence.
func (w *world) heardBy(c *net.UDPConn) (string, error) {
	var all []string
	for buf := make([]byte, 1<<16); len(all) < maxFrames; {
		c.SetReadDeadline(time.Now().Add(silence))
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return counted(all), nil
		}
		all = append(all, fmt.Sprintf("%q from %s, port %d", buf[:n], w.role(from.Addr()), from.Port()))
	}
	return counted(all), nil
}

func udpEcho(size int) func(*world) (string, error) {
	return func(w *world) (string, error) {
		return w.socket(func(c *net.UDPConn) (string, error) {
			payload, buf := bytes.Repeat([]byte("pattern"), size/7+1)[:size], make([]byte, 1<<16)
			if _, err := c.WriteToUDPAddrPort(payload, addrPort(w.f.far, portEcho)); err != nil {
				return "", err
			}
			c.SetReadDeadline(time.Now().Add(3 * time.Second))
			n, _, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return "nothing", nil
			}
			return verdict(n, bytes.Equal(buf[:n], payload)), nil
		})
	}
}

// verdict is what came back of n bytes.
func verdict(n int, same bool) string {
	if same {
		return "all back, unchanged"
	}
	return fmt.Sprintf("%d bytes back, changed", n)
}

// askFrom is what comes back from a port that answers in a way of its own.
func askFrom(port int) func(*world) (string, error) {
	return func(w *world) (string, error) {
		return w.socket(func(c *net.UDPConn) (string, error) {
			if _, err := c.WriteToUDPAddrPort([]byte("?"), addrPort(w.f.far, port)); err != nil {
				return "", err
			}
			return w.heardBy(c)
		})
	}
}

// portsSeen asks both servers which port they see; all answers must be told apart.
func (w *world) portsSeen(c *net.UDPConn) (seen [2]string, err error) {
	for i := range seen {
		if _, err := c.WriteToUDPAddrPort([]byte("?"), addrPort(w.f.far, portSees+i)); err != nil {
			return seen, err
		}
		buf := make([]byte, 64)
		c.SetReadDeadline(time.Now().Add(3 * time.Second))
		n, _, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return seen, err
		}
		seen[i] = string(buf[:n])
	}
	return seen, nil
}

// packetProbe sends one packet made by hand and tells what comes back.
func packetProbe(make func(w *world) []byte) func(*world) (string, error) {
	return func(w *world) (string, error) { return w.exchange(make(w)) }
}

func to(host string, port int, payload string) func(*world) []byte {
	return func(w *world) []byte { return w.datagram(w.host(host), port, payload) }
}

// udpBehaviours are the rows of UDP.
func udpBehaviours() (rows []behaviour) {
	const g = "UDP"
	for _, size := range []int{0, 1, 512, 1472, 1473, 3000, 9000, 65507} {
		rows = append(rows, behaviour{group: g, name: fmt.Sprintf("echo of %d bytes", size), probe: udpEcho(size)})
	}
	return append(rows, []behaviour{
		{group: g, name: "answer of 3,000 bytes to one byte", probe: func(w *world) (string, error) {
			return w.socket(func(c *net.UDPConn) (string, error) {
				c.WriteToUDPAddrPort([]byte("?"), addrPort(w.f.far, portLarge)) //nolint:errcheck // seen below
				c.SetReadDeadline(time.Now().Add(3 * time.Second))
				n, _, err := c.ReadFromUDPAddrPort(make([]byte, 4000))
				return fmt.Sprintf("%d bytes", n), err
			})
		}},
		{group: g, name: "to a closed port", probe: telling(probe{payload: 100}, "far", portClosed)},
		{group: g, name: "1,400 bytes to a closed port", probe: telling(probe{payload: 1400}, "far", portClosed)},
		{group: g, name: "to a port that is filtered silently", probe: packetProbe(to("far", portFiltered, "x"))},
		{group: g, name: "a filter says host unreachable", probe: telling(probe{payload: 10}, "far", 83)},
		{group: g, name: "a filter says no route", probe: telling(probe{payload: 10}, "far", 84)},
		{group: g, name: "a filter says prohibited", probe: telling(probe{payload: 10}, "far", 85)},
		{group: g, name: "where the gateway has a prohibit route", probe: telling(probe{payload: 10}, "prohibited", 9)},
		{group: g, name: "where the gateway has an unreachable route", probe: telling(probe{payload: 10}, "unreachable", 9)},
		{group: g, name: "to a neighbour that does not exist", probe: telling(probe{payload: 10}, "dead", 9)},
		{group: g, name: "to a multicast group", probe: packetProbe(to("multicast", 9, "x"))},
		{group: g, name: "to the far network's broadcast address", only: "IPv4", probe: packetProbe(to("broadcast", 9, "x"))},
		{group: g, name: "to a link-local address", probe: slowly(4*time.Second, func(w *world) [][]byte {
			return [][]byte{w.datagram(w.host("link-local"), 9, "x")}
		})},
		{group: g, name: "to port 0", probe: packetProbe(to("far", 0, "x"))},
		{group: g, name: "to the gateway's address on the LAN, closed port", probe: packetProbe(to("lan", portClosed, "x"))},
		{group: g, name: "to the gateway's address on the WAN, closed port", probe: packetProbe(to("wan", portClosed, "x"))},
		{group: g, name: "checksum of zero", probe: packetProbe(func(w *world) []byte {
			p := w.datagram(w.f.far, portEcho, "x")
			copy(transportOf(p)[6:], []byte{0, 0})
			return p
		})},
		{group: g, name: "wrong checksum", probe: packetProbe(func(w *world) []byte {
			p := w.datagram(w.f.far, portEcho, "x")
			transportOf(p)[6] ^= 0x5a
			return p
		})},
		{group: g, name: "length beyond the packet", probe: packetProbe(func(w *world) []byte {
			p := w.datagram(w.f.far, portEcho, "x")
			transportOf(p)[5] += 9
			return p
		})},
		{group: g, name: "one socket, two destinations", probe: func(w *world) (string, error) {
			return w.socket(func(c *net.UDPConn) (string, error) {
				seen, err := w.portsSeen(c)
				return fmt.Sprintf("the same source port: %v", seen[0] == seen[1]), err
			})
		}},
		{group: g, name: "two sockets, one destination", probe: func(w *world) (string, error) {
			return w.socket(func(c *net.UDPConn) (string, error) {
				return w.socket(func(d *net.UDPConn) (string, error) {
					first, err := w.portsSeen(c)
					if err != nil {
						return "", err
					}
					second, err := w.portsSeen(d)
					return fmt.Sprintf("different source ports: %v", first[0] != second[0]), err
				})
			})
		}},
		{group: g, name: "an answer also from another port of the server", probe: askFrom(portElsewhere)},
		{group: g, name: "an answer also from another address", probe: askFrom(portOther)},
		{group: g, name: "DSCP of a datagram", probe: func(w *world) (string, error) {
			before := w.marked.Packets()
			p := w.datagram(w.f.far, portMarked, "x")
			if w.f.name == "IPv6" {
				p[0], p[1] = 0x6b, 0x80
			} else {
				p[1] = 46 << 2
				rechecked(p)
			}
			s, err := w.exchange(p)
			return fmt.Sprintf("%s, mark seen by the server: %v", s, w.marked.Packets() > before), err
		}},
		{group: g, name: "1,400 bytes with DF where the path takes less", probe: packetProbe(func(w *world) []byte {
			return dontFragment(w.datagram(w.host("narrow"), 9, string(make([]byte, 1400))))
		})},
	}...)
}
