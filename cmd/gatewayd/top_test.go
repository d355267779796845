package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"gatewayd/flow"
	"gatewayd/internal/api"
	"gatewayd/track"
)

// emulator is a terminal's screen, as far as top uses one: what it does not know
// panics.
type emulator struct {
	width, height int
	cells         [][]rune
	reversed      []bool // lines that have a reversed character
	row, col      int
	alternate     bool
	hidden        bool // the cursor
	nowrap        bool
	reverse       bool
	resized       bool   // what comes until it is cleared may be for the old size
	held          []byte // the beginning of a sequence or a character
}

func newEmulator(width, height int) *emulator {
	e := &emulator{width: width, height: height}
	e.clear()
	return e
}

func (e *emulator) clear() {
	e.cells, e.reversed = make([][]rune, e.height), make([]bool, e.height)
	for i := range e.cells {
		e.cells[i] = []rune(strings.Repeat(" ", e.width))
	}
}

func (e *emulator) Write(p []byte) (int, error) {
	e.held = append(e.held, p...)
	for len(e.held) > 0 {
		if e.held[0] != 0x1b {
			if !utf8.FullRune(e.held) {
				break
			}
			r, n := utf8.DecodeRune(e.held)
			e.held = e.held[n:]
			e.put(r)
			continue
		}
		end := -1
		for i := 2; i < len(e.held); i++ {
			if e.held[i] >= 0x40 {
				end = i
				break
			}
		}
		if end < 0 {
			break
		}
		sequence := string(e.held[:end+1])
		e.held = e.held[end+1:]
		e.control(sequence)
	}
	return len(p), nil
}

func (e *emulator) put(r rune) {
	switch r {
	case '\r':
		e.col = 0
		return
	case '\n':
		e.row++
		return
	}
	if r < ' ' || e.row >= e.height || e.col >= e.width {
		if e.resized {
			return
		}
		panic(fmt.Sprintf("%q at line %d, column %d of %d×%d", r, e.row, e.col, e.width, e.height))
	}
	e.cells[e.row][e.col] = r
	e.reversed[e.row] = e.reversed[e.row] || e.reverse
	e.col++
}

func (e *emulator) control(s string) {
	var row int
	switch {
	case s == "\x1b[?1049h", s == "\x1b[?1049l":
		e.alternate = strings.HasSuffix(s, "h")
	case s == "\x1b[?25h", s == "\x1b[?25l":
		e.hidden = strings.HasSuffix(s, "l")
	case s == "\x1b[?7h", s == "\x1b[?7l":
		e.nowrap = strings.HasSuffix(s, "l")
	case s == "\x1b[m", s == "\x1b[7m":
		e.reverse = s == "\x1b[7m"
	case s == "\x1b[2J":
		e.clear()
		e.resized = false
	case s == "\x1b[K":
		if e.resized {
			return
		}
		for i := min(e.col, e.width-1); i < e.width; i++ { // at the margin the cursor is on the last character
			e.cells[e.row][i] = ' '
		}
		e.reversed[e.row] = e.reversed[e.row] && e.col > 0
	default:
		if _, err := fmt.Sscanf(s, "\x1b[%dH", &row); err != nil || row < 1 || row > e.height && !e.resized {
			panic(fmt.Sprintf("sequence %q on %d lines", s, e.height))
		}
		e.row, e.col = row-1, 0
		if e.row < e.height {
			e.reversed[e.row] = false // a line is painted from its beginning
		}
	}
}

func (e *emulator) text() string {
	var b strings.Builder
	for i, line := range e.cells {
		mark := " "
		if e.reversed[i] {
			mark = ">"
		}
		fmt.Fprintln(&b, strings.TrimRight(mark+string(line), " "))
	}
	return b.String()
}

// However the screen changes, painting what differs shows the same as painting all.
func TestPaintingTheDifferenceShowsTheWholeScreen(t *testing.T) {
	line := rapid.Custom(func(rt *rapid.T) screenLine {
		return screenLine{rapid.StringMatching(`[ab ]{0,11}[b]|`).Draw(rt, "text"), rapid.Bool().Draw(rt, "reverse")}
	})
	rapid.Check(t, func(rt *rapid.T) {
		term := newEmulator(12, 5)
		var shown []screenLine
		for range 8 {
			next := rapid.SliceOfN(line, 0, 5).Draw(rt, "screen")
			for i := range next {
				next[i].reverse = next[i].reverse && next[i].text != ""
			}
			out := paint(shown, next)
			if shown != nil && draw(shown) == draw(next) && len(shown) == len(next) && out != "" {
				rt.Fatalf("%q is sent though nothing changed", out)
			}
			fmt.Fprint(term, out)
			shown = next
			if shown == nil {
				shown = []screenLine{}
			}
			want := draw(next) + strings.Repeat("\n", 5-len(next))
			if got := term.text(); got != want {
				rt.Fatalf("shown\n%s\nwant\n%s", got, want)
			}
		}
	})
}

