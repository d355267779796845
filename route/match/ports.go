package match

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// PortRange is a range of ports, From and To included.
type PortRange struct{ From, To uint16 }

// ParsePortRange reads "443" or "8000-9000". Ports are 1 to 65535.
func ParsePortRange(s string) (PortRange, error) {
	from, to, ranged := strings.Cut(s, "-")
	if !ranged {
		to = from
	}
	var r PortRange
	var err error
	if r.From, err = parsePort(from); err == nil {
		r.To, err = parsePort(to)
	}
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return PortRange{}, fmt.Errorf("port %q: %w", s, err)
	}
	return r, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, errors.New("want a port from 1 to 65535, or a range as in 8000-9000")
	}
	return uint16(n), nil
}

// String is the form that ParsePortRange reads.
func (r PortRange) String() string {
	s := strconv.Itoa(int(r.From))
	if r.From != r.To {
		s += "-" + strconv.Itoa(int(r.To))
	}
	return s
}

func (r PortRange) check() error {
	switch {
	case r.From == 0:
		return errors.New("0 is not a port")
	case r.From > r.To:
		return fmt.Errorf("range is reversed, want %d-%d", r.To, r.From)
	}
	return nil
}

// compare orders the range against a port: 0 is inside.
func (r PortRange) compare(port uint16) int {
	switch {
	case r.To < port:
		return -1
	case r.From > port:
		return 1
	}
	return 0
}

// Ports is an immutable set of ports.
type Ports struct {
	ranges []PortRange // sorted, apart from each other
}

// NewPorts makes the set of ranges that may overlap and come in any order. An
// empty or reversed range is refused.
func NewPorts(ranges []PortRange) (*Ports, error) {
	sorted := slices.Clone(ranges)
	slices.SortFunc(sorted, func(a, b PortRange) int { return cmp.Compare(a.From, b.From) })
	s := new(Ports)
	for _, r := range sorted {
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("port %v: %w", r, err)
		}
		s.add(r)
	}
	return s, nil
}

// add appends r, which begins no earlier than what is there.
func (s *Ports) add(r PortRange) {
	if n := len(s.ranges); n > 0 && int(r.From) <= int(s.ranges[n-1].To)+1 {
		s.ranges[n-1].To = max(s.ranges[n-1].To, r.To)
		return
	}
	s.ranges = append(s.ranges, r)
}

// Contains reports whether port is in the set.
func (s *Ports) Contains(port uint16) bool {
	_, ok := slices.BinarySearchFunc(s.ranges, port, PortRange.compare)
	return ok
}
