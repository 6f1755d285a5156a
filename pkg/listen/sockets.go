package listen

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Sockets are the listening sockets of a process, which another process can take over (package takeover). A nil
// *Sockets opens sockets as usual.
//
// For a while both processes have the same sockets. The kernel has one queue for each socket, so no connection is
// lost while at least one process accepts. Pause and Resume say whether this process accepts.
type Sockets struct {
	serving chan struct{} // closed by Serve; nothing is sent
	left    chan struct{} // closed by Leave; nothing is sent

	accepted [allUsers]atomic.Pointer[time.Time] // see LastAccepted

	mu        sync.Mutex // guards the following
	inherited []Copy     // sockets of the other process that no module of this process has opened yet
	listeners map[*shared]struct{}
	packets   []packetSocket
	paused    [allUsers]bool
	shut      [allUsers]bool // the users for whom Close was called
	changed   tunnel.Change
}

// Users is the kind of peers that connect to a socket.
type Users int

// All users.
const (
	Callers   Users = iota
	Edges           // also agents and other replicas
	Operators       // also health checks, and clients of DNS
	allUsers
)

// Name is what the configuration calls a socket.
type Name struct {
	Network string `json:"network"` // as for net.Listen; "unix" has a path as its address
	Address string `json:"address"`
}

// Copy is a copy of a listening socket: this process passes it to another process, or has got it from another.
type Copy struct {
	Name
	File *os.File
}

// packetSocket is a UDP socket that OpenPacket has opened. Its owner may have closed it since.
type packetSocket struct {
	name Name
	conn net.PacketConn
}

// NewSockets returns the sockets of a process that takes over from nobody.
func NewSockets() *Sockets {
	s := Inherit(nil)
	s.paused = [allUsers]bool{}
	close(s.serving)
	return s
}

// Inherit returns the sockets of a process that takes over from another one. It is paused until Resume and
// Serve are called.
func Inherit(from []Copy) *Sockets {
	return &Sockets{
		serving: make(chan struct{}), left: make(chan struct{}),
		inherited: from, listeners: make(map[*shared]struct{}), paused: [allUsers]bool{true, true, true},
	}
}

// Listen takes the listener from the other process, or opens one with lc.
func (s *Sockets) Listen(
	ctx context.Context, users Users, lc net.ListenConfig, network, address string,
) (net.Listener, error) {
	open := func() (net.Listener, error) { return lc.Listen(ctx, network, address) }
	ln, err := s.Open(users, Name{network, address}, open)
	if l, ok := ln.(*shared); ok {
		l.keepAlive = lc.KeepAliveConfig
	}
	return ln, err
}

// Open takes the listener from the other process, or opens one by calling open. If Close was called before for users,
// nobody can connect to the new listener either.
func (s *Sockets) Open(users Users, name Name, open func() (net.Listener, error)) (net.Listener, error) {
	if s == nil {
		return open()
	}
	var ln net.Listener
	var err error
	file := s.take(name)
	if file == nil {
		ln, err = open()
	} else {
		ln, err = net.FileListener(file)
		file.Close() // ln has a copy of the socket
	}
	if err != nil {
		return nil, err
	}
	l := &shared{Listener: ln, sockets: s, users: users, name: name, inherited: file != nil, closed: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listeners[l] = struct{}{}
	if s.shut[users] {
		l.close()
	}
	return l, nil
}

// OpenPacket is Open for a UDP socket. The owner of the socket must begin to read when the channel Serving is closed,
// and must stop when the channel Left is closed.
func (s *Sockets) OpenPacket(name Name, open func() (net.PacketConn, error)) (net.PacketConn, error) {
	if s == nil {
		return open()
	}
	var c net.PacketConn
	var err error
	if file := s.take(name); file == nil {
		c, err = open()
	} else {
		c, err = net.FilePacketConn(file)
		file.Close()
	}
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.packets = slices.DeleteFunc(s.packets, func(p packetSocket) bool { return isClosed(p.conn) })
	s.packets = append(s.packets, packetSocket{name, c})
	return c, nil
}

// isClosed reports whether the owner of a socket has closed it.
func isClosed(c net.PacketConn) bool {
	raw, err := c.(syscall.Conn).SyscallConn() //nolint:forcetypeassert // every socket of package net
	return err != nil || raw.Control(func(uintptr) {}) != nil
}

// take removes the socket with this name from inherited and returns it; nil: inherited has no such socket.
func (s *Sockets) take(name Name) *os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.inherited, func(one Copy) bool { return one.Name == name })
	if i < 0 {
		return nil
	}
	file := s.inherited[i].File
	s.inherited = slices.Delete(s.inherited, i, i+1)
	return file
}

// Copies returns a copy of every open socket, for another process. The caller closes the copies.
func (s *Sockets) Copies() (all []Copy, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	add := func(name Name, c any) {
		file, failed := duplicate(c.(syscall.Conn)) //nolint:forcetypeassert // every socket of package net
		switch {
		case failed == nil:
			all = append(all, Copy{name, file})
		case !errors.Is(failed, net.ErrClosed):
			err = errors.Join(err, failed)
		}
	}
	for l := range s.listeners {
		add(l.name, l.Listener)
	}
	for _, p := range s.packets {
		add(p.name, p.conn)
	}
	if err != nil {
		CloseCopies(all)
		return nil, err
	}
	return all, nil
}

// CloseCopies closes copies.
func CloseCopies(all []Copy) {
	for _, one := range all {
		one.File.Close()
	}
}

