package stream

import (
	"net"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/conn"
)

// A session may have data connections beside its own connection. Each data connection carries one
// conn at a time. Package conn defines the frames and phases. The edge opens a data connection when
// the cloud asks for one. The cloud asks when no data connection is free for an open; that open then
// uses the session's own connection. A node without conns for dataIdle has no data connections.
//
// data.go holds what both ends share. data_cloud.go is the cloud's end, data_edge.go the edge's.

// DataProtocol distinguishes a data connection from a gRPC connection (ALPN, RFC 7301).
const DataProtocol = "tunnel-data/1"

const (
	// dataIdle is how long an idle data connection is kept for the next conn.
	dataIdle = 2 * time.Minute
	// answerTime is how long the other end's kernel may take to acknowledge an open.
	answerTime = 5 * time.Second
)

// dataConn is one end of a data connection of a session.
type dataConn struct {
	*conn.Data
	raw net.Conn     // the connection below TLS
	tcp *net.TCPConn // the connection below raw; nil in tests with a network of their own

	carries atomic.Pointer[conn.Conn] // the current conn

	// Guarded by session.mu.
	since   time.Time   // when it was last used
	inUse   bool        // at the edge: it serves an open, or the cloud has not confirmed the end of the conn
	byPods  bool        // at the cloud: it is in use, and its claim says so
	saying  *time.Timer // timer that calls sayEnd
	wasOpen bool        // the last call of mayStall has found the peer's window open
	unheard time.Time   // when the method lost first saw the kernel resend without an answer; zero: it does not resend
}

func newDataConn(c, raw net.Conn, b *conn.Blocks) *dataConn {
	d := &dataConn{Data: conn.NewData(c, raw, b), raw: raw, since: time.Now()}
	switch r := raw.(type) {
	case *carrier:
		d.tcp = r.tcp
	case *net.TCPConn:
		d.tcp = r
	}
	return d
}

// waitShort makes the kernel end the connection if sent bytes stay unacknowledged for
// answerTime. It applies while no conn uses the connection. Then at most an open is in flight, and
// the other end's kernel acknowledges an open at once.
func (d *dataConn) waitShort() { d.userTimeout(answerTime) }

// waitLong makes the kernel end the connection only if sent bytes stay unacknowledged for dataTimeout. It is called
// when a conn starts. mayStall changes the timeout while the conn lasts.
func (d *dataConn) waitLong() { d.userTimeout(dataTimeout) }

// mayStall lets a stalled reader keep its peer waiting for any time. The user timeout also ends a connection whose
// peer has closed its window for that long (tcp(7)), so there is none while the window is closed. The kernel counts
// from the first time that it found the window closed, until the window has room for a whole packet. So the timeout
// comes back only when the window was open twice in a row. The session calls mayStall every heartbeatInterval, for a
// data connection that carries a conn. The caller holds session.mu.
func (d *dataConn) mayStall(fd uintptr, a acks) {
	before := d.wasOpen
	d.wasOpen = !a.closed
	//nolint:errcheck // it fails when the connection has ended, and other code notices that
	switch {
	case a.closed:
		userTimeout(fd, 0)
	case before:
		userTimeout(fd, dataTimeout)
	}
}

func (d *dataConn) userTimeout(t time.Duration) {
	if d.tcp != nil {
		setUserTimeout(d.tcp, t) //nolint:errcheck // it fails when d is closed, and other code notices that
	}
}

// abort closes the connection and ends every call that waits for it. The other end sees no clean
// end of its conn. Unsent bytes are discarded.
func (d *dataConn) abort() {
	if d.tcp != nil {
		d.tcp.SetLinger(0)
		d.tcp.Close() // first: behind a proxy with TLS, the Close of raw would wait until it has sent the end
	}
	d.raw.Close()
}

// lost reports whether the kernel has ended the connection, or has retransmitted for limit
// without an answer. A peer that does not read still answers. The session calls lost every
// heartbeatInterval. lost also calls mayStall. The caller holds session.mu.
func (d *dataConn) lost(limit time.Duration) (is bool) {
	if d.tcp == nil {
		return false
	}
	raw, err := d.tcp.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) {
		a, ok := acksOf(fd)
		is = ok && d.isLost(a, time.Now(), limit)
		if ok && d.carries.Load() != nil {
			d.mayStall(fd, a)
		}
	})
	return is
}

// isLost decides for the method lost. a is what the kernel knows at time now.
func (d *dataConn) isLost(a acks, now time.Time, limit time.Duration) bool {
	switch heard := now.Add(-a.last); {
	case !a.missing:
		d.unheard = time.Time{}
	case d.unheard.IsZero(), heard.After(d.unheard):
		d.unheard = now // the connection may have been idle before, so an old last answer proves nothing
	}
	return a.ended || a.missing && now.Sub(d.unheard) >= limit
}

// hold adds a data connection to the session. It returns false if the session has ended.
func (s *session) hold(d *dataConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	if s.data == nil {
		s.data = make(map[*dataConn]struct{})
	}
	s.data[d] = struct{}{}
	if c, ok := d.raw.(*carrier); ok {
		s.pacer.add(c)
	}
	s.counters.DataLive.Add(1)
	return true
}

// drop undoes hold and closes the connection.
func (s *session) drop(d *dataConn) {
	s.mu.Lock()
	s.dropLocked(d)
	s.mu.Unlock()
	d.abort()
}

// dropLocked undoes hold. The caller holds mu, and closes the connection.
func (s *session) dropLocked(d *dataConn) {
	if _, held := s.data[d]; held {
		delete(s.data, d)
		if c, ok := d.raw.(*carrier); ok {
			s.pacer.remove(c)
		}
		s.counters.DataLive.Add(-1)
	}
}

// dropLost closes the data connections whose other end cannot be reached, and ends their conns. The session itself
// lives, so dropLost is more patient than watchSilence: after a cut of 10 s the kernel resends bytes only every
// dataBackoff, and a full queue may lose several of these packets. It waits even longer over a narrow link, where most
// packets of a connection may be lost for a while.
func (s *session) dropLost() {
	limit := s.own.lost() + heartbeatInterval
	if s.pacer.narrow() {
		limit = lostOverNarrow
	}
	s.mu.Lock()
	var lost []*dataConn
	for d := range s.data {
		if d.lost(limit) {
			lost = append(lost, d)
		}
	}
	s.mu.Unlock()
	for _, d := range lost {
		s.log.Info("a data connection is lost", "remote", d.raw.RemoteAddr().String())
		if c := d.carries.Load(); c != nil {
			c.Abort() // the conn's owner may not be receiving
		}
		s.drop(d)
	}
}
