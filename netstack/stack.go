package netstack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sagernet/gvisor/pkg/tcpip"
	"github.com/sagernet/gvisor/pkg/tcpip/header"
	"github.com/sagernet/gvisor/pkg/tcpip/network/ipv4"
	"github.com/sagernet/gvisor/pkg/tcpip/network/ipv6"
	"github.com/sagernet/gvisor/pkg/tcpip/stack"
	"github.com/sagernet/gvisor/pkg/tcpip/transport/tcp"

	"gatewayd/flow"
	"gatewayd/internal/admit"
	"gatewayd/internal/epoll"
)

// Handler is asked about everything new that clients send.
type Handler interface {
	// HandleTCP decides about a client's SYN, on a goroutine of its own. It must
	// end with p.Accept or p.Refuse, and may block for as long as p.Context lives.
	HandleTCP(p *Pending)
	// HandleDatagrams gets what f.Source sent one after the other, UDP datagrams and
	// trains of them or echo requests, each for its Peer; f has no Dest. It is called
	// on the goroutine that reads the device and must not block. Trains and their
	// payloads are valid during the call.
	HandleDatagrams(f flow.Flow, ts []flow.Train)
}

// Keepalive is how a silent TCP client is probed.
type Keepalive struct {
	Idle, Interval time.Duration
	Probes         int
}

// Config is what a Stack is made of. Zero limits mean unlimited.
type Config struct {
	Tag       string // the inbound that flows name
	Device    Device
	Addresses []netip.Addr // that ICMP errors come from; the kernel drops those of this host
	// IsBroadcast tells broadcast addresses of this host's networks: nothing to them is
	// carried. Asked for every packet. nil: there are none.
	IsBroadcast func(netip.Addr) bool
	// MTUToward is the MTU of this host's route to a client, in bytes; 0 if unknown.
	// It is asked once in a while for each IPv6 client that is sent large datagrams,
	// and must not block. Nil: no smaller than the device's.
	MTUToward  func(client netip.Addr) int
	Handler    Handler
	Poller     *epoll.Poller // the relay's kernel sockets
	Drops      *flow.Drops
	Clock      tcpip.Clock // nil: the real one
	Keepalive  Keepalive   // zero Idle: none
	HalfClosed time.Duration
	Dials      admit.Shares // dials in progress at once
	SYNs       admit.Rates  // connection attempts begun
	Buffers    Buffers      // the zero value: DefaultBuffers
	// Full reports that there is no memory for another connection. It is called for
	// each SYN that begins one, with a lock held; nil: there always is.
	Full func() bool
}

// Stack terminates the TCP of one device and carries its UDP.
type Stack struct {
	cfg     Config
	net     *stack.Stack
	link    *link
	pending pendingTable
	workers []*worker
	builder sync.Pool // *udpBuilder

	forwarder atomic.Pointer[tcp.Forwarder] // of the buffers that hold
	recvMax   atomic.Int64                  // bytes that a receive buffer is to have at most
	chunk     atomic.Int32                  // bytes written to an endpoint at once: they stay in memory until the last one is acknowledged

	errors errorLimiter
	ids    datagramIDs

	paths pathMTUs

	reopened chan reopening // SYNs that wait for the end of a connection

	fragments *reassembler
}

const nicID = 1

const timeWait = 3 * time.Second

// New makes the stack of cfg.Device. Nothing runs before Run.
func New(cfg Config) (*Stack, error) {
	s := &Stack{cfg: cfg, workers: newWorkers(runtime.GOMAXPROCS(0))}
	s.link = &link{dev: cfg.Device, drops: cfg.Drops, pending: &s.pending}
	s.builder.New = func() any { return new(udpBuilder) }
	s.errors.init()
	s.ids.init()
	s.reopened = make(chan reopening, maxReopens)
	s.fragments = newReassembler(defaultFragmentLimits(), cfg.Drops, s.tellTimeOver)
	s.pending.init(cfg.Dials, cfg.SYNs, cfg.Drops)
	s.pending.admission.full = cfg.Full
	s.net = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
		Clock:              cfg.Clock,
	})
	if err := s.setOptions(); err != nil {
		s.net.Close()
		return nil, err
	}
	if err := s.setNIC(); err != nil {
		s.net.Close()
		return nil, err
	}
	s.setBuffers(cmp.Or(cfg.Buffers, DefaultBuffers))
	s.net.SetTransportProtocolHandler(tcp.ProtocolNumber, s.handleSegment)
	return s, nil
}

func (s *Stack) setOptions() error {
	sack := tcpip.TCPSACKEnabled(true)
	rack := tcpip.TCPRecovery(0) // off: spurious recoveries would never be undone; slower under loss, too (docs/performance.md)
	nagle := tcpip.TCPDelayEnabled(false)
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	reno := tcpip.CongestionControlOption("reno")
	wait := tcpip.TCPTimeWaitTimeoutOption(timeWait)
	retries := tcpip.TCPMaxRetriesOption(math.MaxUint32) // see silence.go
	for _, o := range []tcpip.SettableTransportProtocolOption{
		&sack, &rack, &nagle, &moderate, &reno, &wait, &retries,
	} {
		if err := s.net.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fmt.Errorf("netstack: option %T: %s", o, err)
		}
	}
	return nil
}

func (s *Stack) setNIC() error {
	if err := s.net.CreateNIC(nicID, s.link); err != nil {
		return fmt.Errorf("netstack: create interface: %s", err)
	}
	s.net.SetPromiscuousMode(nicID, true) //nolint:errcheck // the NIC exists
	s.net.SetSpoofing(nicID, true)        //nolint:errcheck
	s.net.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nicID},
		{Destination: header.IPv6EmptySubnet, NIC: nicID},
	})
	return nil
}

// Run carries packets until ctx ends (nil) or the device fails. Flows that are
// still open then are not ended: whoever handled them ends them first.
func (s *Stack) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, w := range s.workers {
		wg.Go(func() { w.run(ctx) })
	}
	wg.Go(func() { s.pending.sweep(ctx) })
	wg.Go(func() { s.fragments.sweep(ctx) })
	wg.Go(func() { s.reopenAll(ctx) })
	err := s.cfg.Device.Run(ctx, func() *Batch { return NewBatch(s.deliver) })
	cancel()
	wg.Wait()
	s.pending.cancelAll(flow.ErrShutdown)
	s.net.Close()
	s.net.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Pending is how many dials are in progress.
func (s *Stack) Pending() int { return s.pending.len() }

// CancelPending ends every dial in progress with cause.
func (s *Stack) CancelPending(cause error) { s.pending.cancelAll(cause) }

// tcpipAddr is a as gVisor has it; addrOf is the way back.
func tcpipAddr(a netip.Addr) tcpip.Address {
	if a.Is4() {
		return tcpip.AddrFrom4(a.As4())
	}
	return tcpip.AddrFrom16(a.As16())
}

func addrOf(a tcpip.Address) netip.Addr {
	ip, _ := netip.AddrFromSlice(a.AsSlice())
	return ip.Unmap()
}