// pty is a terminal with a program on it.
type pty struct {
	*testing.T
	master *os.File
	slave  string
	cmd    *exec.Cmd
	exited chan error

	mu     sync.Mutex
	screen *emulator
	sent   int // bytes that came from the program
}

// runOn runs gatewayd on a terminal of this size, as a session of its own.
func runOn(t *testing.T, width, height int, env string, args ...string) *pty {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &pty{T: t, master: master, slave: fmt.Sprintf("/dev/pts/%d", n), exited: make(chan error, 1), screen: newEmulator(width, height)}
	p.resize(width, height)
	slave, err := os.OpenFile(p.slave, os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd = &exec.Cmd{
		Path: self, Args: append([]string{"gatewayd"}, args...), Env: append(os.Environ(), env), Stdin: slave, Stdout: slave, Stderr: slave,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true, Setctty: true},
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.exited <- p.cmd.Wait() }()
	var reading sync.WaitGroup
	reading.Go(p.read)
	t.Cleanup(func() {
		p.cmd.Process.Kill() //nolint:errcheck // it has ended
		slave.Close()        //nolint:errcheck // the last one who has it open ends read
		reading.Wait()
		master.Close() //nolint:errcheck // a terminal that nobody uses
	})
	return p
}

func (p *pty) read() {
	buf := make([]byte, 4096)
	for {
		n, err := unix.Read(int(p.master.Fd()), buf) // blocks in the kernel: the end is the hang-up
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		p.mu.Lock()
		p.sent += n
		p.screen.Write(buf[:n]) //nolint:errcheck // it never fails
		p.mu.Unlock()
	}
}

func (p *pty) resize(width, height int) {
	p.Helper()
	p.mu.Lock()
	p.screen.resized = width != p.screen.width || height != p.screen.height
	p.screen.width, p.screen.height = width, height
	p.screen.clear()
	p.mu.Unlock()
	if err := unix.IoctlSetWinsize(int(p.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(height), Col: uint16(width)}); err != nil {
		p.Fatal(err)
	}
}

func (p *pty) send(keys string) {
	p.Helper()
	if _, err := p.master.WriteString(keys); err != nil {
		p.Fatal(err)
	}
}

// shows waits until the screen is as wanted.
func (p *pty) shows(what string, holds func(screen string) bool) {
	p.Helper()
	end := time.After(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		p.mu.Lock()
		text := p.screen.text()
		ok := holds(text)
		p.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			p.Fatalf("in vain: %s; the screen is\n%s", what, text)
		}
	}
}

func has(words ...string) func(string) bool {
	return func(screen string) bool {
		for _, w := range words {
			if !strings.Contains(screen, w) {
				return false
			}
		}
		return true
	}
}

// ends waits for the program's end and its exit code.
func (p *pty) ends(code int) {
	p.Helper()
	select {
	case <-p.exited:
	case <-time.After(20 * time.Second):
		p.Fatal("it does not end")
	}
	if got := p.cmd.ProcessState.ExitCode(); got != code {
		p.Errorf("exit code %d, want %d", got, code)
	}
}

