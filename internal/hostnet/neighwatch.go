package hostnet

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// NeighbourNews is one message of WatchNeighbours.
type NeighbourNews struct {
	Kind      NewsKind
	Neighbour // of a NeighbourChanged
}

// NewsKind tells what a NeighbourNews is.
type NewsKind uint8

// The kinds. What was not told of between a TableBegins and the TableEnds that
// follows it is not in the kernel's table, unless another TableBegins comes first.
const (
	NeighbourChanged NewsKind = iota
	TableBegins
	TableEnds
)

const (
	// pause is the least time between two dumps of the neighbour table.
	pause = time.Second

	// neighbourBuffer is the room for messages that were not read yet, in bytes.
	// What does not fit is lost, which the kernel tells and a dump makes good.
	neighbourBuffer = 1 << 20
)

// WatchNeighbours tells of the whole neighbour table and then of each change to it,
// on one goroutine and in the kernel's order: the table comes through the same socket
// as the changes. When changes were lost the table is told again, at most once in a
// second. It blocks until ctx ends (nil) or netlink fails; tell must not block longer
// than ctx lives.
func WatchNeighbours(ctx context.Context, tell func(NeighbourNews)) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_NEIGH)
	if err != nil {
		return fmt.Errorf("netlink subscription: %w", err)
	}
	_ = s.SetReceiveBufferSize(neighbourBuffer, false) // the kernel takes what it allows
	port, err := s.GetPid()
	if err != nil {
		s.Close()
		return fmt.Errorf("netlink subscription: %w", err)
	}
	w := &neighbourWatch{s: s, port: port, tell: tell, again: make(chan struct{}, 1)}
	failed := make(chan error, 1)
	w.wantTable()
	go func() { failed <- w.listen() }()
	ended, err := w.ask(ctx, failed)
	s.Close()
	if !ended {
		<-failed
	}
	if err != nil {
		return fmt.Errorf("netlink subscription: %w", err)
	}
	return nil
}

type neighbourWatch struct {
	s     *nl.NetlinkSocket
	port  uint32 // of s, to tell answers from news
	tell  func(NeighbourNews)
	again chan struct{} // one place: the table is wanted
	seq   atomic.Uint32 // of the last request for it
	begun uint32        // the request whose answer has begun; the listener's own
}

func (w *neighbourWatch) wantTable() {
	select {
	case w.again <- struct{}{}:
	default:
	}
}

// ask requests the table when it is wanted, until ctx ends or the listener failed.
func (w *neighbourWatch) ask(ctx context.Context, failed <-chan error) (listenerEnded bool, err error) {
	var rest <-chan time.Time
	again := w.again
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case err := <-failed:
			return true, err
		case <-rest:
			again = w.again
		case <-again:
			req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
			req.AddData(&netlink.Ndmsg{})
			w.seq.Store(req.Seq)
			if err := w.s.Send(req); err != nil {
				return false, err
			}
			again, rest = nil, time.After(pause)
		}
	}
}

// listen reads until the socket fails or is closed.
func (w *neighbourWatch) listen() error {
	for {
		msgs, from, err := w.s.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS):
			w.wantTable()
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case from.Pid != nl.PidKernel:
			continue
		}
		for i := range msgs {
			w.take(&msgs[i])
		}
	}
}

// take tells what one message says.
func (w *neighbourWatch) take(m *syscall.NetlinkMessage) {
	if m.Header.Pid == w.port && m.Header.Seq == w.seq.Load() {
		if w.begun != m.Header.Seq {
			w.begun = m.Header.Seq
			w.tell(NeighbourNews{Kind: TableBegins})
		}
		switch {
		case m.Header.Type == unix.NLMSG_ERROR, m.Header.Type == unix.NLMSG_DONE && m.Header.Flags&unix.NLM_F_DUMP_INTR != 0:
			w.wantTable()
			return
		case m.Header.Type == unix.NLMSG_DONE:
			w.tell(NeighbourNews{Kind: TableEnds})
			return
		}
	}
	if n, ok := neighbourNews(m); ok {
		w.tell(NeighbourNews{Neighbour: n})
	}
}
