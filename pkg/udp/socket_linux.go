package udp

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// growReceive enlarges the receive buffer of a socket. The kernel limits it to net.core.rmem_max, unless
// the process has CAP_NET_ADMIN.
func growReceive(raw syscall.RawConn, bytes int) {
	raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes) != nil {
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, bytes) //nolint:errcheck // the size stays
		}
	})
}

// receiveTrains lets the kernel hand over several datagrams of one caller at once (UDP_GRO, udp(7)).
func receiveTrains(raw syscall.RawConn) {
	raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1) //nolint:errcheck // Linux before 5.0 cannot
	})
}

// trainSegment returns the size of the datagrams that were received at once; 0: there is one.
func trainSegment(control []byte) int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_UDP && m.Header.Type == unix.UDP_GRO && len(m.Data) >= 4 {
			return int(binary.NativeEndian.Uint32(m.Data)) // an int: udp_cmsg_recv in the kernel's include/linux/udp.h
		}
	}
	return 0
}

// sourceFor returns the address of this machine from which the kernel would answer an IPv4 datagram. The zero Addr
// means that the kernel does not say. The address is the destination of the datagram, unless that is a broadcast
// address: no datagram may leave from there.
func sourceFor(control []byte) netip.Addr {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}
	}
	for _, m := range messages {
		// struct in_pktinfo: the number of the device, ipi_spec_dst, ipi_addr (ip(7)).
		if m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo {
			return netip.AddrFrom4([4]byte(m.Data[4:8]))
		}
	}
	return netip.Addr{}
}

// canSegment reports whether the kernel can send several datagrams of one size by one call
// (UDP_SEGMENT, udp(7)). Linux before 4.18 ignores the control message, and would send one long datagram.
//
//nolint:gochecknoglobals // asked once in a process
var canSegment = sync.OnceValue(func() bool { return knowsOption(unix.UDP_SEGMENT) })

// knowsOption reports whether the kernel knows an option of UDP sockets.
func knowsOption(name int) bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	_, err = unix.GetsockoptInt(fd, unix.IPPROTO_UDP, name)
	return err == nil
}

// appendSegment appends the control message that makes the kernel send datagrams of size bytes.
func appendSegment(control []byte, size int) []byte {
	const data = 2 // bytes: the kernel takes a 16-bit size
	at := len(control)
	control = append(control, make([]byte, unix.CmsgSpace(data))...)
	m := control[at:]
	if unix.SizeofCmsghdr == 16 { // struct cmsghdr of cmsg(3): size_t, int, int
		binary.NativeEndian.PutUint64(m, uint64(unix.CmsgLen(data))) //nolint:gosec // a dozen
		m = m[8:]
	} else {
		binary.NativeEndian.PutUint32(m, uint32(unix.CmsgLen(data))) //nolint:gosec // a dozen
		m = m[4:]
	}
	binary.NativeEndian.PutUint32(m, unix.IPPROTO_UDP)
	binary.NativeEndian.PutUint32(m[4:], unix.UDP_SEGMENT)
	binary.NativeEndian.PutUint16(control[at+unix.CmsgLen(0):], uint16(size)) //nolint:gosec // a datagram's length
	return control
}

// receiveDrops asks the kernel how many datagrams found the receive buffer of a socket full.
type receiveDrops struct {
	raw  syscall.RawConn // set once
	seen uint32          // the kernel's count at the last call; the caller of more has a lock
}

// more returns how many datagrams were dropped since the last call; 0 if the socket is closed.
func (d *receiveDrops) more() uint64 {
	const drops = 8 // SK_MEMINFO_DROPS of linux/sock_diag.h
	now := d.seen
	d.raw.Control(func(fd uintptr) {
		var info [drops + 1]uint32
		size := uint32(unsafe.Sizeof(info))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
		if errno == 0 && int(size) == int(unsafe.Sizeof(info)) {
			now = info[drops]
		}
	})
	n := now - d.seen // the kernel's count may wrap
	d.seen = now
	return uint64(n)
}
