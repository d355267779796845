package store

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// flashTypes are file systems that are used on flash alone, or, as overlay, mostly on it
// where routers are concerned (linux/magic.h).
var flashTypes = map[uint32]bool{
	0x72b6:     true, // jffs2
	0x24051905: true, // ubifs
	0xf2f52010: true, // f2fs
	0x794c7630: true, // overlay
}

// onFlash says whether dir, or where it will be, is on flash: by its file system, or by
// the name that the kernel gives to SD cards and eMMC.
func onFlash(dir string) bool {
	var st unix.Statfs_t
	var info unix.Stat_t
	if unix.Statfs(dir, &st) != nil || unix.Stat(dir, &info) != nil {
		return false
	}
	if flashTypes[uint32(st.Type)] {
		return true
	}
	dev := uint64(info.Dev)
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	return err == nil && strings.Contains(link, "/mmcblk")
}
