package suite

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gatewayd/internal/testnet"
)

// spender is a user that uses up its traffic.
type spender struct {
	b      *userBed
	who    person
	host   string
	got    tally // at the client
	up     *tally
	wg     sync.WaitGroup
	opened int
	begun  []func()     // what goes off once all flows are open
	tcp    atomic.Int64 // connections that ended
	cut    atomic.Int64 // that were reset
	odd    atomic.Pointer[error]
}

// source is the address by which the host is reached.
func (s *spender) source() string {
	if netip.MustParseAddr(s.host).Is4() {
		return s.who.v4
	}
	return s.who.v6
}

func (s *spender) dial(network string, port int) net.Conn {
	s.b.t.Helper()
	s.opened++
	return s.b.mustDial(s.source(), network, hostPort(s.host, port))
}

// ended notes how a connection ended.
func (s *spender) ended(err error) {
	if s.tcp.Add(1); isReset(err) {
		s.cut.Add(1)
	} else {
		s.odd.Store(&err)
	}
}

func (s *spender) download() {
	c := s.dial("tcp", quotaSource)
	s.wg.Go(func() { s.ended(s.got.drain(c)) })
	s.begun = append(s.begun, func() { c.Write([]byte("x")) }) //nolint:errcheck // nothing would come
}

// idle is a connection that exchanged a word, and says nothing any more.
func (s *spender) idle() {
	s.b.t.Helper()
	c := s.dial("tcp", quotaEcho)
	if err := exchangeWord(c, "before"); err != nil {
		s.b.t.Fatal(err)
	}
	s.got.add(len("before"))
	s.up.add(len("before"))
	s.wg.Go(func() { s.ended(s.got.drain(c)) })
}

func (s *spender) upload() {
	c := s.dial("tcp", quotaSink)
	s.wg.Go(func() {
		_, err := testnet.WritePattern(c, -1)
		if _, last := c.Read(make([]byte, 1)); !isReset(err) { // the write may have seen a broken pipe
			err = last
		}
		s.ended(err)
	})
}

func (s *spender) blastUp() {
	c := s.dial("udp", quotaSink)
	s.wg.Go(func() { gush(c, 1200, 20_000_000, s.b.t.Context().Done()) }) // until it is prohibited
}

func (s *spender) blastDown() {
	c := s.dial("udp", quotaBlast)
	roomy(s.b.t, c.(*net.UDPConn))
	s.wg.Go(func() {
		stop, p := make(chan struct{}), make([]byte, 1<<16)
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			gush(c, 1, 250, stop)
		}()
		for c.SetReadDeadline(time.Now().Add(5*time.Second)) == nil { //nolint:staticcheck // each datagram has its own
			n, err := c.Read(p)
			if s.got.add(n); err != nil {
				break
			}
		}
		close(stop)
		<-asked
	})
}

// spent is what a spender's end looked like.
type spent struct {
	up, down uint64        // of its records
	lost     uint64        // of them, not at their receivers: a kernel may lose datagrams
	late     time.Duration // from the last byte to the end of the last flow
}

// finish waits for the end and checks all of it that is not about time.
func (s *spender) finish(t *testing.T, j *journal, total uint64) (o spent) {
	t.Helper()
	for _, begin := range s.begun {
		begin()
	}
	records := s.b.records(j, s.who.name, s.opened)
	s.wg.Wait()
	if s.cut.Load() != s.tcp.Load() {
		t.Errorf("%d of %d connections were reset, another ended with %v", s.cut.Load(), s.tcp.Load(), *s.odd.Load())
	}
	last := time.Unix(0, max(s.got.last.Load(), s.up.last.Load()))
	for _, r := range records {
		if r.Reason != "quota" {
			t.Errorf("flow#%d closed as %s, want quota", r.ID, r.Reason)
		}
		o.up, o.down = o.up+r.Up, o.down+r.Down
		o.late = max(o.late, r.Ended.Sub(last))
	}
	u := s.b.user(s.who.name)
	if u.State != "exhausted" || u.Usage.Up != o.up || u.Usage.Down != o.down || u.Usage.Connections != 0 {
		t.Errorf("the user is %s with %+v; its %d records sum to %d up, %d down", u.State, u.Usage, len(records), o.up, o.down)
	}
	if sum := o.up + o.down; sum < total || sum >= total+oneTransfer {
		t.Errorf("%d bytes of %d moved, %d over it", sum, total, int64(sum)-int64(total))
	}
	got, up := uint64(s.got.bytes.Load()), uint64(s.up.bytes.Load())
	if o.lost = o.up + o.down - up - got; got > o.down || up > o.up || s.tcp.Load() > 0 && o.lost != 0 {
		t.Errorf("%d bytes up and %d down, of which the server read %d and the client %d", o.up, o.down, up, got)
	}
	s.b.refused(s.source(), s.host, quotaEcho, quotaEcho)
	return o
}

func TestB45_TrafficThatIsUsedUpEndsAllFlowsOfItsUserAlone(t *testing.T) {
	const total = 10_000_000
	cases := []struct {
		name  string
		begin func(s *spender)
	}{
		{"a download", (*spender).download},
		{"twenty downloads", func(s *spender) {
			for range 20 {
				s.download()
			}
		}},
		{"an upload", (*spender).upload},
		{"datagrams up", (*spender).blastUp},
		{"datagrams down", (*spender).blastDown},
		{"a download beside idle flows", func(s *spender) {
			for range 3 {
				s.idle()
			}
			s.download()
		}},
	}
	all := people(1 + 3*len(cases))
	config := usersBase + "users:\n  - " + all[0].yaml("") + "\n"
	for _, p := range all[1:] {
		config += "  - " + p.yaml(fmt.Sprintf("limits: {traffic: {total: %d}}", total)) + "\n"
	}
	b := newUserBed(t, config, all...)
	up := b.serveAll()
	j := b.follow(t)
	other := newChatter(t)
	beside := other.talk(b.Cli, "tcp", hostPort(testnet.FarV4, quotaEcho))
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var o spent
			for try := range 3 { // the machine's own slowness is not the gateway's
				host := []string{testnet.FarV4, testnet.FarV6}[try%2]
				y := &up[try%2]
				y.bytes.Store(0)
				y.last.Store(0)
				s := &spender{b: b.on(t), who: all[1+3*i+try], host: host, up: y}
				c.begin(s)
				o = s.finish(t, j, total)
				t.Logf("%d bytes over, %d lost, the last flow ended %v after the last byte", o.up+o.down-total, o.lost, o.late)
				if o.late <= cutLimit && o.lost == 0 || t.Failed() {
					return
				}
			}
			t.Errorf("three times all was not over in %v, or bytes were lost: %+v", cutLimit, o)
		})
	}
	other.end()
	if f := j.end(t, patience, beside.LocalAddr()); f.Reason != "eof" {
		t.Errorf("another's flow closed as %s", f.Reason)
	}
	j.sound(t)
}
