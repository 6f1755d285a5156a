package egress

import (
	"net"
	"sync"
	"time"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// waitingRoom bounds what strangers cost at the agents' port: a connection without a
// session is closed after a while, and there are only so many, in all and of one source.
type waitingRoom struct {
	net.Listener
	counters *tunnel.Counters
	groups   *auth.Groups

	mu      sync.Mutex // guards the following
	waiting int        // connections without a session
	conns   map[string]*waitingConn
}

// waitingConn is a connection. It is good for one attempt to join, and one session.
type waitingConn struct {
	net.Conn
	room  *waitingRoom
	leave func() // it waits no more
	tried bool   // guarded by the room's mu
}

func newWaitingRoom(ln net.Listener, counters *tunnel.Counters) *waitingRoom {
	return &waitingRoom{Listener: ln, counters: counters, groups: auth.NewGroups(agentsJoining), conns: make(map[string]*waitingConn)}
}

// Accept implements net.Listener.
func (w *waitingRoom) Accept() (net.Conn, error) {
	for {
		raw, err := w.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c := w.admit(raw); c != nil {
			return c, nil
		}
		raw.Close()
	}
}

func (w *waitingRoom) admit(raw net.Conn) *waitingConn {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting >= agentsStrangers {
		w.counters.Limited(tunnel.LimitJoining)
		return nil
	}
	release, ok := w.groups.Admit(auth.GroupOf(raw.RemoteAddr()))
	if !ok {
		w.counters.Limited(tunnel.LimitJoiningPerAddress)
		return nil
	}
	late := time.AfterFunc(agentJoinTime, func() {
		w.counters.Limited(tunnel.LimitJoinTimeout)
		raw.Close()
	})
	w.waiting++
	c := &waitingConn{Conn: raw, room: w, leave: sync.OnceFunc(func() {
		late.Stop()
		release()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.waiting--
	})}
	w.conns[raw.RemoteAddr().String()] = c
	return c
}

// joined says that the connection from an address has a session.
func (w *waitingRoom) joined(remote string) {
	w.mu.Lock()
	c := w.conns[remote]
	w.mu.Unlock()
	if c != nil {
		c.leave()
	}
}

// try reports whether the connection from an address may try to join: once.
func (w *waitingRoom) try(remote string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.conns[remote]
	if c == nil || c.tried {
		return false
	}
	c.tried = true
	return true
}

// end closes the connection from an address when a status has had time to leave. It may
// be stuck behind what the other side does not read.
func (w *waitingRoom) end(remote string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := w.conns[remote]; c != nil {
		time.AfterFunc(time.Second, func() { c.Close() }) //nolint:errcheck // it is being thrown away
	}
}

// Close implements net.Conn.
func (c *waitingConn) Close() error {
	c.leave()
	key := c.RemoteAddr().String()
	c.room.mu.Lock()
	if c.room.conns[key] == c {
		delete(c.room.conns, key)
	}
	c.room.mu.Unlock()
	return c.Conn.Close()
}
