package suite

// explanations are the rows where a gateway differs, and why, by group and name.
func explanations() map[string][]difference {
	const (
		stray   = "No connection is known, and the gateway would have to dial to learn whether somebody listens. It answers as a host without a listener does (RFC 9293, 3.10.7.1), where a Linux listener is silent. A scanner learns nothing about the server from it."
		ecn     = "The client's connection ends at the gateway, which does not take up ECN; a host may decline it (RFC 3168, 6.1.1)."
		urgent  = "The urgent byte is carried in line, as RFC 6093 asks: its mark does not pass, nothing of the stream is lost."
		hop     = "The kernel that diverts the traffic into the device is a hop, and the gateway is the next: a client counts one more than over plain forwarding."
		foreign = "The gateway carries TCP, UDP and echo alone. It says so itself, instead of the server: nothing of another protocol leaves it."
		whole   = "Fragments are put together by the gateway, and nothing is sent on until they are complete. What never gets complete it drops, and tells, after 30 s, over IPv6 60 s, as Linux does by default; this server waits less."
		first   = "The server refuses a first fragment without the whole TCP header (RFC 7112). Here it never sees one: the gateway put the fragments together."
		ends    = "Extension headers and fragments end at the gateway, which sends the server a datagram of its own. It says itself what the server would complain about."
		code    = "The kernel forwards with one error for an unreachable route (code 0) and gives a socket of its own another (EHOSTUNREACH); the latter is all that the gateway learns, and is told as code 3. Applications see either as unreachable."
		port0   = "Port 0 names nobody: the gateway drops such a datagram as malformed and counts it, where the server's kernel finds no listener."
		wait    = "The gateway's stack keeps TIME_WAIT through a reset, as RFC 1337 advises; Linux ends it unless net.ipv4.tcp_rfc1337 is set."
		begins  = "No client begins so. The gateway drops and counts it without asking the server, as a Linux listener does."
		answer  = "gVisor acknowledges a SYN that it has answered, and repeats its answer by a timer of its own: after 1 s, as a client repeats its SYN."
		guess   = "Nobody sends it who saw the answer. The gateway drops and counts it, and the handshake goes on, as it does at the server."
		both    = "The client's connection ends at the gateway, which is no party to what the server begins: it dials, and nobody listens there."
		hole    = "End to end only the server can notice, and Linux does with net.ipv4.tcp_mtu_probing alone. Toward its clients the gateway is the sender: after a segment was repeated three times, packets of the connection shrink to 1,280 bytes, after three more repetitions to 576 over IPv4 (RFC 4821)."
		stamp   = "Of ICMP's queries the gateway carries echo alone. Timestamps tell a host's clock; most filters drop them."
	)
	scan := []difference{{kernel: "nothing", gateway: "RST+ACK", why: stray}}
	protocols := []difference{
		{only: "IPv4", kernel: "protocol unreachable from the server", gateway: "protocol unreachable from the gateway", why: foreign},
		{only: "IPv6", kernel: "parameter problem 1 (next header) from the server", gateway: "parameter problem 1 (next header) from the gateway", why: foreign},
	}
	unreachable := func(quoted string) []difference {
		return []difference{{only: "IPv6", kernel: "no route from the gateway" + quoted, gateway: "address unreachable from the gateway" + quoted, why: code}}
	}
	return map[string][]difference{
		"TCP: connect where the gateway has an unreachable route":    unreachable(", 40 bytes quoted"),
		"TCP: an urgent byte up":                                     {{kernel: `the server read "abcd" in line, end of file`, gateway: `the server read "ab!cd" in line, end of file`, why: urgent}},
		"TCP segments: FIN to an open port without a connection":     scan,
		"TCP segments: no flags to an open port (null scan)":         scan,
		"TCP segments: FIN, PSH and URG to an open port (xmas scan)": scan,
		"TCP segments: SYN that offers ECN":                          {{kernel: "SYN+ACK+ECE, 0 bytes acknowledged", gateway: "SYN+ACK, 0 bytes acknowledged", why: ecn}},
		"TCP segments: SYN in two fragments":                         {{only: "IPv6", kernel: "ICMP 4/3 from the server", gateway: "RST+ACK", why: first}},
		"TCP segments: a FIN again after a reset in TIME_WAIT":       {{kernel: "RST", gateway: "ACK", why: wait}},
		"TCP: 1 MiB down where the client's side drops large packets silently": {
			{kernel: "0 bytes, timeout", gateway: "1048576 bytes, end of file", why: hole},
		},
		"TCP segments: SYN and FIN to a closed port":                      {{kernel: "RST+ACK", gateway: "nothing", why: begins}},
		"TCP segments: the same SYN again":                                {{kernel: "SYN+ACK", gateway: "ACK", why: answer}},
		"TCP segments: an ACK of nothing instead of the handshake's last": {{kernel: "RST", gateway: "nothing", why: guess}},
		"TCP segments: SYN from both ends at once":                        {{kernel: "SYN, then SYN+ACK", gateway: "SYN, then RST+ACK", why: both}},
		"UDP: where the gateway has an unreachable route":                 unreachable(", 10 bytes quoted"),
		"UDP: to port 0": {{kernel: "port unreachable from the server", gateway: "nothing", why: port0}},
		"ICMP and the rest: echo where the gateway has an unreachable route":       unreachable(""),
		"ICMP and the rest: timestamp request":                                     {{kernel: "timestamp reply from the server", gateway: "nothing", why: stamp}},
		"ICMP and the rest: echo, hops 1 to 3":                                     oneMoreHop(hop, "echo reply of 56 bytes from the server"),
		"ICMP and the rest: UDP, hops 1 to 3":                                      oneMoreHop(hop, "1 bytes by UDP"),
		"ICMP and the rest: TCP, hops 1 to 3":                                      oneMoreHop(hop, "RST+ACK"),
		"ICMP and the rest: SCTP":                                                  protocols,
		"ICMP and the rest: GRE":                                                   protocols,
		"ICMP and the rest: ESP":                                                   protocols,
		"ICMP and the rest: a protocol that nobody has (253)":                      protocols,
		"Fragments and headers: fragments that never get complete":                 {{kernel: "reassembly time exceeded from the server", gateway: "nothing", why: whole}},
		"Fragments and headers: routing header of type 0, one segment left":        {{kernel: "parameter problem 0 from the server", gateway: "parameter problem 0 from the gateway", why: ends}},
		"Fragments and headers: a fragment of an odd size":                         {{kernel: "parameter problem 0 from the server", gateway: "parameter problem 0 from the gateway", why: ends}},
		"Fragments and headers: a hop-by-hop header behind another":                {{kernel: "parameter problem 1 (next header) from the server", gateway: "parameter problem 1 (next header) from the gateway", why: ends}},
		"Fragments and headers: an unknown next header behind destination options": protocols,
		"Fragments and headers: destination options, unknown option to be reported": {
			{kernel: "parameter problem 2 (option) from the server", gateway: "parameter problem 2 (option) from the gateway", why: ends},
		},
	}
}

