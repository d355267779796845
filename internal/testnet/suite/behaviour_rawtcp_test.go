package suite

import (
	"encoding/binary"
	"fmt"
)

// More flags of a TCP header.
const (
	tcpFIN = 0x01
	tcpPSH = 0x08
	tcpURG = 0x20
)

// sent is a probe of one segment without a connection.
func sent(s seg) func(*world) (string, error) {
	return func(w *world) (string, error) {
		s := s
		s.sport, s.seq = w.nextPort(), 1000
		return w.exchange(w.tcp(s))
	}
}

// byHand is a connection whose segments the probe makes.
type byHand struct {
	w *world
	s seg
}

// open makes the handshake; synack is the far side's answer.
func (w *world) open(port int, options []byte) (h byHand, synack []byte, err error) {
	h, synack, err = w.begin(seg{sport: w.nextPort(), dport: port, seq: 1000, flags: tcpSYN, options: options})
	if err != nil {
		return h, nil, err
	}
	return h, synack, h.say(tcpACK, "")
}

// say sends one segment of the connection.
func (h *byHand) say(flags byte, data string) error {
	s := h.s
	s.flags, s.data = flags, data
	h.s.seq += uint32(len(data))
	if flags&tcpFIN != 0 {
		h.s.seq++
	}
	return h.w.wire.send(h.w.tcp(s))
}

func transportOf(p []byte) []byte {
	if p[0]>>4 == 6 {
		return p[40:]
	}
	return p[int(p[0]&15)*4:]
}

// handmade is a probe that needs a connection made by hand.
func handmade(port int, talk func(w *world, h *byHand) (string, error)) func(*world) (string, error) {
	return func(w *world) (string, error) {
		h, _, err := w.open(port, nil)
		if err != nil {
			return "", err
		}
		s, err := talk(w, &h)
		h.reset()
		return s, err
	}
}

