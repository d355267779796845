package testnet

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	netnsDir       = "/run/netns"
	commandTimeout = 20 * time.Second
)

// Netns is one network namespace of a lab.
type Netns struct {
	Name string // as `ip netns` lists it
	lab  *Lab
}

// Do runs f with the calling thread inside the namespace: sockets that f opens
// on its own goroutine belong to it. What f starts on other goroutines does not.
// The thread is thrown away afterwards, so f can leave nothing behind in it.
func (n *Netns) Do(f func() error) error {
	result := make(chan error, 1)
	go func() { result <- doLocked(filepath.Join(netnsDir, n.Name), f) }()
	return <-result
}

// doLocked never unlocks its thread, which therefore ends with the goroutine.
func doLocked(path string, f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread cannot end and is what /proc/self shows: hold it here, so that
		// another goroutine gets another thread.
		defer runtime.UnlockOSThread()
		result := make(chan error, 1)
		go func() { result <- doLocked(path, f) }()
		return <-result
	}
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("namespace: %w", err)
	}
	defer file.Close()
	if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("namespace %s: setns: %w", path, err)
	}
	return f()
}

// in is Do for a function with a result.
func in[V any](n *Netns, f func() (V, error)) (v V, err error) {
	err = n.Do(func() error {
		v, err = f()
		return err
	})
	return v, err
}

// Dial connects from inside the namespace. The address is a literal one. It
// blocks as net.Dialer does, until ctx ends.
func (n *Netns) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return n.DialFrom(ctx, nil, network, address)
}

// DialFrom is Dial from a local address; nil lets the kernel choose.
func (n *Netns) DialFrom(ctx context.Context, local net.Addr, network, address string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: local}
	d.SetMultipathTCP(false)
	return in(n, func() (net.Conn, error) { return d.DialContext(ctx, network, address) })
}

// HTTPClient is a web client inside the namespace with a connection for each
// request; URLs have literal addresses.
func (n *Netns) HTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: n.Dial, DisableKeepAlives: true}}
}

// Listen listens inside the namespace, on a literal address.
func (n *Netns) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return in(n, func() (net.Listener, error) { return lc.Listen(ctx, network, address) })
}

// ListenUDP opens a UDP socket inside the namespace, on a literal address.
func (n *Netns) ListenUDP(ctx context.Context, address string) (*net.UDPConn, error) {
	var lc net.ListenConfig
	return in(n, func() (*net.UDPConn, error) {
		c, err := lc.ListenPacket(ctx, "udp", address)
		if err != nil {
			return nil, err
		}
		return c.(*net.UDPConn), nil
	})
}

// Command is a program to be run inside the namespace. The process is the
// program itself, nothing stays between; ctx ends it.
func (n *Netns) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", n.Name, program}, args...)...)
}

// Run runs a program inside the namespace and returns what it printed. One that
// fails, or takes over 20 s, fails the test.
func (n *Netns) Run(program string, args ...string) string {
	n.lab.t.Helper()
	out, err := n.output(program, args...)
	if err != nil {
		n.lab.t.Fatalf("%v", err)
	}
	return out
}

func (n *Netns) output(program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := n.Command(ctx, program, args...)
	var complaint strings.Builder // what ip says of other labs' namespaces, too
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %s %s: %w: %s", n.Name, program, strings.Join(args, " "), err, strings.TrimSpace(complaint.String()+string(out)))
	}
	return string(out), nil
}

// AwaitLocal waits until what goes to an address of the namespace is taken there.
// The kernel adds the route of an IPv6 address in a work queue, after the address
// itself, also without duplicate address detection.
func (n *Netns) AwaitLocal(address string) {
	n.lab.t.Helper()
	Until(n.lab.t, commandTimeout, address+" is local in "+n.Name, func() bool {
		out, err := n.output("ip", "route", "get", address)
		return err == nil && strings.HasPrefix(out, "local ")
	})
}

// ip runs lines of iproute2's batch language in the namespace.
func (n *Netns) ip(lines ...string) error { return ipBatch(n.Name, "", lines...) }

func (n *Netns) sysctl(settings ...string) error {
	_, err := n.output("sysctl", append([]string{"-qw"}, settings...)...)
	return err
}

// ipBatch runs lines in a namespace, "" for the caller's. A family, "-4" or "-6",
// is for lines without an address that tells it.
func ipBatch(namespace, family string, lines ...string) error {
	args := []string{"-batch", "-"}
	if family != "" {
		args = append([]string{family}, args...)
	}
	if namespace != "" {
		args = append([]string{"-n", namespace}, args...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ip", args...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", namespace, err, strings.TrimSpace(string(out)))
	}
	return nil
}
