//go:build soak

package suite

import (
	"slices"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestSoakMixedTrafficOfTenMinutesLeavesMemoryFlat(t *testing.T) {
	b := newMixedBed(t)
	b.mixed(t, time.Minute)
	rest, before := b.rest(t), leastMemory(b.tcpBed, settling)
	resident := b.mixed(t, 9*time.Minute)
	b.isAsBefore(t, rest)
	testnet.Until(t, 2*time.Minute, "memory is as before, but for a tenth", func() bool { return b.gw.Process().RSS <= before+before/10 })
	t.Logf("at rest: %d goroutines, %d descriptors, %d KiB; before %d KiB", rest.goroutines, rest.fds, b.gw.Process().RSS>>10, before>>10)
	third := len(resident) / 3
	begin, end := median(resident[:third]), median(resident[2*third:])
	t.Logf("under load: %d KiB in the first third, %d KiB in the last", begin>>10, end>>10)
	if end > begin+begin/10 {
		t.Error("memory grew under load")
	}
}

func median(of []uint64) uint64 {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[len(sorted)/2]
}
