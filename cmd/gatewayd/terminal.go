package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Sequences of ECMA-48 and xterm that every terminal in use knows.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J" // another screen, no cursor, no wrapping, clear
	leaveScreen = "\x1b[m\x1b[?7h\x1b[?25h\x1b[?1049l"
	clearScreen = "\x1b[m\x1b[2J"
)

// terminal is one that shows a screen of our own, from openTerminal to close.
type terminal struct {
	in, out *os.File
	saved   unix.Termios
	shown   []screenLine
	stop    *os.File // closing it ends readKeys
	stopped *os.File
}

// isTerminal reports whether f is one.
func isTerminal(f any) (*os.File, bool) {
	file, ok := f.(*os.File)
	if !ok {
		return nil, false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return file, err == nil
}

// openTerminal makes the terminal raw and clears it. close undoes that.
func openTerminal(in, out *os.File) (*terminal, error) {
	saved, err := unix.IoctlGetTermios(int(in.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	t := &terminal{in: in, out: out, saved: *saved}
	if t.stopped, t.stop, err = os.Pipe(); err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	if err := t.raw(); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// raw turns echo, lines and signals off, and shows an empty screen; again after a stop.
func (t *terminal) raw() error {
	raw := t.saved
	raw.Iflag &^= unix.BRKINT | unix.ICRNL | unix.INPCK | unix.ISTRIP | unix.IXON
	raw.Lflag &^= unix.ECHO | unix.ICANON | unix.IEXTEN | unix.ISIG
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(int(t.in.Fd()), unix.TCSETS, &raw); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	t.shown = nil
	return t.write(enterScreen)
}

// close ends readKeys and gives the terminal back as it was.
func (t *terminal) close() {
	t.stop.Close()                                              //nolint:errcheck // a pipe of our own
	t.write(leaveScreen)                                        //nolint:errcheck // it may be gone
	unix.IoctlSetTermios(int(t.in.Fd()), unix.TCSETS, &t.saved) //nolint:errcheck // likewise
}

func (t *terminal) write(s string) error {
	_, err := io.WriteString(t.out, s)
	return err
}

// size is the terminal's, 80×24 if it does not tell.
func (t *terminal) size() (width, height int) {
	s, err := unix.IoctlGetWinsize(int(t.out.Fd()), unix.TIOCGWINSZ)
	if err != nil || s.Col == 0 || s.Row == 0 {
		return 80, 24
	}
	return int(s.Col), int(s.Row)
}

// forget makes the next show paint everything: the size has changed.
func (t *terminal) forget() { t.shown = nil }

// show paints lines with as few bytes as it takes.
func (t *terminal) show(lines []screenLine) error {
	out := paint(t.shown, lines)
	t.shown = lines
	if out == "" {
		return nil
	}
	return t.write(out)
}

// paint is what makes a terminal that shows before show after: the lines that
// differ. Before nil is anything.
func paint(before, after []screenLine) string {
	var b strings.Builder
	if before == nil {
		b.WriteString(clearScreen)
	}
	for i := range max(len(before), len(after)) {
		var old, now screenLine
		if i < len(before) {
			old = before[i]
		}
		if i < len(after) {
			now = after[i]
		}
		if old == now {
			continue
		}
		fmt.Fprintf(&b, "\x1b[%dH", i+1)
		if now.reverse {
			b.WriteString("\x1b[7m" + now.text + "\x1b[m")
		} else {
			b.WriteString(now.text)
		}
		// At the right margin the cursor stays on the last character, which this would erase.
		if utf8.RuneCountInString(now.text) < utf8.RuneCountInString(old.text) {
			b.WriteString("\x1b[K")
		}
	}
	return b.String()
}

// escapeWait is how long the rest of a key's sequence may take.
const escapeWait = 50 * time.Millisecond

// readKeys calls press for each key until close, or until the terminal is gone (an error).
func (t *terminal) readKeys(press func(key)) error {
	defer t.stopped.Close() //nolint:errcheck // a pipe of our own
	var d keyDecoder
	buf := make([]byte, 256)
	fds := []unix.PollFd{{Fd: int32(t.in.Fd()), Events: unix.POLLIN}, {Fd: int32(t.stopped.Fd()), Events: unix.POLLIN}}
	for {
		wait := -1
		if d.pending() {
			wait = int(escapeWait / time.Millisecond)
		}
		n, err := unix.Poll(fds, wait)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("terminal: %w", err)
		case fds[1].Revents != 0:
			return nil
		}
		keys := d.flush
		if n > 0 {
			read, err := unix.Read(int(t.in.Fd()), buf)
			if err != nil || read <= 0 {
				return fmt.Errorf("terminal: %w", errors.Join(io.EOF, err))
			}
			keys = func() []key { return d.feed(buf[:read]) }
		}
		for _, k := range keys() {
			press(k)
		}
	}
}