// served is a gateway's API with two flows, of which the first one moves.
func served(t *testing.T) (tracker *track.Tracker, flows []*track.Flow, env string) {
	t.Helper()
	tracker, err := track.New(track.Options{Interval: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "api.sock")
	server, err := api.New(api.Options{Listen: []string{"unix:" + socket}, Version: "1.2.3", Tracker: tracker, Gateway: &scripted{}, Drops: new(flow.Drops)})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(ctx) })
	for i, source := range []string{"10.0.0.2:51234", "10.0.0.3:1000"} {
		m := track.Meta{
			Inbound: "lan", Network: flow.TCP, Source: netip.MustParseAddrPort(source), Outbound: "direct", Version: 1,
			Dest: flow.Destination{Addr: netip.MustParseAddrPort("203.0.113.5:443"), Domain: []string{"busy.example", "idle.example"}[i], From: flow.FromSNI},
		}
		flows = append(flows, tracker.Open(m, nil))
	}
	running.Go(func() {
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			select {
			case <-tick.C:
				flows[0].Moved(flow.Down, 1000)
			case <-ctx.Done():
				return
			}
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return tracker, flows, "GATEWAYD_API=unix:" + socket
}

func TestTopShowsFiltersAndKillsOnATerminalAndRestoresIt(t *testing.T) {
	tracker, flows, env := served(t)
	p := runOn(t, 80, 24, env, "top", "--interval", "100ms")
	before, err := unix.IoctlGetTermios(int(p.master.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	p.shows("both flows, the busy one first and chosen, with its rate", func(s string) bool {
		lines := strings.Split(s, "\n")
		return strings.Contains(lines[0], "gatewayd 1.2.3") && strings.HasPrefix(lines[4], ">     1 tcp  10.0.0.2:51234") && strings.Contains(lines[5], "     2 tcp  10.0.0.3:1000") &&
			strings.Contains(lines[4], "k") && strings.Contains(lines[23], "q quit")
	})
	p.mu.Lock()
	if !p.screen.alternate || !p.screen.hidden || !p.screen.nowrap {
		t.Error("not a screen of its own")
	}
	p.mu.Unlock()

	p.send("/idle\r")
	p.shows("only what matches", func(s string) bool { return has("filter idle", "1-1 of 1", "10.0.0.3:1000")(s) && !has("10.0.0.2")(s) })
	p.send("k")
	p.shows("a question", has("kill flow 2, tcp to idle.example:443? y/N"))
	p.send("y")
	p.shows("what was done", has("killed flow 2"))
	if flows[1].Cause() != track.ErrKilled || flows[0].Cause() != nil {
		t.Errorf("causes %v and %v", flows[1].Cause(), flows[0].Cause())
	}
	flows[1].Close(nil)
	p.shows("no row", has("none"))
	p.send("\x1b")
	p.shows("all flows again", func(s string) bool { return has("10.0.0.2:51234", "1-1 of 1")(s) && !has("filter idle")(s) })
	p.send("vv")
	p.shows("outbounds", has("outbounds by rate", "OUTBOUND"))
	p.send("v")

	p.resize(100, 10)
	p.shows("the new size", func(s string) bool {
		lines := strings.Split(s, "\n")
		return len(lines) == 11 && has("RULE")(lines[3]) && has("q quit")(lines[9])
	})
	if tracker.Live() != 1 {
		t.Errorf("%d flows", tracker.Live())
	}
	p.send("q")
	p.ends(0)
	after, err := unix.IoctlGetTermios(int(p.master.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal was %+v, is %+v, %v", before, after, err)
	}
	p.shows("the shell's screen", func(string) bool {
		return !p.screen.alternate && !p.screen.hidden && !p.screen.nowrap && !p.screen.reverse
	})
}

func TestTopEndsWithASignalItsGatewayOrItsTerminalAndRestoresWhatIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(p *pty)
		code int
	}{
		"SIGTERM": {func(p *pty) { p.cmd.Process.Signal(syscall.SIGTERM) }, 0}, //nolint:errcheck // told by its end
		"Ctrl-C":  {func(p *pty) { p.send("\x03") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, env := served(t)
			p := runOn(t, 80, 24, env, "top")
			p.shows("the screen", has("q quit"))
			c.end(p)
			p.ends(c.code)
			p.shows("the shell's screen", func(string) bool { return !p.screen.alternate && !p.screen.hidden })
		})
	}
}

// While nothing moves next to nothing is sent: a second's frame is the clock.
func TestTopSendsOnlyWhatChanged(t *testing.T) {
	_, _, env := served(t)
	p := runOn(t, 80, 24, env, "top", "--interval", "100ms", "--filter", "idle")
	p.shows("the screen", has("q quit", "idle"))
	sent := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.sent
	}
	start := sent()
	looks := 0
	for last := ""; looks < 3; {
		p.shows("the clock moves", func(s string) bool {
			line, _, _ := strings.Cut(s, "\n")
			if line == last {
				return false
			}
			last = line
			return true
		})
		looks++
	}
	if grown := sent() - start; grown > 3000 {
		t.Errorf("%d bytes for three seconds of nothing", grown)
	}
	p.send("q")
	p.ends(0)
}

func TestTopWithoutAGatewayIsAnErrorAndNoScreen(t *testing.T) {
	p := runOn(t, 200, 24, "GATEWAYD_API=unix:/nonexistent/api.sock", "top")
	p.ends(1)
	p.shows("the error", func(s string) bool { return has("cannot reach gatewayd")(s) && !p.screen.alternate })
}