// tcpSegments are behaviours that only packets made by hand show.
func tcpSegments() []behaviour {
	const g = "TCP segments"
	return []behaviour{
		{group: g, name: "a connection that its client resets at its begin", probe: func(w *world) (string, error) {
			h, synack, err := w.open(portTold, nil)
			if err != nil {
				return "", err
			}
			w.pause() // the relay has begun
			h.reset()
			return segmentName(synack) + "; " + w.told(), nil
		}},
		{group: g, name: "SYN to a closed port", probe: sent(seg{dport: portClosed, flags: tcpSYN})},
		{group: g, name: "SYN with data to a closed port", probe: sent(seg{dport: portClosed, flags: tcpSYN, data: "hello"})},
		{group: g, name: "FIN to an open port without a connection", probe: sent(seg{dport: portEcho, flags: tcpFIN})},
		{group: g, name: "no flags to an open port (null scan)", probe: sent(seg{dport: portEcho})},
		{group: g, name: "FIN, PSH and URG to an open port (xmas scan)", probe: sent(seg{dport: portEcho, flags: tcpFIN | tcpPSH | tcpURG})},
		{group: g, name: "ACK to an open port without a connection", probe: sent(seg{dport: portEcho, flags: tcpACK, ack: 77})},
		{group: g, name: "SYN+ACK without a connection", probe: sent(seg{dport: portEcho, flags: tcpSYN | tcpACK, ack: 77})},
		{group: g, name: "RST without a connection", probe: sent(seg{dport: portEcho, flags: tcpRST})},
		{group: g, name: "FIN to a closed port", probe: sent(seg{dport: portClosed, flags: tcpFIN})},
		{group: g, name: "SYN that offers ECN", probe: func(w *world) (string, error) {
			return firstOf(w, seg{dport: portEcho, flags: tcpSYN | tcpECE | tcpCWR})
		}},
		{group: g, name: "SYN with data", probe: func(w *world) (string, error) {
			return firstOf(w, seg{dport: portEcho, flags: tcpSYN, data: "early"})
		}},
		{group: g, name: "options of the answer to a full offer", probe: func(w *world) (string, error) {
			offer := []byte{2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7}
			h, synack, err := w.open(portEcho, offer)
			if err != nil {
				return "", err
			}
			h.reset()
			return optionNames(synack), nil
		}},
		{group: g, name: "segments out of order", probe: handmade(portEcho, func(w *world, h *byHand) (string, error) {
			late := h.s
			h.s.seq += 5
			if err := h.say(tcpACK|tcpPSH, "world"); err != nil {
				return "", err
			}
			late.data = "hello"
			got, err := w.bytesBack(w.tcp(late))
			return got, err
		})},
		{group: g, name: "a retransmission that overlaps", probe: handmade(portEcho, func(w *world, h *byHand) (string, error) {
			first, second := h.s, h.s
			first.data, second.data = "hello", "hello, you"
			if err := w.wire.send(w.tcp(first)); err != nil {
				return "", err
			}
			h.s.seq += 10
			return w.bytesBack(w.tcp(second))
		})},
		{group: g, name: "data with FIN in one segment", probe: handmade(portTold, func(w *world, h *byHand) (string, error) {
			if err := h.say(tcpACK|tcpFIN|tcpPSH, "last words"); err != nil {
				return "", err
			}
			return w.told(), nil
		})},
		{group: g, name: "RST outside the window", probe: handmade(portEcho, func(w *world, h *byHand) (string, error) {
			stray := h.s
			stray.seq, stray.flags = stray.seq+1<<30, tcpRST
			if err := w.wire.send(w.tcp(stray)); err != nil {
				return "", err
			}
			s := h.s
			s.flags, s.data = tcpACK|tcpPSH, "alive"
			h.s.seq += 5
			return w.bytesBack(w.tcp(s))
		})},
		{group: g, name: "a segment with a wrong checksum", probe: func(w *world) (string, error) {
			p := w.tcp(seg{sport: w.nextPort(), dport: portEcho, seq: 1000, flags: tcpSYN})
			p[len(p)-4] ^= 0xff
			return w.exchange(p)
		}},
		{group: g, name: "SYN in two fragments", probe: func(w *world) (string, error) {
			p := w.tcp(seg{sport: w.nextPort(), dport: portClosed, seq: 1000, flags: tcpSYN, options: []byte{2, 4, 5, 180}})
			return w.exchange(fragments(p, 99, 16)...)
		}},
	}
}

// timeWait is a connection that the far side ended first: its TIME_WAIT is there.
func timeWait(w *world) (h byHand, err error) {
	h, synack, err := w.open(portEnd, nil)
	if err != nil {
		return h, err
	}
	for synack[13]&tcpFIN == 0 {
		p := w.next(3 * silence)
		if p == nil {
			return h, fmt.Errorf("no FIN from the server")
		}
		synack = transportOf(p)
	}
	h.s.ack = binary.BigEndian.Uint32(synack[4:]) + 1
	if err := h.say(tcpFIN|tcpACK, ""); err != nil {
		return h, err
	}
	if w.next(silence) == nil { // the acknowledgement
		return h, fmt.Errorf("no answer to a FIN")
	}
	return h, nil
}

// tcpTimeWaits are behaviours of a connection that has ended.
func tcpTimeWaits() []behaviour {
	const g = "TCP segments"
	return []behaviour{
		{group: g, name: "a FIN again in TIME_WAIT", probe: func(w *world) (string, error) {
			h, err := timeWait(w)
			if err != nil {
				return "", err
			}
			again := h.s
			again.seq, again.flags = again.seq-1, tcpFIN|tcpACK
			return w.exchange(w.tcp(again))
		}},
		{group: g, name: "a FIN again after a reset in TIME_WAIT", probe: func(w *world) (string, error) {
			h, err := timeWait(w)
			if err != nil {
				return "", err
			}
			again, reset := h.s, h.s
			reset.flags = tcpRST
			again.seq, again.flags = again.seq-1, tcpFIN|tcpACK
			return w.exchange(w.tcp(reset), w.tcp(again))
		}},
		{group: g, name: "the 4-tuple is used again right behind a reset", probe: func(w *world) (string, error) {
			h, _, err := w.open(portEcho, nil)
			if err != nil {
				return "", err
			}
			h.say(tcpRST, "") //nolint:errcheck // it is gone at worst
			return firstOf(w, seg{sport: h.s.sport, dport: portEcho, seq: h.s.seq + 1<<20, flags: tcpSYN})
		}},
		{group: g, name: "the 4-tuple is used again in TIME_WAIT", probe: func(w *world) (string, error) {
			h, err := timeWait(w)
			if err != nil {
				return "", err
			}
			return accepted(w, seg{sport: h.s.sport, dport: portEnd, seq: h.s.seq + 1<<20, flags: tcpSYN})
		}},
	}
}

