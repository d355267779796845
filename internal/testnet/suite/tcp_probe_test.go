package suite

import (
	"testing"

	"gatewayd/internal/testnet"
)

// oddities are beginnings that lead nowhere, as of scanners, of broken stacks and of
// forged sources. Each packet has a port of its own.
func oddities() map[string][]seg {
	const acked = 0x77777777
	return map[string][]seg{
		"SYN":                    {{flags: tcpSYN}},
		"SYN with data":          {{flags: tcpSYN, data: "early"}},
		"SYN with a cookie":      {{flags: tcpSYN, options: fastOpen, data: "early"}},
		"SYN, FIN":               {{flags: tcpSYN | tcpFIN}},
		"SYN, RST":               {{flags: tcpSYN | tcpRST}},
		"null":                   {{}},
		"xmas":                   {{flags: tcpFIN | tcpPSH | tcpURG}},
		"all flags":              {{flags: 0x3f}},
		"FIN":                    {{flags: tcpFIN}},
		"ACK":                    {{flags: tcpACK, ack: acked}},
		"SYN-ACK":                {{flags: tcpSYN | tcpACK, ack: acked}},
		"RST":                    {{flags: tcpRST}},
		"SYN, then RST":          {{flags: tcpSYN}, {flags: tcpRST, seq: 1}},
		"SYN twice":              {{flags: tcpSYN}, {flags: tcpSYN}},
		"SYN, then another":      {{flags: tcpSYN}, {flags: tcpSYN, seq: 1 << 20}},
		"SYN, then SYN-ACK":      {{flags: tcpSYN}, {flags: tcpSYN | tcpACK, ack: acked}},
		"SYN, then a wrong ACK":  {{flags: tcpSYN}, {flags: tcpACK, seq: 1, ack: acked}},
		"SYN, then a wrong data": {{flags: tcpSYN}, {flags: tcpACK | tcpPSH, seq: 1, ack: acked, data: "forged"}},
		"SYN, then FIN":          {{flags: tcpSYN}, {flags: tcpFIN | tcpACK, seq: 1, ack: acked}},
	}
}

func TestOddHandshakesLeaveNoFlowAndNoSlot(t *testing.T) {
	b := newTCPBed(t, "timeouts: {dial: 2s}\n")
	b.Srv.Filter("input", "tcp dport 81", "drop")
	for _, f := range behaviourFamilies() {
		w := newWorld(t, b.Lab, f)
		first := b.connect(t, hostPort(f.far, portEcho)) // a first one, for what it makes the gateway open for good
		first.Close()
		testnet.Until(t, patience, "the first connection ended", func() bool { return b.gw.API.Status().Flows == 0 })
		fds := b.gw.Process().FDs
		up, down := b.moved(t)
		for name, segments := range oddities() {
			for _, port := range []int{portEcho, 81, 444} { // open, silent, closed
				for range 5 {
					sport := w.nextPort()
					for _, s := range segments {
						s.sport, s.dport, s.seq = sport, port, s.seq+1000
						if err := w.wire.send(w.tcp(s)); err != nil {
							t.Fatalf("%s: %v", name, err)
						}
						w.wire.next(w.raw, prompt/50) // the answer, if one comes at once
					}
				}
			}
		}
		testnet.Until(t, 2*patience, "nothing is left of them", func() bool {
			s := b.gw.API.Status()
			return s.Flows == 0 && s.Associations == 0 && b.gw.Process().FDs <= fds
		})
		if u, d := b.moved(t); u != up || d != down {
			t.Errorf("%s: %d bytes up and %d down were counted, want none", f.name, u-up, d-down)
		}
		c := b.connect(t, hostPort(f.far, portEcho))
		exchange(t, c, "the gateway works on")
		c.Close()
	}
}

// moved is what the gateway counted up to now.
func (b *tcpBed) moved(t *testing.T) (up, down uint64) {
	t.Helper()
	tick := b.gw.API.Traffic().Tick
	testnet.Until(t, patience, "a tick", func() bool { return b.gw.API.Traffic().Tick > tick })
	total := b.gw.API.Traffic().Total
	return total.Up, total.Down
}
