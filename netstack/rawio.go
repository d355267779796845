package netstack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// System calls on non-blocking sockets. They do not tell Go's scheduler, which
// would look after each as if it might block, and that costs more than the call.

func rawRead(fd int, b []byte) (int, unix.Errno) { return rawIO(unix.SYS_READ, fd, b) }

// rawWrite writes a and then b.
func rawWrite(fd int, a, b []byte) (int, unix.Errno) {
	if len(a) == 0 {
		return rawIO(unix.SYS_WRITE, fd, b)
	}
	if len(b) == 0 {
		return rawIO(unix.SYS_WRITE, fd, a)
	}
	var v [2]unix.Iovec
	v[0].Base, v[1].Base = unsafe.SliceData(a), unsafe.SliceData(b)
	v[0].SetLen(len(a))
	v[1].SetLen(len(b))
	n, _, errno := unix.RawSyscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&v)), uintptr(len(v)))
	return int(n), errno
}

func rawIO(call uintptr, fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), errno
}

// rawQueue asks for the length of one of a socket's queues: SIOCINQ, SIOCOUTQ.
func rawQueue(fd int, request uintptr) (int, unix.Errno) {
	var n int32
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&n)))
	return int(n), errno
}
