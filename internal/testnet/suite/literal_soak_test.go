//go:build soak

package suite

import (
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

func TestSoakFloodsOfHalfAMinute(t *testing.T) {
	for _, f := range floods() {
		t.Run(f.name, func(t *testing.T) {
			survive(t, []flood{f}, 2*floodRate, 30*time.Second)
		})
	}
}

func TestSoakB29_ADatagramToTheDevicesPeerIsFollowedByTenSecondsOfSilence(t *testing.T) {
	lab, g := udpBed(t, udpBase)
	for _, peer := range []string{tunV4[2], tunV6[2]} {
		before := lab.GW.Stats("gw0")
		openUDP(t, lab.Cli, map[bool]string{true: testnet.ClientV4, false: testnet.ClientV6}[peer == tunV4[2]]).sendTo(addrPort(peer, 5351), "x")
		time.Sleep(10 * time.Second)
		after := lab.GW.Stats("gw0")
		if n := after.RxPackets + after.TxPackets - before.RxPackets - before.TxPackets; n >= 5 || len(g.API.Flows("")) > 1 {
			t.Errorf("%s: %d packets on the device, %d flows", peer, n, len(g.API.Flows("")))
		}
	}
}

func TestSoakB12_LossAndReorderingDoNotCollapseThroughputOnEitherSide(t *testing.T) {
	underLoss(t, []string{testnet.LANDevice, testnet.WANDevice}, 5*time.Second)
}

// With the default keepalive: 2 min, then 4 probes 20 s apart.
func TestSoakB10_AThousandFlowsOfAVanishedClientEnd(t *testing.T) {
	vanish(t, "", 1000, 200*time.Second)
}

func TestSoakB09_TenThousandSlowClientsStayWithinTheMemoryBudget(t *testing.T) {
	press(t, 20_000, 512<<20) // which about half of them fit
}

// 200,000 source ports with two datagrams each, 5,000 clients a second.
func TestSoakB20_AMinuteOfChurnPassesNoLimitAndLeavesNothing(t *testing.T) {
	churn(t, 5000, 10_000, 40*time.Second)
}
