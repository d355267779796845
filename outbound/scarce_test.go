package outbound

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"gatewayd/flow"
)

func TestALackOfDescriptorsIsToldFromTheFarSidesFaults(t *testing.T) {
	d, _ := direct(t, nil)
	_, dest := peer(t, "127.0.0.1:0")
	l, _ := open(t, d, dest)
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	none := unix.Rlimit{Cur: 0, Max: before.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &before)
	check := func(what string, err error) {
		if !flow.Scarce(err) || flow.VerdictOf(err) != flow.VerdictSilent || flow.DropOf(err, flow.DropOpenFailed) != flow.DropResources {
			t.Errorf("%s: %v has verdict %d", what, err, flow.VerdictOf(err))
		}
	}
	_, err := d.DialStream(t.Context(), toward(flow.TCP, dest))
	check("a stream", err)
	_, err = d.OpenLink(t.Context(), toward(flow.UDP, dest), newEar())
	check("a link", err)
	_, err = d.OpenLink(t.Context(), toward(flow.ICMP, dest), newEar())
	check("an echo stream", err)
	_, _, err = l.Send([]flow.Train{to(netip.MustParseAddrPort("[::1]:9"), "to the other family")})
	check("a link's second socket", err)
}
