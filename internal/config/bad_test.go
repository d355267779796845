package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gatewayd/internal/exitcode"
)

// badFiles are files with one fault each: what is wrong, where it is told, and a part of what is told.
var badFiles = []struct {
	name, text string
	at, part   string // at is LINE:COL: PATH
}{
	{"empty file", "", "1:1: version", "missing; write version: 1"},
	{"comments only", "# nothing\n", "1:1: version", "missing"},
	{"byte order mark and nothing", "\ufeff", "1:1: version", "missing"},
	{"version missing", "log: {level: info}\n", "1:1: version", "missing"},
	{"version 2", "version: 2\n", "1:10: version", "the only one"},
	{"version quoted", "version: \"1\"\n", "1:10: version", "want version: 1"},
	{"version decimal", "version: 1.0\n", "1:10: version", "want version: 1"},
	{"version empty", "version:\n", "1:1: version", "empty; give it a value"},
	{"a list as the file", "- version: 1\n", "1:1", "found a list, want a map"},
	{"text as the file", "hello\n", "1:1", "found text, want a map"},
	{"two documents", "version: 1\n---\nversion: 1\n", "3:8", "second document"},
	{"tab", "version: 1\nlog:\n\tlevel: info\n", "3:1", "not YAML"},
	{"open bracket", "version: 1\nlog: {level: info\n", "2:6", "not YAML"},
	{"open quote", "version: 1\nstate_dir: \"/x\n", "2:12", "not YAML"},
	{"indentation", "version: 1\nlog:\n  level: info\n format: text\n", "4:2", "not YAML"},
	{"control character", "version: 1\nstate_dir: /a\x00b\n", "2:14", "control character"},
	{"Latin-1", "version: 1\nstate_dir: /\xe9\n", "2:13", "not UTF-8"},
	{"tag", "version: !!int 1\n", "1:10", "YAML tags"},
	{"merge key", "version: 1\nlog: &l {level: info}\napi: {<<: *l}\n", "3:7", "merge keys"},
	{"complex key", "? version\n: 1\n", "1:1", "complex keys"},
	{"unknown anchor", "version: 1\nlog: *l\n", "2:6", "no anchor &l"},
	{"anchor in itself", "version: 1\nroute: {rules: &r [{any: *r}]}\n", "2:26", "no anchor &r"},

	{"unknown key", "version: 1\nlogs: {}\n", "2:1: logs", "did you mean log?"},
	{"unknown key, nothing near", "version: 1\nlog: {colour: red}\n", "2:7: log.colour", "known are format, level"},
	{"unknown inner key", "version: 1\ntun:\n  - tag: lan\n    device: gw0\n    adress: 10.0.0.1/24\n", "5:5: tun[0].adress", "did you mean address?"},
	{"unknown key in JSON", `{"version":1,"tun":[{"tag":"lan","devise":"gw0"}]}`, "1:34: tun[0].devise", "did you mean device?"},
	{"odd key", "version: 1\n\"a b\": 1\n", "2:1: \"a b\"", "unknown key"},
	{"duplicate key", "version: 1\nprivacy: full\nprivacy: none\n", "3:1: privacy", "duplicate key; the first is at gw.yaml:2:1"},
	{"duplicate JSON key", `{"version":1,"sample":"1s","sample":"2s"}`, "1:28: sample", "duplicate key"},
	{"duplicate port key", "version: 1\ntimeouts: {udp: {ports: {53: 1s, 53: 2s}}}\n", "2:34: timeouts.udp.ports.53", "duplicate key"},

	{"map for a scalar", "version: 1\nprivacy: {a: b}\n", "2:10: privacy", "found a map"},
	{"scalar for a map", "version: 1\nlog: info\n", "2:6: log", "found text, want a map"},
	{"list for a map", "version: 1\nlog: [info]\n", "2:6: log", "found a list, want a map"},
	{"map for a list", "version: 1\ntun: {lan: {device: gw0}}\n", "2:7: tun.lan", "unknown key"},
	{"list for a scalar", "version: 1\nstate_dir: [/a]\n", "2:12: state_dir", "found a list"},
	{"number for text", "version: 1\napi: {socket_group: 42}\n", "2:21: api.socket_group", "put it in quotes"},
	{"yes for a number of probes", "version: 1\ntimeouts: {tcp: {keepalive: {probes: many}}}\n", "2:38: timeouts.tcp.keepalive.probes", "want a number"},
	{"text for true", "version: 1\nroute: {rules: [{outbound: direct, pin: yes}]}\n", "2:41: route.rules[0].pin", "want true or false"},
	{"quoted number", "version: 1\nlimits: {per_source: {dials: \"5\"}}\n", "2:30: limits.per_source.dials", "want a number"},
	{"negative number", "version: 1\nlimits: {per_source: {dials: -5}}\n", "2:30: limits.per_source.dials", "want a whole number from 0"},
	{"octal number", "version: 1\nlimits: {per_source: {dials: 010}}\n", "2:30: limits.per_source.dials", "want a whole number"},
	{"huge number", "version: 1\nlimits: {flows: 99999999999}\n", "2:17: limits.flows", "want auto or a whole number"},
	{"empty text", "version: 1\napi: {socket_group: \"\"}\n", "2:21: api.socket_group", "empty"},
	{"a flow log without a file", "version: 1\nevents: {flow_log: {keep: 3}}\n", "2:20: events.flow_log.file", "missing"},
	{"a flow log elsewhere", "version: 1\nevents: {flow_log: {file: flows.jsonl}}\n", "2:27: events.flow_log.file", "absolute"},
	{"a tiny flow log", "version: 1\nevents: {flow_log: {file: /x, size: 1kB}}\n", "2:37: events.flow_log.size", "at least 64KiB"},
	{"too many old flow logs", "version: 1\nevents: {flow_log: {file: /x, keep: 1001}}\n", "2:37: events.flow_log.keep", "1000"},
	{"bad enum", "version: 1\nprivacy: secret\n", "2:10: privacy", "want full, addresses or none"},
	{"bad level", "version: 1\nlog: {level: WARN}\n", "2:14: log.level", "want debug, info, warn or error"},
	{"relative path", "version: 1\nstate_dir: state\n", "2:12: state_dir", "absolute path"},

	{"duration without unit", "version: 1\nsample: 10\n", "2:9: sample", "want a duration with a unit"},
	{"negative duration", "version: 1\nsample: -1s\n", "2:9: sample", "must not be negative"},
	{"sample of zero", "version: 1\nsample: 0s\n", "2:9: sample", "at least 1ms"},
	{"sweep too short", "version: 1\nsweep: 10us\n", "2:8: sweep", "at least 1ms"},
	{"dial of zero", "version: 1\ntimeouts: {dial: 0s}\n", "2:18: timeouts.dial", "want more"},
	{"overflowing duration", "version: 1\ntimeouts: {dial: 99999w}\n", "2:18: timeouts.dial", "want a duration"},
	{"half a second of keepalive", "version: 1\ntimeouts: {tcp: {keepalive: {idle: 500ms}}}\n", "2:36: timeouts.tcp.keepalive.idle", "whole seconds"},
	{"no probes", "version: 1\ntimeouts: {tcp: {keepalive: {probes: 0}}}\n", "2:38: timeouts.tcp.keepalive.probes", "want 1 to 127"},
	{"timeout of port 0", "version: 1\ntimeouts: {udp: {ports: {0: 1s}}}\n", "2:26: timeouts.udp.ports.0", "want 1 to 65535"},
	{"timeout of zero for a port", "version: 1\ntimeouts: {udp: {ports: {53: 0s}}}\n", "2:30: timeouts.udp.ports.53", "want more"},

	{"listener of no kind", "version: 1\napi: {listen: /run/x.sock}\n", "2:15: api.listen", "want unix:PATH"},
	{"relative socket", "version: 1\napi: {listen: \"unix:x.sock\"}\n", "2:15: api.listen", "absolute path"},
	{"socket path too long", "version: 1\napi: {listen: \"unix:/" + strings.Repeat("x", 107) + "\"}\n", "2:15: api.listen", "108 bytes long"},
	{"named listener", "version: 1\napi: {listen: \"tcp:localhost:80\"}\n", "2:15: api.listen", "literal address"},
	{"listener on port 0", "version: 1\napi: {listen: \"tcp:127.0.0.1:0\"}\n", "2:15: api.listen", "port 0"},
	{"listener without token", "version: 1\napi: {listen: [\"unix:/s\", \"tcp:127.0.0.1:80\"]}\n", "2:27: api.listen[1]", "needs a token"},
	{"listener off loopback without TLS", "version: 1\napi:\n  listen: tcp:0.0.0.0:80\n  tokens: {name: a, role: read, file: /t}\n", "3:11: api.listen", "needs TLS"},
	{"same listener twice", "version: 1\napi: {listen: [\"unix:/s\", \"unix:/s\"]}\n", "2:27: api.listen[1]", "is taken"},
	{"token of no role", "version: 1\napi: {tokens: [{name: a, role: root, file: /t}]}\n", "2:32: api.tokens[0].role", "want read, users or admin"},
	{"token without file", "version: 1\napi: {tokens: [{name: a, role: read}]}\n", "2:16: api.tokens[0].file", "missing"},
	{"same token twice", "version: 1\napi:\n  tokens:\n    - {name: a, role: read, file: /t}\n    - {name: a, role: admin, file: /u}\n", "5:14: api.tokens[1].name", "is taken"},
	{"certificate without key", "version: 1\napi: {tls: {cert_file: /c}}\n", "2:12: api.tls.key_file", "missing; write the path of the private key"},
	{"host with port", "version: 1\napi: {hosts: \"gw.example:80\"}\n", "2:14: api.hosts", "without a port"},

	{"TUN without tag", "version: 1\ntun: [{device: gw0}]\n", "2:7: tun[0].tag", "missing; write a tag"},
	{"TUN without device", "version: 1\ntun:\n  - tag: lan\n", "3:5: tun[0].device", "missing; write a name"},
	{"duplicate TUN tag", "version: 1\ntun:\n  - {tag: lan, device: gw0}\n  - {tag: lan, device: gw1}\n", "4:11: tun[1].tag", `"lan" is taken, by tun[0].tag at gw.yaml:3:11`},
	{"duplicate device", "version: 1\ntun:\n  - {tag: lan, device: gw0}\n  - {tag: lan2, device: gw0}\n", "4:25: tun[1].device", "is taken"},
	{"bad tag", "version: 1\ntun: {tag: \"l n\", device: gw0}\n", "2:12: tun.tag", "want 1 to 63 letters"},
	{"device name of 16 bytes", "version: 1\ntun: {tag: lan, device: abcdefghijklmnop}\n", "2:25: tun.device", "16 bytes long; the kernel allows 15"},
	{"device name with a slash", "version: 1\ntun: {tag: lan, device: gw/0}\n", "2:25: tun.device", "without blanks"},
	{"device name with a blank", "version: 1\ntun: {tag: lan, device: gw 0}\n", "2:25: tun.device", "without blanks"},
	{"address without length", "version: 1\ntun: {tag: lan, device: gw0, address: 10.0.0.1}\n", "2:39: tun.address", "lacks its prefix length"},
	{"prefix of /33", "version: 1\ntun: {tag: lan, device: gw0, address: 10.0.0.1/33}\n", "2:39: tun.address", "want 0 to 32"},
	{"prefix of /129", "version: 1\ntun: {tag: lan, device: gw0, address: \"fd00::1/129\"}\n", "2:39: tun.address", "want 0 to 128"},
	{"network's own address", "version: 1\ntun: {tag: lan, device: gw0, address: 10.0.0.0/24}\n", "2:39: tun.address", "write 10.0.0.1/24"},
	{"broadcast address", "version: 1\ntun: {tag: lan, device: gw0, address: 10.0.0.255/24}\n", "2:39: tun.address", "write 10.0.0.254/24"},
	{"loopback address", "version: 1\ntun: {tag: lan, device: gw0, address: 127.0.0.1/8}\n", "2:39: tun.address", "can not be a device's own"},
	{"no address at all", "version: 1\ntun: {tag: lan, device: gw0, address: []}\n", "2:39: tun.address", "remove it for automatic"},
	{"overlapping TUN prefixes", "version: 1\ntun:\n  - {tag: a, device: gw0, address: 10.0.0.1/8}\n  - {tag: b, device: gw1, address: [\"fd00::1/64\", 10.1.2.3/24]}\n", "4:51: tun[1].address[1]", "10.1.2.3/24 overlaps 10.0.0.1/8 of tun[0].address"},
	{"address twice on a device", "version: 1\ntun: {tag: lan, device: gw0, address: [10.0.0.1/24, 10.0.0.1/16]}\n", "2:53: tun.address[1]", "overlaps"},
	{"tiny MTU", "version: 1\ntun: {tag: lan, device: gw0, mtu: 500}\n", "2:35: tun.mtu", "want 576 to 65535"},
	{"MTU below IPv6's", "version: 1\ntun: {tag: lan, device: gw0, mtu: 1000, address: \"fd00::1/64\"}\n", "2:35: tun.mtu", "takes no IPv6 address"},
	{"no queue", "version: 1\ntun: {tag: lan, device: gw0, queues: 0}\n", "2:38: tun.queues", "want 1 to 256"},
	{"offload of no kind", "version: 1\ntun: {tag: lan, device: gw0, offload: some}\n", "2:39: tun.offload", "want auto, on or off"},

	{"duplicate outbound tag", "version: 1\noutbounds:\n  - {tag: a, type: direct}\n  - {tag: a, type: direct}\n", "4:11: outbounds[1].tag", "is taken, by outbounds[0].tag"},
	{"one tag for a device and an outbound", "version: 1\noutbounds: {tag: a, type: direct}\nwireguard: {tag: a}\n", "2:18: outbounds.tag", "is taken, by wireguard[0].tag"},
	{"reject redefined", "version: 1\noutbounds: {tag: reject, type: direct}\n", "2:18: outbounds.tag", "built in"},
	{"direct of another type", "version: 1\noutbounds: {tag: direct, type: socks5, server: \"a:1\"}\n", "2:32: outbounds.type", "only be redefined with type: direct"},
	{"outbound without type", "version: 1\noutbounds: {tag: a}\n", "2:12: outbounds.type", "missing; write type: direct"},
	{"outbound of no type", "version: 1\noutbounds: {tag: a, type: vless}\n", "2:27: outbounds.type", "want direct, socks5, http or balancer"},
	{"key of another type", "version: 1\noutbounds: {tag: a, type: direct, server: \"a:1\"}\n", "2:35: outbounds.server", "belongs to socks5, http"},
	{"source with prefix", "version: 1\noutbounds: {tag: a, type: direct, source: 10.0.0.1/24}\n", "2:43: outbounds.source", "without prefix length"},
	{"two sources of a family", "version: 1\noutbounds: {tag: a, type: direct, source: [10.0.0.1, 10.0.0.2]}\n", "2:54: outbounds.source[1]", "second ipv4 address"},
	{"source of the other family", "version: 1\noutbounds: {tag: a, type: direct, family: ipv6, source: 10.0.0.1}\n", "2:57: outbounds.source", "no ipv6 address"},
	{"mark of 33 bits", "version: 1\noutbounds: {tag: a, type: direct, mark: 0x100000000}\n", "2:41: outbounds.mark", "0xffffffff"},
	{"drain of no kind", "version: 1\noutbounds: {tag: a, type: direct, drain: soon}\n", "2:42: outbounds.drain", "want keep, now or a duration"},
	{"via an outbound that is missing", "version: 1\noutbounds: {tag: a, type: http, server: \"a:1\", via: b}\n", "2:53: outbounds.via", `no outbound "b"`},
	{"via itself", "version: 1\noutbounds: {tag: a, type: direct, via: a}\n", "2:40: outbounds.via", "cycle: a → a"},
	{"cycle of three", "version: 1\noutbounds:\n  - {tag: a, type: socks5, via: b}\n  - {tag: b, type: http, via: c}\n  - {tag: c, type: balancer, members: [direct, a]}\n", "5:48: outbounds[2].members[1]", "cycle: a → b → c → a"},
	{"balancer of none", "version: 1\noutbounds: {tag: a, type: balancer, members: []}\n", "2:46: outbounds.members", "needs members"},

	{"rule to a missing outbound", "version: 1\nwireguard: {tag: vpn}\nroute:\n  rules:\n    - {outbound: direct}\n    - {ip: 10.0.0.0/8,\n       outbound: vpm}\n", "7:18: route.rules[1].outbound", `no outbound "vpm"; known are direct, drop, reject, vpn; did you mean vpn?`},
	{"rule without outbound", "version: 1\nroute: {rules: [{ip: 10.0.0.0/8}]}\n", "2:17: route.rules[0].outbound", "missing; write outbound: and a tag; known are direct, drop, reject"},
	{"rule of a missing inbound", "version: 1\ntun: {tag: lan, device: gw0}\nroute: {rules: [{inbound: lam, outbound: direct}]}\n", "3:27: route.rules[0].inbound", "did you mean lan?"},
	{"inbound where there is none", "version: 1\nroute: {rules: [{inbound: lan, outbound: direct}]}\n", "2:27: route.rules[0].inbound", "there is none at all"},
	{"missing default", "version: 1\nroute: {default: vpn}\n", "2:18: route.default", `no outbound "vpn"`},
	{"default to dns", "version: 1\nroute: {default: dns}\n", "2:18: route.default", "dns: not yet available"},
	{"two rules of a name", "version: 1\nroute:\n  rules:\n    - {name: a, outbound: direct}\n    - {name: a, outbound: direct}\n", "5:14: route.rules[1].name", "is taken"},
	{"host bits", "version: 1\nroute: {rules: [{ip: [10.0.0.0/8, 10.1.2.3/16], outbound: direct}]}\n", "2:35: route.rules[0].ip[1]", "host bits; write 10.1.0.0/16"},
	{"host bits in IPv6", "version: 1\nroute: {rules: [{source: \"2001:db8::1/32\", outbound: direct}]}\n", "2:26: route.rules[0].source", "write 2001:db8::/32"},
	{"no prefix at all", "version: 1\nroute: {rules: [{ip: example.org, outbound: direct}]}\n", "2:22: route.rules[0].ip", "no address or prefix"},
	{"IPv4 in IPv6", "version: 1\nroute: {rules: [{ip: \"::ffff:10.0.0.1\", outbound: direct}]}\n", "2:22: route.rules[0].ip", "write it as 10.0.0.1"},
	{"zone", "version: 1\nroute: {rules: [{ip: \"fe80::1%eth0\", outbound: direct}]}\n", "2:22: route.rules[0].ip", "no address or prefix"},
	{"port 0", "version: 1\nroute: {rules: [{port: 0, outbound: direct}]}\n", "2:24: route.rules[0].port", "1 to 65535"},
	{"port 70000", "version: 1\nroute: {rules: [{port: [80, 70000], outbound: direct}]}\n", "2:29: route.rules[0].port[1]", "1 to 65535"},
	{"reversed range", "version: 1\nroute: {rules: [{port: 90-80, outbound: direct}]}\n", "2:24: route.rules[0].port", "reversed; write 80-90"},
	{"open range", "version: 1\nroute: {rules: [{source_port: 80-, outbound: direct}]}\n", "2:31: route.rules[0].source_port", "or a range"},
	{"network of no kind", "version: 1\nroute: {rules: [{network: sctp, outbound: direct}]}\n", "2:27: route.rules[0].network", "want tcp, udp or icmp"},
	{"ports of ICMP", "version: 1\nroute: {rules: [{network: icmp, port: 7, outbound: direct}]}\n", "2:39: route.rules[0].port", "icmp has no ports"},
	{"empty list", "version: 1\nroute: {rules: [{ip: [], outbound: direct}]}\n", "2:22: route.rules[0].ip", "matches nothing"},
	{"empty not", "version: 1\nroute: {rules: [{not: {}, outbound: direct}]}\n", "2:23: route.rules[0].not", "no condition"},
	{"option inside a condition", "version: 1\nroute: {rules: [{any: [{port: 1, pin: true}], outbound: direct}]}\n", "2:34: route.rules[0].any[0].pin", "unknown key"},
	{"host bits deep inside", "version: 1\nroute:\n  rules:\n    - not:\n        any:\n          - all: {ip: 1.2.3.4/8}\n      outbound: direct\n", "6:23: route.rules[0].not.any[0].all.ip", "write 1.0.0.0/8"},

	{"user without name", "version: 1\nusers: [{group: a}]\ngroups: {name: a}\n", "2:9: users[0].name", "missing; write a name"},
	{"user of digits", "version: 1\nusers: {name: \"42\"}\n", "2:15: users.name", "not all digits"},
	{"user that is a number", "version: 1\nusers: {name: 42}\n", "2:15: users.name", "put it in quotes"},
	{"user with a line break", "version: 1\nusers: {name: \"a\\nb\"}\n", "2:15: users.name", "control characters"},
	{"user with a blank at its end", "version: 1\nusers: {name: \"a \"}\n", "2:15: users.name", "without blanks"},
	{"user of 66 bytes", "version: 1\nusers: {name: üüüüüüüüüüüüüüüüüüüüüüüüüüüüüüüüü}\n", "2:15: users.name", "1 to 64 bytes"},
	{"user with a slash", "version: 1\nusers: {name: a/b}\n", "2:15: users.name", "a path can hold"},
	{"group of digits", "version: 1\ngroups: {name: \"42\"}\n", "2:16: groups.name", "not all digits"},
	{"user of dots", "version: 1\nusers: {name: ..}\n", "2:15: users.name", "a path can hold"},
	{"two users of a name", "version: 1\nusers: [{name: a}, {name: a}]\n", "2:27: users[1].name", "\"a\" is taken, by users[0].name at gw.yaml:2:16"},
	{"two users of an id", "version: 1\nusers: [{name: a, id: 7}, {name: b, id: 7}]\n", "2:41: users[1].id", "is taken"},
	{"id of zero", "version: 1\nusers: {name: a, id: 0}\n", "2:22: users.id", "want a number from 1 to 9007199254740991"},
	{"id that JSON would round", "version: 1\nusers: {name: a, id: 9007199254740992}\n", "2:22: users.id", "want a number from 1"},
	{"user of a missing group", "version: 1\ngroups: {name: staff}\nusers: {name: a, group: stuff}\n", "3:25: users.group", "no group \"stuff\"; known are staff; did you mean staff?"},
	{"user of a group where there is none", "version: 1\nusers: {name: a, group: staff}\n", "2:25: users.group", "there is none at all"},
	{"two groups of a name", "version: 1\ngroups: [{name: a}, {name: a}]\n", "2:28: groups[1].name", "is taken"},
	{"enabled that is a word", "version: 1\nusers: {name: a, enabled: yes}\n", "2:27: users.enabled", "want true or false"},
	{"empty limits", "version: 1\nusers: {name: a, limits: }\n", "2:18: users.limits", "empty"},
	{"quota without unit", "version: 1\nusers: {name: a, limits: {traffic: {total: 5G}}}\n", "2:44: users.limits.traffic.total", "want bytes with a unit"},
	{"speed in bits of no time", "version: 1\nusers: {name: a, limits: {speed: 5Mbit}}\n", "2:34: users.limits.speed", "want a rate with a unit"},
	{"bandwidth below a byte", "version: 1\ngroups: {name: a, limits: {bandwidth: {up: 1bit/s}}}\n", "2:44: groups.limits.bandwidth.up", "below 1 byte per second"},
	{"negative connections", "version: 1\nusers: {name: a, limits: {connections: -1}}\n", "2:40: users.limits.connections", "want a whole number from 0"},
	{"multiplier of seven decimals", "version: 1\nusers: {name: a, limits: {multiplier: 0.1234567}}\n", "2:39: users.limits.multiplier", "at most six decimals"},
	{"multiplier above 1000", "version: 1\nusers: {name: a, limits: {multiplier: 1000.000001}}\n", "2:39: users.limits.multiplier", "from 0 to 1000"},
	{"negative multiplier", "version: 1\nusers: {name: a, limits: {multiplier: -0.5}}\n", "2:39: users.limits.multiplier", "must not be negative"},
	{"multiplier in quotes", "version: 1\nusers: {name: a, limits: {multiplier: \"0.5\"}}\n", "2:39: users.limits.multiplier", "want a number"},
	{"multiplier with an exponent", "version: 1\nusers: {name: a, limits: {multiplier: 1e2}}\n", "2:39: users.limits.multiplier", "want a number"},
	{"reset without period", "version: 1\nusers: {name: a, limits: {traffic: {reset: {day: 3}}}}\n", "2:44: users.limits.traffic.reset.every", "missing; write every:"},
	{"reset of no period", "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: year}}}}\n", "2:52: users.limits.traffic.reset.every", "want hour, day, week or month"},
	{"day of a week", "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: week, day: 1}}}}\n", "2:63: users.limits.traffic.reset.day", "goes with every: month only"},
	{"day 32", "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: month, day: 32}}}}\n", "2:64: users.limits.traffic.reset.day", "want 1 to 31"},
	{"zone that is none", "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: day, zone: Europe/Berlim}}}}\n", "2:63: users.limits.traffic.reset.zone", "no time zone \"Europe/Berlim\""},
	{"zone of the environment", "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: day, zone: Local}}}}\n", "2:63: users.limits.traffic.reset.zone", "IANA database"},
	{"zone that is a path", "version: 1\nusers: {name: a, limits: {traffic: {reset: {every: day, zone: ../UTC}}}}\n", "2:63: users.limits.traffic.reset.zone", "no time zone"},
	{"exhausted in a word", "version: 1\nusers: {name: a, limits: {when_exhausted: stop}}\n", "2:43: users.limits.when_exhausted", "want a map or block"},
	{"exhausted to a missing outbound", "version: 1\nusers: {name: a, limits: {when_exhausted: {outbound: slow}}}\n", "2:54: users.limits.when_exhausted.outbound", "no outbound \"slow\""},
	{"exhausted to both", "version: 1\nusers: {name: a, limits: {when_exhausted: {throttle: 1Mbit/s, outbound: direct}}}\n", "2:43: users.limits.when_exhausted", "exclude each other"},
	{"throttle of zero", "version: 1\ngroups: {name: a, limits: {when_exhausted: {throttle: 0}}}\n", "2:55: groups.limits.when_exhausted.throttle", "want more than that"},
	{"expiry without a time of day", "version: 1\nusers: {name: a, expires: {at: 2030-01-31}}\n", "2:32: users.expires.at", "RFC 3339"},
	{"expiry without offset", "version: 1\nusers: {name: a, expires: {at: 2030-01-31T00:00:00}}\n", "2:32: users.expires.at", "with its offset"},
	{"expiry in the year 1", "version: 1\nusers: {name: a, expires: {at: 0001-01-01T00:00:00Z}}\n", "2:32: users.expires.at", "after 1970"},
	{"expiry after no use", "version: 1\nusers: {name: a, expires: {after_first_use: 0s}}\n", "2:45: users.expires.after_first_use", "never expires"},
	{"expiry in words", "version: 1\nusers: {name: a, expires: {after_first_use: 30}}\n", "2:45: users.expires.after_first_use", "want a duration with a unit"},
	{"device of five bytes", "version: 1\nusers: {name: a, devices: \"mac:3c:22:fb:aa:bb\"}\n", "2:27: users.devices", "want six bytes"},
	{"multicast device", "version: 1\nusers: {name: a, devices: \"mac:01:00:5e:00:00:01\"}\n", "2:27: users.devices", "multicast"},
	{"device of zeros", "version: 1\nusers: {name: a, devices: \"mac:00:00:00:00:00:00\"}\n", "2:27: users.devices", "zeros"},
	{"host with a blank", "version: 1\nusers: {name: a, devices: [\"host:a b\"]}\n", "2:28: users.devices[0]", "no host name"},
	{"device with host bits", "version: 1\nusers: {name: a, devices: 192.168.1.65/28}\n", "2:27: users.devices", "write 192.168.1.64/28, or 192.168.1.65 for the one address"},
	{"device that is a name", "version: 1\nusers: {name: a, devices: tablet}\n", "2:27: users.devices", "want mac:"},
	{"device of IPv4 in IPv6", "version: 1\nusers: {name: a, devices: \"::ffff:10.0.0.1\"}\n", "2:27: users.devices", "write it as 10.0.0.1"},
	{"a device of two users", "version: 1\nusers: [{name: a, devices: \"mac:3c:22:fb:aa:bb:cc\"}, {name: b, devices: [10.0.0.1, \"mac:3C-22-FB-AA-BB-CC\"]}]\n", "2:84: users[1].devices[1]", "is taken, by users[0].devices"},
	{"rule of a user of digits", "version: 1\nroute: {rules: [{user: \"42\", outbound: direct}]}\n", "2:24: route.rules[0].user", "not all digits"},
	{"rule of a state that is none", "version: 1\nroute: {rules: [{user_state: [active, gone], outbound: direct}]}\n", "2:39: route.rules[0].user_state[1]", "want anonymous, active, disabled, expired, exhausted, throttled or unused"},
	{"rule of no user", "version: 1\nroute: {rules: [{user: [], outbound: direct}]}\n", "2:24: route.rules[0].user", "matches nothing"},
	{"rule of a device that is none", "version: 1\nroute: {rules: [{not: {device: tablet}, outbound: direct}]}\n", "2:32: route.rules[0].not.device", "want mac:"},
	{"expiry in a thousand years", "version: 1\nusers: [{name: a, expires: {at: 3030-01-31T00:00:00Z}}]\n", "2:33: users[0].expires.at", "no year from 1970 to 2200"},
	{"notes of a book", "version: 1\nusers: [{name: a}, {name: b, notes: " + strings.Repeat("x", 5000) + "}]\n", "2:37: users[1].notes", "at most 4096"},
	{"ledger that writes all the time", "version: 1\nledger: {commit: 10ms}\n", "2:18: ledger.commit", "want 1s to 1h"},
	{"ledger that keeps no hour", "version: 1\nledger: {hourly: 0s}\n", "2:18: ledger.hourly", "want 1h0m0s to 2400h"},
	{"ledger that keeps days for ever", "version: 1\nledger: {daily: 5000d}\n", "2:17: ledger.daily", "want 24h"},
	{"too many users in metrics", "version: 1\nmetrics: {per_user: 10001}\n", "2:21: metrics.per_user", "want 0 to 10000"},
	{"webhook without URL", "version: 1\nevents: {webhooks: [{on: user}]}\n", "2:21: events.webhooks[0].url", "missing"},
	{"webhook without events", "version: 1\nevents: {webhooks: [{url: \"http://a/\"}]}\n", "2:21: events.webhooks[0].on", "missing; write the events"},
	{"webhook on nothing", "version: 1\nevents: {webhooks: [{url: \"http://a/\", on: []}]}\n", "2:44: events.webhooks[0].on", "posts nothing"},
	{"webhook on no kind", "version: 1\nevents: {webhooks: [{url: \"http://a/\", on: [users.near]}]}\n", "2:45: events.webhooks[0].on[0]", "did you mean user?"},
	{"webhook by another scheme", "version: 1\nevents: {webhooks: {url: \"ftp://a/\", on: user}}\n", "2:26: events.webhooks.url", "want http:// or https://"},
	{"webhook of no host", "version: 1\nevents: {webhooks: {url: \"https:///hook\", on: user}}\n", "2:26: events.webhooks.url", "and a host"},
	{"webhook with a password", "version: 1\nevents: {webhooks: {url: \"https://u:p@a/\", on: user}}\n", "2:26: events.webhooks.url", "without user"},
	{"17 webhooks", "version: 1\nevents: {webhooks: [{url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}, {url: \"http://a/\", on: user}]}\n", "2:20: events.webhooks", "16 is the most"},

	{"CRLF", "version: 1\r\nroute:\r\n  default: vpn\r\n", "3:12: route.default", "no outbound"},
	{"after letters of two bytes", "version: 1\napi: {socket_group: \"üü\", hosts: [\"ö ö\"]}\n", "2:35: api.hosts[0]", "without a port"},
	{"tabs in JSON", "{\n\t\"version\":\t1,\n\t\"tun\":\t[{\"tag\":\t\"a\",\t\"device\": \"gw 0\"}]\n}", "3:33: tun[0].device", "without blanks"},
	{"tab before a comment", "version:\t2 \t# two\n", "1:10: version", "the only one"},
	{"tab inside a key", "versi\ton: 1\n", "1:1", "a tab inside text"},
	{"missing included file", "version: 1\ninclude: [no-such-file.yaml]\n", "2:11: include[0]", "can not be read: no such file"},
	{"bad include pattern", "version: 1\ninclude: \"[\"\n", "2:10: include", "pattern"},
}

