package stream

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/tunnel"
)

// A connection with Multipath TCP (RFC 8684) has a TCP connection for each path. TCP_INFO of its socket
// describes only the first path, even after that path has ended. So the functions here ask for all paths.

// Options of level SOL_MPTCP (include/uapi/linux/mptcp.h), since Linux 5.16. Both return a header of four
// 32-bit numbers, and then an element for each path. The header holds its own size, the number of paths, the
// size of the kernel's element, and the size of an element in the answer, which is never larger.
const (
	mptcpTCPInfo = 2
	mptcpAddrs   = 3

	mptcpHeader = 16
	// mptcpPaths is the largest number of paths of a connection in Linux, the first included.
	mptcpPaths = 8 + 1
)

// isMultipath reports whether a socket has Multipath TCP. An accepted connection whose peer has no Multipath
// TCP is a socket of plain TCP.
func isMultipath(fd uintptr) bool {
	protocol, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL)
	return err == nil && protocol == unix.IPPROTO_MPTCP
}

// infosOf asks the kernel about each path of a socket. A socket of plain TCP has one path. ok is false if the kernel
// does not answer.
func infosOf(fd uintptr) (infos []*unix.TCPInfo, ok bool) {
	if isMultipath(fd) {
		const size = unsafe.Sizeof(unix.TCPInfo{})
		elements, err := mptcpOption(fd, mptcpTCPInfo, int(size))
		if err == nil {
			for _, e := range elements {
				info := new(unix.TCPInfo)
				copy(unsafe.Slice((*byte)(unsafe.Pointer(info)), size), e)
				infos = append(infos, info)
			}
			return infos, true
		}
		// The peer or a box in between has no Multipath TCP: the kernel treats the socket as plain TCP.
	}
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return nil, false
	}
	return []*unix.TCPInfo{info}, true
}

// mptcpOption returns the elements of an option, one for each path. size is how many bytes of an element to read.
func mptcpOption(fd uintptr, option, size int) (elements [][]byte, err error) {
	buf := make([]byte, mptcpHeader+mptcpPaths*size)
	binary.NativeEndian.PutUint32(buf, mptcpHeader)
	binary.NativeEndian.PutUint32(buf[12:], uint32(size)) //nolint:gosec // some hundred bytes
	length := uint32(len(buf))                            //nolint:gosec // a few KiB
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_MPTCP, uintptr(option),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return nil, errno
	}
	paths, each := binary.NativeEndian.Uint32(buf[4:]), binary.NativeEndian.Uint32(buf[12:])
	for i := range min(paths, mptcpPaths) {
		at := mptcpHeader + i*each
		elements = append(elements, buf[at:at+each])
	}
	return elements, nil
}

// pathsOf returns the addresses of each path of a socket with Multipath TCP. It returns nil for any other
// socket, and if the peer or a box in between has no Multipath TCP.
func pathsOf(fd uintptr) (paths []tunnel.Path) {
	// An element has the local and the remote address, each with room for a struct sockaddr_storage.
	elements, err := mptcpOption(fd, mptcpAddrs, 2*sizeofStorage)
	if err != nil {
		return nil
	}
	paths = []tunnel.Path{} // not nil, even if all paths have ended
	for _, e := range elements {
		paths = append(paths, tunnel.Path{Local: addrPortOf(e), Remote: addrPortOf(e[len(e)/2:])})
	}
	return paths
}

// sizeofStorage is the size of struct sockaddr_storage.
const sizeofStorage = 128

// addrPortOf decodes a struct sockaddr_in or sockaddr_in6.
func addrPortOf(b []byte) netip.AddrPort {
	port := binary.BigEndian.Uint16(b[2:])
	switch binary.NativeEndian.Uint16(b) {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), port)
	}
	return netip.AddrPort{}
}
