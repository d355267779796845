package track_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"gatewayd/flow"
	"gatewayd/track"
)

// A program that embeds a tracker runs its sampler for as long as it has flows.
func Example() {
	tracker, err := track.New(track.Options{Interval: time.Second})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	sampled := make(chan error)
	go func() { sampled <- tracker.Run(ctx) }()

	// Whoever relays a flow opens it after its dial, reports what moved, and closes it.
	f := tracker.Open(track.Meta{
		Inbound: "lan", Network: flow.TCP, Source: netip.MustParseAddrPort("10.0.0.2:51234"),
		Dest:     flow.Destination{Addr: netip.MustParseAddrPort("203.0.113.5:443")},
		Outbound: "direct", Version: 1, Rule: -1,
	}, func(cause error) { /* make the relay stop */ })
	if max, err := f.Ready(flow.Up, nil); err == nil {
		n := min(max, 1500)
		f.Took(flow.Up, n)
		f.Moved(flow.Up, n)
	}
	for _, r := range tracker.Flows() {
		fmt.Printf("%v from %v to %v over %s: %d bytes up\n", r.ID, r.Source, r.Dest, r.Outbound, r.Up)
	}
	f.Close(nil)

	// The last tick comes after the last flow, and stays.
	stop()
	<-sampled
	fmt.Println(tracker.Snapshot().Total.Up, "bytes in all,", tracker.Live(), "flows live")
	// Output:
	// flow#1 from 10.0.0.2:51234 to 203.0.113.5:443 over direct: 1500 bytes up
	// 1500 bytes in all, 0 flows live
}

// A metered connection is used like the one below it.
func ExampleTracker_Stream() {
	tracker, _ := track.New(track.Options{Interval: time.Second})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			io.Copy(c, c) // an echo server
			c.Close()
		}
	}()

	dialled, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		panic(err)
	}
	conn := tracker.Stream(track.Meta{Inbound: "app", Network: flow.TCP, Outbound: "direct"}, dialled.(*net.TCPConn))
	fmt.Fprint(conn, "hello")
	conn.CloseWrite()
	b, _ := io.ReadAll(conn)
	r, _ := tracker.Get(conn.Flow().ID())
	fmt.Printf("%s: %d up, %d down\n", b, r.Up, r.Down)
	conn.Close()
	fmt.Println("closed:", tracker.Closed()[0].Reason)
	// Output:
	// hello: 5 up, 5 down
	// closed: eof
}

// A datagram link is metered in both directions; a kill closes it.
func ExampleFlow_Link() {
	tracker, _ := track.New(track.Options{Interval: time.Second})
	link := &loopback{}
	f := tracker.Open(track.Meta{Inbound: "app", Network: flow.UDP, Outbound: "direct"}, func(error) { link.Close() })
	link.back = f.Receiver(printer{})
	metered := f.Link(link)
	metered.Send([]flow.Train{{Payload: []byte("ping")}})
	tracker.Kill(f.ID())
	_, _, err := metered.Send([]flow.Train{{Payload: []byte("ping")}})
	fmt.Println(err)
	f.Close(nil)
	r := tracker.Closed()[0]
	fmt.Printf("%d up, %d down, %v\n", r.Up, r.Down, r.Reason)
	// Output:
	// received ping
	// the flow was killed
	// 4 up, 4 down, killed
}

// loopback is a link whose far side sends everything back.
type loopback struct{ back flow.Receiver }

func (l *loopback) Send(ts []flow.Train) (taken, moved int, err error) {
	return len(ts), l.back.Receive(ts), nil
}
func (l *loopback) Close() error              { return nil }
func (l *loopback) LocalAddr() netip.AddrPort { return netip.AddrPort{} }

type printer struct{}

func (printer) Receive(ts []flow.Train) (moved int) {
	for _, t := range ts {
		fmt.Printf("received %s\n", t.Payload)
		moved += len(t.Payload)
	}
	return moved
}
func (printer) Unreachable(flow.ICMPError) {}
func (printer) Closed(error)               {}

// A predicate picks what is killed. It may look at everything in the record.
func ExampleTracker_KillWhere() {
	tracker, _ := track.New(track.Options{Interval: time.Second})
	open := func(outbound string) *track.Flow {
		return tracker.Open(track.Meta{Inbound: "lan", Network: flow.TCP, Outbound: outbound}, nil)
	}
	old, other := open("vpn"), open("direct")
	vpn := func(r *track.Record) bool { return r.Outbound == "vpn" }
	fmt.Println(tracker.KillWhere(vpn), "killed, then", tracker.KillWhere(vpn))

	_, err := old.Ready(flow.Up, nil)
	fmt.Println(err, errors.Is(err, track.ErrKilled), errors.Is(err, syscall.ECONNABORTED))
	_, err = other.Ready(flow.Up, nil)
	fmt.Println(err)
	// Output:
	// 1 killed, then 0
	// the flow was killed true true
	// <nil>
}

// A subscriber who is slow is told how much it missed, and holds nobody up.
func ExampleTracker_Subscribe() {
	tracker, _ := track.New(track.Options{Interval: time.Second, Events: 3})
	sub := tracker.Subscribe()
	defer sub.Close()
	for range 4 {
		tracker.Open(track.Meta{Inbound: "lan", Network: flow.TCP, Outbound: "direct"}, nil).Close(nil)
	}
	for range 3 {
		ev, missed, err := sub.Next(context.Background())
		fmt.Println(ev.Kind, ev.Record.ID, missed, err)
	}
	// Output:
	// closed flow#3 5 <nil>
	// opened flow#4 0 <nil>
	// closed flow#4 0 <nil>
}

// A reader of the traffic gets the newest tick, however slow it is.
func ExampleTracker_Watch() {
	tracker, _ := track.New(track.Options{Interval: time.Second})
	tracker.Open(track.Meta{Inbound: "lan", Network: flow.TCP, Outbound: "direct"}, nil).Moved(flow.Down, 1000)
	tracker.Final() // stands for a tick of Run
	tracker.Final()
	s, err := tracker.Watch(context.Background(), 0)
	fmt.Println(s.Tick, s.Inbounds["lan"].Down, s.Outbounds["direct"].Flows, err)
	// Output: 2 1000 1 <nil>
}
