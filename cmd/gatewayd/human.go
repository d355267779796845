package main

import (
	"fmt"
	"strconv"
	"time"
)

// humanBytes is n in three digits or so, by powers of 1,000.
func humanBytes(n uint64) string {
	if n < 1000 {
		return strconv.FormatUint(n, 10) + " B"
	}
	v, units := float64(n), []string{"kB", "MB", "GB", "TB", "PB", "EB"}
	unit := ""
	for _, unit = range units {
		if v /= 1000; v < 999.95 {
			break
		}
	}
	return fmt.Sprintf("%.1f %s", v, unit)
}

// humanRate is bytes per second.
func humanRate(n uint64) string { return humanBytes(n) + "/s" }

// humanAge is d in its two largest units.
func humanAge(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}
