//go:build unix

package udp

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// sender sends datagrams, and never waits for room in a socket's buffer. One goroutine owns it.
type sender struct {
	call       func(fd uintptr) bool // set once, so that sending allocates nothing
	p, control []byte
	to         unix.Sockaddr // nil: the socket is connected
	err        error

	in4   unix.SockaddrInet4 // to points to in4 or in6; they are here, so that sending allocates nothing
	in6   unix.SockaddrInet6
	zones map[string]uint32 // indexes of network interfaces, for link-local callers
}

func newSender() *sender {
	s := new(sender)
	s.call = s.once
	return s
}

// send sends p through a connected socket. If the buffer of the socket is full, the error is EAGAIN.
func (s *sender) send(by *endSocket, p, control []byte) error {
	s.p, s.control = p, control
	err := by.raw.Write(s.call)
	s.p, s.control = nil, nil
	if err != nil {
		return err
	}
	return s.err
}

// sendTo is send for a socket that is not connected: the datagram goes to a caller.
func (s *sender) sendTo(by *endSocket, v6 bool, caller netip.AddrPort, p, control []byte) error {
	a := caller.Addr()
	if v6 {
		s.in6.Addr, s.in6.Port, s.in6.ZoneId = a.As16(), int(caller.Port()), s.zone(a.Zone())
		s.to = &s.in6
	} else {
		s.in4.Addr, s.in4.Port = a.Unmap().As4(), int(caller.Port())
		s.to = &s.in4
	}
	err := s.send(by, p, control)
	s.to = nil
	if err != nil {
		delete(s.zones, a.Zone()) // the interface may have another index now
	}
	return err
}

// zone returns the index of a network interface that the kernel has named as the zone of a caller.
func (s *sender) zone(name string) uint32 {
	if name == "" {
		return 0
	}
	index, ok := s.zones[name]
	if ok {
		return index
	}
	if i, err := net.InterfaceByName(name); err == nil {
		index = uint32(i.Index) //nolint:gosec // not negative
	} else if n, err := strconv.ParseUint(name, 10, 32); err == nil { // package net gives the index if it has no name
		index = uint32(n)
	}
	if s.zones == nil {
		s.zones = make(map[string]uint32)
	}
	s.zones[name] = index
	return index
}

func (s *sender) once(fd uintptr) bool {
	for {
		_, s.err = unix.SendmsgN(int(fd), s.p, s.control, s.to, 0)
		if !errors.Is(s.err, unix.EINTR) {
			return true
		}
	}
}

// endSocket is a UDP socket: of a flow at an edge, connected to the target, or of a port, not connected.
type endSocket struct {
	conn *net.UDPConn
	raw  syscall.RawConn
}

// receive calls handle for each datagram, until the socket is closed or handle returns false.
// failed gets errors of single datagrams, such as ECONNREFUSED. An error that the kernel returns again
// and again ends receive. While no datagram waits, receive holds no buffer of the pool.
func (e *endSocket) receive(pool *buffers, handle func(p []byte) bool, failed func(error) (goOn bool)) error {
	return e.raw.Read(func(fd uintptr) (done bool) {
		b := pool.get()
		defer pool.put(b)
		for failures := 0; failures < maxFailures; {
			n, err := unix.Read(int(fd), b[:])
			switch {
			case err == nil:
				failures = 0
				if !handle(b[:n]) {
					return true
				}
			case errors.Is(err, unix.EAGAIN):
				return false
			case errors.Is(err, unix.EINTR):
			case failed(err):
				failures++
			default:
				return true
			}
		}
		return true
	})
}
