package suite

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"gatewayd/internal/testnet"
)

// behaviour is one thing that a client sees of the network.
type behaviour struct {
	group, name string
	only        string                       // a family; "" is both
	probe       func(*world) (string, error) // what is seen, in a few words
	differs     []difference                 // where a gateway may differ; the first of the family counts
}

// difference is how what is seen through a gateway differs from the kernel's forwarding, and why.
type difference struct {
	only            string // a family; "" is both
	kernel, gateway string
	why             string
}

// behaviours is the table, in the order of the page.
func behaviours() (rows []behaviour) {
	for _, part := range [][]behaviour{tcpConnects(), tcpStreams(), tcpSizes(), tcpSegments(), tcpHandshakes(), tcpWindows(), tcpTimeWaits(), udpBehaviours(), icmpBehaviours(), headerBehaviours()} {
		rows = append(rows, part...)
	}
	why := explanations()
	for i, b := range rows {
		rows[i].differs = why[b.id()]
	}
	return rows
}

// explained is the difference that a row declares for a family.
func (b behaviour) explained(family string) *difference {
	for i, d := range b.differs {
		if d.only == "" || d.only == family {
			return &b.differs[i]
		}
	}
	return nil
}

// sightings are results by side ("kernel", "gatewayd"), family and row.
type sightings struct {
	mu  sync.Mutex
	all map[[3]string]string
}

func (s *sightings) put(side, family, row, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[[3]string{side, family, row}] = text
}

func (b behaviour) id() string { return b.group + ": " + b.name }

// sides are what is compared.
var sides = []string{"kernel", "gatewayd"}

func behaviourFamilies() []udpFamily {
	return []udpFamily{
		{"IPv4", testnet.FarV4, testnet.ServerV4, testnet.ClientV4, "0.0.0.0"},
		{"IPv6", testnet.FarV6, testnet.ServerV6, testnet.ClientV6, "::"},
	}
}

var update = flag.Bool("update", false, "write docs/wire-behaviour.md from what is seen")

func TestAClientSeesWhatItWouldSeeWithoutTheGatewayButForWhatIsExplained(t *testing.T) {
	testnet.Require(t, "ethtool")
	rows := behaviours()
	seen := &sightings{all: make(map[[3]string]string)}
	worlds := make(map[string]*world)
	for _, side := range sides {
		lab := newBehaviourBed(t, side == "kernel")
		for _, f := range behaviourFamilies() {
			worlds[side+" "+f.name] = newWorld(t, lab, f)
		}
	}
	var wg sync.WaitGroup // not parallel subtests, whose number follows the cores: probes mostly wait
	for name, w := range worlds {
		wg.Go(func() { w.see(rows, strings.Fields(name)[0], seen) })
	}
	wg.Wait()
	known := make(map[string]bool)
	for _, b := range rows {
		if known[b.id()] {
			t.Errorf("%s: twice in the table", b.id())
		}
		known[b.id()] = true
	}
	for id := range explanations() {
		if !known[id] {
			t.Errorf("%s: explained and not in the table", id)
		}
	}
	for _, b := range rows {
		for _, family := range []string{"IPv4", "IPv6"} {
			if b.only == "" || b.only == family {
				b.compare(t, family, seen)
			}
		}
	}
	checkPage(t, rows, seen)
}

// see runs every row of the family.
func (w *world) see(rows []behaviour, side string, into *sightings) {
	for _, b := range rows {
		if b.only != "" && b.only != w.f.name {
			continue
		}
		for len(w.seen) > 0 {
			<-w.seen
		}
		text, err := b.probe(w)
		if err != nil {
			text = errnoName(err)
		}
		into.put(side, w.f.name, b.id(), text)
	}
}

// compare wants what the row declares: the same, or the difference.
func (b behaviour) compare(t *testing.T, family string, seen *sightings) {
	t.Helper()
	kernel, gateway := seen.all[[3]string{"kernel", family, b.id()}], seen.all[[3]string{"gatewayd", family, b.id()}]
	switch d := b.explained(family); {
	case d == nil && kernel != gateway:
		t.Errorf("%s, %s:\n\tkernel:   %s\n\tgatewayd: %s", b.id(), family, kernel, gateway)
	case d != nil && (kernel == gateway || kernel != d.kernel || gateway != d.gateway):
		t.Errorf("%s, %s:\n\tkernel:   %s\n\tgatewayd: %s\n\texplained: %s / %s", b.id(), family, kernel, gateway, d.kernel, d.gateway)
	}
}

// pagePath is the page that holds the table.
var pagePath = filepath.Join("..", "..", "..", "docs", "wire-behaviour.md")

// checkPage compares the page with the table as it was seen, or writes it.
func checkPage(t *testing.T, rows []behaviour, seen *sightings) {
	t.Helper()
	page := renderPage(rows, seen)
	if *update {
		if err := os.WriteFile(pagePath, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(pagePath)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != page {
		t.Errorf("%s is not what is seen; -update writes it: %s", pagePath, firstDifference(string(have), page))
	}
}

// firstDifference is the first line that two texts do not share.
func firstDifference(have, want string) string {
	h, w := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range min(len(h), len(w)) {
		if h[i] != w[i] {
			return fmt.Sprintf("line %d is %q, want %q", i+1, h[i], w[i])
		}
	}
	return fmt.Sprintf("%d lines, want %d", len(h), len(w))
}
