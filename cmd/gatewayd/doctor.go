package main

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"gatewayd/internal/exitcode"
)

// Results of a check. Missing is what gatewayd cannot run without; a note is what
// only some set-ups need.
const (
	resultOK      = "ok"
	resultMissing = "missing"
	resultNote    = "note"
)

// finding is what one check of the doctor found.
type finding struct {
	Check  string `json:"check"`
	Result string `json:"result"` // ok, missing or note
	Found  string `json:"found"`
	Fix    string `json:"fix,omitempty"`
}

func doctorCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the kernel pieces, permissions and sysctls that gatewayd needs",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			findings := examine("/")
			findings = append(findings, checkNftables())
			if err := a.printFindings(findings); err != nil {
				return err
			}
			return verdict(findings)
		},
	}
}

func (a *app) printFindings(findings []finding) error {
	if a.json {
		return a.printJSON(map[string][]finding{"findings": findings})
	}
	for _, f := range findings {
		line := fmt.Sprintf("%-8s %-30s %s", f.Result, f.Check, f.Found)
		if f.Fix != "" {
			line += ": " + f.Fix
		}
		if err := a.printf("%s\n", wrap(line, cmp.Or(a.width(), 80), 9)); err != nil {
			return err
		}
	}
	return nil
}

// verdict is an error that names what is missing.
func verdict(findings []finding) error {
	var missing []string
	for _, f := range findings {
		if f.Result == resultMissing {
			missing = append(missing, f.Check)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return exitcode.With(exitcode.Missing, fmt.Errorf("missing: %s", strings.Join(missing, ", ")))
}

// examine makes the checks that files answer, below root.
func examine(root string) []finding {
	return []finding{
		checkTUN(root),
		checkCapability(root, "CAP_NET_ADMIN", unix.CAP_NET_ADMIN, resultMissing, "run as root, or give the service AmbientCapabilities=CAP_NET_ADMIN"),
		checkCapability(root, "CAP_NET_RAW", unix.CAP_NET_RAW, resultNote, "needed for ping where ping_group_range is closed"),
		checkIPv6(root),
		checkForwarding(root, "net/ipv4/ip_forward"),
		checkForwarding(root, "net/ipv6/conf/all/forwarding"),
		checkReversePath(root),
		checkPingGroups(root),
	}
}

func checkTUN(root string) finding {
	const check = "/dev/net/tun"
	f, err := os.OpenFile(filepath.Join(root, check), os.O_RDWR, 0)
	switch {
	case err == nil:
		_ = f.Close() // nothing was written
		return finding{check, resultOK, "opens", ""}
	case errors.Is(err, fs.ErrNotExist):
		return finding{check, resultMissing, "does not exist", "modprobe tun (OpenWrt: opkg install kmod-tun); in a container pass --device /dev/net/tun"}
	case errors.Is(err, fs.ErrPermission):
		return finding{check, resultMissing, "no permission", "run as root"}
	case errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.ENXIO):
		return finding{check, resultMissing, "no driver behind it", "modprobe tun (OpenWrt: opkg install kmod-tun)"}
	}
	return finding{check, resultMissing, err.Error(), "modprobe tun"}
}

func checkCapability(root, name string, bit int, absent, fix string) finding {
	b, err := os.ReadFile(filepath.Join(root, "proc/self/status"))
	if err != nil {
		return finding{name, resultNote, "unknown: " + err.Error(), "mount /proc"}
	}
	for line := range strings.Lines(string(b)) {
		text, ok := strings.CutPrefix(line, "CapEff:")
		if !ok {
			continue
		}
		mask, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
		if err == nil && mask&(1<<bit) != 0 {
			return finding{name, resultOK, "held", ""}
		}
	}
	return finding{name, absent, "not held", fix}
}

// sysctl reads one value below /proc/sys.
func sysctl(root, path string) (string, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/sys", path))
	return strings.Join(strings.Fields(string(b)), " "), err
}

// sysctlName is the dotted form that sysctl(8) takes.
func sysctlName(path string) string { return strings.ReplaceAll(path, "/", ".") }

func checkIPv6(root string) finding {
	const path = "net/ipv6/conf/all/disable_ipv6"
	v, err := sysctl(root, path)
	switch {
	case err != nil:
		return finding{"IPv6", resultNote, "the kernel has none", "boot without ipv6.disable=1; without it gatewayd carries IPv4 only"}
	case v != "0":
		return finding{"IPv6", resultNote, "disabled", "sysctl -w " + sysctlName(path) + "=0; without it gatewayd carries IPv4 only"}
	}
	return finding{"IPv6", resultOK, "enabled", ""}
}

// checkForwarding: packets of other hosts reach the TUN device only through it.
func checkForwarding(root, path string) finding {
	name := sysctlName(path)
	v, err := sysctl(root, path)
	switch {
	case err != nil:
		return finding{name, resultNote, "not there", ""}
	case v == "0":
		return finding{name, resultNote, "0", "other hosts' traffic does not reach the device; sysctl -w " + name + "=1"}
	}
	return finding{name, resultOK, v, ""}
}

// checkReversePath: replies come out of the TUN device with sources whose route is
// another device, which strict filtering drops.
func checkReversePath(root string) finding {
	const path = "net/ipv4/conf/all/rp_filter"
	name := sysctlName(path)
	v, err := sysctl(root, path)
	switch {
	case err != nil:
		return finding{name, resultNote, "not there", ""}
	case v == "1":
		return finding{name, resultNote, "1 (strict)", "replies out of the device may be dropped; sysctl -w " + name + "=2"}
	}
	return finding{name, resultOK, v, ""}
}

func checkPingGroups(root string) finding {
	const path = "net/ipv4/ping_group_range"
	name := sysctlName(path)
	v, err := sysctl(root, path)
	low, high, _ := strings.Cut(v, " ")
	from, errLow := strconv.ParseUint(low, 10, 32)
	to, errHigh := strconv.ParseUint(high, 10, 32)
	switch {
	case err != nil:
		return finding{name, resultNote, "not there", ""}
	case errLow != nil || errHigh != nil || from > to:
		return finding{name, resultNote, v + " (nobody)", `ping needs CAP_NET_RAW; or sysctl -w ` + name + `="0 2147483647"`}
	}
	return finding{name, resultOK, v, ""}
}

// checkNftables asks the kernel for the generation of its rule set.
func checkNftables() finding {
	const check = "nftables"
	fix := "modprobe nf_tables (OpenWrt: opkg install kmod-nft-core); needed to divert traffic"
	err := askNftables()
	switch {
	case err == nil:
		return finding{check, resultOK, "answers", ""}
	case errors.Is(err, syscall.EPERM):
		return finding{check, resultNote, "no permission to ask", "run as root"}
	}
	return finding{check, resultNote, err.Error(), fix}
}

// askNftables sends NFT_MSG_GETGEN and reads one answer, for at most a second.
func askNftables() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	timeout := unix.NsecToTimeval(int64(time.Second))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return err
	}
	request := make([]byte, 20) // nlmsghdr and nfgenmsg
	binary.NativeEndian.PutUint32(request, uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	if n >= 20 && binary.NativeEndian.Uint16(answer[4:]) == unix.NLMSG_ERROR {
		return syscall.Errno(-int32(binary.NativeEndian.Uint32(answer[16:])))
	}
	return nil
}
