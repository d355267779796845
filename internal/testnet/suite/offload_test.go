package suite

import (
	"net"
	"strings"
	"testing"

	"gatewayd/internal/testnet"
)

// offloadBed is a gateway whose LAN's driver loses every super-packet, and a server
// of size bytes.
func offloadBed(t *testing.T, offload string, size int64) (*tcpBed, *testnet.Rule) {
	t.Helper()
	testnet.Require(t)
	lab := testnet.New(t, testnet.Options{})
	b := &tcpBed{lab, lab.Start(testnet.GatewayOptions{
		Config: strings.Replace(tcpConfig(""), "device: "+tcpDevice, "offload: "+offload+", device: "+tcpDevice, 1), Device: tcpDevice,
	})}
	for _, f := range tcpFamilies() {
		b.Srv.Serve(f.addr(80), func(c *net.TCPConn) {
			testnet.WritePattern(c, size) //nolint:errcheck // the client looks
			c.CloseWrite()                //nolint:errcheck
			c.Read(make([]byte, 1))       //nolint:errcheck
		})
	}
	return b, lab.GW.Filter("forward", `iifname "`+tcpDevice+`" meta length > 1500`, "drop")
}

func TestOffloadsAreTurnedOffWhereSuperPacketsGetLost(t *testing.T) {
	const size = 16 << 20
	b, lost := offloadBed(t, "auto", size)
	if s := b.gw.API.Status(); !strings.HasPrefix(s.Inbounds[0].Offload, "tcp") || len(s.Warnings) != 0 {
		t.Fatalf("offloads %q, warnings %q", s.Inbounds[0].Offload, s.Warnings)
	}
	begun := make([]*net.TCPConn, 2)
	read := make(chan int64, len(begun))
	for i, f := range tcpFamilies() {
		begun[i] = b.connect(t, f.addr(80))
		go func() {
			n, _ := testnet.ReadPattern(begun[i]) // n tells
			read <- n
		}()
	}
	b.gw.WaitLog(patience, "offloads were turned off")
	for range begun { // connections that began with offloads end well
		if n := <-read; n != size {
			t.Errorf("%d bytes of %d arrived", n, size)
		}
	}
	if n := lost.Packets(); n == 0 {
		t.Fatal("no super-packet was lost: the test shows nothing")
	}
	before := lost.Packets()
	for _, f := range tcpFamilies() {
		if n, err := testnet.ReadPattern(b.connect(t, f.addr(80))); n != size {
			t.Errorf("%s: %d bytes of %d arrived: %v", f.name, n, size, err)
		}
	}
	if n := lost.Packets() - before; n != 0 {
		t.Errorf("%d super-packets were still sent", n)
	}
	s := b.gw.API.Status()
	if s.Inbounds[0].Offload != "off" || len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0], "offloads are off") {
		t.Errorf("offloads %q, warnings %q", s.Inbounds[0].Offload, s.Warnings)
	}
	if n := strings.Count(b.gw.Log(), "offloads were turned off"); n != 1 {
		t.Errorf("%d lines tell of it", n)
	}
}

func TestOffloadsThatAreOffOrOnStaySo(t *testing.T) {
	const size = 64 << 10
	for offload, want := range map[string]string{"on": "tcp", "off": "off"} {
		t.Run(offload, func(t *testing.T) {
			b, lost := offloadBed(t, offload, size)
			for _, f := range tcpFamilies() { // what is sent again arrives
				if n, err := testnet.ReadPattern(b.connect(t, f.addr(80))); n != size {
					t.Errorf("%s: %d bytes of %d arrived: %v", f.name, n, size, err)
				}
			}
			if s := b.gw.API.Status(); !strings.HasPrefix(s.Inbounds[0].Offload, want) || len(s.Warnings) != 0 {
				t.Errorf("offloads %q, warnings %q", s.Inbounds[0].Offload, s.Warnings)
			}
			if n := lost.Packets(); (n > 0) != (offload == "on") {
				t.Errorf("%d super-packets were sent", n)
			}
		})
	}
}
