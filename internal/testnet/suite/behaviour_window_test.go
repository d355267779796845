package suite

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"

	"gatewayd/internal/testnet"
)

// Ports of the server that are for clients that take nothing.
const (
	portBroken  = 121 // sends, then resets
	portEnded   = 122 // sends, then closes
	windowBytes = 20_000
)

// serveWindows starts the servers for them.
func (w *world) serveWindows() {
	for port, handle := range map[int]func(*net.TCPConn){
		portBroken: func(c *net.TCPConn) {
			testnet.WritePattern(c, windowBytes)
			time.Sleep(silence / 4) // the reset comes after the bytes
			hardClose(c)
		},
		portEnded: func(c *net.TCPConn) {
			testnet.WritePattern(c, windowBytes)
			c.CloseWrite()
			io.Copy(io.Discard, c)
		},
	} {
		w.lab.Srv.Serve(hostPort(w.f.far, port), handle)
	}
}

// openShut connects and takes nothing.
func (w *world) openShut(port int) (h byHand, err error) {
	h, _, err = w.begin(seg{sport: w.nextPort(), dport: port, seq: 1000, flags: tcpSYN})
	if err != nil {
		return h, err
	}
	h.s.shut = true
	return h, h.say(tcpACK, "")
}

// takeAll opens the window and acknowledges what comes, until the end.
func (h *byHand) takeAll() (string, error) {
	h.s.shut = false
	got := 0
	for {
		if err := h.say(tcpACK, ""); err != nil {
			return "", err
		}
		p := h.w.next(3 * time.Second)
		if p == nil {
			return fmt.Sprintf("%d bytes, then nothing", got), nil
		}
		b := transportOf(p)
		n := len(b) - int(b[12]>>4)*4
		if seq := binary.BigEndian.Uint32(b[4:]); seq != h.s.ack {
			continue // again, or before its turn
		}
		got += n
		h.s.ack += uint32(n)
		if b[13]&(tcpFIN|tcpRST) != 0 {
			return fmt.Sprintf("%d bytes, then %s", got, segmentName(append(b[:12:12], 5<<4, b[13]))), nil
		}
	}
}

// untilReset waits for a reset, past probes of the window.
func (w *world) untilReset(limit time.Duration) bool {
	for end := time.Now().Add(limit); ; {
		p := w.next(time.Until(end))
		if p == nil {
			return false
		}
		if transportOf(p)[13]&tcpRST != 0 {
			return true
		}
	}
}

// tcpWindows are behaviours toward a client whose window is closed.
func tcpWindows() []behaviour {
	const g = "TCP segments"
	return []behaviour{
		{group: g, name: "the server ends while the client's window is closed, which then opens", probe: func(w *world) (string, error) {
			h, err := w.openShut(portEnded)
			if err != nil {
				return "", err
			}
			defer h.reset()
			w.pause()
			return h.takeAll()
		}},
		{group: g, name: "the server resets while the client's window is closed", probe: func(w *world) (string, error) {
			h, err := w.openShut(portBroken)
			if err != nil {
				return "", err
			}
			defer h.reset()
			return fmt.Sprintf("reset: %v", w.untilReset(10*time.Second)), nil // the gateway tries for 5 s
		}},
		{group: g, name: "the client resets while its window is closed", probe: func(w *world) (string, error) {
			h, err := w.openShut(portTold)
			if err != nil {
				return "", err
			}
			w.pause()
			h.reset()
			return w.told(), nil
		}},
	}
}
