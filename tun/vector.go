package tun

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// x/sys has Readv and Writev, but they build the array of iovecs anew for every
// call, on the heap. These two take it ready-made.

func readv(fd uintptr, iov []unix.Iovec) (n int, errno unix.Errno) {
	return vector(unix.SYS_READV, fd, iov)
}

func writev(fd uintptr, iov []unix.Iovec) (n int, errno unix.Errno) {
	return vector(unix.SYS_WRITEV, fd, iov)
}

func vector(call, fd uintptr, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
	return int(n), errno
}

// part makes an iovec of b.
func part(b []byte) (v unix.Iovec) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
	return v
}
