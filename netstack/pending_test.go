package netstack

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"gatewayd/flow"
	"gatewayd/internal/admit"
)

func newTable(max, perSource int) *pendingTable {
	t := new(pendingTable)
	t.init(admit.Shares{Max: max, Per: perSource}, admit.Rates{}, new(flow.Drops))
	return t
}

// attempt is a connection attempt of one source's port.
func attempt(src netip.Addr, port uint16, isn uint32) *Pending {
	p := &Pending{tuple: tuple{netip.AddrPortFrom(src, port), dst4}, isn: isn}
	p.ctx, p.stop = context.WithCancelCause(context.Background())
	return p
}

var (
	source1 = netip.MustParseAddr("10.0.0.2")
	source2 = netip.MustParseAddr("10.0.0.3")
	epoch   = time.Unix(1_000_000, 0)
)

func wantSYN(t *testing.T, got, want synResult) {
	t.Helper()
	if got != want {
		t.Fatalf("the SYN is %d, want %d", got, want)
	}
}

func TestARepeatedSYNBelongsToItsAttempt(t *testing.T) {
	tab := newTable(1, 1)
	p := attempt(source1, 1, 7)
	wantSYN(t, outcome(tab, p, epoch), synNew)
	wantSYN(t, outcome(tab, attempt(source1, 1, 7), epoch.Add(time.Second)), synRepeated)
	if p.ctx.Err() != nil || tab.len() != 1 {
		t.Fatal("a repetition ended the attempt or made another")
	}
}

func TestASYNWithAnotherSequenceNumberCancels(t *testing.T) {
	tab := newTable(0, 0)
	p := attempt(source1, 1, 7)
	ask(tab, p, epoch)
	wantSYN(t, outcome(tab, attempt(source1, 1, 8), epoch), synRepeated)
	wantGaveUp(t, p)
	if tab.len() != 1 {
		t.Fatal("the attempt left before its verdict: its dial still runs")
	}
	tab.remove(p)
	wantSYN(t, outcome(tab, attempt(source1, 1, 8), epoch), synNew)
}

func wantGaveUp(t *testing.T, p *Pending) {
	t.Helper()
	if p.ctx.Err() == nil || context.Cause(p.ctx) != errGaveUp {
		t.Fatalf("the attempt goes on, cause %v", context.Cause(p.ctx))
	}
}

func TestAResetCancelsItsOwnAttemptOnly(t *testing.T) {
	tab := newTable(0, 0)
	p, other := attempt(source1, 1, 7), attempt(source1, 2, 7)
	ask(tab, p, epoch)
	ask(tab, other, epoch)
	if tab.reset(tuple{p.tuple.client, dst6}, 8) || tab.reset(p.tuple, 9) || tab.reset(p.tuple, 6) {
		t.Fatal("a reset of somebody else, or from out of the blue, was taken")
	}
	if p.ctx.Err() != nil || !tab.reset(p.tuple, 8) || !tab.reset(other.tuple, 7) {
		t.Fatal("the client's own reset was not taken")
	}
	wantGaveUp(t, p)
	wantGaveUp(t, other)
}

// A network may deliver a SYN twice; the next one comes no sooner for that.
func TestACopyOfASYNDoesNotShortenItsClientsPatience(t *testing.T) {
	tab := newTable(0, 0)
	p := attempt(source1, 1, 7)
	ask(tab, p, epoch)
	for _, after := range []time.Duration{time.Millisecond, time.Second, time.Second + time.Millisecond} {
		ask(tab, attempt(source1, 1, 7), epoch.Add(after))
	}
	tab.cancelSilent(epoch.Add(4 * time.Second))
	if p.ctx.Err() != nil {
		t.Fatal("cancelled within 3 s of its last SYN")
	}
	tab.cancelSilent(epoch.Add(4*time.Second + 2*time.Millisecond))
	wantGaveUp(t, p)
}

func TestAnAttemptThatIsBeingAcceptedIsNotSilent(t *testing.T) {
	tab := newTable(0, 0)
	p := attempt(source1, 1, 7)
	ask(tab, p, time.Now())
	tab.accepting(p)
	tab.cancelSilent(time.Now().Add(acceptTimeout))
	if p.ctx.Err() != nil {
		t.Fatal("cancelled while its handshake may go on")
	}
}

// RFC 6298: the first repetition comes after 1 s, the next gaps double.
func TestSilenceOfTwiceTheLastGapAndASecondCancels(t *testing.T) {
	for _, c := range []struct {
		name string
		syns []time.Duration // after the first
		end  time.Duration   // after the last
	}{
		{"one SYN", nil, 3 * time.Second},
		{"repeated after 1 s", []time.Duration{time.Second}, 3 * time.Second},
		{"repeated after 1 s and 3 s", []time.Duration{time.Second, 3 * time.Second}, 5 * time.Second},
		{"repeated up to 15 s", []time.Duration{time.Second, 3 * time.Second, 7 * time.Second, 15 * time.Second}, 17 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			tab := newTable(0, 0)
			p := attempt(source1, 1, 7)
			ask(tab, p, epoch)
			last := epoch
			for _, after := range c.syns {
				last = epoch.Add(after)
				tab.cancelSilent(last)
				ask(tab, attempt(source1, 1, 7), last)
			}
			tab.cancelSilent(last.Add(c.end))
			if p.ctx.Err() != nil {
				t.Fatalf("cancelled within %s of its last SYN", c.end)
			}
			tab.cancelSilent(last.Add(c.end + time.Millisecond))
			wantGaveUp(t, p)
		})
	}
}

func TestCancellingAllCancelsEachWithTheCause(t *testing.T) {
	tab := newTable(0, 0)
	var ps []*Pending
	for i := range 10 {
		ps = append(ps, attempt(source1, uint16(i), 0))
		ask(tab, ps[i], epoch)
	}
	tab.cancelAll(flow.ErrShutdown)
	for _, p := range ps {
		if !errors.Is(context.Cause(p.ctx), flow.ErrShutdown) {
			t.Fatalf("cause %v", context.Cause(p.ctx))
		}
	}
}

func TestRoomForManyAttemptsIsGivenBack(t *testing.T) {
	tab := newTable(0, 0)
	var ps []*Pending
	for port := range 4096 {
		ps = append(ps, attempt(source1, uint16(port), 0))
		ask(tab, ps[port], epoch)
	}
	grown := reflect.ValueOf(tab.byTuple).Pointer()
	for _, p := range ps[1:] {
		tab.remove(p)
	}
	if reflect.ValueOf(tab.byTuple).Pointer() == grown || tab.get(ps[0].tuple) != ps[0] {
		t.Fatalf("there is room for %d, and the one that is left is lost: %v", len(ps), tab.get(ps[0].tuple) == nil)
	}
}

// ask asks the table for an attempt that was made already.
func ask(tab *pendingTable, p *Pending, now time.Time) (synResult, flow.Drop) {
	return tab.syn(p.tuple, p.isn, now, func() *Pending { return p })
}

// outcome is what becomes of p's SYN.
func outcome(tab *pendingTable, p *Pending, now time.Time) synResult {
	result, _ := ask(tab, p, now)
	return result
}
