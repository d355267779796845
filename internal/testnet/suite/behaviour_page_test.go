package suite

import (
	"fmt"
	"strings"
)

const pageHead = `# What a client sees on the wire

A suite compares gatewayd with plain kernel forwarding, row by row, in two labs that are alike but for the gateway
(` + "`internal/testnet/suite/behaviour_*_test.go`" + `). Traffic is forwarded by routes, without address translation, so that nothing but
forwarding is compared. This page is written by that test (` + "`-update`" + `) and compared with what it sees in every run.

%d rows, %d results over IPv4 and IPv6, of which %d differ. "The same" is what both showed. "The gateway" is any address of
the host that the client talks through. A number in brackets leads to the reason below.
`

// renderPage is the page of what was seen.
func renderPage(rows []behaviour, seen *sightings) string {
	var body strings.Builder
	var reasons []string
	results, different, group := 0, 0, ""
	for _, b := range rows {
		if b.group != group {
			group = b.group
			fmt.Fprintf(&body, "\n## %s\n\n| behaviour | family | kernel | gatewayd |\n|---|---|---|---|\n", group)
		}
		v4, v6 := b.line("IPv4", seen, &reasons), b.line("IPv6", seen, &reasons)
		for family, l := range map[string]string{"IPv4": v4, "IPv6": v6} {
			if b.only == "" || b.only == family {
				results++
				if !strings.HasSuffix(l, "| the same |") {
					different++
				}
			}
		}
		switch {
		case b.only == "IPv4":
			fmt.Fprintf(&body, "| %s | IPv4 | %s\n", b.name, v4)
		case b.only == "IPv6":
			fmt.Fprintf(&body, "| %s | IPv6 | %s\n", b.name, v6)
		case v4 == v6:
			fmt.Fprintf(&body, "| %s | both | %s\n", b.name, v4)
		default:
			fmt.Fprintf(&body, "| %s | IPv4 | %s\n| | IPv6 | %s\n", b.name, v4, v6)
		}
	}
	body.WriteString("\n## Why they differ\n\n")
	for i, why := range reasons {
		fmt.Fprintf(&body, "%d. %s\n", i+1, why)
	}
	body.WriteString(pageNotes)
	return fmt.Sprintf(pageHead, len(rows), results, different) + body.String()
}

// line is both sides of a row, for one family.
func (b behaviour) line(family string, seen *sightings, reasons *[]string) string {
	kernel, gateway := seen.all[[3]string{"kernel", family, b.id()}], seen.all[[3]string{"gatewayd", family, b.id()}]
	if kernel == gateway {
		return kernel + " | the same |"
	}
	d := b.explained(family)
	if d == nil {
		return kernel + " | " + gateway + " (not explained) |"
	}
	n := 0
	for n < len(*reasons) && (*reasons)[n] != d.why {
		n++
	}
	if n == len(*reasons) {
		*reasons = append(*reasons, d.why)
	}
	return fmt.Sprintf("%s | %s [%d] |", kernel, gateway, n+1)
}
