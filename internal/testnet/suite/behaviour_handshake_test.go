package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fastOpen is the option by which a client asks for a cookie (RFC 7413, 4.1.1).
var fastOpen = []byte{34, 2, 1, 1}

// tcpHandshakes are connections that begin in odd ways.
func tcpHandshakes() []behaviour {
	const g = "TCP segments"
	return []behaviour{
		{group: g, name: "SYN and FIN to an open port", probe: sent(seg{dport: portEcho, flags: tcpSYN | tcpFIN})},
		{group: g, name: "SYN and FIN to a closed port", probe: sent(seg{dport: portClosed, flags: tcpSYN | tcpFIN})},
		{group: g, name: "SYN and RST to an open port", probe: sent(seg{dport: portEcho, flags: tcpSYN | tcpRST})},
		{group: g, name: "all flags to a closed port", probe: sent(seg{dport: portClosed, flags: 0x3f})},
		{group: g, name: "SYN that asks for a fast-open cookie, with data", probe: func(w *world) (string, error) {
			return firstOf(w, seg{dport: portEcho, flags: tcpSYN, options: fastOpen, data: "early"})
		}},
		{group: g, name: "SYN with data that the client then repeats", probe: func(w *world) (string, error) {
			s := seg{sport: w.nextPort(), dport: portEcho, seq: 1000, flags: tcpSYN, data: "early"}
			h, _, err := w.begin(s)
			if err != nil {
				return "", err
			}
			defer h.reset()
			s = h.s
			s.flags, s.data = tcpACK|tcpPSH, "early"
			return w.bytesBack(w.tcp(s))
		}},
		{group: g, name: "the same SYN again", probe: func(w *world) (string, error) {
			h, _, err := w.begin(seg{sport: w.nextPort(), dport: portEcho, seq: 1000, flags: tcpSYN})
			if err != nil {
				return "", err
			}
			defer h.reset()
			return w.firstHeard(seg{sport: h.s.sport, dport: portEcho, seq: 1000, flags: tcpSYN})
		}},
		{group: g, name: "SYN of another connection before the first is complete", probe: func(w *world) (string, error) {
			h, _, err := w.begin(seg{sport: w.nextPort(), dport: portEcho, seq: 1000, flags: tcpSYN})
			if err != nil {
				return "", err
			}
			defer h.reset()
			return w.firstHeard(seg{sport: h.s.sport, dport: portEcho, seq: 1 << 30, flags: tcpSYN})
		}},
		{group: g, name: "SYN of another connection beside the first", probe: handmade(portEcho, func(w *world, h *byHand) (string, error) {
			w.pause()
			s, err := w.firstHeard(seg{sport: h.s.sport, dport: portEcho, seq: 1 << 30, flags: tcpSYN})
			if err != nil {
				return "", err
			}
			alive := h.s
			alive.flags, alive.data = tcpACK|tcpPSH, "alive"
			h.s.seq += 5
			back, err := w.bytesBack(w.tcp(alive))
			return s + "; " + back, err
		})},
		{group: g, name: "an ACK of nothing instead of the handshake's last", probe: func(w *world) (string, error) {
			h, _, err := w.begin(seg{sport: w.nextPort(), dport: portEcho, seq: 1000, flags: tcpSYN})
			if err != nil {
				return "", err
			}
			defer h.reset()
			s := h.s
			s.flags, s.ack = tcpACK, s.ack+12345
			return w.firstHeard(s)
		}},
		{group: g, name: "SYN from both ends at once", probe: crossed},
		{group: g, name: "the 4-tuple is used again after the client ended first", probe: func(w *world) (string, error) {
			h, _, err := w.open(portEcho, nil)
			if err != nil {
				return "", err
			}
			if err := h.say(tcpFIN|tcpACK, ""); err != nil {
				return "", err
			}
			for {
				p := w.next(3 * silence)
				if p == nil {
					return "no FIN from the server", nil
				}
				if transportOf(p)[13]&tcpFIN != 0 {
					break
				}
			}
			h.s.ack++
			if err := h.say(tcpACK, ""); err != nil {
				return "", err
			}
			w.pause()
			return accepted(w, seg{sport: h.s.sport, dport: portEcho, seq: h.s.seq + 1<<20, flags: tcpSYN})
		}},
	}
}

// begin sends a SYN and waits for its answer, which is not acknowledged.
func (w *world) begin(s seg) (h byHand, synack []byte, err error) {
	w.wire.drain()
	if err := w.wire.send(w.tcp(s)); err != nil {
		return h, nil, err
	}
	p := w.next(3 * silence)
	if p == nil {
		return h, nil, errors.New("no answer to a SYN")
	}
	synack = transportOf(p)
	if synack[13]&(tcpSYN|tcpACK) != tcpSYN|tcpACK {
		return h, nil, errors.New("a SYN was answered by " + segmentName(synack))
	}
	return byHand{w, seg{sport: s.sport, dport: s.dport, seq: s.seq + 1, ack: binary.BigEndian.Uint32(synack[4:]) + 1, flags: tcpACK}}, synack, nil
}

// reset ends what is left of a connection.
func (h *byHand) reset() {
	h.say(tcpRST|tcpACK, "") //nolint:errcheck // it is gone at worst
}

// firstHeard is the first answer to a segment. Repetitions are not told.
func (w *world) firstHeard(s seg) (string, error) {
	w.wire.drain()
	if err := w.wire.send(w.tcp(s)); err != nil {
		return "", err
	}
	if p := w.next(silence); p != nil {
		return w.describe(p), nil
	}
	return "nothing", nil
}

// crossed has the server connect to the client's port from the port that the client
// then connects to (RFC 9293, 3.5, figure 7).
func crossed(w *world) (string, error) {
	const port = 117
	s := seg{sport: w.nextPort(), dport: port, seq: 1000, flags: tcpSYN}
	w.wire.drain()
	ctx, cancel := context.WithTimeout(context.Background(), 4*silence)
	connected := make(chan error, 1)
	go func() { connected <- w.connectFrom(ctx, port, s.sport) }()
	defer func() { cancel(); <-connected }()
	p := w.next(3 * silence)
	if p == nil {
		return "no SYN from the server", nil
	}
	first := w.describe(p)
	answer, err := w.firstHeard(s)
	return first + ", then " + answer, err
}

// connectFrom connects from a port of the server to one of the client's.
func (w *world) connectFrom(ctx context.Context, port, to int) error {
	again := func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }) //nolint:errcheck // at worst it does not bind
	}
	return w.lab.Srv.Do(func() error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(w.f.far), Port: port}, Control: again}
		d.SetMultipathTCP(false)
		c, err := d.DialContext(ctx, "tcp", hostPort(w.raw, to))
		if err != nil {
			return err
		}
		c.SetDeadline(time.Now()) //nolint:errcheck // it is not used
		return hardClose(c.(*net.TCPConn))
	})
}
