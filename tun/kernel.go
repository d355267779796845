package tun

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"gatewayd/internal/exitcode"
	"gatewayd/internal/hostnet"
)

// devicePath is where the TUN driver is.
const devicePath = "/dev/net/tun"

// Offloads as in linux/if_tun.h; Linux 6.2 brought the UDP ones.
const (
	offloadTCP = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6
	offloadUDP = unix.TUN_F_USO4 | unix.TUN_F_USO6
)

// openQueue opens a queue of the device name. The first one creates the device
// and fails if anything has that name.
func openQueue(path, name string, first, multi bool) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, openError(path, err)
	}
	flags := unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	if first {
		flags |= unix.IFF_TUN_EXCL
	}
	if multi {
		flags |= unix.IFF_MULTI_QUEUE
	}
	if err := attach(fd, name, uint16(flags)); err != nil {
		unix.Close(fd)
		return nil, attachError(name, err)
	}
	// Only now: the poller refuses a descriptor that has no device yet.
	return os.NewFile(uintptr(fd), name), nil
}

func attach(fd int, name string, flags uint16) error {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	req.SetUint16(flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, headerSize)
}

// setOffload asks for the offloads that o wants and tells which ones are on.
func setOffload(f *os.File, o Offload) (tcp, udp bool, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, false, err
	}
	set := func(bits int) (err error) {
		cerr := raw.Control(func(fd uintptr) { err = unix.IoctlSetInt(int(fd), unix.TUNSETOFFLOAD, bits) })
		return errors.Join(cerr, err)
	}
	if o == OffloadOff {
		return false, false, set(0)
	}
	if set(offloadTCP|offloadUDP) == nil {
		return true, true, nil
	}
	err = set(offloadTCP)
	if err != nil && o == OffloadAuto {
		return false, false, nil
	}
	return err == nil, false, err
}

func openError(path string, err error) error {
	const fix = "load it with `modprobe tun`, or on OpenWrt install kmod-tun"
	switch {
	case errors.Is(err, unix.ENOENT):
		err = fmt.Errorf("%s is missing, the kernel's TUN driver: %s, or give it to the container: %w", path, fix, err)
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		err = fmt.Errorf("%s has no driver: %s: %w", path, fix, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		err = fmt.Errorf("%s can't be opened: run as root, or allow reading and writing it: %w", path, err)
	default:
		return fmt.Errorf("%s: %w", path, err)
	}
	return exitcode.With(exitcode.Missing, err)
}

func attachError(name string, err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return permissionError(name, err)
	case errors.Is(err, unix.EBUSY):
		return exitcode.With(exitcode.Collision, fmt.Errorf("device %s: %s: %w", name, occupant(name), err))
	case errors.Is(err, unix.EINVAL):
		return exitcode.With(exitcode.Missing, fmt.Errorf(
			"device %s: the kernel's TUN driver lacks IFF_VNET_HDR or IFF_MULTI_QUEUE: use one queue or a newer kernel: %w", name, err))
	}
	return fmt.Errorf("device %s: TUNSETIFF: %w", name, err)
}

func permissionError(name string, err error) error {
	return exitcode.With(exitcode.Missing, fmt.Errorf(
		"device %s: CAP_NET_ADMIN is missing: run as root, or set AmbientCapabilities=CAP_NET_ADMIN in the service: %w", name, err))
}

// occupant says who has a device's name, and what to do about it.
func occupant(name string) string {
	l, ok, err := hostnet.LinkByName(name)
	switch {
	case err != nil || !ok:
		return "its name is taken: choose another one"
	case l.Kind != "tun":
		return fmt.Sprintf("a %s link has this name: choose another name, or remove it with `ip link del %s`", l.Kind, name)
	}
	if who := holder(name); who != "" {
		return who + " has it open: stop that, or choose another name"
	}
	return fmt.Sprintf("a TUN device has this name that no process here has open: remove it with `ip link del %s`, or choose another name", name)
}

// holder names the process of our network namespace that has the TUN device
// open; "" if there is none, or it can't be seen.
func holder(name string) string {
	ours, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return ""
	}
	procs, _ := filepath.Glob("/proc/[0-9]*") // it fails for a bad pattern only
	for _, proc := range procs {
		if theirs, err := os.Readlink(proc + "/ns/net"); err != nil || theirs != ours || !holds(proc, name) {
			continue
		}
		comm, _ := os.ReadFile(proc + "/comm") // empty if it just ended
		return fmt.Sprintf("process %s (%s)", filepath.Base(proc), strings.TrimSpace(string(comm)))
	}
	return ""
}

// holds reports whether one of a process's descriptors is the device's.
func holds(proc, name string) bool {
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return false
	}
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
		if err == nil && strings.HasSuffix(target, "/tun") && infoNames(filepath.Join(proc, "fdinfo", fd.Name()), name) {
			return true
		}
	}
	return false
}

// infoNames looks for the line "iff: NAME" that TUN adds to a descriptor's fdinfo.
func infoNames(path, name string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) == 2 && fields[0] == "iff:" && fields[1] == name {
			return true
		}
	}
	return false
}