// Pause stops the listeners for users from accepting: new connections wait in the kernel. An Accept that waits already
// may still return one connection that arrives at the same moment.
func (s *Sockets) Pause(users Users) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paused[users] = true
	for l := range s.listeners {
		if l.users == users {
			l.interrupt(true)
		}
	}
}

// Resume lets the listeners for users accept again.
func (s *Sockets) Resume(users Users) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.listeners {
		if l.users == users {
			l.interrupt(false)
		}
	}
	s.paused[users] = false
	s.changed.Notify()
}

// Close closes the listeners for users, and each listener for them that is opened later: nobody can connect. The
// owners of the listeners do not notice: Accept waits until the owner closes the listener.
func (s *Sockets) Close(users Users) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shut[users] = true
	for l := range s.listeners {
		if l.users == users {
			l.close()
		}
	}
}

// Serve makes this process the owner of the sockets. It resumes all listeners, and closes the inherited sockets that
// no module has opened. Serve also removes the files of closed unix sockets, since the other process leaves them.
func (s *Sockets) Serve() {
	for users := range allUsers {
		s.Resume(users)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	CloseCopies(s.inherited)
	for _, one := range s.inherited {
		if one.Network == "unix" {
			os.Remove(one.Address) //nolint:errcheck // the file is gone already, or this user may not remove it
		}
	}
	s.inherited = nil
	s.keepPathsLocked(false)
	close(s.serving)
}

// Leave leaves the sockets to another process. From then on, this process accepts no connection and receives no
// datagram. When the owner of a listener closes it, the file of a unix socket stays.
func (s *Sockets) Leave() {
	for users := range allUsers {
		s.Pause(users)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keepPathsLocked(true)
	close(s.left)
}

// keepPathsLocked sets whether the file of a unix socket stays when its listener is closed. The caller holds mu.
func (s *Sockets) keepPathsLocked(keep bool) {
	for l := range s.listeners {
		if unix, ok := l.Listener.(*net.UnixListener); ok {
			unix.SetUnlinkOnClose(!keep)
		}
	}
}

// Serving returns a channel that is closed when this process becomes the owner of the sockets.
func (s *Sockets) Serving() <-chan struct{} {
	if s == nil {
		now := make(chan struct{})
		close(now)
		return now
	}
	return s.serving
}

// Left returns a channel that is closed when another process has taken over.
func (s *Sockets) Left() <-chan struct{} {
	if s == nil {
		return nil
	}
	return s.left
}

// Accepted notes that this process has accepted a connection of users. The listeners of Open do so themselves.
func (s *Sockets) Accepted(users Users) {
	if s != nil {
		s.accepted[users].Store(new(time.Now()))
	}
}

// LastAccepted returns when this process last accepted a connection of users; the zero time: never.
func (s *Sockets) LastAccepted(users Users) (at time.Time) {
	if s != nil {
		if last := s.accepted[users].Load(); last != nil {
			at = *last
		}
	}
	return at
}

// shared is a listener that another process can take over.
type shared struct {
	net.Listener

	// Set once.
	sockets   *Sockets
	users     Users
	name      Name
	inherited bool
	keepAlive net.KeepAliveConfig // for accepted connections, if the listener is inherited
	closed    chan struct{}       // closed by Close; nothing is sent

	shut atomic.Bool // Sockets.Close has closed the socket
	once sync.Once   // makes Close close closed only once
}

// Accept implements net.Listener. It waits while the listener is paused.
func (l *shared) Accept() (net.Conn, error) {
	for {
		if !l.wait() {
			return nil, net.ErrClosed
		}
		c, err := l.Listener.Accept()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue // paused
		case err != nil && l.shut.Load():
			<-l.closed
			return nil, net.ErrClosed
		}
		if tcp, ok := c.(*net.TCPConn); ok && err == nil && l.inherited && l.keepAlive.Enable {
			tcp.SetKeepAliveConfig(l.keepAlive) //nolint:errcheck // it fails only if the caller has gone
		}
		if err == nil {
			l.sockets.Accepted(l.users)
		}
		return c, err
	}
}

// wait waits until the listener is not paused. It reports false if the listener is closed.
func (l *shared) wait() bool {
	for {
		l.sockets.mu.Lock()
		paused, changed := l.sockets.paused[l.users], l.sockets.changed.Next()
		l.sockets.mu.Unlock()
		if !paused {
			return true
		}
		select {
		case <-changed:
		case <-l.closed:
			return false
		}
	}
}

// interrupt(true) ends an Accept that waits for a connection. interrupt(false) lets Accept wait again.
func (l *shared) interrupt(now bool) {
	var at time.Time
	if now {
		at = time.Unix(1, 0)
	}
	if d, ok := l.Listener.(interface{ SetDeadline(time.Time) error }); ok {
		d.SetDeadline(at) //nolint:errcheck // it fails only if the listener is closed
	}
}

// close closes the socket. The owner does not notice: its Accept waits until the owner calls Close.
func (l *shared) close() {
	l.shut.Store(true)
	l.Listener.Close()
}

// Close implements net.Listener.
func (l *shared) Close() error {
	err := net.ErrClosed
	l.once.Do(func() {
		close(l.closed)
		l.sockets.mu.Lock()
		delete(l.sockets.listeners, l)
		l.sockets.mu.Unlock()
		err = l.Listener.Close()
	})
	return err
}
