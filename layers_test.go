package gatewayd_test

import (
	"fmt"
	"slices"
	"strings"
)

// everyone may be imported by any package above layer 0.
var everyone = []string{"flow", "internal/admit", "internal/epoll", "internal/exitcode", "internal/shrink", "netstack/wire"}

// layers is the table of docs/architecture.md: which packages of ours a package
// may import, besides everyone. A package that is not in it is an error. Tests
// may import what they need.
var layers = map[string][]string{
	// 0
	"flow":              {},
	"internal/admit":    {"internal/shrink"},
	"internal/epoll":    {},
	"internal/exitcode": {},
	"internal/hostnet":  {},
	"internal/shrink":   {},
	"internal/store":    {},
	"netstack/wire":     {},
	"route/match":       {},
	// 1
	"netstack":        {},
	"track":           {},
	"user":            {"internal/store"},
	"route":           {"route/match"},
	"outbound":        {},
	"dns":             {"route/match", "internal/store"},
	"fanout":          {},
	"internal/device": {"internal/hostnet"},
	// 2
	"tun":        {"netstack", "internal/hostnet"},
	"tun/divert": {"internal/hostnet"},
	"wg":         {"netstack"},
	// 3
	"internal/config":  {"route/match", "user"}, // user: one set of types for what an operator may write
	"internal/api":     {"internal/config", "track", "user", "route"},
	"internal/client":  {"internal/api"},
	"internal/flowlog": {"track"},
	"internal/webhook": {},
	// 4
	"internal/gateway": {
		"internal/hostnet", "internal/store", "route/match", "netstack", "track", "user", "route", "outbound",
		"dns", "fanout", "tun", "tun/divert", "wg", "internal/config", "internal/api",
		"internal/device", "internal/flowlog", "internal/webhook",
	},
	// 5
	"cmd/gatewayd": {
		"internal/api", "internal/client", "internal/config", "internal/gateway", "internal/hostnet", "internal/store",
	},
	// beside the house
	"internal/testnet":       {},
	"internal/testnet/demo":  {"internal/testnet"},
	"internal/testnet/suite": {"internal/testnet"},
}

// planned packages have their place in the table before they are written.
var planned = map[string]bool{
	"tun/divert":             true,
	"internal/testnet/suite": true,
}

// bottom are the packages that import only one another's like: flow and nothing else.
var bottom = []string{"flow", "internal/admit", "internal/epoll", "internal/exitcode", "internal/hostnet", "internal/shrink", "internal/store", "netstack/wire", "route/match"}

func checkLayers(p *pkg) (problems []string) {
	room, isTestRoom := testRoom(p.path)
	allowed, known := layers[room]
	if p.path == "." {
		return nil // tests only
	}
	if !known {
		return []string{fmt.Sprintf("%s: not in the table of layers", p.path)}
	}
	for _, path := range p.imports {
		target := inside(path)
		if target == "" || mayImport(room, allowed, target) || isTestRoom && target == room {
			continue
		}
		if _, fake := testRoom(target); fake && isTestRoom {
			continue
		}
		problems = append(problems, fmt.Sprintf("%s: must not import %s", p.path, target))
	}
	return problems
}

func mayImport(room string, allowed []string, target string) bool {
	if slices.Contains(allowed, target) {
		return true
	}
	if slices.Contains(bottom, room) {
		return target == "flow" && room != "flow"
	}
	return slices.Contains(everyone, target)
}

// testRoom tells which room a package of fakes, as route/routetest, belongs to.
// Such a package may import its room; only tests and their like may import it.
func testRoom(path string) (room string, isTestRoom bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 || !strings.HasSuffix(path, "test") {
		return path, false
	}
	room = path[:i]
	return room, path[i+1:] == room[strings.LastIndexByte(room, '/')+1:]+"test"
}

// owners is who may import what is not ours; nil is everyone.
var owners = map[string][]string{
	"github.com/sagernet/gvisor":              {"netstack"},
	"github.com/vishvananda/netlink":          {"internal/hostnet"},
	"github.com/google/nftables":              {"tun/divert"},
	"github.com/gaissmai/bart":                {"route/match"},
	"github.com/oschwald/maxminddb-golang/v2": {"route/match"},
	"github.com/miekg/dns":                    {"dns"},
	"golang.zx2c4.com/wireguard":              {"wg"},
	"golang.zx2c4.com/wireguard/wgctrl":       {"wg"},
	"github.com/goccy/go-yaml":                {"internal/config"},
	"github.com/VictoriaMetrics/metrics":      {"internal/api"},
	"rsc.io/qr":                               {"internal/api"},
	"github.com/spf13/cobra":                  {"cmd/gatewayd"},
	"github.com/mdlayher/sdnotify":            {"cmd/gatewayd"},
	"github.com/landlock-lsm/go-landlock":     {"cmd/gatewayd"},
	"golang.org/x/sys":                        nil,
	"golang.org/x/sync":                       nil,
}

// testOnly are dependencies that tests alone may import.
var testOnly = []string{
	"go.uber.org/goleak", "pgregory.net/rapid", "github.com/google/go-cmp",
	"github.com/rogpeppe/go-internal", "github.com/puzpuzpuz/xsync/v4",
}

func checkOwners(p *pkg) (problems []string) {
	room, isTestRoom := testRoom(p.path)
	for i, path := range append(slices.Clone(p.imports), p.testImports...) {
		dep, standard := dependency(path)
		mine, known := owners[dep]
		inTest := i >= len(p.imports) || isTestRoom
		switch {
		case standard, known && (mine == nil || slices.Contains(mine, room)):
		case inTest && slices.Contains(testOnly, dep):
		case known:
			problems = append(problems, fmt.Sprintf("%s: must not import %s, which %s owns", p.path, path, strings.Join(mine, ", ")))
		default:
			problems = append(problems, fmt.Sprintf("%s: must not import %s: a dependency that nobody owns", p.path, path))
		}
	}
	return problems
}

// dependency is the longest entry of the tables above that an import path belongs to.
func dependency(path string) (dep string, standard bool) {
	first, _, _ := strings.Cut(path, "/")
	if !strings.Contains(first, ".") { // the standard library, or ours
		return "", true
	}
	longest := func(candidate string) {
		if (path == candidate || strings.HasPrefix(path, candidate+"/")) && len(candidate) > len(dep) {
			dep = candidate
		}
	}
	for candidate := range owners {
		longest(candidate)
	}
	for _, candidate := range testOnly {
		longest(candidate)
	}
	return dep, false
}