// oneMoreHop is a row of hops: an answer comes with a limit of 3 instead of 2.
func oneMoreHop(why, answer string) (both []difference) {
	for family, told := range map[string]string{"IPv4": "TTL exceeded from the gateway; ", "IPv6": "hop limit exceeded from the gateway; "} {
		both = append(both, difference{only: family, kernel: told + answer + "; " + answer, gateway: told + told + answer, why: why})
	}
	return both
}

// pageNotes are differences that the table does not hold, since they depend on
// timing, on rules or on a network that the bed is not.
const pageNotes = `
## Known, and not in the table

* A datagram that a rule rejects is answered as administratively prohibited; a filter of the kernel says what it is told to.
* A client that uses a 4-tuple in TIME_WAIT is accepted, and also hears a reset of the old connection, with numbers that are
  not in its window.
* Where the far side drops large packets silently, the table has net.ipv4.tcp_mtu_probing=1 in the client and in the host of the
  gateway, whose socket sends there. With 0, Linux's default, either upload stalls.
* A client's reset in the same instant as the end of its handshake may reach the server as an end of file.
* An urgent byte from the server may hold up what is behind it until the server sends more. Use no urgent data through a gateway.
* A chain of more than 8 extension headers or 512 bytes is dropped; the kernel takes longer ones.
`
