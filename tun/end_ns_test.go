package tun

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/hostnet"
	"gatewayd/internal/hostnet/hostnettest"
	"gatewayd/netstack"
	"gatewayd/netstack/wire"
)

// flood sends datagrams of the host into the device until the returned function
// is called.
func flood(t *testing.T) (end func()) {
	t.Helper()
	c := udp(t, host4, peer4)
	var stop atomic.Bool
	var sender sync.WaitGroup
	sender.Go(func() {
		for b := pattern(100); !stop.Load(); {
			c.Write(b) // fails when the device is gone
		}
	})
	return func() { stop.Store(true); sender.Wait() }
}

func started(t *testing.T, d *Device) (ended <-chan error, packets *atomic.Uint64) {
	t.Helper()
	c, n := make(chan error, 1), new(atomic.Uint64)
	deliver := func(b *netstack.Batch) { n.Add(uint64(b.Len())) }
	go func() { c <- d.Run(context.Background(), func() *netstack.Batch { return netstack.NewBatch(deliver) }) }()
	return c, n
}

func arrives(t *testing.T, packets *atomic.Uint64) {
	t.Helper()
	for end := time.Now().Add(deadline); packets.Load() < 100; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no traffic within %v", deadline)
		}
	}
}

func TestCloseEndsRunInTheMiddleOfTraffic(t *testing.T) {
	for _, queues := range []int{1, 3} {
		cfg := config()
		cfg.Queues = queues
		d := opened(t, cfg)
		ended, packets := started(t, d)
		end := flood(t)
		arrives(t, packets)
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		within(t, "Run ends with Close", ended)
		end()
	}
}

func TestCloseEndsARunThatIsIdle(t *testing.T) {
	d := opened(t, config())
	ended, _ := started(t, d)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	within(t, "Run ends with Close", ended)
}

func TestTheContextEndsRunAndLeavesTheDevice(t *testing.T) {
	d := opened(t, config())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	var packets atomic.Uint64
	deliver := func(b *netstack.Batch) { packets.Add(uint64(b.Len())) }
	go func() { ended <- d.Run(ctx, func() *netstack.Batch { return netstack.NewBatch(deliver) }) }()
	defer flood(t)()
	arrives(t, &packets)
	cancel()
	within(t, "Run ends with its context", ended)
	if _, ok, err := hostnet.LinkByName("gw0"); !ok || err != nil {
		t.Errorf("the device is there: %v, %v", ok, err)
	}
}

func TestTheRemovalOfTheLinkEndsRunWithAnErrorThatNamesIt(t *testing.T) {
	for _, queues := range []int{1, 3} {
		cfg := config()
		cfg.Queues = queues
		d := opened(t, cfg)
		ended, _ := started(t, d)
		if err := hostnet.Delete(d.Index()); err != nil {
			t.Fatal(err)
		}
		err := result(t, "Run ends without its link", ended)
		if err == nil || !strings.Contains(err.Error(), "device gw0") || !strings.Contains(err.Error(), "removed") {
			t.Errorf("Run: %v", err)
		}
		if err := d.Write(1, [][]byte{pattern(100)}, netstack.Offload{}); !errors.Is(err, unix.EBADFD) {
			t.Errorf("Write: %v", err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestALinkThatIsDownRefusesWritesAndComesBack(t *testing.T) {
	d := opened(t, config())
	got := running(t, d)
	hostnettest.IP(t, "link set gw0 down")
	head := (&wire.Header{Src: peer4, Dst: host4, TTL: 64}).AppendUDP(nil, 1, 1, nil, false)
	if err := d.Write(0, [][]byte{head}, netstack.Offload{}); !errors.Is(err, unix.EIO) {
		t.Errorf("Write: %v", err)
	}
	hostnettest.IP(t, "link set gw0 up")
	if _, err := udp(t, host4, peer4).Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	next(t, got, wire.ProtoUDP, peer4)
}

func TestAMalformedWriteIsAnError(t *testing.T) {
	d := opened(t, config())
	if err := d.Write(0, nil, netstack.Offload{}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("an empty packet: %v", err)
	}
	if err := d.Write(0, make([][]byte, 2000), netstack.Offload{}); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("2000 parts: %v", err)
	}
}

// TestAWriteDuringCloseTouchesNoOtherFile lets files take the descriptor's
// number over, as soon as it is free, and looks whether a packet went into one.
func TestAWriteDuringCloseTouchesNoOtherFile(t *testing.T) {
	for range 20 {
		d := opened(t, config())
		begun := make(chan struct{}, 5)
		var writers, canaries sync.WaitGroup
		for i := range 4 {
			writers.Go(func() { begun <- struct{}{}; writeUntilClosed(t, d, uint32(i)) })
		}
		var stop atomic.Bool
		canaries.Go(func() {
			for begun <- struct{}{}; !stop.Load(); {
				untouched(t)
			}
		})
		for range cap(begun) {
			<-begun
		}
		d.Close()
		writers.Wait()
		stop.Store(true)
		canaries.Wait()
	}
}

func writeUntilClosed(t *testing.T, d *Device, hash uint32) {
	head := (&wire.Header{Src: peer4, Dst: host4, TTL: 64}).AppendUDP(nil, 1, 1, nil, false)
	for {
		err := d.Write(hash, [][]byte{head}, netstack.Offload{})
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			t.Errorf("Write: %v", err)
			return
		}
	}
}

// untouched opens a file for a moment, during which nothing may be written to it.
func untouched(t *testing.T) {
	fd, err := unix.MemfdCreate("canary", unix.MFD_CLOEXEC)
	if err != nil {
		t.Error(err)
		return
	}
	runtime.Gosched()
	if n, err := unix.Seek(fd, 0, io.SeekEnd); n != 0 || err != nil {
		t.Errorf("%d bytes in another file, %v", n, err)
	}
	unix.Close(fd)
}