// accepted sends a SYN, again where nothing comes as clients do, until it is accepted.
// What else comes is not told: whether the old connection says a last word depends on timing.
func accepted(w *world, s seg) (string, error) {
	for range 3 {
		if err := w.wire.send(w.tcp(s)); err != nil {
			return "", err
		}
		for p := w.next(silence); p != nil; p = w.next(silence) {
			if b := transportOf(p); b[13]&tcpSYN != 0 {
				s.flags, s.seq, s.ack = tcpRST|tcpACK, s.seq+1, binary.BigEndian.Uint32(b[4:])+1
				return segmentName(b), w.wire.send(w.tcp(s))
			}
		}
	}
	return "not accepted", nil
}

// firstOf is the first answer to a segment, whose connection is then reset. It is of
// a port of its own unless s names one.
func firstOf(w *world, s seg) (string, error) {
	if s.sport == 0 {
		s.sport, s.seq = w.nextPort(), 1000
	}
	w.wire.drain()
	if err := w.wire.send(w.tcp(s)); err != nil {
		return "", err
	}
	p := w.next(3 * silence)
	if p == nil {
		return "nothing", nil
	}
	b := transportOf(p)
	acked := binary.BigEndian.Uint32(b[8:]) - s.seq - 1
	s = seg{sport: s.sport, dport: s.dport, seq: s.seq + 1, ack: binary.BigEndian.Uint32(b[4:]) + 1, flags: tcpRST | tcpACK}
	return fmt.Sprintf("%s, %d bytes acknowledged", segmentName(b), acked), w.wire.send(w.tcp(s))
}

// bytesBack sends a packet and collects the payload of the segments that come.
func (w *world) bytesBack(p []byte) (string, error) {
	if err := w.wire.send(p); err != nil {
		return "", err
	}
	got := map[uint32]string{}
	var order []uint32
	for range maxFrames {
		p := w.next(silence / 2)
		if p == nil {
			break
		}
		b := transportOf(p)
		seq, data := binary.BigEndian.Uint32(b[4:]), string(b[int(b[12]>>4)*4:])
		if _, ok := got[seq]; !ok && data != "" {
			order = append(order, seq)
		}
		if len(data) > len(got[seq]) {
			got[seq] = data
		}
	}
	all, next := "", uint32(0)
	for i, seq := range order { // retransmissions, since nothing is acknowledged
		if i == 0 || seq == next {
			all, next = all+got[seq], seq+uint32(len(got[seq]))
		}
	}
	return fmt.Sprintf("%q back", all), nil
}

// optionNames are the kinds of a segment's options, with the MSS.
func optionNames(b []byte) string {
	var names []string
	for o := b[20 : int(b[12]>>4)*4]; len(o) > 0; {
		switch o[0] {
		case 0:
			return counted(names)
		case 1:
			o = o[1:]
			continue
		case 2:
			names = append(names, fmt.Sprintf("MSS %d", binary.BigEndian.Uint16(o[2:])))
		case 3:
			names = append(names, "window scale")
		case 4:
			names = append(names, "SACK")
		case 8:
			names = append(names, "timestamps")
		default:
			names = append(names, fmt.Sprint("option ", o[0]))
		}
		if len(o) < 2 || int(o[1]) < 2 || int(o[1]) > len(o) {
			break
		}
		o = o[o[1]:]
	}
	return counted(names)
}
