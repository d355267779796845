package api

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/user"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxGroups is NGROUPS_MAX.
const maxGroups = 65536

// peer is who opened a Unix connection, as the kernel tells it.
type peer struct {
	uid    uint32
	groups []uint32 // the primary one and the supplementary ones
}

// peerOf asks the kernel for the credentials that the peer had when it connected.
func peerOf(c *net.UnixConn) (peer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	var p peer
	var inner error
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			inner = err
			return
		}
		p = peer{cred.Uid, append(peerGroups(fd), cred.Gid)}
	})
	if err = cmp.Or(err, inner); err != nil {
		return peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	return p, nil
}

// peerGroups reads SO_PEERGROUPS (Linux 4.13); older kernels tell only the primary group.
func peerGroups(fd uintptr) []uint32 {
	groups := make([]uint32, 64)
	for {
		size := uint32(4 * len(groups))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			return groups[:size/4]
		case errno == unix.ERANGE && len(groups) < maxGroups:
			groups = make([]uint32, min(max(int(size/4), 2*len(groups)), maxGroups))
		default:
			return nil
		}
	}
}

// judge is the caller that p is: root, the gateway's own user and the members of
// the socket's group may do everything, anybody else nothing.
func (p peer) judge(own uint32, group *uint32, groupName string) caller {
	name := "uid " + strconv.FormatUint(uint64(p.uid), 10)
	switch {
	case p.uid == 0, p.uid == own:
		return caller{name: name, role: RoleAdmin}
	case group != nil && slices.Contains(p.groups, *group):
		return caller{name: name, role: RoleAdmin}
	case groupName != "":
		return caller{name: name, denied: fmt.Sprintf("%s may not use the API: be root or join the group %s", name, groupName)}
	}
	return caller{name: name, denied: name + " may not use the API: be root"}
}

// connContext notes the caller of a Unix connection before its first request.
func (s *Server) connContext(ctx context.Context, c net.Conn) context.Context {
	uc, ok := c.(*limitedUnix)
	if !ok {
		return ctx
	}
	p, err := peerOf(uc.UnixConn)
	who := caller{name: "unknown", denied: "the peer's credentials are not known"}
	if err != nil {
		s.log.Warn("api peer", "error", err)
	} else {
		who = p.judge(uint32(os.Geteuid()), s.group, s.opt.SocketGroup)
	}
	return context.WithValue(ctx, callerKey{}, who)
}

// lookupGroup is the id of a group, nil if there is none of that name.
func lookupGroup(name string) *uint32 {
	if name == "" {
		return nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return nil
	}
	n, err := strconv.ParseUint(g.Gid, 10, 32)
	if err != nil {
		return nil
	}
	id := uint32(n)
	return &id
}