func TestABadFileIsRefusedWithItsPlaceAndAFix(t *testing.T) {
	if len(badFiles) < 60 {
		t.Errorf("%d bad files, want 60 at least", len(badFiles))
	}
	for _, bad := range badFiles {
		t.Run(bad.name, func(t *testing.T) {
			_, err := Parse("gw.yaml", []byte(bad.text))
			p := problems(t, err)
			want := "gw.yaml:" + bad.at + ": "
			if !slices.ContainsFunc(p.List, func(p Problem) bool {
				return strings.HasPrefix(p.String(), want) && strings.Contains(p.Text, bad.part)
			}) {
				t.Errorf("got\n%v\nwant %s… %s", err, want, bad.part)
			}
		})
	}
}

// A bad file has one fault, and one is told: no error follows from another.
func TestOneFaultIsToldOnce(t *testing.T) {
	several := map[string]bool{
		"one tag for a device and an outbound": true, "direct of another type": true, "map for a list": true,
		"via an outbound that is missing": true, "via itself": true, "cycle of three": true, "balancer of none": true,
		"rule to a missing outbound": true, "listener off loopback without TLS": false,
	}
	for _, bad := range badFiles {
		_, err := Parse("gw.yaml", []byte(bad.text))
		if p := problems(t, err); len(p.List) > 1 && !several[bad.name] {
			t.Errorf("%s:\n%v", bad.name, err)
		}
	}
}

func TestLoadAndParseAgreeOnBadFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gw.yaml")
	for _, bad := range badFiles {
		if err := os.WriteFile(path, []byte(bad.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, loaded := Load(path)
		_, parsed := Parse(path, []byte(bad.text))
		if fmt.Sprint(loaded) != fmt.Sprint(parsed) {
			t.Errorf("%s: load says\n%v\nparse says\n%v", bad.name, loaded, parsed)
		}
	}
}

// problems is the list in err, which has to carry the exit code of a bad configuration.
func problems(t *testing.T, err error) *Problems {
	t.Helper()
	p, ok := errors.AsType[*Problems](err)
	if !ok || exitcode.Of(err) != exitcode.Config {
		t.Fatalf("error %v (exit code %d), want problems with exit code %d", err, exitcode.Of(err), exitcode.Config)
	}
	return p
}
